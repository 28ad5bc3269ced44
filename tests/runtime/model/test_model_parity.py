"""Our logits against transformers', float32, for every family and rope kind.

Sequences are longer than every window, than the trained length and than `max_position_embeddings`;
each is computed whole, in chunks that end inside blocks, and token by token. Pools start as NaN.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from model_oracle import (
    Sequence_,
    artifact_of,
    hf_logits,
    load,
    make_hf,
    poisoned_cache,
    random_ids,
    run_alone,
    run_step,
)

from runtime.model.decoder import Decoder

LENGTH = 90
TOLERANCE = 1e-4
GEMMA3 = {
    "head_dim": 12,
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 8,
        "truncate": False,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-mha": {"num_key_value_heads": 6, "hidden_act": "gelu"},
    "mistral": {"sliding_window": 9},
    "mistral-full": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3-bias": {"head_dim": 16, "attention_bias": True},
    "gemma3_text": GEMMA3,
    "gemma3_text-softcap": {**GEMMA3, "final_logit_softcapping": 5.0},
    "gemma3_text-linear": {
        **GEMMA3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 11},
    **{
        f"llama-{name}": {"rope_parameters": {"rope_theta": 500.0, **rope}}
        for name, rope in ROPES.items()
    },
}


@cache
def pair(case: str) -> tuple[Any, Decoder]:
    model = make_hf(case.split("-")[0], **CASES[case])
    return model, load(artifact_of(model))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    model, decoder = pair(case)
    ids = random_ids(LENGTH)
    expected = hf_logits(model, ids)
    assert float(expected.std()) > 0.3, "flat logits would hide errors"
    for chunks in ([LENGTH], [33, 17, LENGTH - 50], [50] + [1] * (LENGTH - 50)):
        found = run_alone(decoder, ids, chunks)
        assert float((found - expected).abs().max()) < TOLERANCE, chunks


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "gemma3_text"])
def test_mixed_batches_equal_transformers(case: str) -> None:
    """Prompts, chunks and decodes of very different lengths in the same steps."""
    model, decoder = pair(case)
    lengths = [70, 3, 18, 16, 33, 1]
    texts = [random_ids(n + 3, seed=n) for n in lengths]
    expected = [hf_logits(model, ids) for ids in texts]
    kv = poisoned_cache(decoder, num_blocks=40)
    free = list(range(40))
    generator = torch.Generator().manual_seed(7)
    sequences = [
        Sequence_(
            ids=ids, blocks=[free.pop(int(torch.randint(len(free), (), generator=generator)))
                             for _ in range(-(-len(ids) // 16))],
        )
        for ids in texts
    ]  # fmt: skip
    plan = [[20, 1, 18, 15, 30, 1], [50, 2, 1, 1, 3, 1], [1] * 6, [1] * 6]
    done: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in plan:
        work = [
            (seq, min(n, len(seq.ids) - seq.computed))
            for seq, n in zip(sequences, counts, strict=True)
        ]
        live = [(i, item) for i, item in enumerate(work) if item[1]]
        for (i, _), logits in zip(live, run_step(decoder, kv, [w for _, w in live]), strict=True):
            done[i].append(logits)
    for logits, want in zip(done, expected, strict=True):
        found = torch.cat(logits)
        assert float((found - want[: len(found)]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ROPES)
def test_each_rope_kind_makes_a_difference(name: str) -> None:
    """The parity above could not tell kinds apart if they all rotated alike."""
    ids = random_ids(LENGTH)
    scaled = run_alone(pair(f"llama-{name}")[1], ids, [LENGTH])
    model = make_hf("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    plain = run_alone(load(artifact_of(model)), ids, [LENGTH])
    assert float((scaled - plain).abs().max()) > 0.05


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_a_trained_length_beside_the_rope_counts_as_in_transformers(name: str) -> None:
    """config.json as it is written by hand; transformers' own object has both in one place."""
    written = {"rope_theta": 500.0, **ROPES[name], "original_max_position_embeddings": 32}
    model = make_hf("llama", original_max_position_embeddings=8, rope_parameters=dict(written))
    config = {**model.config.to_dict(), "rope_parameters": written}
    ids = random_ids(LENGTH)
    found = run_alone(load(artifact_of(model, config=config)), ids, [LENGTH])
    assert float((found - hf_logits(model, ids)).abs().max()) < TOLERANCE


def test_bases_beside_ropes_by_layer_type_count_as_in_transformers() -> None:
    """config.json as it is written by hand; transformers' own object has each base in its rope."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    bases = {"rope_theta": 500.0, "rope_local_base_freq": 50.0}
    written = {**GEMMA3, **bases, "rope_parameters": ropes}
    model = make_hf("gemma3_text", **deepcopy(written))
    config = {**model.config.to_dict(), **written}
    ids = random_ids(LENGTH)
    found = run_alone(load(artifact_of(model, config=config)), ids, [LENGTH])
    assert float((found - hf_logits(model, ids)).abs().max()) < TOLERANCE


def test_dynamic_rope_equals_transformers_token_by_token() -> None:
    """Beyond the trained length the base grows with every token; cached keys keep theirs."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    model = make_hf("llama", max_position_embeddings=32, rope_parameters=rope)
    decoder = load(artifact_of(model))
    out = model.generate(
        torch.tensor([random_ids(30)]),
        max_new_tokens=60,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids, want = out.sequences[0].tolist()[:-1], torch.cat(out.logits)
    # The rule makes rotation a function of the position: how the text is cut does not matter.
    for chunks in ([30] + [1] * 59, [89], [31, 20, 38]):
        found = run_alone(decoder, ids, chunks)[29:]
        assert float((found - want).abs().max()) < TOLERANCE, chunks
    plain = make_hf("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert float((hf_logits(plain, ids)[29:] - want).abs().max()) > 0.05


def test_greedy_tokens_equal_transformers_generate(tiny_model: Any) -> None:
    """The fixture models, saved and read back by transformers: the same 24 tokens."""
    from transformers import AutoModelForCausalLM

    for family in ("llama", "gemma3_text"):
        model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
        decoder = load(artifact_of(model))
        ids = random_ids(40, vocab=model.config.vocab_size)
        kv = poisoned_cache(decoder)
        seq = Sequence_(ids=list(ids), blocks=[3, 1, 2, 0])
        n, ours = len(ids), []
        for _ in range(24):
            ours.append(int(run_step(decoder, kv, [(seq, n)])[0][-1].argmax()))
            seq.ids = [*seq.ids, ours[-1]]
            n = 1
        theirs = model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert ours == theirs[0, len(ids) :].tolist()
