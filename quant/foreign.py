"""Checkpoints that other tools quantized, read without loss: GPTQ (v1 and v2), AWQ (GEMM) and
compressed-tensors.

`QuantizedSource` checks such a directory as `quant.source` checks a float one, and gives every
quantized linear as the `QuantizedWeight` it stands for: the same codes, zero points and scales, in
our layout. What the words mean follows each format's own packing code (AutoGPTQ/GPTQModel
`pack_original`, AutoAWQ `gemm.py`). Nothing is guessed: a format version that is not written down,
true act-order, or a label that contradicts the numbers is refused.

It does not make artifacts (`quant.foreign_convert`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.artifact.dialect import parse_kv_scheme, parse_quantization_config
from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.layout import QuantizedWeight, from_tensors, tensor_names, unpack
from quant.artifact.scheme import DENSE, GROUP_SIZES, Scheme, WeightScheme
from quant.artifact.store import CheckpointReader
from quant.checkpoint import read_object
from quant.errors import SourceError
from quant.kv_scales import scale_names
from quant.modelling import check_family, check_tensors
from quant.source import (
    QUANTIZED_MARKS,
    HFSource,
    read_config,
    refuse_code,
    require_tokenizer,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble n of a word is column 8 w + AWQ_ORDER[n]
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
_SECTION_FILES = ("quantize_config.json", "quant_config.json")


def is_quantized(path: Path) -> bool:
    """Whether a model directory has codes of another tool in it (not an artifact of ours)."""
    if not (path / "config.json").is_file() or (path / "artifact.json").is_file():
        return False
    section = read_object(path / "config.json").get("quantization_config")
    return bool(section) or any((path / name).is_file() for name in _SECTION_FILES)


class QuantizedSource(HFSource):
    """A directory of codes. `schemes` says what each linear is; `weight` gives its codes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = read_config(path)
        self.config = {k: v for k, v in whole.items() if k != "quantization_config"}
        self.section = _section(path, whole)
        self.method = str(self.section.get("quant_method"))
        self.has_kv_scales = False
        refuse_code(path, self.config)
        check_family(self.config, str(path))
        require_tokenizer(path)
        self._reader = CheckpointReader(path)
        self.schemes = self._schemes()
        self._check_names()
        self.dtype = self._reader.dtype("model.embed_tokens.weight")
        _check_convention(self)

    def _schemes(self) -> dict[str, Scheme]:
        shapes = self.module_shapes
        if self.method == "compressed-tensors":
            self.has_kv_scales = parse_kv_scheme(self.section) is not None
            modules = [m for m in shapes if not (self.skeleton.is_tied and m == "lm_head")]
            return {**dict.fromkeys(shapes, DENSE),
                    **parse_quantization_config(self.section, modules)}  # fmt: skip
        read = _gptq_scheme if self.method == "gptq" else _awq_scheme
        settings = _gptq_settings if self.method == "gptq" else _awq_settings
        settings(self.section, self.path)
        return {
            module: read(self, module, shape) if f"{module}.qweight" in self._reader else DENSE
            for module, shape in shapes.items()
        }

    def _check_names(self) -> None:
        """Every tensor has its place; those of a quantized module stand for its weight."""
        used: set[str] = set()
        for module, scheme in self.schemes.items():
            if scheme.is_dense:
                continue
            parts = self._parts(scheme)
            missing = [leaf for leaf in parts if f"{module}.{leaf}" not in self._reader]
            if missing:
                raise IntegrityError(
                    f"{self.path}: tensor {module}.{missing[0]} is missing; fetch the model again"
                )
            used |= {f"{module}.{leaf}" for leaf in (*parts, "g_idx")}
        for index in range(self.num_layers if self.has_kv_scales else 0):
            used.update(scale_names(self.layer_prefix(index)))
        lost = used - set(self._reader.names)
        lost = {name for name in lost if name.endswith(("k_scale", "v_scale"))}
        if lost:
            raise IntegrityError(f"{self.path}: tensor {min(lost)} is missing; fetch it again")
        left = [name for name in self._reader.names if name not in used]
        known = self.skeleton.parameter_shapes
        empty = [n for n in left if self._is_empty_bias(n)]
        codes = [n for n in left if n.endswith((*QUANTIZED_MARKS, ".weight_g_idx", ".g_idx"))]
        codes += [n for n in left if n.endswith(".bias") and n not in (*known, *empty)]
        if codes:
            raise SourceError(f"{self.path}: tensor {codes[0]} has no place in this model")
        quantized = {f"{m}.weight": self.module_shapes[m]
                     for m, scheme in self.schemes.items() if not scheme.is_dense}  # fmt: skip
        self._dense = tuple(n for n in left if n not in empty)
        self.names = (*self._dense, *quantized)
        shapes = {n: tuple(self._reader.shape(n)) for n in self._dense} | quantized
        check_tensors(self.skeleton, shapes, str(self.path))

    def _is_empty_bias(self, name: str) -> bool:
        """Old tools wrote a bias of zeros beside every linear that has none."""
        is_known = name in self.skeleton.parameter_shapes or not name.endswith(".bias")
        return not is_known and not bool(self._reader.tensor(name).any())

    def _parts(self, scheme: Scheme) -> tuple[str, ...]:
        if self.method == "compressed-tensors":
            return tensor_names(scheme)
        return ("qweight", "qzeros", "scales")

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._dense:
            return tuple(self._reader.shape(name))
        return self.module_shapes[name.removesuffix(".weight")]

    @property
    def num_bytes(self) -> int:
        return sum(self._reader.stored(name).num_bytes for name in self._reader.names)

    def weight(self, module: str) -> QuantizedWeight:
        """The codes, scales and zero points of a quantized linear; IntegrityError names it."""
        scheme = self.schemes[module]
        stored = {n: self._reader.tensor(f"{module}.{n}") for n in self._parts(scheme)}
        try:
            qw = self._read(module, stored, scheme)
        except (IntegrityError, SchemeError) as error:
            raise IntegrityError(f"{self.path}: {module}: {error}") from None
        if qw.shape != self.module_shapes[module]:
            raise IntegrityError(f"{self.path}: {module}: holds {list(qw.shape)} codes")
        if not bool((torch.isfinite(qw.scale) & (qw.scale > 0)).all()):
            raise IntegrityError(f"{self.path}: {module}: scales hold NaN, Inf or values <= 0")
        return qw

    def kv_scales(self, layer: int) -> dict[str, Tensor]:
        """The stored scales, [1] each, of a layer's fp8 KV cache; {} without one."""
        if not self.has_kv_scales:
            return {}
        found = {n: self._reader.tensor(n) for n in scale_names(self.layer_prefix(layer))}
        for name, scale in found.items():
            if scale.numel() != 1 or not 0 < float(scale) < float("inf"):
                raise IntegrityError(f"{self.path}: {name} is not one positive number")
        return {name: scale.reshape(1) for name, scale in found.items()}

    def _read(self, module: str, stored: dict[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        if self.method == "compressed-tensors":
            if "weight_shape" in stored:
                stored["weight_shape"] = stored["weight_shape"].to(torch.int64)
            return from_tensors(stored, scheme)
        out, width = self.module_shapes[module]
        assert scheme.weights is not None
        bits = scheme.weights.num_bits
        if self.method == "gptq":
            codes = unpack(stored["qweight"].T.contiguous(), bits, width)
            zeros = unpack(stored["qzeros"].contiguous(), bits, out).T
            zeros = self._true_zeros(zeros)
        else:
            codes, zeros = unpack_awq(stored["qweight"]).T, unpack_awq(stored["qzeros"]).T
        scale, kept = stored["scales"].T.contiguous(), zeros.contiguous()
        if scheme.weights.symmetric:
            if bool(kept.any()):
                raise IntegrityError(
                    "sym is true, but zero points differ from the middle code; the file is of "
                    f"another version than its settings say ({self._version}), or not symmetric"
                )
            return QuantizedWeight(scheme=scheme, codes=codes.contiguous(), scale=scale)
        return QuantizedWeight(
            scheme=scheme, codes=codes.contiguous(), scale=scale, zero_point=kept
        )

    @property
    def _version(self) -> str:
        return str(self.section.get("checkpoint_format") or self.section.get("version"))

    def _true_zeros(self, stored: Tensor) -> Tensor:
        """Signed zero points; version 1 stores them less one."""
        if self.section["checkpoint_format"] == "gptq_v2":
            return stored
        bits = int(self.section["bits"])
        if bool((stored == (1 << (bits - 1)) - 1).any()):
            raise IntegrityError(
                f"a zero point is stored as {(1 << bits) - 1}, which version 1 (checkpoint_format "
                "gptq) cannot mean: it would be one more than fits. The file is of version 2, or "
                "its zero point 0 wrapped around when it was written"
            )
        return stored + 1


def unpack_awq(words: Tensor) -> Tensor:
    """int32 words [rows, n / 8] of AutoAWQ's GEMM layout -> signed codes [rows, n] int8."""
    shifts = torch.tensor([4 * AWQ_ORDER.index(column) for column in range(8)], dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 0xF
    return (codes.flatten(1) - 8).to(torch.int8)


def _section(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings, in one form whichever file they stand in."""
    section = dict(config.get("quantization_config") or {})
    beside = [name for name in _SECTION_FILES if (path / name).is_file()]
    if beside:
        other = read_object(path / beside[0])
        clash = [k for k in other.keys() & section.keys()
                 if k in ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "version")
                 and str(other[k]).lower() != str(section[k]).lower()]  # fmt: skip
        if clash:
            raise SourceError(
                f"{path}: {beside[0]} and config.json differ in {', '.join(sorted(clash))}"
            )
        section = {**other, **section}
        if "quant_method" not in section and beside[0] == "quantize_config.json":
            section["quant_method"] = "gptq"
    if section.get("quant_method") not in ("gptq", "awq", "compressed-tensors"):
        raise SourceError(
            f"{path}: quant_method is {section.get('quant_method')!r}; gptq, awq and "
            "compressed-tensors can be converted"
        )
    is_dialect = section["quant_method"] == "compressed-tensors"
    return _as_written_now(section) if is_dialect else section


def _as_written_now(section: dict[str, Any]) -> dict[str, Any]:
    """Older versions write the format once for all groups, and that nothing is sparse at length."""
    groups, fmt = section.get("config_groups"), section.get("format")
    if isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values()):
        filled = {n: {**g, "format": g.get("format") or fmt} for n, g in groups.items()}
        section = {**section, "config_groups": filled}
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        section = {**section, "sparsity_config": {}}
    return section


def _gptq_settings(section: Mapping[str, Any], path: Path) -> None:
    if section.get("checkpoint_format") not in CHECKPOINT_FORMATS:
        raise SourceError(
            f"{path}: checkpoint_format is {section.get('checkpoint_format')!r}, expected gptq "
            "(zero points stored less one) or gptq_v2 (stored as they are); without it every zero "
            "point may be off by one. Write the right one into quantization_config if you know it "
            "(AutoGPTQ's are gptq)"
        )
    for key in ("bits", "group_size", "sym"):
        if key not in section:
            raise SourceError(f"{path}: the quantization settings lack {key}")
    if section.get("dynamic"):
        raise SourceError(f"{path}: per-module settings (`dynamic`) are not supported")
    if section.get("pack_dtype", "int32") != "int32":
        raise SourceError(f"{path}: pack_dtype {section['pack_dtype']!r}; only int32 is supported")


def _awq_settings(section: Mapping[str, Any], path: Path) -> None:
    if str(section.get("version")).lower() != "gemm":
        raise SourceError(f"{path}: AWQ version is {section.get('version')!r}; only gemm is read")
    if section.get("zero_point") is not True:
        raise SourceError(f"{path}: zero_point is {section.get('zero_point')!r}; only true is read")
    bits = section.get("bits", section.get("w_bit"))
    if bits != 4:
        raise SourceError(f"{path}: {bits!r} bits; AWQ's gemm layout has 4")


def _gptq_scheme(source: QuantizedSource, module: str, shape: tuple[int, int]) -> Scheme:
    section, reader = source.section, source._reader
    bits, size = section["bits"], section["group_size"]
    scheme = _packed(source, module, bits, size, bool(section["sym"]), shape[1])
    _check_shape(source, f"{module}.qweight", (shape[1] * bits // 32, shape[0]))
    groups = 1 if size == -1 else shape[1] // size
    _check_shape(source, f"{module}.qzeros", (groups, shape[0] * bits // 32))
    _check_shape(source, f"{module}.scales", (groups, shape[0]))
    if f"{module}.g_idx" in reader:
        _refuse_act_order(source, module, shape[1], shape[1] // groups)
    elif section.get("desc_act"):
        raise SourceError(f"{source.path}: desc_act is true, but {module}.g_idx is missing")
    return scheme


def _awq_scheme(source: QuantizedSource, module: str, shape: tuple[int, int]) -> Scheme:
    size: Any = source.section.get("group_size", source.section.get("q_group_size"))
    scheme = _packed(source, module, 4, size, False, shape[1])
    groups = 1 if size == -1 else shape[1] // size
    _check_shape(source, f"{module}.qweight", (shape[1], shape[0] // 8))
    _check_shape(source, f"{module}.qzeros", (groups, shape[0] // 8))
    _check_shape(source, f"{module}.scales", (groups, shape[0]))
    return scheme


def _packed(
    source: QuantizedSource, module: str, bits: Any, size: Any, symmetric: bool, width: int
) -> Scheme:
    if size != -1 and (size not in GROUP_SIZES or width % size):
        raise SourceError(
            f"{source.path}: {module}: group_size {size!r}; supported are -1 (one scale per "
            f"channel) and {', '.join(map(str, GROUP_SIZES))} where they divide {width}"
        )
    try:
        weights = WeightScheme(
            num_bits=bits, kind="int", symmetric=symmetric,
            strategy="channel" if size == -1 else "group", group_size=None if size == -1 else size,
        )  # fmt: skip
        return Scheme(layout="pack-quantized", weights=weights)
    except SchemeError as error:
        raise SourceError(f"{source.path}: {module}: {error}") from None


def _check_shape(source: QuantizedSource, name: str, expected: tuple[int, int]) -> None:
    if name not in source._reader:
        raise IntegrityError(f"{source.path}: tensor {name} is missing; fetch the model again")
    found = tuple(source._reader.shape(name))
    if found != expected:
        raise IntegrityError(
            f"{source.path}: tensor {name} has shape {list(found)}; bits, group_size and "
            f"config.json make it {list(expected)}"
        )


def _refuse_act_order(source: QuantizedSource, module: str, width: int, size: int) -> None:
    """Groups of neighbouring columns are the only ones that our layout can say."""
    g_idx = source._reader.tensor(f"{module}.g_idx").long()
    if g_idx.shape != (width,) or not torch.equal(g_idx, torch.arange(width) // size):
        raise SourceError(
            f"{source.path}: {module}.g_idx puts columns into groups out of order (act-order "
            "without static groups); no layout that engines still read can say this, and the "
            "columns of most modules cannot be reordered. Quantize the original checkpoint"
        )


def _check_convention(source: QuantizedSource) -> None:
    """SourceError when asymmetric GPTQ zero points only make sense under the other version.

    Weights average about zero, so codes average their zero point to a small part of a step; a
    wrong version puts every module off by one whole step in the same direction.
    """
    if source.method != "gptq" or source.section["sym"]:
        return
    modules = [m for m, scheme in source.schemes.items() if not scheme.is_dense]
    sample = modules[:: max(1, len(modules) // 8)][:8]
    weights = [source.weight(module) for module in sample]
    means = [
        float(qw.codes.float().mean() - qw.zero_point.float().mean())
        for qw in weights
        if qw.zero_point is not None
    ]
    is_v1 = source.section["checkpoint_format"] == "gptq"
    off = [mean if is_v1 else -mean for mean in means]
    if off and all(-1.5 < mean < -0.5 for mean in off):
        raise SourceError(
            f"{source.path}: checkpoint_format says {source.section['checkpoint_format']}, but "
            f"then every weight is off by one step (codes lie {abs(means[0]):.2f} steps beside "
            "their zero points on average); the file is of the other version: correct "
            "checkpoint_format in its quantization settings"
        )
