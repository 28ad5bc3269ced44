"""artifact.json: what the artifact is, module by module, tensor by tensor, and where it came from.

Nothing is inferred from tensor names: schemes, tied tensors and KV scales are written down. The
sha256 of this file's bytes is the artifact's digest; it lists the sha256 of every other file the
digest covers. This module parses and checks the file itself, not the files it describes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from quant.artifact import overlap
from quant.artifact.errors import ManifestError, SchemeError
from quant.artifact.jsonio import (
    canonical_json,
    check_version,
    is_newer_minor,
    parse_object,
    validation_message,
)
from quant.artifact.probe import ProbeRecord
from quant.artifact.scheme import ActivationScheme, KVScheme, Layout, Scheme, WeightScheme

MANIFEST_NAME = "artifact.json"
FORMAT_VERSION = "1.0"

# Written beside an artifact, before or after sealing, without being part of what it is.
_OUTSIDE_DIGEST = ("README", "report.", "gate.", "eval")


def is_outside_digest(name: str) -> bool:
    """Whether file `name` is a report, model card or stamp, which the digest leaves out."""
    return name.startswith(_OUTSIDE_DIGEST)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WeightRecord(_Record):
    """`scheme.WeightScheme`, field for field."""

    num_bits: int
    kind: Literal["int", "float"]
    symmetric: bool
    strategy: Literal["group", "channel", "block"]
    group_size: int | None = None


class ActivationRecord(_Record):
    """`scheme.ActivationScheme`, field for field; `group_size` is only written where it is set."""

    num_bits: int
    kind: Literal["int", "float"]
    group_size: int | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {k: v for k, v in data.items() if k != "group_size" or v is not None}


class SchemeRecord(_Record):
    """`scheme.Scheme`, field for field."""

    layout: Layout
    weights: WeightRecord | None = None
    activations: ActivationRecord | None = None

    @classmethod
    def of(cls, scheme: Scheme) -> SchemeRecord:
        w, a = scheme.weights, scheme.activations
        return cls(
            layout=scheme.layout,
            weights=None if w is None else WeightRecord.model_validate(w, from_attributes=True),
            activations=None
            if a is None
            else ActivationRecord.model_validate(a, from_attributes=True),
        )

    def scheme(self) -> Scheme:
        """The value; SchemeError when the combination is not a supported one."""
        w, a = self.weights, self.activations
        return Scheme(
            layout=self.layout,
            weights=None if w is None else WeightScheme(**w.model_dump()),
            activations=None if a is None else ActivationScheme(**a.model_dump()),
        )


class ModuleRecord(_Record):
    """One linear: its scheme (a key of `Manifest.schemes`), shape (out, in), and how it was made.

    `reason` says why a module has another scheme or method than the recipe's own. `tied_to` names
    the tensor that holds a dense module's weight when `<module>.weight` itself is not stored.
    """

    scheme: str
    shape: tuple[int, int]
    method: str = "none"
    reason: str = ""
    tied_to: str | None = None
    rel_error: float | None = None
    loss: float | None = None
    damping: float | None = None
    fallback: str | None = None
    dead_columns: int | None = None


class KVRecord(_Record):
    """A quantized KV cache. Of fp8 there are `<module>.k_scale` and `.v_scale` for each of
    `modules`, shape [1], or [kv heads, 1, 1] by the strategy "attn_head"; of int8 ("token_head")
    nothing is stored.

    `modules` are the attention modules (`model.layers.0.self_attn`, ...) whose cache is quantized,
    in layer order. The caches of others have the compute type.
    """

    num_bits: Literal[8] = 8
    kind: Literal["float", "int"] = "float"
    strategy: Literal["tensor", "attn_head", "token_head"] = "tensor"
    modules: tuple[str, ...] = Field(min_length=1)

    def scheme(self) -> KVScheme:
        return KVScheme(num_bits=self.num_bits, kind=self.kind, strategy=self.strategy)


class TensorRecord(_Record):
    """dtype is the safetensors code (`I32`, `BF16`, ...); sha256 is of the raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str


class FileRecord(_Record):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class AdapterRecord(_Record):
    """A LoRA adapter merged into the source: its directory's name, sha256 over its two files."""

    name: str
    digest: str


class SourceRecord(_Record):
    """The checkpoint that was quantized; `digest` covers the adapter where one was merged."""

    path: str
    kind: Literal["hf", "gguf"]
    revision: str | None = None
    digest: str
    dtype: str
    adapter: AdapterRecord | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`adapter` is only written where there is one."""
        data: dict[str, Any] = handler(self)
        return {k: v for k, v in data.items() if k != "adapter" or v is not None}


class RecipeRecord(_Record):
    """The recipe verbatim, its sha256, and what the command line changed."""

    text: str
    sha256: str
    name: str = ""
    overrides: dict[str, JsonValue] = Field(default_factory=dict)


class SketchRecord(_Record):
    """`overlap.Sketch`: which texts calibrated, as hashes, so that a gate cannot hold them unseen.

    documents: sorted uint32 in little-endian base64, one string a document.
    """

    run: Literal[10] = 10
    keep: int = Field(ge=1)
    documents: tuple[str, ...]
    ids: tuple[str, ...] = ()

    @field_validator("documents")
    @classmethod
    def _decodable(cls, documents: tuple[str, ...]) -> tuple[str, ...]:
        for text in documents:
            overlap.decode(text)
        return documents

    @classmethod
    def of(cls, sketch: overlap.Sketch) -> SketchRecord:
        return cls(
            keep=sketch.keep,
            documents=tuple(map(overlap.encode, sketch.documents)),
            ids=tuple(sorted(sketch.ids)),
        )

    def sketch(self) -> overlap.Sketch:
        """The value."""
        documents = tuple(map(overlap.decode, self.documents))
        return overlap.Sketch(keep=self.keep, documents=documents, ids=frozenset(self.ids))


class CalibrationRecord(_Record):
    """The calibration tokens: digest, how many, their coverage as reported, and the texts' sketch.

    `sketch` is only written where there is one: windows given as ids have none.
    """

    digest: str
    samples: int
    tokens: int
    coverage: dict[str, JsonValue] = Field(default_factory=dict)
    sketch: SketchRecord | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {k: v for k, v in data.items() if k != "sketch" or v is not None}


class Manifest(_Record):
    """artifact.json. `tensors` and `files` are filled in when the artifact is sealed."""

    format_version: str = FORMAT_VERSION
    created_by: str
    architecture: str
    dtype: str
    schemes: dict[str, SchemeRecord]
    modules: dict[str, ModuleRecord]
    kv_cache: KVRecord | None = None
    tensors: dict[str, TensorRecord] = Field(default_factory=dict)
    files: dict[str, FileRecord] = Field(default_factory=dict)
    source: SourceRecord
    recipe: RecipeRecord
    calibration: CalibrationRecord | None = None
    tools: dict[str, str] = Field(default_factory=dict)
    probe: ProbeRecord | None = None

    @model_validator(mode="after")
    def _schemes_resolve(self) -> Self:
        for name, module in self.modules.items():
            if module.scheme not in self.schemes:
                raise ValueError(f"module {name} has scheme {module.scheme!r}, not in `schemes`")
            if module.tied_to is not None and self.schemes[module.scheme].weights is not None:
                raise ValueError(f"module {name} is quantized, so it cannot be tied to a tensor")
        return self

    def module_schemes(self) -> dict[str, Scheme]:
        """Every linear's scheme, by checkpoint name."""
        values = {key: record.scheme() for key, record in self.schemes.items()}
        return {name: values[module.scheme] for name, module in self.modules.items()}

    def kv_scheme(self) -> KVScheme | None:
        """The KV cache's scheme; SchemeError when the combination is not a supported one."""
        return None if self.kv_cache is None else self.kv_cache.scheme()

    def to_bytes(self) -> bytes:
        """The bytes of artifact.json; their sha256 is the artifact's digest."""
        return canonical_json(self.model_dump(mode="json"))


def scheme_tables(modules: dict[str, Scheme]) -> dict[str, SchemeRecord]:
    """`Manifest.schemes` for modules whose records name schemes by label."""
    return {scheme.label: SchemeRecord.of(scheme) for scheme in modules.values()}


def read_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest in `path` (an artifact.json) and the artifact's digest, sha256 in hex.

    FormatVersionError for another major version, ManifestError when it is garbled. Fields that a
    newer minor version added are ignored.
    """
    data = parse_object(path)
    check_version(path, data, FORMAT_VERSION)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        manifest = _parse(data)
        manifest.module_schemes()
        manifest.kv_scheme()
    except ValidationError as error:
        raise ManifestError(f"{path}: {validation_message(error)}") from None
    except SchemeError as error:
        raise ManifestError(f"{path}: {error}") from None
    return manifest, digest


def _parse(data: dict[str, Any]) -> Manifest:
    try:
        return _validate(data)
    except ValidationError as error:
        unknown = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
        newer = is_newer_minor(data["format_version"], FORMAT_VERSION)
        if not newer or len(unknown) != error.error_count():
            raise
        for loc in unknown:
            _drop(data, loc)
        return _validate(data)


def _validate(data: dict[str, Any]) -> Manifest:
    return Manifest.model_validate_json(json.dumps(data), strict=True)


def _drop(data: Any, loc: tuple[int | str, ...]) -> None:
    for part in loc[:-1]:
        data = data[part]
    del data[loc[-1]]
