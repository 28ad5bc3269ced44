"""Checkpoints that other tools quantized, read without loss: GPTQ (v1 and v2), AWQ (GEMM), fp8 in
blocks (as DeepSeek and Qwen publish it) and compressed-tensors.

`QuantizedSource` checks such a directory as `quant.source` checks a float one, and gives every
quantized linear as the `QuantizedWeight` it stands for: the same codes, zero points and scales, in
our layout, and the scales of an fp8 KV cache under our names. What is there decides what a module
is; what the settings say must agree with it, and what they say of nothing is refused.

It does not make artifacts (`quant.foreign_convert`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quant.artifact.dialect import parse_kv_scheme, parse_quantization_config
from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.layout import FP8, QuantizedWeight, from_tensors, tensor_names
from quant.artifact.scheme import DENSE, GROUP_SIZES, PRESETS, KVScheme, Scheme
from quant.artifact.store import CheckpointReader
from quant.checkpoint import read_object
from quant.errors import SourceError
from quant.foreign_keys import unknown_keys_note
from quant.foreign_packed import PARTS, PackedReader, wider
from quant.foreign_settings import (
    SECTION_FILES,
    check_blocks,
    narrowed,
    packed_settings,
    read_section,
)
from quant.kv_scales import scale_names
from quant.modelling import EMBEDDING_WEIGHT, HEAD, check_family, check_tensors
from quant.source import (
    DTYPES,
    QUANTIZED_MARKS,
    WEIGHT_DTYPES,
    HFSource,
    check_tied_head,
    read_config,
    refuse_code,
    require_tokenizer,
)

# Where the scales of keys and values stand, after the layer's prefix: in compressed-tensors, in its
# older releases, and in ModelOpt's exports.
_KV_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
)
_MARKS = (
    *QUANTIZED_MARKS, ".weight_g_idx", ".g_idx", ".q_scale", ".output_scale", ".input_zero_point",
    ".input_global_scale", ".weight_global_scale", ".weight_scale_2", ".pre_quant_scale",
)  # fmt: skip
# The scales beside fp8 blocks: what codes are multiplied with, whatever the name says.
_SCALE_INV = "weight_scale_inv"
# Why a tensor that belongs to codes has no place.
_WHY = {
    ".weight_g_idx": "it puts columns into groups out of order (act-order), which no engine reads "
    "any more; quantize the original checkpoint",
    ".input_scale": "inputs are rounded with scales made at run time here, not with stored ones",
    ".q_scale": "attention itself is quantized, which is not supported",
    ".k_scale": "the settings have no kv_cache_scheme for it",
    ".v_scale": "the settings have no kv_cache_scheme for it",
    ".output_scale": "the settings have no kv_cache_scheme for it",
}


def is_quantized(path: Path) -> bool:
    """Whether a model directory has codes of another tool in it (not an artifact of ours)."""
    if not (path / "config.json").is_file() or (path / "artifact.json").is_file():
        return False
    section = read_object(path / "config.json").get("quantization_config")
    return bool(section) or any((path / name).is_file() for name in SECTION_FILES)


class QuantizedSource(HFSource):
    """A directory of codes. `schemes` says what each linear is; `weight` gives its codes.

    kv: the scheme of the KV cache whose scales are stored. notes: what was read off the numbers
    because the settings leave it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = read_config(path)
        self.config = {k: v for k, v in whole.items() if k != "quantization_config"}
        self.section = read_section(path, whole)
        self.method = str(self.section["quant_method"])
        self.kv: KVScheme | None = None
        self.notes = unknown_keys_note(self.section)
        refuse_code(path, self.config)
        check_family(self.config, str(path))
        require_tokenizer(path)
        self._reader = CheckpointReader(path)
        self._times: set[int] = set()
        self._packed = self._settled() if self.method in ("gptq", "awq") else None
        if self._packed is not None:
            self.schemes = self._of(self._packed)
        else:
            self.schemes = self._of_blocks() if self.method == "fp8" else self._of_dialect()
        self._check_head()
        self._check_names()
        self.dtype = self._float_dtype()

    def _of_dialect(self) -> dict[str, Scheme]:
        section, self._times = narrowed(self.section, max(GROUP_SIZES))
        try:
            self.kv = parse_kv_scheme(section)
            is_tied = self.skeleton.is_tied
            modules = [m for m in self.module_shapes if not (is_tied and m == "lm_head")]
            found = parse_quantization_config(section, modules)
        except SchemeError as error:
            raise SourceError(f"{self.path}: {error}") from None
        return {**dict.fromkeys(self.module_shapes, DENSE), **found}

    def _of_blocks(self) -> dict[str, Scheme]:
        """What has scales is in blocks; `modules_to_not_convert` says the same at more length."""
        check_blocks(self.section, self.path)
        found = {}
        for module in self.module_shapes:
            has_scales = f"{module}.{_SCALE_INV}" in self._reader
            name = f"{module}.weight"
            if not has_scales and name in self._reader and self._reader.dtype(name) == FP8:
                raise IntegrityError(
                    f"{self.path}: tensor {module}.{_SCALE_INV} is missing; fetch the model again"
                )
            found[module] = PRESETS["fp8-block"] if has_scales else DENSE
        return found

    def _of(self, packed: PackedReader) -> dict[str, Scheme]:
        return {
            module: packed.scheme(module, shape) if self._has_codes(module) else DENSE
            for module, shape in self.module_shapes.items()
        }

    def _settled(self) -> PackedReader:
        settings = packed_settings(self.section, self.path)
        packed = PackedReader(path=self.path, reader=self._reader, settings=settings)
        self._of(packed)
        quantized = {m: shape for m, shape in self.module_shapes.items() if self._has_codes(m)}
        settled = packed.settled(quantized)
        if settings.method == "gptq" and settings.version is None and quantized:
            number = 1 if settled.settings.version == "gptq" else 2
            self.notes = (
                *self.notes,
                f"checkpoint_format is not written down; the zero points are those of version "
                f"{number} ({settled.settings.version})",
            )
        return settled

    def _has_codes(self, module: str) -> bool:
        return f"{module}.qweight" in self._reader

    def _float_dtype(self) -> torch.dtype:
        dtype = self._reader.dtype(EMBEDDING_WEIGHT)
        if dtype not in DTYPES.values():
            raise SourceError(
                f"{self.path}: tensor {EMBEDDING_WEIGHT} is {dtype}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        return dtype

    def _check_head(self) -> None:
        if self.skeleton.is_tied and not self.schemes[HEAD].is_dense:
            raise SourceError(
                f"{self.path}: lm_head has codes of its own, yet config.json says "
                "tie_word_embeddings, so that the embedding would be the head; write "
                "`tie_word_embeddings: false` there if the codes are what the head should be"
            )
        check_tied_head(self.path, self._reader, self.skeleton)

    def _check_names(self) -> None:
        """Every tensor has its place; those of a quantized module stand for its weight."""
        used = {name for names in self._kv_names() for name in names}
        for module, scheme in self.schemes.items():
            if not scheme.is_dense:
                used |= {f"{module}.{leaf}" for leaf in (*self._parts(scheme), "g_idx")}
        missing = {n for n in used if not n.endswith(".g_idx")} - set(self._reader.names)
        if missing:
            raise IntegrityError(
                f"{self.path}: tensor {min(missing)} is missing; fetch the model again"
            )
        left = [name for name in self._reader.names if name not in used]
        empty = [name for name in left if self._is_empty_bias(name)]
        self._refuse_codes(name for name in left if name not in empty)
        quantized = {f"{m}.weight": self.module_shapes[m]
                     for m, scheme in self.schemes.items() if not scheme.is_dense}  # fmt: skip
        self._dense = tuple(n for n in left if n not in empty)
        for name in self._dense:
            self._require_float(name)
        self.names = (*self._dense, *quantized)
        shapes = {n: tuple(self._reader.shape(n)) for n in self._dense} | quantized
        check_tensors(self.skeleton, shapes, str(self.path))

    def _require_float(self, name: str) -> None:
        dtype = self._reader.dtype(name)
        if name in self.skeleton.parameter_shapes and dtype not in WEIGHT_DTYPES:
            raise IntegrityError(
                f"{self.path}: tensor {name} is {str(dtype).removeprefix('torch.')}, and nothing "
                "says what its codes mean; fetch the model again"
            )

    def _refuse_codes(self, names: Iterator[str]) -> None:
        known = self.skeleton.parameter_shapes
        for name in names:
            if name.endswith(_MARKS) or (name.endswith(".bias") and name not in known):
                why = next((_WHY[mark] for mark in _WHY if name.endswith(mark)), "")
                raise SourceError(
                    f"{self.path}: tensor {name} has no place in this model{': ' * bool(why)}{why}"
                )

    def _is_empty_bias(self, name: str) -> bool:
        """Old tools wrote a bias of zeros beside every linear that has none."""
        is_known = name in self.skeleton.parameter_shapes or not name.endswith(".bias")
        return not is_known and not bool(self._reader.tensor(name).any())

    def _parts(self, scheme: Scheme) -> tuple[str, ...]:
        if self._packed is not None:
            return PARTS
        return ("weight", _SCALE_INV) if self.method == "fp8" else tensor_names(scheme)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._dense:
            return tuple(self._reader.shape(name))
        return self.module_shapes[name.removesuffix(".weight")]

    @property
    def num_bytes(self) -> int:
        return sum(self._reader.stored(name).num_bytes for name in self._reader.names)

    def weight(self, module: str) -> QuantizedWeight:
        """The codes, scales and zero points of a quantized linear; IntegrityError names it."""
        scheme, shape = self.schemes[module], self.module_shapes[module]
        try:
            if self._packed is None:
                qw = self._stored(module, scheme)
            else:
                qw = self._packed.weight(module, shape, scheme)
        except (IntegrityError, SchemeError) as error:
            raise IntegrityError(f"{self.path}: {module}: {error}") from None
        if qw.shape != shape:
            raise IntegrityError(f"{self.path}: {module}: holds {list(qw.shape)} codes")
        if not bool((torch.isfinite(qw.scale) & (qw.scale > 0)).all()):
            raise IntegrityError(f"{self.path}: {module}: scales hold NaN, Inf or values <= 0")
        return qw

    def _stored(self, module: str, scheme: Scheme) -> QuantizedWeight:
        stored = {n: self._reader.tensor(f"{module}.{n}") for n in self._parts(scheme)}
        if self.method == "fp8":
            return from_tensors(
                {"weight": stored["weight"], "weight_scale": stored[_SCALE_INV]}, scheme
            )
        if "weight_shape" in stored:
            stored["weight_shape"] = stored["weight_shape"].to(torch.int64)
        size = scheme.weights.group_size if scheme.weights else None
        groups = self.module_shapes[module][1] // size if size else 1
        for leaf in ("weight_scale", "weight_zero_point"):
            part = stored.get(leaf)
            if (
                part is not None
                and part.ndim == 2
                and groups in {part.shape[1] * times for times in self._times}
            ):
                stored[leaf] = wider(part, groups)
        return from_tensors(stored, scheme)

    def kv_scales(self, layer: int) -> dict[str, Tensor]:
        """The stored scales of a layer's fp8 KV cache under our names, [1] each or [kv heads, 1,
        1]; {} without one. IntegrityError for any other shape and for what is no scale."""
        if self.kv is None:
            return {}
        ours, theirs = scale_names(self.layer_prefix(layer)), self._kv_names()[layer]
        is_by_head = self.kv.strategy == "attn_head"
        shape = (self.skeleton.num_kv_heads, 1, 1) if is_by_head else (1,)
        return {
            name: self._kv_scale(stored, shape) for name, stored in zip(ours, theirs, strict=True)
        }

    def _kv_scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        scale = self._reader.tensor(name)
        is_float = scale.dtype in DTYPES.values()
        if not is_float or scale.numel() != torch.Size(shape).numel():
            raise IntegrityError(
                f"{self.path}: {name} is {scale.dtype} {list(scale.shape)}; by kv_cache_scheme it "
                f"is a float {list(shape)}"
            )
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise IntegrityError(f"{self.path}: {name} holds NaN, Inf or values <= 0")
        return scale.reshape(shape)

    def _kv_names(self) -> list[tuple[str, str]]:
        """The names of each layer's key and value scale in this checkpoint; none without any."""
        if self.kv is None:
            return []
        prefixes = [self.layer_prefix(index) for index in range(self.num_layers)]
        known = [[(p + key, p + value) for key, value in _KV_NAMES] for p in prefixes]
        return [
            next((names for names in found if names[0] in self._reader), found[0])
            for found in known
        ]
