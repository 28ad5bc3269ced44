"""The engine over kernels, in Triton's interpreter: padded decode steps as graphs replay them,
chunks beside decodes, drawing by slot. It says what the CPU's ops say in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine.cuda_runner import CudaRunner
from runtime.engine.engine import Engine
from runtime.engine.load import make_cache
from runtime.engine.step_plan import Kind, RunnerLimits
from runtime.model.decoder import Decoder
from runtime.request import Request, SamplingParams

LIMITS = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, block_size=16)


@dataclass
class FullSize:
    """Stands for graphs: every decode step has the largest size, most of it padding."""

    runner: CudaRunner

    def size_for(self, num_rows: int) -> int:
        return LIMITS.max_num_seqs

    def run(self, size: int, kind: Kind) -> torch.Tensor | None:
        return self.runner._decode_step(size, kind)


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("runtime.") and hasattr(module, "uses_triton"):
            monkeypatch.setattr(module, "uses_triton", lambda device: True)


def requests() -> list[Request]:
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.0, "logprobs": 2, "frequency_penalty": 0.5},
    ]
    draw = torch.Generator().manual_seed(0)
    return [
        Request(
            id=str(i),
            prompt=tuple(torch.randint(0, 290, (length,), generator=draw).tolist()),
            sampling=SamplingParams(max_tokens=3, ignore_eos=True, **way),
        )
        for i, (length, way) in enumerate(zip((15, 40, 9), ways, strict=True))
    ]


def settings(dtype: str) -> EngineConfig:
    return EngineConfig(
        device="cpu", dtype=dtype, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128,
        num_gpu_blocks_override=32,
    )  # fmt: skip


# The interpreter computes with numpy, which warns of what masks throw away.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run for real here")
def test_padded_steps_over_kernels(
    tiny_model: Callable[..., Path],
    dense_artifact: Callable[[Path], Path],
    request: pytest.FixtureRequest,
) -> None:
    path = dense_artifact(
        tiny_model("llama", hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
                   num_hidden_layers=1)
    )  # fmt: skip
    expected = Engine.from_artifact(path, settings("float32")).generate(requests())
    plain = Engine.from_artifact(path, settings("float16"))
    request.getfixturevalue("kernels_everywhere")
    decoder = plain.runner.decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, Decoder)
    decoder = Decoder(
        spec=decoder.spec, layers=decoder.layers, embedding_VE=decoder.embedding_VE,
        final_norm=decoder.final_norm, head=decoder.head, kv_scales=decoder.kv_scales,
        num_positions=128,
    )  # fmt: skip
    assert decoder.has_kernels
    kv = make_cache(decoder, "float16", 32, 16)
    for pool in kv.pools:
        pool[:32].fill_(float("nan"))
    runner = CudaRunner(decoder, kv, LIMITS, use_graphs=False)
    runner._graphs = FullSize(runner)  # type: ignore[assignment]
    found = Engine(decoder, kv, plain.resolved, plain.artifact, runner).generate(requests())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids, ours.id
    for mine, other in zip(found[2].logprobs or (), expected[2].logprobs or (), strict=True):
        assert mine.top_ids == other.top_ids
        assert mine.value == pytest.approx(other.value, abs=0.02)
