"""Scoring given tokens: log-likelihoods, and divergence from a reference, chunk by chunk.

Full logits exist for one slice of rows at a time and are reduced at once. KV goes to scratch blocks
that are neither taken from the prefix cache nor published to it; of a context that several items go
on from, the whole blocks are computed once.

Shape legend: R rows of one slice, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby

import torch

from runtime.config import ResolvedConfig
from runtime.engine.batch import Piece
from runtime.engine.block_manager import BlockManager
from runtime.engine.logprobs import FLOOR
from runtime.engine.runner import Runner
from runtime.engine.validation import Bounds, check_ids
from runtime.request import RequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreItem:
    """Tokens to score. The first `num_given` are read, not scored, and read once for items with the
    same ones that stand side by side. `reference` [n - num_given, vocab] holds a reference model's
    log-probs: row i for the token at position num_given + i; any floating dtype, -inf allowed."""

    token_ids: tuple[int, ...]
    num_given: int = 1
    reference: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Per scored token (positions num_given .. n - 1), natural logarithms.

    nll: of the given token. kl: KL(reference || engine), None without a reference. top1: the
    engine's most likely id (lowest of equals); top1_agree: it is the reference's, too. Values are
    NaN where the engine's logits are.
    """

    nll: list[float]
    kl: list[float] | None
    top1_agree: list[bool] | None
    top1: list[int]


@dataclass(slots=True, eq=False)
class _Context:
    """Whole blocks that several jobs begin with. The first of them computes them; `blocks` are held
    until the last one has started."""

    num_tokens: int
    num_waiting: int
    writer: _Job | None = None
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Job:
    """One item under way; `num_done` of its tokens have been computed, or are its context's."""

    item: ScoreItem
    context: _Context | None = None
    blocks: list[int] = field(default_factory=list)
    num_done: int = 0
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        """The last token is only predicted, never computed."""
        return len(self.item.token_ids) - 1

    @property
    def first(self) -> int:
        """The first input whose logits are wanted."""
        return self.item.num_given - 1

    @property
    def is_ready(self) -> bool:
        """Nothing that it begins with is still being computed."""
        shared = self.context
        if shared is None or shared.writer is None:
            return True
        return shared.writer.num_done >= shared.num_tokens

    def score(self) -> Score:
        has_reference = self.item.reference is not None
        return Score(
            nll=self.nll,
            kl=self.kl if has_reference else None,
            top1_agree=self.agree if has_reference else None,
            top1=self.top1,
        )


def score_items(
    items: Seq[ScoreItem],
    runner: Runner,
    blocks: BlockManager,
    bounds: Bounds,
    resolved: ResolvedConfig,
) -> list[Score]:
    """One Score per item, in order. RequestError names the item that cannot be scored."""
    for index, item in enumerate(items):
        _check(index, item, bounds)
    jobs = [_Job(item) for item in items]
    waiting, active = deque(jobs), list[_Job]()
    contexts = _share(jobs, blocks.block_size)
    try:
        while waiting or active:
            _start(waiting, active, blocks, resolved.max_num_seqs)
            if not active:
                _part(waiting, contexts, blocks)
                continue
            _advance(active, runner, resolved.max_num_batched_tokens)
            _retire(active, blocks)
    finally:
        for job in active:
            blocks.release(job.blocks)
        for context in contexts:
            _let_go(context, blocks)
    return [job.score() for job in jobs]


def _check(index: int, item: ScoreItem, bounds: Bounds) -> None:
    name, num_tokens = f"item {index}", len(item.token_ids)
    if num_tokens < 2:
        raise RequestError(f"{name} has {num_tokens} tokens; scoring needs at least 2")
    # The last token is only predicted, so one more than can be computed fits.
    if num_tokens > min(bounds.max_model_len, bounds.num_pool_tokens) + 1:
        raise RequestError(
            f"{name} has {num_tokens} tokens; the context holds {bounds.max_model_len} and the KV "
            f"pool {bounds.num_pool_tokens}; score it in windows"
        )
    check_ids(name, item.token_ids, bounds.vocab)
    if not 1 <= item.num_given < num_tokens:
        raise RequestError(
            f"{name} gives {item.num_given} of its {num_tokens} tokens; expected 1 to "
            f"{num_tokens - 1}"
        )
    expected = (num_tokens - item.num_given, bounds.vocab)
    if item.reference is not None and tuple(item.reference.shape) != expected:
        raise RequestError(
            f"{name} has a reference of shape {tuple(item.reference.shape)}; expected {expected}"
        )


def _share(jobs: Seq[_Job], block_size: int) -> list[_Context]:
    """Gives neighbours with the same given tokens a context, where it has a whole block."""
    contexts = []
    for given, each in groupby(jobs, key=lambda job: job.item.token_ids[: job.item.num_given]):
        alike = list(each)
        # The last given token predicts the first scored one: each computes that itself.
        num_tokens = (len(given) - 1) // block_size * block_size
        if num_tokens and len(alike) > 1:
            context = _Context(num_tokens=num_tokens, num_waiting=len(alike))
            contexts.append(context)
            for job in alike:
                job.context = context
    return contexts


def _start(waiting: deque[_Job], active: list[_Job], blocks: BlockManager, limit: int) -> None:
    """Begin what there is room for, in order; who waits for a context lets others pass."""
    passed: list[_Job] = []
    while waiting and len(active) < limit:
        job = waiting.popleft()
        if job.is_ready and _place(job, blocks):
            active.append(job)
            continue
        passed.append(job)
        if job.is_ready:
            break
    waiting.extendleft(reversed(passed))


def _place(job: _Job, blocks: BlockManager) -> bool:
    """Take the job's blocks; False, and nothing taken, where there are too few."""
    context = job.context
    shared = [] if context is None else context.blocks
    found = blocks.acquire(shared, blocks.blocks_for(job.num_inputs) - len(shared))
    if found is None:
        return False
    job.blocks = found
    if context is not None:
        _join(job, context, blocks)
    return True


def _join(job: _Job, context: _Context, blocks: BlockManager) -> None:
    context.num_waiting -= 1
    if context.writer is None:
        context.writer = job
        held = blocks.acquire(job.blocks[: context.num_tokens // blocks.block_size], 0)
        assert held is not None, "blocks that are owned can be held"
        context.blocks = held
    else:
        job.num_done = context.num_tokens
    if not context.num_waiting:
        _let_go(context, blocks)


def _let_go(context: _Context, blocks: BlockManager) -> None:
    blocks.release(context.blocks)
    context.blocks = []


def _part(waiting: deque[_Job], contexts: Seq[_Context], blocks: BlockManager) -> None:
    """Contexts that are held leave too little room: who waits for one computes it again."""
    assert any(context.blocks for context in contexts), (
        "an idle pool holds any item that passed the check"
    )
    for context in contexts:
        _let_go(context, blocks)
    for job in waiting:
        job.context = None


def _retire(active: list[_Job], blocks: BlockManager) -> None:
    for job in [job for job in active if job.num_done == job.num_inputs]:
        blocks.release(job.blocks)
        active.remove(job)


def _advance(active: list[_Job], runner: Runner, budget: int) -> None:
    """One forward pass over the next chunks, then its rows, slice by slice."""
    chunks: list[tuple[_Job, int, int]] = []
    for job in active:
        num_tokens = min(job.num_inputs - job.num_done, budget)
        if num_tokens:
            chunks.append((job, job.num_done, job.num_done + num_tokens))
            budget -= num_tokens
    hidden_RH = runner.forward([_piece(*chunk) for chunk in chunks])
    for job, start, end, rows in _slices(chunks, runner.rows_per_slice):
        _reduce(job, start, end, runner.logits(hidden_RH[rows]))
    for job, _, end in chunks:
        job.num_done = end


def _piece(job: _Job, start: int, end: int) -> Piece:
    return Piece(
        tokens=job.item.token_ids[start:end],
        start=start,
        block_ids=job.blocks,
        wanted=range(max(job.first - start, 0), end - start),
    )


def _slices(
    chunks: Seq[tuple[_Job, int, int]], num_rows: int
) -> Iterator[tuple[_Job, int, int, slice]]:
    """Wanted positions [start, end) of a job, at most `num_rows`, and their rows of the step."""
    row = 0
    for job, start, end in chunks:
        for low in range(max(start, job.first), end, num_rows):
            high = min(low + num_rows, end)
            yield job, low, high, slice(row, row + high - low)
            row += high - low


@torch.inference_mode()
def _reduce(job: _Job, start: int, end: int, logits_RV: torch.Tensor) -> None:
    values_RV = logits_RV.float().log_softmax(-1)
    targets = torch.tensor(job.item.token_ids[start + 1 : end + 1], device=logits_RV.device)
    top1_R = logits_RV.argmax(-1)
    job.nll += (-values_RV.gather(1, targets.unsqueeze(1)).squeeze(1)).tolist()
    job.top1 += top1_R.tolist()
    if job.item.reference is None:
        return
    reference_RV = job.item.reference[start - job.first : end - job.first].to(
        values_RV.device, torch.float32
    )
    reference_RV = reference_RV.clamp(min=FLOOR)  # -inf has weight 0, not NaN
    job.agree += (reference_RV.argmax(-1) == top1_R).tolist()
    job.kl += divergence(reference_RV, values_RV).tolist()


def divergence(reference_RV: torch.Tensor, values_RV: torch.Tensor) -> torch.Tensor:
    """[R] KL(reference || values) of log-probabilities, terms in float32, summed in float64."""
    terms_RV = reference_RV.exp() * (reference_RV - values_RV)
    return terms_RV.sum(-1, dtype=torch.float64)
