"""A LoRA adapter (PEFT's files) merged into the model it was trained on, tensor by tensor.

`AdapterSource` stands before any other source and changes the tensors that the adapter touches when
they are read, in float32; nothing is merged ahead, so memory stays that of one layer. What the
numbers mean follows PEFT: W + s B A with s = alpha / r (or alpha / sqrt(r)), DoRA's magnitudes,
whole tensors of `modules_to_save`, biases. A setting that is not understood is refused by name.

It does not know how a layer computes, nor what becomes of the merged weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, ValidationError
from safetensors import safe_open
from torch import Tensor

from quant.artifact.errors import UnsafeCheckpointError
from quant.artifact.integrity import sha256_of
from quant.artifact.jsonio import validation_message
from quant.artifact.manifest import AdapterRecord
from quant.artifact.store import read_header
from quant.checkpoint import Source, read_object
from quant.errors import NonFiniteError, SourceError, UnsupportedModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_PREFIX = "base_model.model."
# What may stand in adapter_config.json without changing what the stored numbers mean.
_NOTES = frozenset({
    "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "lora_dropout",
    "inference_mode", "peft_version", "megatron_core", "runtime_config", "qalora_group_size",
    "eva_config", "ensure_weight_tying", "layers_pattern",
})  # fmt: skip
# Ways to initialize that leave the base's weights alone; the others train against changed ones.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
# A tensor's name, without the prefix: module, then what it is of the module.
_PARTS = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector(?:\.weight)?|"
    r"(?:base_layer\.|modules_to_save\.)?(?:weight|bias))"
)


class AdapterConfig(BaseModel):
    """The settings of adapter_config.json that decide what is computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    r: StrictInt
    lora_alpha: StrictInt | float
    use_rslora: StrictBool = False
    use_dora: StrictBool = False
    # PEFT ignores it for linears that store [out, in], and all of the supported families do.
    fan_in_fan_out: StrictBool = False
    bias: StrictStr = "none"
    lora_bias: StrictBool = False
    rank_pattern: dict[str, StrictInt] = {}
    alpha_pattern: dict[str, StrictInt | float] = {}
    modules_to_save: tuple[StrictStr, ...] | None = None
    target_modules: tuple[StrictStr, ...] | StrictStr | None = None
    exclude_modules: tuple[StrictStr, ...] | StrictStr | None = None
    layers_to_transform: tuple[StrictInt, ...] | StrictInt | None = None

    def rank(self, module: str) -> int:
        """r of a module, by `rank_pattern` or the general one."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """What B A is multiplied by."""
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return float(alpha) / (rank**0.5 if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter was trained on this linear or embedding."""
        if self.exclude_modules is not None and _named(self.exclude_modules, module):
            return False
        layer = re.search(r"\.layers\.(\d+)\.", module)
        only = self.layers_to_transform
        wanted = (only,) if isinstance(only, int) else only
        if wanted is not None and (layer is None or int(layer[1]) not in wanted):
            return False
        if self.target_modules == "all-linear":
            return module not in (HEAD, EMBEDDING)
        return self.target_modules is not None and _named(self.target_modules, module)


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    """PEFT's rule: a string is a regular expression, a list holds names or their last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith("." + name) for name in names)


def _pattern_key(patterns: Mapping[str, object], module: str) -> str:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


class Adapter:
    """The adapter in a directory: its settings, and its tensors by module and part.

    Raises SourceError (missing, garbled, incomplete), UnsupportedModelError (a setting or tensor
    that is not supported) or UnsafeCheckpointError (pickle weights).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_directory(path)
        raw = read_object(path / CONFIG)
        self.base_name = str(raw.get("base_model_name_or_path") or "")
        self.config = parse_config(raw, path / CONFIG)
        self._shapes = {n: s.shape for n, s in read_header(path / WEIGHTS).items()}
        self.parts = self._index()

    @property
    def record(self) -> AdapterRecord:
        return AdapterRecord(name=self.path.resolve().name, digest=self.digest)

    @cached_property
    def digest(self) -> str:
        lines = [f"{name} {sha256_of(self.path / name)}\n" for name in (CONFIG, WEIGHTS)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _index(self) -> dict[str, dict[str, str]]:
        """module -> part -> the name of the stored tensor."""
        found: dict[str, dict[str, str]] = {}
        unknown = []
        for stored in self._shapes:
            match = _PARTS.fullmatch(stored.removeprefix(_PREFIX))
            if match is None or not stored.startswith(_PREFIX):
                unknown.append(stored)
                continue
            part = match["part"].removeprefix("base_layer.").removeprefix("modules_to_save.")
            part = part.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
            if part in found.setdefault(match["module"], {}):
                raise SourceError(f"{self.path}: two tensors for {match['module']}.{part}")
            found[match["module"]][part] = stored
        if unknown:
            raise UnsupportedModelError(
                f"{self.path}: {len(unknown)} tensors are of no kind of adapter that is supported: "
                f"{', '.join(unknown[:5])}"
            )
        if not found:
            raise SourceError(f"{self.path / WEIGHTS}: holds no tensors")
        return found

    def shape(self, module: str, part: str) -> tuple[int, ...]:
        return tuple(self._shapes[self.parts[module][part]])

    def tensor(self, module: str, part: str) -> Tensor:
        """A stored tensor in float32; NonFiniteError if it holds NaN or Inf."""
        name = self.parts[module][part]
        with safe_open(self.path / WEIGHTS, framework="pt", device="cpu") as file:
            value: Tensor = file.get_tensor(name).float()
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"{self.path}: tensor {name} holds NaN or Inf values")
        return value


class AdapterSource(Source):
    """`base` with `adapter` merged in.

    SourceError names what does not fit: modules the base lacks, shapes, tensors that are missing.
    """

    def __init__(self, base: Source, adapter: Adapter) -> None:
        self.base, self.adapter = base, adapter
        self.path, self.kind, self.config = base.path, base.kind, base.config
        self.hub_id, self.revision = base.hub_id, base.revision
        self.dtype, self.names = base.dtype, base.names
        self.merged = adapter.record
        check_fit(base, adapter)

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    @cached_property
    def digest(self) -> str:
        both = f"{self.base.digest} {self.adapter.digest}\n"
        return hashlib.sha256(both.encode()).hexdigest()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def files(self) -> dict[str, bytes]:
        return self.base.files()

    def tokenizer(self) -> Any:
        return self.base.tokenizer()

    def notes(self) -> Iterator[str]:
        """What the user should know: files of the adapter's directory that are not used."""
        mine = self.base.files()
        other = [
            name
            for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
            if (self.adapter.path / name).is_file()
            and (self.adapter.path / name).read_bytes() != mine.get(name)
        ]
        if other:
            yield (
                f"the adapter's directory has another {', '.join(other)} than the model; the "
                "model's are used: copy the adapter's over them if it was trained with those"
            )

    def raw_tensor(self, name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        parts = self.adapter.parts.get(module, {})
        base = self.base.raw_tensor(name)
        if leaf == "bias":
            return self._bias(module, parts, base)
        if leaf != "weight" or not parts.keys() - {"bias", "lora_B.bias"}:
            return base
        return self._weight(module, parts, base)

    def _weight(self, module: str, parts: Mapping[str, str], base: Tensor) -> Tensor:
        if "weight" in parts:
            base = self.adapter.tensor(module, "weight")
        merged = base.float()
        if "lora_embedding_A" in parts:
            up = self.adapter.tensor(module, "lora_embedding_B")
            down = self.adapter.tensor(module, "lora_embedding_A")
            return merged + (up @ down).T * self.adapter.config.scale(module)
        if "lora_A.weight" not in parts:
            return merged
        up = self.adapter.tensor(module, "lora_B.weight")
        down = self.adapter.tensor(module, "lora_A.weight")
        merged = merged + (up @ down) * self.adapter.config.scale(module)
        if "lora_magnitude_vector" in parts:
            norm = merged.norm(dim=1)
            magnitude = self.adapter.tensor(module, "lora_magnitude_vector").reshape(-1)
            merged = merged * (magnitude / norm)[:, None]
        return merged

    def _bias(self, module: str, parts: Mapping[str, str], base: Tensor) -> Tensor:
        if "bias" in parts:
            base = self.adapter.tensor(module, "bias")
        if "lora_B.bias" in parts:
            added = self.adapter.tensor(module, "lora_B.bias")
            return base.float() + added * self.adapter.config.scale(module)
        return base


def with_adapter(base: Source, adapter: str | Path) -> AdapterSource:
    """`base` with the LoRA adapter in directory `adapter`, checked to fit."""
    return AdapterSource(base, Adapter(Path(adapter)))


def parse_config(raw: Mapping[str, Any], where: Path) -> AdapterConfig:
    """The settings; UnsupportedModelError names each that changes the meaning unsupportedly."""
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"{where}: peft_type is {raw.get('peft_type')!r}; only LORA adapters can be merged"
        )
    if (init := raw.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise UnsupportedModelError(
            f"{where}: init_lora_weights is {init!r}, which changes the base's weights as well; "
            "save the adapter converted to plain LoRA (PEFT: path_initial_model_for_weight_"
            "conversion)"
        )
    known = AdapterConfig.model_fields
    strange = {
        key: value
        for key, value in raw.items()
        if key not in known and key not in _NOTES and key != "init_lora_weights" and value
    }
    if strange:
        found = ", ".join(f"{key} = {value!r:.60}" for key, value in sorted(strange.items()))
        raise UnsupportedModelError(
            f"{where}: {found}: not supported; merge the adapter with PEFT (merge_and_unload) and "
            "quantize the result"
        )
    try:
        chosen = {key: raw[key] for key in known if raw.get(key) is not None}
        config = AdapterConfig.model_validate(chosen)
    except ValidationError as error:
        raise SourceError(f"{where}: {validation_message(error)}") from None
    if config.bias not in ("none", "all", "lora_only"):
        raise UnsupportedModelError(f"{where}: bias {config.bias!r}; known: none, all, lora_only")
    if min([config.r, *config.rank_pattern.values()]) < 1:
        raise SourceError(f"{where}: a rank below 1")
    return config


def check_fit(base: Source, adapter: Adapter) -> None:
    """SourceError or UnsupportedModelError unless every tensor of the adapter has its place."""
    where, known = adapter.path, {name.rpartition(".")[0] for name in base.names}
    known |= set(base.module_shapes) | {EMBEDDING}
    strangers = [module for module in adapter.parts if module not in known]
    if strangers:
        raise SourceError(
            f"{where}: {len(strangers)} modules of the adapter are not in {base.name}: "
            f"{', '.join(strangers[:8])}; it was trained on another model"
            + (f" ({adapter.base_name})" if adapter.base_name else "")
        )
    for module, parts in adapter.parts.items():
        _check_tied(base, adapter, module)
        _check_complete(adapter, module, parts)
        for part in parts:
            _check_shape(base, adapter, module, part)
    _check_none_missing(base, adapter)


def _check_tied(base: Source, adapter: Adapter, module: str) -> None:
    if base.skeleton.is_tied and module in (EMBEDDING, HEAD):
        raise UnsupportedModelError(
            f"{adapter.path}: the adapter changes {module}, which in {base.name} shares its weight "
            f"with {HEAD if module == EMBEDDING else EMBEDDING}; merging would change both. Untie "
            "them in the model first (tie_word_embeddings: false, lm_head.weight stored)"
        )


def _check_complete(adapter: Adapter, module: str, parts: Mapping[str, str]) -> None:
    config = adapter.config
    for one, other in (
        ("lora_A.weight", "lora_B.weight"),
        ("lora_embedding_A", "lora_embedding_B"),
    ):
        for there, missing in ((one, other), (other, one)):
            if there in parts and missing not in parts:
                raise SourceError(f"{adapter.path}: {module} has {there} but no {missing}")
    if ("lora_magnitude_vector" in parts) != (config.use_dora and "lora_A.weight" in parts):
        raise SourceError(
            f"{adapter.path}: use_dora is {str(config.use_dora).lower()}, but {module} has "
            f"{'a' if 'lora_magnitude_vector' in parts else 'no'} lora_magnitude_vector"
        )
    if config.use_dora and "lora_embedding_A" in parts:
        raise UnsupportedModelError(f"{adapter.path}: DoRA on {module} is not supported")
    if "bias" in parts and config.bias == "none" and not _is_saved(config, module):
        raise SourceError(f"{adapter.path}: bias is 'none', but {module}.bias is stored")
    if "weight" in parts and module not in (EMBEDDING, HEAD) and not _is_saved(config, module):
        raise SourceError(
            f"{adapter.path}: {module}.weight is stored, but modules_to_save does not name it"
        )
    if "lora_B.bias" in parts and not config.lora_bias:
        raise SourceError(f"{adapter.path}: lora_bias is false, but {module} has lora_B.bias")


def _is_saved(config: AdapterConfig, module: str) -> bool:
    """Whether the adapter may hold this module whole: PEFT's rule is how the name ends, whatever
    stands before it, so that `norm` takes every input_layernorm too."""
    return any(module.endswith(name) for name in config.modules_to_save or ())


def _check_shape(base: Source, adapter: Adapter, module: str, part: str) -> None:
    found, weight = adapter.shape(module, part), f"{module}.weight"
    name = f"{module}.bias" if part.endswith("bias") else weight
    if name not in base.names:
        raise SourceError(f"{adapter.path}: {module}.{part} is stored, but the model has no {name}")
    rows, width = (base.shape(weight) + (1,))[:2]
    rank = adapter.config.rank(module)
    expected = {
        "lora_A.weight": (rank, width), "lora_B.weight": (rows, rank),
        "lora_embedding_A": (rank, rows), "lora_embedding_B": (width, rank),
        "lora_magnitude_vector": (rows,), "lora_B.bias": (rows,),
    }.get(part, tuple(base.shape(name)))  # fmt: skip
    if part == "lora_magnitude_vector" and found == (rows, 1):
        return
    if found != expected:
        resized = part == "weight" and module in (EMBEDDING, HEAD)
        raise SourceError(
            f"{adapter.path}: {module}.{part} has shape {list(found)}, but {base.name} and rank "
            f"{rank} make it {list(expected)}; it was trained on another model"
            + (", or on one with a resized vocabulary: resize the model first" if resized else "")
        )


def _check_none_missing(base: Source, adapter: Adapter) -> None:
    """Every module that the settings name has tensors: one that is lost would go unnoticed."""
    config = adapter.config
    candidates = [*base.module_shapes, EMBEDDING]
    lost = [
        module
        for module in candidates
        if config.targets(module)
        and not adapter.parts.get(module, {}).keys() & {"lora_A.weight", "lora_embedding_A"}
    ]
    norms = [name.removesuffix(".weight") for name in base.names if name.endswith("norm.weight")]
    lost += [
        m
        for m in (*candidates, *norms)
        if _named(config.modules_to_save or (), m) and "weight" not in adapter.parts.get(m, {})
    ]
    if lost:
        raise SourceError(
            f"{adapter.path}: {CONFIG} names {len(lost)} modules whose tensors are missing from "
            f"{WEIGHTS}: {', '.join(lost[:8])}; fetch the adapter again"
        )


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise SourceError(f"adapter {path}: no such directory; expected one with {CONFIG}")
    if not (path / CONFIG).is_file():
        raise SourceError(f"adapter {path}: no {CONFIG}; is this a PEFT adapter?")
    if not (path / WEIGHTS).is_file():
        pickles = sorted(p.name for p in path.glob("*.bin"))
        if pickles:
            raise UnsafeCheckpointError(
                f"adapter {path}: only pickle weights ({pickles[0]}); loading them would run code. "
                f"Save it as {WEIGHTS} (PEFT: save_pretrained(..., safe_serialization=True))"
            )
        raise SourceError(f"adapter {path}: no {WEIGHTS}")
