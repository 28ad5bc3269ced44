"""Codes as GPTQ and AWQ pack them: tensors of one module to a `QuantizedWeight`, bit for bit.

What the words mean follows each format's own packing code (AutoGPTQ/GPTQModel `pack_original`,
AutoAWQ `gemm.py`). Nothing is guessed: what the settings leave open is read off the numbers where
they leave no doubt and refused where they do. Groups wider than our layout's become several of the
same scale.

It does not know models or where settings stand (`quant.foreign_settings`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.layout import SCALE_DTYPES, QuantizedWeight, unpack
from quant.artifact.scheme import GROUP_SIZES, Scheme, WeightScheme
from quant.artifact.store import CheckpointReader
from quant.errors import SourceError
from quant.foreign_settings import ModuleFormat, PackedSettings

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble n of a word is column 8 w + AWQ_ORDER[n]
PARTS = ("qweight", "qzeros", "scales")
_WIDEST = max(GROUP_SIZES)
_SAMPLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReader:
    """The packed modules of a checkpoint. `settings.version` is what the zero points mean."""

    path: Path
    reader: CheckpointReader
    settings: PackedSettings

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme:
        """The scheme of a module that has codes; SourceError or IntegrityError names what does not
        fit its settings."""
        found = self._format(module)
        scheme = self._scheme(module, found, shape[1])
        groups = num_groups(found, shape[1])
        if any(side * found.bits % 32 for side in shape):
            raise SourceError(
                f"{self.path}: {module} is {list(shape)}, whose {found.bits}-bit codes do not fill "
                "whole words; how the rest is packed differs between tools"
            )
        if self.settings.method == "gptq":
            shapes = (shape[1] * found.bits // 32, shape[0]), (groups, shape[0] * found.bits // 32)
        else:
            shapes = (shape[1], shape[0] // 8), (groups, shape[0] // 8)
        self._check(f"{module}.qweight", shapes[0], (torch.int32,))
        self._check(f"{module}.qzeros", shapes[1], (torch.int32,))
        self._check(f"{module}.scales", (groups, shape[0]), tuple(SCALE_DTYPES))
        if f"{module}.g_idx" in self.reader:
            self._refuse_act_order(module, shape[1], shape[1] // groups)
        elif found.has_act_order:
            raise SourceError(f"{self.path}: desc_act is true, but {module}.g_idx is missing")
        return scheme

    def weight(self, module: str, shape: tuple[int, int], scheme: Scheme) -> QuantizedWeight:
        """The module's codes, zero points and scales; IntegrityError when they contradict it."""
        codes, zeros, scales = self._parts(module, shape)
        zeros = self._true_zeros(zeros, self._format(module).bits)
        assert scheme.weights is not None
        groups = shape[1] // (scheme.weights.group_size or shape[1])
        scales, zeros = (wider(part, groups) for part in (scales, zeros))
        if not scheme.weights.symmetric:
            return QuantizedWeight(scheme=scheme, codes=codes, scale=scales, zero_point=zeros)
        if bool(zeros.any()):
            raise IntegrityError(
                "sym is true, but zero points differ from the middle code; the file is of another "
                f"version than its settings say ({self.settings.version}), or not symmetric"
            )
        return QuantizedWeight(scheme=scheme, codes=codes, scale=scales)

    def settled(self, modules: Mapping[str, tuple[int, int]]) -> PackedReader:
        """This reader, sure of the version; SourceError where settings and numbers disagree.

        modules: those that have codes, with shapes. Symmetric zero points say exactly which version
        they are of. Asymmetric weights average about zero, so their codes average their zero point
        to a small part of a step; under the wrong version every one of them is off by one step.
        """
        if self.settings.method == "awq" or not modules:
            return self
        names = list(modules)[:: max(1, len(modules) // _SAMPLE)][:_SAMPLE]
        offsets = [self._offset(name, modules[name]) for name in names]
        is_first = all(-0.5 < offset < 0.5 for offset in offsets)
        is_second = all(-1.5 < offset < -0.5 for offset in offsets)
        stated = self.settings.version
        if stated is None:
            return self._inferred(names, is_first, is_second)
        if is_second if stated == "gptq" else is_first:
            step = abs(offsets[0] + (stated == "gptq_v2"))
            raise SourceError(
                f"{self.path}: checkpoint_format says {stated}, but then every weight is off by "
                f"one step (codes lie {step:.2f} steps beside their zero points on average); the "
                "file is of the other version: correct checkpoint_format in its quantization "
                "settings"
            )
        return self

    def _inferred(self, names: Sequence[str], is_first: bool, is_second: bool) -> PackedReader:
        """The version that the zero points bear out. Tools that do not write it down wrote the
        first, so the second is only believed where it is certain."""
        is_certain = all(self._format(name).symmetric for name in names)
        if is_first or (is_second and is_certain):
            version = "gptq" if is_first else "gptq_v2"
            return replace(self, settings=replace(self.settings, version=version))
        raise SourceError(
            f"{self.path}: checkpoint_format is not written down, and the zero points do not bear "
            "out version 1 (gptq), which tools that leave it out write; every zero point may be "
            "off by one. Write `checkpoint_format` into quantization_config if you know it: gptq "
            "(zero points stored less one) or gptq_v2 (stored as they are)"
        )

    def _offset(self, module: str, shape: tuple[int, int]) -> float:
        """Steps from the zero points to the codes on average, were the file of version 1."""
        codes, zeros, _ = self._parts(module, shape)
        if not self._format(module).symmetric:
            return float(codes.float().mean() - zeros.float().mean()) - 1
        middle = {-1: 0.0, 0: -1.0}  # stored less one, stored as it is
        low, high = int(zeros.min()), int(zeros.max())
        return middle.get(low, math.nan) if low == high else math.nan

    def _format(self, module: str) -> ModuleFormat:
        found = self.settings.of(module)
        if found is None:
            raise SourceError(
                f"{self.path}: `dynamic` excludes {module}, yet {module}.qweight is stored"
            )
        return found

    def _parts(self, module: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Signed codes [out, in] int8, zero points as stored [out, G] int8, scales [out, G]."""
        words, zeros, scales = (self.reader.tensor(f"{module}.{part}") for part in PARTS)
        bits = self._format(module).bits
        if self.settings.method == "gptq":
            codes = unpack(words.T.contiguous(), bits, shape[1])
            stored = unpack(zeros.contiguous(), bits, shape[0]).T
        else:
            codes, stored = unpack_awq(words).T, unpack_awq(zeros).T
        return codes.contiguous(), stored.contiguous(), scales.T.contiguous()

    def _true_zeros(self, stored: Tensor, bits: int) -> Tensor:
        """Signed zero points; version 1 of GPTQ stores them less one."""
        if self.settings.version != "gptq":
            return stored
        if bool((stored == (1 << (bits - 1)) - 1).any()):
            raise IntegrityError(
                f"a zero point is stored as {(1 << bits) - 1}, which version 1 (checkpoint_format "
                "gptq) cannot mean: it would be one more than fits. The file is of version 2, or "
                "its zero point 0 wrapped around when it was written"
            )
        return stored + 1

    def _scheme(self, module: str, found: ModuleFormat, width: int) -> Scheme:
        size = found.group_size
        if size in GROUP_SIZES and width % size == 0:
            group: int | None = size
        elif size == -1 or size > width:
            group = None
        elif size > _WIDEST and size % _WIDEST == 0 and width % size == 0:
            group = _WIDEST
        else:
            raise SourceError(
                f"{self.path}: {module}: group_size {size!r}; supported are -1 (one scale per "
                f"channel), {', '.join(map(str, GROUP_SIZES))} and multiples of {_WIDEST}, where "
                f"they divide its {width} columns"
            )
        try:
            weights = WeightScheme(
                num_bits=found.bits, kind="int", symmetric=found.symmetric,
                strategy="channel" if group is None else "group", group_size=group,
            )  # fmt: skip
            return Scheme(layout="pack-quantized", weights=weights)
        except SchemeError as error:
            raise SourceError(f"{self.path}: {module}: {error}") from None

    def _check(self, name: str, expected: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
        if name not in self.reader:
            raise IntegrityError(f"{self.path}: tensor {name} is missing; fetch the model again")
        found, dtype = tuple(self.reader.shape(name)), self.reader.dtype(name)
        if found != expected or dtype not in dtypes:
            raise IntegrityError(
                f"{self.path}: tensor {name} has shape {list(found)} ({_short(dtype)}); bits, "
                f"group_size and config.json make it {list(expected)} ({_short(dtypes[0])})"
            )

    def _refuse_act_order(self, module: str, width: int, size: int) -> None:
        """Groups of neighbouring columns are the only ones that our layout can say."""
        g_idx = self.reader.tensor(f"{module}.g_idx")
        if g_idx.shape != (width,) or not torch.equal(g_idx.long(), torch.arange(width) // size):
            raise SourceError(
                f"{self.path}: {module}.g_idx puts columns into groups out of order (act-order "
                "without static groups); no layout that engines still read can say this, and the "
                "columns of most modules cannot be reordered. Quantize the original checkpoint"
            )


def wider(part: Tensor, groups: int) -> Tensor:
    """Scales or zero points [out, G] for `groups` groups, a multiple of G: each several times."""
    return part.repeat_interleave(groups // part.shape[1], dim=1).contiguous()


def num_groups(found: ModuleFormat, width: int) -> int:
    """Scales of each output row."""
    is_whole = found.group_size == -1 or found.group_size >= width
    return 1 if is_whole else width // found.group_size


def unpack_awq(words: Tensor) -> Tensor:
    """int32 words [rows, n / 8] of AutoAWQ's GEMM layout -> signed codes [rows, n] int8."""
    shifts = torch.tensor([4 * AWQ_ORDER.index(column) for column in range(8)], dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 0xF
    return (codes.flatten(1) - 8).to(torch.int8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
