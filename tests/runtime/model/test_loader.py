"""Loading: every fault of an artifact stops the start with the name of the tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_oracle import (
    MemoryArtifact,
    MemoryReader,
    artifact_of,
    load,
    make_hf,
    random_ids,
    rtn,
    run_alone,
)

from quant.artifact import layout
from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.scheme import DENSE, PRESETS, Scheme, with_group_size
from runtime.model.errors import UnsupportedModelError
from runtime.model.kv_cache import KVCache

W4 = with_group_size(PRESETS["w4a16"], 32)
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}


def w4_artifact(**changes: Any) -> MemoryArtifact:
    return artifact_of(make_hf("llama", **SHAPE, **changes), W4)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.weight_packed",
        "model.layers.0.self_attn.v_proj.weight_shape",
        "model.layers.1.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named_before_anything_is_read(name: str) -> None:
    artifact = w4_artifact()
    del artifact.reader.tensors[name]
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        load(artifact)
    assert artifact.reader.read == []


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    artifact = w4_artifact()
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    artifact.reader.tensors[name] = artifact.reader.tensors[name][:, :1]
    with pytest.raises(IntegrityError, match=r"q_proj\.weight_scale .*\[64, 1\].*\[64, 2\]"):
        load(artifact)


def test_an_unknown_tensor_is_named() -> None:
    artifact = w4_artifact()
    artifact.reader.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(IntegrityError, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        load(artifact)


def test_more_layers_than_the_config_says_are_unknown_tensors() -> None:
    artifact = w4_artifact()
    artifact.config = {**artifact.config, "num_hidden_layers": 1, "layer_types": None}
    with pytest.raises(IntegrityError, match=r"layers\.1\."):
        load(artifact)


def test_a_module_without_a_scheme_is_named() -> None:
    artifact = w4_artifact()
    del artifact.modules["model.layers.1.mlp.up_proj"]
    with pytest.raises(IntegrityError, match=r"layers\.1\.mlp\.up_proj"):
        load(artifact)


def test_fused_modules_of_different_schemes_are_refused() -> None:
    artifact = w4_artifact()
    module = "model.layers.0.mlp.up_proj"
    for key in layout.tensor_names(W4):
        del artifact.reader.tensors[f"{module}.{key}"]
    artifact.reader.tensors[f"{module}.weight"] = torch.randn(96, 64)
    artifact.modules[module] = DENSE
    with pytest.raises(SchemeError, match=r"dense, w4a16-g32"):
        load(artifact)


def test_a_dense_weight_of_integers_is_refused() -> None:
    artifact = artifact_of(make_hf("llama", **SHAPE))
    artifact.reader.tensors["lm_head.weight"] = torch.zeros(97, 64, dtype=torch.int8)
    with pytest.raises(IntegrityError, match="lm_head"):
        load(artifact)


def test_weights_beyond_float16_are_refused_there_only() -> None:
    artifact = artifact_of(make_hf("llama", **SHAPE))
    artifact.reader.tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    load(artifact, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.down_proj.*bfloat16"):
        load(artifact, torch.float16)


def test_heads_that_no_kernel_serves_are_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.model.loader.uses_triton", lambda _: True)
    artifact = artifact_of(make_hf("llama", **SHAPE, head_dim=24))
    with pytest.raises(UnsupportedModelError, match=r"heads of 24.*16, 32, 64, 128, 256.*cpu"):
        load(artifact, torch.bfloat16)
    assert artifact.reader.read == []
    load(artifact, torch.float32)


def test_tied_heads() -> None:
    model = make_hf("llama", **SHAPE, tie_word_embeddings=True)
    artifact = artifact_of(model)
    embedding = artifact.reader.tensors["model.embed_tokens.weight"]
    assert load(artifact).head is None
    artifact.reader.tensors["lm_head.weight"] = embedding.clone()
    assert load(artifact).head is None
    artifact.reader.tensors["lm_head.weight"] = embedding + 1
    with pytest.raises(IntegrityError, match=r"lm_head\.weight differs"):
        load(artifact)


def test_a_tied_model_may_have_its_head_quantized() -> None:
    artifact = artifact_of(make_hf("llama", **SHAPE, vocab_size=96, tie_word_embeddings=True))
    head = rtn(artifact.reader.tensors["model.embed_tokens.weight"], PRESETS["w8a8"])
    artifact.modules["lm_head"] = PRESETS["w8a8"]
    artifact.reader.tensors |= {f"lm_head.{k}": v for k, v in layout.to_tensors(head).items()}
    decoder = load(artifact)
    assert decoder.head is not None
    assert decoder.lm_head_scheme == "w8a8-channel"
    assert torch.equal(decoder.head.reconstruct(), layout.dequantize(head))


def test_towers_and_old_buffers_are_left_alone() -> None:
    model = make_hf("gemma3_text", **SHAPE, head_dim=8, tie_word_embeddings=True)
    artifact = artifact_of(model)
    tensors = artifact.reader.tensors
    artifact.reader.tensors = {
        "language_model." + name: tensor for name, tensor in tensors.items()
    } | {"vision_tower.patch.weight": torch.zeros(3)}
    artifact.modules = {"language_model." + name: s for name, s in artifact.modules.items()}
    artifact.config = {"model_type": "gemma3", "text_config": artifact.config}
    nested = load(artifact)
    assert torch.equal(nested.embedding_VE, tensors["model.embed_tokens.weight"])
    old = artifact_of(make_hf("llama", **SHAPE))
    old.reader.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load(old)


@pytest.mark.parametrize(
    "scheme", [*PRESETS.values(), W4, with_group_size(PRESETS["w8a16"], 32)], ids=lambda s: s.label
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fusing_is_exact(scheme: Scheme, scale_dtype: torch.dtype) -> None:
    """The fused matrix is the shards' matrices, bit for bit."""
    from runtime.model.linear import Linear

    torch.manual_seed(3)
    weights = [torch.randn(rows, 128) for rows in (63, 16, 17)]
    shards = weights if scheme.is_dense else [rtn(w, scheme, scale_dtype) for w in weights]
    cpu = torch.device("cpu")
    fused = Linear.from_shards(shards, [None] * 3, torch.float32, cpu)
    single = [Linear.from_shards([s], [None], torch.float32, cpu).reconstruct() for s in shards]
    assert torch.equal(fused.reconstruct(), torch.cat(single))
    if scheme.activations is None and not scheme.is_dense:
        assert torch.equal(single[0], layout.dequantize(shards[0]).float())


def test_bfloat16_artifact_in_float32_compute_and_back() -> None:
    artifact = artifact_of(make_hf("qwen2", **SHAPE))
    narrow = {name: tensor.bfloat16() for name, tensor in artifact.reader.tensors.items()}
    decoder = load(replace(artifact, reader=MemoryReader(tensors=narrow)))
    assert decoder.dtype == torch.float32
    q_bias = narrow["model.layers.0.self_attn.q_proj.bias"].float()
    bias = decoder.layers[0].qkv.bias
    assert bias is not None
    assert torch.equal(bias[:64], q_bias)
    assert load(artifact, torch.bfloat16).embedding_VE.dtype == torch.bfloat16


def test_kv_scales_reach_the_cache() -> None:
    artifact = w4_artifact()
    artifact.kv = {1: (0.5, 0.25)}
    artifact.reader.tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.5])
    decoder = load(artifact)
    kv = KVCache(decoder.spec, 4, 16, "fp8", scales=decoder.kv_scales)
    assert kv.scales == ((1.0, 1.0), (0.5, 0.25))


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8", 1), ("int8", 1)]
)
def test_bytes_per_block_is_what_is_allocated(dtype: str, size: int) -> None:
    spec = load(w4_artifact()).spec
    kv = KVCache(spec, 5, 8, dtype)
    scale_bytes = 4 if dtype == "int8" else 0
    assert KVCache.bytes_per_block(spec, 8, dtype) == 2 * 2 * 2 * 8 * (8 * size + scale_bytes)
    allocated = sum(
        tensor.nbytes for tensor in [*kv.pools, *(s for s in kv.token_scales if s is not None)]
    )
    assert allocated == 6 * KVCache.bytes_per_block(spec, 8, dtype)


def test_kv_scales_by_head() -> None:
    spec = load(w4_artifact()).spec
    by_head = torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    kv = KVCache(spec, 4, 16, "fp8", scales=[by_head, (0.5, 0.25)])
    assert kv.scales == (None, (0.5, 0.25))
    assert kv.head_scales[0] is not None
    assert torch.equal(kv.head_scales[0], by_head)
    assert kv.head_scales[1] is not None
    assert kv.head_scales[1].tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert KVCache(spec, 4, 16, "float32", scales=[by_head, None]).head_scales == (None, None)
    with pytest.raises(ValueError, match=r"layer 1.*\[2, 3\].*\[2, 2\]"):
        KVCache(spec, 4, 16, "fp8", scales=[None, torch.ones(2, 3)])
    with pytest.raises(ValueError, match="layer 0"):
        KVCache(spec, 4, 16, "fp8", scales=[torch.zeros(2, 2), None])


@pytest.mark.parametrize("dtype", ["float32", "fp8", "int8"])
def test_copied_blocks_take_their_scales_along(dtype: str) -> None:
    kv = KVCache(load(w4_artifact()).spec, 4, 16, dtype)
    tensors = [*kv.pools, *(s for s in kv.token_scales if s is not None)]
    for i, tensor in enumerate(tensors):
        tensor.view(torch.uint8)[1] = i + 1
        tensor.view(torch.uint8)[3] = 0
    kv.copy_blocks(torch.tensor([1]), torch.tensor([3]))
    for i, tensor in enumerate(tensors):
        assert bool((tensor.view(torch.uint8)[3] == i + 1).all())
    assert len(tensors) == (4 if dtype == "int8" else 2)


def test_kv_cache_refuses_bad_settings() -> None:
    spec = load(w4_artifact()).spec
    with pytest.raises(ValueError, match="int3"):
        KVCache(spec, 5, 8, "int3")
    with pytest.raises(ValueError, match="3 pairs"):
        KVCache(spec, 5, 8, "fp8", scales=[None] * 3)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="layer 1"):
            KVCache(spec, 5, 8, "fp8", scales=[None, (1.0, bad)])


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_copied_blocks_hold_the_same_bytes(dtype: str) -> None:
    kv = KVCache(load(w4_artifact()).spec, 6, 4, dtype)
    for pool in kv.pools:
        pool.view(torch.uint8).random_(0, 127)
    kv.copy_blocks(torch.tensor([1, 4]), torch.tensor([0, 5]))
    for pool in kv.pools:
        data = pool.view(torch.uint8)
        assert torch.equal(data[0], data[1])
        assert torch.equal(data[5], data[4])


@pytest.mark.parametrize(
    "scheme", [DENSE, W4, PRESETS["w8a8"], PRESETS["fp8"]], ids=lambda s: s.label
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_owns_its_weights(scheme: Scheme, dtype: torch.dtype) -> None:
    """The files behind the tensors may change or go away while the model serves."""
    artifact = artifact_of(make_hf("llama", **SHAPE), scheme)
    if dtype == torch.bfloat16:
        for name, tensor in artifact.reader.tensors.items():
            if tensor.dtype == torch.float32:
                artifact.reader.tensors[name] = tensor.bfloat16()
    decoder = load(artifact, dtype)
    ids, kv_dtype = random_ids(20), "bfloat16" if dtype == torch.bfloat16 else "float32"
    before = run_alone(decoder, ids, [19, 1], kv_dtype=kv_dtype)
    for tensor in artifact.reader.tensors.values():
        tensor.view(torch.uint8).random_(0, 127)
    assert torch.equal(run_alone(decoder, ids, [19, 1], kv_dtype=kv_dtype), before)
