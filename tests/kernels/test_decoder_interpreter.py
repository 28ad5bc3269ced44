"""A whole decoder over the kernels, in Triton's interpreter, against torch's ops in float32."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from quant.artifact.layout import QuantizedWeight, min_max_qparams, quantize
from quant.artifact.scheme import PRESETS, Scheme, with_group_size
from runtime.kernels import attention
from runtime.kernels.w4a16.tile import Tile
from runtime.kernels.workspace import KernelOptions, Workspace
from runtime.model.decoder import Decoder, DecoderLayer, Norms
from runtime.model.kv_cache import KVCache
from runtime.model.linear import Linear
from runtime.model.spec import ModelSpec
from runtime.model.step import StepInputs

CPU = torch.device("cpu")
BLOCK = 16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 3, 1, 64, 96, 160
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
# (new tokens, length, blocks) of each span: two prompts, then decodes beside a chunk, then decodes.
STEPS = [
    [(20, 20, (3, 1)), (5, 5, (7,))],
    [(1, 21, (3, 1)), (1, 6, (7,)), (35, 35, (5, 2, 0))],
    [(1, 22, (3, 1)), (1, 7, (7,)), (1, 36, (5, 2, 0))],
]


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op takes its Triton kernel although the device is a CPU."""
    pytest.importorskip("triton")
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("runtime.") and hasattr(
            module, "uses_triton"
        ):
            monkeypatch.setattr(module, "uses_triton", lambda device: True)


def shard(out: int, width: int, scheme: Scheme | None, dtype: torch.dtype) -> object:
    weight = (torch.randn(out, width) * 0.1).half().float()
    if scheme is None:
        return weight.to(dtype)
    assert scheme.weights is not None
    scale, zero = min_max_qparams(weight, scheme.weights, torch.float16)
    return quantize(weight, scale, zero, scheme)


def make_decoder(
    scheme: Scheme | None, dtype: torch.dtype, options: KernelOptions, num_layers: int = 1
) -> Decoder:
    """Its layers have the same weights."""
    torch.manual_seed(3)
    spec = ModelSpec.from_config({**CONFIG, "num_hidden_layers": num_layers})

    def linear(out: int, width: int) -> Linear:
        part = shard(out, width, scheme, dtype)
        assert isinstance(part, torch.Tensor | QuantizedWeight)
        return Linear.from_shards([part], [None], dtype, CPU, options)

    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layer = DecoderLayer(
        spec=spec.layers[0],
        qkv=linear(rows, HIDDEN),
        o=linear(HIDDEN, HEADS * HEAD_DIM),
        gate_up=linear(2 * INTERMEDIATE, HIDDEN),
        down=linear(HIDDEN, INTERMEDIATE),
        norms=Norms(
            attention=torch.rand(HIDDEN) + 0.5,
            after_attention=None,
            mlp=torch.rand(HIDDEN) + 0.5,
            after_mlp=None,
            q=None,
            k=None,
        ),
    )
    return Decoder(
        spec=spec,
        layers=(layer,) * num_layers,
        embedding_VE=(torch.randn(VOCAB, HIDDEN) * 0.3).half().to(dtype),
        final_norm=torch.rand(HIDDEN) + 0.5,
        head=None,
        kv_scales=(None,) * num_layers,
        options=options,
    )


def step_inputs(
    spans: list[tuple[int, int, tuple[int, ...]]], *, on_device: bool, says_last: bool = False
) -> StepInputs:
    positions = [p for new, length, _ in spans for p in range(length - new, length)]
    tables = [table for new, _, table in spans for _ in range(new)]
    slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t, p in zip(tables, positions, strict=True)]
    starts = [0]
    for new, _, _ in spans:
        starts.append(starts[-1] + new)
    lengths = [length for _, length, _ in spans]
    width = max(len(table) for _, _, table in spans)
    padded = [[*table, *[0] * (width - len(table))] for _, _, table in spans]
    facts = {}
    if on_device:
        facts = {
            "query_starts_S1": torch.tensor(starts, dtype=torch.int32),
            "seq_lens_S": torch.tensor(lengths, dtype=torch.int32),
            "num_decodes": sum(new == 1 for new, _, _ in spans),
            "max_query_len": max(new for new, _, _ in spans),
            "wants_last_rows": says_last,
        }
    return StepInputs(
        token_ids_T=torch.tensor([(7 * p + 3) % VOCAB for p in positions]),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        block_tables_SB=torch.tensor(padded, dtype=torch.int32 if on_device else torch.int64),
        query_lens=tuple(new for new, _, _ in spans),
        seq_lens=tuple(lengths),
        logit_rows_R=torch.tensor(starts[1:]) - 1,
        **facts,
    )


def logits(
    decoder: Decoder, kv_dtype: str | tuple[str, ...], *, on_device: bool, says_last: bool = False
) -> torch.Tensor:
    """Of every step's last rows; slots nobody wrote hold NaN (255 as a code)."""
    kv = KVCache(decoder.spec, 8, BLOCK, kv_dtype, CPU)
    for pool in kv.pools:
        pool.view(torch.uint8)[:-1] = 255
    for scales in kv.token_scales:
        if scales is not None:
            scales[:-1] = float("nan")
    steps = [step_inputs(spans, on_device=on_device, says_last=says_last) for spans in STEPS]
    return torch.cat([decoder.logits(decoder.forward(step, kv)) for step in steps])


@pytest.fixture
def options() -> KernelOptions:
    return KernelOptions(workspace=Workspace(CPU))


@pytest.mark.parametrize(
    ("scheme", "kv_dtype", "tolerance"),
    [
        (None, "float16", 3e-3),
        (with_group_size(PRESETS["w4a16"], 32), "int8", 2e-2),
        (PRESETS["w8a8"], "float16", 5e-2),
    ],
    ids=["dense", "w4a16-int8-kv", "w8a8"],
)
def test_kernels_compute_what_torch_computes(
    scheme: Scheme | None,
    kv_dtype: str,
    tolerance: float,
    options: KernelOptions,
    request: pytest.FixtureRequest,
) -> None:
    expected = logits(make_decoder(scheme, torch.float32, options), "float32", on_device=False)
    request.getfixturevalue("on_kernels")
    decoder = make_decoder(scheme, torch.float16, options)
    assert decoder.has_kernels
    found = logits(decoder, kv_dtype, on_device=True)
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("kv_dtypes", [("int8", "float16"), ("float16", "int8")])
@pytest.mark.parametrize("says_last", [False, True])
def test_layers_may_have_caches_of_their_own_types(
    kv_dtypes: tuple[str, ...],
    says_last: bool,
    options: KernelOptions,
    request: pytest.FixtureRequest,
) -> None:
    """A layer whose numbers were read as the other type would be far off."""
    exact = make_decoder(None, torch.float32, options, 2)
    expected = logits(exact, "float32", on_device=False)
    rounded = logits(exact, tuple(d.replace("float16", "float32") for d in kv_dtypes),
                     on_device=False)  # fmt: skip
    assert 0 < float((rounded - expected).norm() / expected.norm()) < 1e-2
    request.getfixturevalue("on_kernels")
    decoder = make_decoder(None, torch.float16, options, 2)
    found = logits(decoder, kv_dtypes, on_device=True, says_last=says_last)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8"])
def test_last_rows_alone_are_answered_as_decodes(
    kv_dtype: str, options: KernelOptions, on_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt's queries in the last layer only the last one is anybody's."""
    seen: list[int] = []
    plain = attention.attend

    def attend(q_THD: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(len(q_THD))
        return plain(q_THD, *args, **kwargs)

    monkeypatch.setattr(attention, "attend", attend)
    decoder = make_decoder(None, torch.float16, options)
    whole = logits(decoder, kv_dtype, on_device=True)
    assert seen == [25, 37, 3]
    last = logits(decoder, kv_dtype, on_device=True, says_last=True)
    assert seen[3:] == [2, 3, 3]
    assert float((last - whole).norm() / whole.norm()) < 2e-3
    same = make_decoder(None, torch.float16, replace(options, deterministic=True))
    whole, last = (logits(same, kv_dtype, on_device=True, says_last=on) for on in (False, True))
    assert torch.equal(last, whole)


def test_attention_is_for_rows_that_are_wanted(
    options: KernelOptions, on_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(None, torch.float16, options)
    step = step_inputs(STEPS[0], on_device=True)
    kvs = [KVCache(decoder.spec, 8, BLOCK, "float16", CPU) for _ in range(2)]
    for kv in kvs:
        kv.pools[0].zero_()
    decoder.forward(step, kvs[0])
    monkeypatch.setattr(attention, "attend", None)
    nobody = replace(step, logit_rows_R=torch.empty(0, dtype=torch.int64))
    assert decoder.forward(nobody, kvs[1]).shape == (0, HIDDEN)
    assert kvs[0].pools[0].any()
    assert torch.equal(kvs[0].pools[0], kvs[1].pools[0])


def test_products_of_many_rows_are_added_to_the_residual(
    options: KernelOptions, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = with_group_size(PRESETS["w4a16"], 32)
    expected = logits(make_decoder(scheme, torch.float32, options), "float32", on_device=False)
    request.getfixturevalue("on_kernels")
    monkeypatch.setattr("runtime.kernels.w4a16.choose", lambda *_: Tile(kernel="dense"))
    plain, added = Linear.add_, []

    def add_(self: Linear, sum_TN: torch.Tensor, x: torch.Tensor) -> None:
        added.append(self)
        plain(self, sum_TN, x)

    monkeypatch.setattr(Linear, "add_", add_)
    decoder = make_decoder(scheme, torch.float16, options)
    found = logits(decoder, "float16", on_device=True)
    layer = decoder.layers[0]
    assert [id(it) for it in added] == [id(layer.o), id(layer.down)] * len(STEPS)
    assert float((found - expected).norm() / expected.norm()) < 3e-3
