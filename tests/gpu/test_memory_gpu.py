"""The account of a GPU holds: whatever requests ask for, nothing grows beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.config import Account
from runtime.engine.cuda_runner import CudaRunner
from runtime.engine.engine import Engine
from runtime.request import Request, SamplingParams

pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Any]
SLACK_BYTES = 64 * 2**20  # kernels that are loaded when first used

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 2},
    {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 5},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 3},
    {"temperature": 0.0, "logit_bias": ((5, 1.0),), "min_tokens": 4},
]


def requests(vocab: int, count: int, length: int) -> list[Request]:
    draw = torch.Generator().manual_seed(count)
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(torch.randint(0, vocab, (length,), generator=draw).tolist()),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True, **WAYS[i % len(WAYS)]),
        )
        for i in range(count)
    ]


def planned_bytes(account: Account) -> int:
    """What torch was given: everything but what lies outside of it."""
    return account.weights + account.kv + account.workspace + account.graphs


def test_nothing_grows_beyond_the_account(
    engine_of: MakeEngine, tell: Callable[[str], None]
) -> None:
    engine: Engine = engine_of("w4a16", gpu_memory_utilization=0.5, max_num_seqs=128)
    account = engine.resolved.account
    assert account is not None
    assert isinstance(engine.runner, CudaRunner)
    torch.cuda.reset_peak_memory_stats()
    while engine.make_ready():
        pass
    for count, length in ((1, 2000), (128, 64), (24, 700), (6, 1900)):
        done = engine.generate(requests(engine.resolved.vocab_size, count, length))
        assert [c.error for c in done if c.error] == []
    used, planned = torch.cuda.max_memory_allocated(), planned_bytes(account)
    lost = torch.cuda.memory_reserved() - used
    tell(
        f"memory: {used / 2**20:.0f} MiB in use at most, {planned / 2**20:.0f} MiB planned, "
        f"{lost / 2**20:.0f} MiB between the pieces; {account}"
    )
    assert used <= planned + SLACK_BYTES
    assert lost <= account.left
    cost = engine.step_cost
    assert cost is not None
    assert cost.decode_s(1) <= cost.decode_s(128) < cost.prefill_s(8192)
