"""What the decoder promises besides parity: rows do not touch each other, stored KV is what is
read, quantized weights compute what they stand for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from model_oracle import (
    MemoryArtifact,
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

from quant.artifact.scheme import PRESETS, Scheme, WeightScheme, with_group_size
from runtime.model.decoder import Decoder

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
ASYMMETRIC = Scheme(
    layout="pack-quantized",
    weights=WeightScheme(num_bits=4, kind="int", symmetric=False, strategy="group", group_size=32),
)
SCHEMES: dict[str, Scheme] = {
    "w4a16": with_group_size(PRESETS["w4a16"], 32),
    "w4a16-channel": with_group_size(PRESETS["w4a16"], None),
    "w4a16-asym": ASYMMETRIC,
    "w8a16": with_group_size(PRESETS["w8a16"], 64),
    "w8a8": PRESETS["w8a8"],
    "fp8": PRESETS["fp8"],
}


@cache
def model_of(family: str) -> Any:
    extra = {"head_dim": 8, "sliding_window": 8} if family == "gemma3_text" else {}
    return make_hf(family, **SHAPE, **extra)


@cache
def artifact(family: str, scheme: str | None) -> MemoryArtifact:
    model = model_of(family)
    return artifact_of(model, SCHEMES[scheme]) if scheme else artifact_of(model)


def decoder_of(
    scheme: str | None, family: str = "llama", dtype: torch.dtype = torch.float32
) -> Decoder:
    return load(artifact(family, scheme), dtype)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-channel", "w4a16-asym", "w8a16"])
def test_weight_only_equals_transformers_on_the_dequantized_weights(scheme: str) -> None:
    decoder = decoder_of(scheme)
    model = make_hf("llama", **SHAPE)
    with torch.no_grad():
        for layer, ours in zip(model.model.layers, decoder.layers, strict=True):
            q, k, v = ours.qkv.reconstruct().split(list(ours.qkv.rows))
            gate, up = ours.gate_up.reconstruct().split(list(ours.gate_up.rows))
            attn, mlp = layer.self_attn, layer.mlp
            for target, weight in (
                (attn.q_proj, q), (attn.k_proj, k), (attn.v_proj, v),
                (attn.o_proj, ours.o.reconstruct()), (mlp.gate_proj, gate), (mlp.up_proj, up),
                (mlp.down_proj, ours.down.reconstruct()),
            ):  # fmt: skip
                target.weight.copy_(weight)
    ids = random_ids(50)
    assert worst(run_alone(decoder, ids, [30, 20]), hf_logits(model, ids)) < 1e-4
    assert worst(hf_logits(model, ids), hf_logits(model_of("llama"), ids)) > 1e-3


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(scheme: str | None, dtype: torch.dtype) -> None:
    decoder = decoder_of(scheme, dtype=dtype)
    kv_dtype = "float32" if dtype == torch.float32 else "bfloat16"
    lengths = [5, 17, 40, 33, 16, 2, 60, 21]
    texts = [random_ids(n, seed=n) for n in lengths]
    kv = poisoned_cache(decoder, 40, dtype=kv_dtype)
    free = iter(range(40))
    sequences = [
        Sequence_(ids=ids, blocks=[next(free) for _ in range(-(-len(ids) // 16))]) for ids in texts
    ]
    run_step(decoder, kv, [(seq, len(seq.ids) - 1) for seq in sequences])
    together = run_step(decoder, kv, [(seq, 1) for seq in sequences])
    # float32 noise passes a rounding to 8 bits (w8a8, fp8 inputs) now and then as one code.
    tolerance = 1e-4 if scheme not in ("w8a8", "fp8") else 2e-2
    tolerance = tolerance if dtype == torch.float32 else 0.25
    for ids, row in zip(texts, together, strict=True):
        alone = run_alone(decoder, ids, [len(ids) - 1, 1], kv_dtype=kv_dtype)[-1]
        assert worst(row[0], alone) < tolerance


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_bfloat16_stays_near_float32(scheme: str | None) -> None:
    ids = random_ids(40)
    exact = run_alone(decoder_of(scheme), ids, [39, 1])
    rounded = run_alone(decoder_of(scheme, dtype=torch.bfloat16), ids, [39, 1], kv_dtype="bfloat16")
    assert rounded.dtype == torch.float32
    # 8-bit inputs round chaotically: a last-bit change moves codes. It must cost less than
    # quantizing did; elsewhere bfloat16's own rounding is all there is.
    dense = run_alone(decoder_of(None), ids, [39, 1])
    limit = (exact - dense).norm() if scheme in ("w8a8", "fp8") else 0.05 * exact.norm()
    assert float((rounded - exact).norm()) < float(limit)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "bfloat16", "float16"])
def test_quantized_kv_is_the_same_however_the_prompt_is_cut(family: str, kv_dtype: str) -> None:
    """Also the state a prefix hit leaves: blocks written earlier, the rest computed now."""
    art = artifact(family, None)
    scales = {i: (0.05 + 0.01 * i, 0.02) for i in range(2)}
    decoder = load(MemoryArtifact(config=art.config, reader=art.reader, modules=art.modules,
                                  kv=scales))  # fmt: skip
    ids = random_ids(70)
    whole = run_alone(decoder, ids, [70], kv_dtype=kv_dtype)
    for chunks in ([16, 54], [32, 32, 6], [48, 21, 1], [64] + [1] * 6, [1] * 70):
        found = run_alone(decoder, ids, chunks, kv_dtype=kv_dtype)
        # Noise of 1e-7 can move a value across a rounding boundary of the stored type: rarely.
        assert float((found - whole).abs().mean()) < 2e-3, chunks
        assert worst(found, whole) < 0.1, chunks
    plain = run_alone(decoder, ids, [70])
    assert worst(plain, whole) > 1e-5, "the KV type made no difference: it was not used"
    assert float((plain - whole).norm() / plain.norm()) < 0.1


def test_reference_reads_the_same_fp8_values() -> None:
    """Prompt chunk and decode agree because both read the codes, not because both skip them."""
    decoder = decoder_of(None)
    ids = random_ids(33)
    kv = poisoned_cache(decoder, 4, dtype="fp8")
    run_step(decoder, kv, [(Sequence_(ids=ids, blocks=[2, 0, 1]), 32)])
    untouched = run_step(decoder, kv, [(Sequence_(ids=ids, blocks=[2, 0, 1], computed=32), 1)])[0]
    codes = kv.pools[0].view(torch.uint8)
    codes[2, 1] = 0  # the first 16 values of layer 0
    changed = run_step(decoder, kv, [(Sequence_(ids=ids, blocks=[2, 0, 1], computed=32), 1)])[0]
    assert worst(untouched, changed) > 1e-3


def test_nan_of_one_sequence_stays_its_own() -> None:
    decoder = decoder_of(None)
    kv = poisoned_cache(decoder, 8)
    good = Sequence_(ids=random_ids(20), blocks=[0, 1])
    bad = Sequence_(ids=random_ids(20, seed=1), blocks=[2, 3])
    run_step(decoder, kv, [(good, 19), (bad, 19)])
    for pool in kv.pools:
        pool[2] = torch.nan
    ours, theirs = run_step(decoder, kv, [(good, 1), (bad, 1)])
    assert torch.isnan(theirs).all()
    assert worst(ours[0], run_alone(decoder, good.ids, [20])[-1]) < 1e-4
    # The freed blocks go to a new sequence: what they held before does not matter.
    heir = Sequence_(ids=random_ids(18, seed=2), blocks=[3, 2])
    found = torch.cat([run_step(decoder, kv, [(heir, n)])[0] for n in (17, 1)])
    assert worst(found, run_alone(decoder, heir.ids, [18])) < 1e-4


def test_a_step_that_wants_no_logits_gives_none() -> None:
    from dataclasses import replace

    from runtime.model.step import StepInputs

    decoder = decoder_of(None)
    step = StepInputs(
        token_ids_T=torch.tensor([3, 4]),
        positions_T=torch.tensor([0, 1]),
        slots_T=torch.tensor([0, 1]),
        block_tables_SB=torch.tensor([[0]]),
        query_lens=(2,),
        seq_lens=(2,),
        logit_rows_R=torch.tensor([], dtype=torch.int64),
    )
    kv = poisoned_cache(decoder, 2)
    assert decoder.forward(step, kv).shape == (0, 64)
    assert decoder.logits(torch.empty(0, 64)).shape == (0, 97)
    some = decoder.forward(replace(step, logit_rows_R=torch.tensor([1])), kv)
    assert some.shape == (1, 64)


def test_logits_are_float32_and_vocabulary_wide() -> None:
    decoder = decoder_of("w4a16", dtype=torch.bfloat16)
    hidden = torch.randn(3, 64).bfloat16()
    assert decoder.logits(hidden).dtype == torch.float32
    assert decoder.logits(hidden).shape == (3, 97)
    assert decoder.lm_head_scheme == "dense"
