"""config.json -> ModelSpec: both spellings, the families' defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.model.errors import ModelConfigError, ModelError, UnsupportedModelError
from runtime.model.spec import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes})


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_shapes_follow_from_the_config() -> None:
    spec = spec_of()
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (8, 64, 16)
    assert spec.attention_scale == 8**-0.5
    assert spec.max_positions == 256


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_rope_give_the_same_spec(key: str) -> None:
    factors = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = spec_of(rope_theta=5e5, rope_scaling={key: "llama3", **factors})
    new = spec_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **factors})
    both = {"rope_type": "llama3", "rope_theta": 5e5, **factors}
    assert old == new == spec_of(rope_parameters=both, rope_scaling={key: "llama3", **factors})
    rope = old.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor, rope.trained_positions) == ("llama3", 5e5, 8.0, 64)


def test_published_gemma3_config_leaves_most_fields_to_the_defaults() -> None:
    spec = ModelSpec.from_config(
        {
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262_208)
    assert windows(spec)[:7] == [1024] * 5 + [None, 1024]
    local, full = spec.layers[0].rope, spec.layers[5].rope
    assert local is not None
    assert full is not None
    assert (local.kind, local.theta) == ("default", 10_000.0)
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert spec.eos_token_ids == (1, 106)
    assert spec.tied
    assert spec.norm_offset == 1.0


def test_rope_parameters_per_layer_type() -> None:
    spec = spec_of(
        model_type="gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 9.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
        },
    )
    kinds = [layer.rope.kind for layer in spec.layers if layer.rope]
    assert kinds == ["default", "yarn"] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "llama", "sliding_window": 32}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 32}, [None] * 4),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 3,
            },
            [None, None, None, 32],
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 8] * 2,
        ),
    ],
)
def test_windows(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(spec_of(**changes)) == expected


def test_biases() -> None:
    qwen2 = spec_of(model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    llama = spec_of(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_rope_free_layers() -> None:
    spec = spec_of(model_type="smollm3", no_rope_layers=[1, 0, 1, 0])
    assert [layer.rope is not None for layer in spec.layers] == [True, False, True, False]


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
)
def test_scaled_context_length(rope: dict[str, Any], expected: int) -> None:
    assert spec_of(rope_scaling=rope).max_positions == expected
    trained = rope.get("original_max_position_embeddings")
    inside = {**rope, "original_max_position_embeddings": 8} if trained else rope
    beside = spec_of(rope_scaling=inside, original_max_position_embeddings=trained)
    assert beside.max_positions == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "llama", "qwen3", "gemma3_text"]),
        ({"model_type": None}, ["None", "llama"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["'longrope'", "llama3"]),
        ({"rope_parameters": {"rope_type": "su"}}, ["'su'", "yarn"]),
        ({"hidden_act": "relu2"}, ["'relu2'", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["partial rotary"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ["causal"]),
        ({"is_causal": False}, ["'is_causal'", "only causal"]),
        ({"final_logit_softcapping": 30.0}, ["'final_logit_softcapping'", "this family"]),
        ({"model_type": "qwen3", "query_pre_attn_scalar": 7}, ["'query_pre_attn_scalar'"]),
        (
            {
                "model_type": "mistral",
                "rope_parameters": {"full_attention": {"rope_theta": 5e5}},
            },
            ["by layer type"],
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
            ["'full_attention'", "'sliding_attention'"],
        ),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 4},
            ["linear_attention", "sliding_attention"],
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"] * 2},
            ["layer_types"],
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            ["'yarn'", "default"],
        ),
    ],
)
def test_unsupported_is_refused_and_names_what_is_supported(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
@pytest.mark.parametrize("value", [None, 0, -3, "64", 1.5, True])
def test_missing_or_senseless_sizes_name_the_field(key: str, value: object) -> None:
    with pytest.raises(ModelConfigError, match=key):
        spec_of(**{key: value})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "below 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "high_freq_factor",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            "'rope_parameters' and 'rope_scaling' contradict",
        ),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        (
            {
                "model_type": "mistral",
                "layer_types": ["full_attention"] * 4,
                "sliding_window": 9,
            },
            "'sliding_window' is 9; set it to null",
        ),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        spec_of(**changes)
