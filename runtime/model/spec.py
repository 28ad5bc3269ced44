"""ModelSpec: what a config.json says, resolved into what the decoder computes.

Reads plain dictionaries; knows neither transformers nor tensors. Every rule that differs between
families comes from the table in `runtime.model.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from runtime.model.errors import ModelConfigError, UnsupportedModelError
from runtime.model.families import FAMILIES, Family
from runtime.model.rope import RopeSpec, parse_rope

Activation = Literal["silu", "gelu_tanh", "gelu"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: `window` tokens are visible (None: all); `rope` None rotates nothing."""

    window: int | None
    rope: RopeSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder needs to know about a model besides its weights.

    `attention_scale` multiplies the scores; `embedding_scale` the embeddings (None: 1);
    `norm_offset` is added to every norm weight; `logit_softcap` c gives c * tanh(logits / c).
    `max_positions` is the longest context the model was made for. `prefixes` and
    `ignored_prefixes` say where tensors lie in the checkpoint (see `Family`).
    """

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    norm_offset: float
    act: Activation
    attention_scale: float
    embedding_scale: float | None
    logit_softcap: float | None
    qk_norm: bool
    sandwich_norms: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    qkv_modules: tuple[str, ...]
    gate_up_modules: tuple[str, ...]
    prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...]

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a config.json's content.

        Raises:
            UnsupportedModelError: unknown family, rope kind, activation or attention feature; the
                message names what is supported.
            ModelConfigError: a field is missing, has the wrong type or contradicts another.
        """
        family_name, family = _family(config)
        return _resolve(family_name, family, _Fields(config, family))

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection."""
        return self.kv_heads * self.head_dim


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return str(name), FAMILIES[str(name)]


class _Fields:
    """Typed access to config.json with the family's defaults; errors name the field."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        text = config.get("text_config") or {}
        self._values = {**family.defaults, **config, **text}

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"config.json: {key!r} must be a positive integer; is {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelConfigError(f"config.json: {key!r} must be a number; is {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value not in (None, False, True):
            raise ModelConfigError(f"config.json: {key!r} must be true or false; is {value!r}")
        return bool(value)

    def refuse(self, key: str, why: str) -> None:
        if self._values.get(key):
            raise UnsupportedModelError(f"config.json: {key!r} is set; {why}")


def _resolve(name: str, family: Family, fields: _Fields) -> ModelSpec:
    fields.refuse("attn_logit_softcapping", "soft-capped attention scores are not supported")
    fields.refuse("use_bidirectional_attention", "only causal attention is supported")
    if fields.get("is_causal") is False:
        raise UnsupportedModelError(
            "config.json: 'is_causal' is false; only causal attention is supported"
        )
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelConfigError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly"
        )
    _require_known_scales(fields, family, head_dim)
    softcap = fields.get("final_logit_softcapping")
    from_config = family.biases == "config"
    return ModelSpec(
        family=name,
        num_layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=family.norm_offset,
        act=_activation(fields, family),
        attention_scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if family.scaled_embeddings else None,
        logit_softcap=None if softcap is None else fields.number("final_logit_softcapping", 0.0),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        qkv_bias=family.biases == "qkv" or (from_config and fields.flag("attention_bias")),
        o_bias=from_config and fields.flag("attention_bias"),
        mlp_bias=from_config and fields.flag("mlp_bias"),
        tied=fields.flag("tie_word_embeddings"),
        max_positions=_max_positions(fields),
        eos_token_ids=_eos_ids(fields),
        layers=_layers(fields, family, head_dim),
        qkv_modules=family.qkv,
        gate_up_modules=family.gate_up,
        prefixes=family.prefixes,
        ignored_prefixes=family.ignored_prefixes,
    )


def _require_known_scales(fields: _Fields, family: Family, head_dim: int) -> None:
    """Scales that only some families have must not seem to count in the others."""
    if family.scaled_scores:
        return
    why = "this family does not compute it; remove it if the model was trained without"
    fields.refuse("final_logit_softcapping", why)
    if fields.get("query_pre_attn_scalar") != head_dim:
        fields.refuse("query_pre_attn_scalar", why)


def _activation(fields: _Fields, family: Family) -> Activation:
    name = fields.get(family.activation_key, "silu")
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModelError(f"activation {name!r} is not supported; supported: {known}")
    return _ACTIVATIONS[name]


def _eos_ids(fields: _Fields) -> tuple[int, ...]:
    """The config's own end-of-text ids; generation_config.json's are the engine's to add."""
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelConfigError(f"config.json: 'eos_token_id' must be ids; is {value!r}")
    return tuple(cast("list[int]", ids))


def _max_positions(fields: _Fields) -> int:
    """The stated length, or the one that the rope's scaling reaches where that is unambiguous."""
    stated = fields.integer("max_position_embeddings")
    params = _given_rope(fields)
    kind, factor = _rope_kind(params), params.get("factor") or 1.0
    if kind == "yarn" and params.get("original_max_position_embeddings"):
        return max(stated, int(params["original_max_position_embeddings"] * factor))
    return int(stated * factor) if kind == "dynamic" else stated


def _layers(fields: _Fields, family: Family, head_dim: int) -> tuple[LayerSpec, ...]:
    windows = _windows(fields, family)
    ropes = _ropes(fields, family, head_dim)
    rotated = _rotated_layers(fields, family, len(windows))
    return tuple(
        LayerSpec(
            window=window,
            rope=ropes["full_attention" if window is None else "sliding_attention"] if on else None,
        )
        for window, on in zip(windows, rotated, strict=True)
    )


def _rotated_layers(fields: _Fields, family: Family, count: int) -> list[bool]:
    """Which layers rotate queries and keys; all but SmolLM3's rope-free ones."""
    if family.window != "rope_free_layers":
        return [True] * count
    flags = fields.get("no_rope_layers")
    if flags is None:
        every = fields.integer("no_rope_layer_interval")
        return [(i + 1) % every != 0 for i in range(count)]
    if len(flags) != count:
        raise ModelConfigError(
            f"config.json: 'no_rope_layers' has {len(flags)} entries for {count} layers"
        )
    return [bool(flag) for flag in flags]


def _windows(fields: _Fields, family: Family) -> list[int | None]:
    """Per layer the window in tokens, None where attention is full."""
    count = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    if family.window == "none":
        return [None] * count
    if family.window == "every_layer":
        _require_uniform(fields, window)
        return [window] * count
    if family.window in ("last_layers", "rope_free_layers") and not fields.flag(
        "use_sliding_window"
    ):
        window = None
    types = fields.get("layer_types") or _default_types(fields, family, count, window)
    return [_window_of(kind, window) for kind in _checked_types(types, count)]


def _require_uniform(fields: _Fields, window: int | None) -> None:
    kinds = set(fields.get("layer_types") or ())
    if len(kinds) > 1:
        raise UnsupportedModelError(
            "config.json: mixed 'layer_types' in a family whose layers are all alike"
        )
    if window is not None and "full_attention" in kinds:
        raise ModelConfigError(
            f"config.json: 'layer_types' are all full attention, but 'sliding_window' is {window}; "
            "set it to null if the layers see everything"
        )


def _default_types(fields: _Fields, family: Family, count: int, window: int | None) -> list[str]:
    """`layer_types` of configs older than that field."""
    if window is None:
        return ["full_attention"] * count
    if family.window == "last_layers":
        first = int(fields.number("max_window_layers", 0))
        sliding = [i >= first for i in range(count)]
    elif family.window == "pattern":
        every = fields.integer("sliding_window_pattern")
        sliding = [(i + 1) % every != 0 for i in range(count)]
    else:
        sliding = [not on for on in _rotated_layers(fields, family, count)]
    return ["sliding_attention" if on else "full_attention" for on in sliding]


def _checked_types(types: Any, count: int) -> list[str]:
    if not isinstance(types, list) or len(types) != count:
        raise ModelConfigError(f"config.json: 'layer_types' must list {count} layers; is {types!r}")
    unknown = sorted({str(kind) for kind in types} - set(_LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"layer types {unknown} are not supported; supported: {', '.join(_LAYER_TYPES)}"
        )
    return types


def _window_of(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if window is None:
        raise ModelConfigError(
            "config.json: a layer has sliding attention but no 'sliding_window' is in force"
        )
    return window


def _ropes(fields: _Fields, family: Family, head_dim: int) -> dict[str, RopeSpec]:
    """The rope of each layer type."""
    parsed = {}
    for kind, params in _rope_parameters(fields, family).items():
        partial = params.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
        if partial != 1.0 and not family.partial_rotary:
            raise UnsupportedModelError("partial rotary embeddings do not exist in this family")
        parsed[kind] = parse_rope(
            params,
            theta=fields.number("rope_theta", 10_000.0),
            rotary_dim=int(head_dim * partial),
            max_positions=fields.integer("max_position_embeddings"),
        )
        if family.ropes and parsed[kind].kind not in family.ropes:
            raise UnsupportedModelError(
                f"rope type {parsed[kind].kind!r} is not supported in this family; "
                f"supported: {', '.join(family.ropes)}"
            )
    return parsed


def _rope_parameters(fields: _Fields, family: Family) -> dict[str, Mapping[str, Any]]:
    """Raw parameters by layer type, from either spelling of config.json."""
    given = _given_rope(fields)
    if _is_by_layer_type(given):
        if family.window != "pattern":
            raise UnsupportedModelError("ropes by layer type do not exist in this family")
        return {
            kind: {**_fallback(fields, kind), **(given.get(kind) or {})} for kind in _LAYER_TYPES
        }
    if family.window == "pattern":
        if fields.get("rope_parameters"):
            raise UnsupportedModelError(
                "config.json: 'rope_parameters' must name 'full_attention' and "
                "'sliding_attention' in this family"
            )
        # Only the full-attention layers are stretched; the local ones have their own base.
        return {"full_attention": given, "sliding_attention": _fallback(fields, _LAYER_TYPES[1])}
    return dict.fromkeys(_LAYER_TYPES, given)


def _given_rope(fields: _Fields) -> Mapping[str, Any]:
    """`rope_parameters` or, in the older spelling, `rope_scaling`; empty without either.

    A trained length that stands beside them counts more than one within, as in transformers.
    """
    new, old = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if new and old and _scaling_of(new) != _scaling_of(old):
        raise ModelConfigError(
            "config.json: 'rope_parameters' and 'rope_scaling' contradict each other; remove one "
            f"of them: {dict(new)} and {dict(old)}"
        )
    given = new or old
    trained = fields.optional_integer("original_max_position_embeddings")
    if trained is None or _is_by_layer_type(given):
        return given
    return {**given, "original_max_position_embeddings": trained}


def _is_by_layer_type(params: Mapping[str, Any]) -> bool:
    return any(isinstance(params.get(kind), Mapping) for kind in _LAYER_TYPES)


def _rope_kind(params: Mapping[str, Any]) -> Any:
    return params.get("rope_type") or params.get("type")


def _scaling_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """What stretches a rope, however it is spelled; the base may stand elsewhere."""
    named = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in params.items() if key not in named}
    return {"rope_type": _rope_kind(params) or "default", **rest}


def _fallback(fields: _Fields, kind: str) -> Mapping[str, Any]:
    key = "rope_local_base_freq" if kind == "sliding_attention" else "rope_theta"
    return {"rope_theta": fields.get(key)}
