"""Decoders without weights, for tests of everything around the decoder.

`HashDecoder` reads the sequence back from the KV pool through the block table it is given and makes
logits out of a hash of it: a wrong table, slot, position or stale block changes every later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from lagging import LaggingRunner

from runtime.config import ResolvedConfig
from runtime.engine.engine import Engine
from runtime.model.step import StepInputs
from runtime.request import Completion, Request, SamplingParams

VOCAB = 50
EMPTY = -7  # content of a slot that was never written

Logits = Callable[[tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Spec:
    vocab: int = VOCAB


def hashed_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits that depend on every token and on nothing else; with ties now and then."""
    digest = sha256(repr(tokens).encode()).digest()
    values = torch.tensor([digest[i % 32] // 8 for i in range(VOCAB)], dtype=torch.float32)
    return values / 4


@dataclass
class Pool:
    """The KV cache: which token lies in which slot."""

    tokens: torch.Tensor
    block_size: int


@dataclass
class ScriptedDecoder:
    """`make_logits` gives the logits after a sequence of tokens read back from the pool."""

    make_logits: Logits = hashed_logits
    spec: Spec = field(default_factory=Spec)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    steps: list[StepInputs] = field(default_factory=list)

    def forward(self, step: StepInputs, kv: Pool) -> torch.Tensor:
        self.steps.append(step)
        kv.tokens[step.slots_T] = step.token_ids_T
        block_size = kv.block_size
        hidden: list[torch.Tensor] = []
        first = 0
        for i, (new, total) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
            blocks = step.block_tables_SB[i, : -(-total // block_size)]
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:total]
            history = tuple(kv.tokens[slots].tolist())
            assert EMPTY not in history, "read a slot that was never written"
            positions = step.positions_T[first : first + new].tolist()
            assert positions == list(range(total - new, total))
            hidden += [self.make_logits(history[: p + 1]) for p in positions]
            first += new
        return torch.stack(hidden)[step.logit_rows_R]

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    chunk: int = 32,
    max_model_len: int = 1024,
    eos: Sequence[int] = (),
    caching: bool = True,
    threshold: int = 0,
    make_logits: Logits = hashed_logits,
    lag: int = 0,
) -> Engine:
    pool = Pool(torch.full((num_blocks * block_size,), EMPTY), block_size)
    resolved = ResolvedConfig(
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        long_prefill_token_threshold=threshold,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        deterministic=False,
        seed=0,
        eos_token_ids=tuple(eos),
        vocab_size=VOCAB,
        artifact_digest="scripted",
    )
    decoder = ScriptedDecoder(make_logits)
    runner = LaggingRunner(decoder, pool, block_size, lag) if lag else None
    return Engine(decoder, pool, resolved, runner=runner)


def request(name: str, prompt: Sequence[int], **sampling: object) -> Request:
    """A greedy request unless `sampling` says otherwise."""
    params = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(id=name, prompt=tuple(prompt), sampling=SamplingParams(**params))


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    """`generate`, with an audit after every step and everything given back at the end."""
    step = engine.step

    def audited() -> object:
        output = step()
        engine.audit()
        return output

    engine.step = audited
    try:
        done = engine.generate(requests)
    finally:
        engine.step = step
    assert_idle(engine)
    return {completion.id: completion for completion in done}


def alone(engine_options: dict[str, object], requests: Sequence[Request]) -> dict[str, Completion]:
    """Each request in an engine of its own, with a roomy pool."""
    found: dict[str, Completion] = {}
    for one in requests:
        engine = make_engine(**{**engine_options, "num_blocks": 256})
        found |= run(engine, [one])
    return found


def assert_idle(engine: Engine) -> None:
    engine.audit()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
