"""Activations: the streams that flow through the layers, and statistics of what linears read.

A `Stream` holds the hidden states of all calibration windows (or probe prompts) between two layers,
on the CPU. Statistics count *valid tokens only*: one mask per batch, made where the batch is padded
and applied here, so that padding, batch size and batch order change nothing but rounding.

It does not know schemes, methods or files.

Shape legend: B sequences of a batch, T tokens (padded), N valid tokens, H hidden size, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quant.errors import NonFiniteError
from quant.modelling import AttentionCall
from quant.parallel import Ranks, Single

# Below this many inputs a Hessian is summed in float64: it costs nothing there.
FLOAT64_BELOW = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows padded to one length on the right. samples: which window each row is."""

    samples: tuple[int, ...]
    token_ids: Tensor  # [B, T] int64, padding is 0
    mask: Tensor  # [B, T] bool, True on real tokens

    @classmethod
    def single(cls, sample: int, token_ids: Sequence[int]) -> Batch:
        """A batch of one window, without padding."""
        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        return cls(samples=(sample,), token_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))


@dataclass(slots=True, kw_only=True)
class Stream:
    """Batches and their hidden states [B, T, H] at the point the pipeline has reached, on `home`.

    `home` is the device that computes while that has the room, else the CPU; there they may lie in
    tensors of their own, `shelf`, such as a file's (`quant.spill`).
    Where several `ranks` work together, each has a share of the batches, and statistics are of all.
    """

    batches: list[Batch]
    hidden: list[Tensor] = field(default_factory=list)
    home: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shelf: list[Tensor] | None = None
    ranks: Ranks = field(default_factory=Single)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        return iter(zip(self.batches, self.hidden, strict=True))

    def num_tokens(self) -> int:
        """Valid tokens of all ranks."""
        return self.ranks.total(sum(int(batch.mask.sum()) for batch in self.batches))

    def advance(self, run: Callable[[Tensor, Tensor], Tensor], where: str) -> None:
        """Replace each hidden state by `run(hidden, mask)`; NonFiniteError names a bad sample."""
        for i, batch in enumerate(self.batches):
            output = run(self.hidden[i], batch.mask)
            check_finite(output, batch, f"the output of {where}")
            self.hidden[i] = self._kept(i, output)

    def fill(self, embedded: Iterable[Tensor]) -> None:
        """Take the hidden states that enter layer 0, batch by batch."""
        self.hidden = [self._kept(i, states) for i, states in enumerate(embedded)]

    def _kept(self, index: int, states: Tensor) -> Tensor:
        return states.to(self.home) if self.shelf is None else self.shelf[index].copy_(states)


def make_batches(
    windows: Sequence[Sequence[int]], batch_tokens: int, chosen: Sequence[int] | None = None
) -> list[Batch]:
    """Windows sorted by length, padded into batches of at most `batch_tokens`, padding included.

    chosen: which windows (None: all). A window longer than that is a batch of its own. The order
    depends on the windows only.
    """
    indices = range(len(windows)) if chosen is None else chosen
    order = sorted(indices, key=lambda i: (len(windows[i]), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * len(windows[i]) <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_pad(windows, group) for group in groups]


def _pad(windows: Sequence[Sequence[int]], group: list[int]) -> Batch:
    width = max(len(windows[i]) for i in group)
    token_ids = torch.zeros(len(group), width, dtype=torch.int64)
    mask = torch.zeros(len(group), width, dtype=torch.bool)
    for row, i in enumerate(group):
        token_ids[row, : len(windows[i])] = torch.tensor(windows[i], dtype=torch.int64)
        mask[row, : len(windows[i])] = True
    return Batch(samples=tuple(group), token_ids=token_ids, mask=mask)


def check_finite(values: Tensor, batch: Batch, what: str) -> None:
    """NonFiniteError naming `what` and the sample, unless all valid tokens' values are finite."""
    bad = ~torch.isfinite(values).all(-1).cpu() & batch.mask
    if bool(bad.any()):
        rows = [batch.samples[row] for row in bad.any(1).nonzero()[:, 0].tolist()]
        raise NonFiniteError(
            f"{what} is NaN or infinite for calibration sample {rows[0]} ({len(rows)} in its "
            "batch); the model overflows on this text: drop the sample, or check the checkpoint"
        )


@dataclass(slots=True, kw_only=True)
class InputStatistics:
    """What one input of linears looked like over all valid tokens.

    hessian: X^T X [I, I] (float32; summed in float64 for small I), or None when not asked for;
    square_sum, absmax: [I]. `mean_square` is E[x^2] [I].
    """

    num_inputs: int
    device: torch.device
    needs_hessian: bool
    num_tokens: int = 0
    hessian: Tensor = field(init=False)
    square_sum: Tensor = field(init=False)
    absmax: Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.float64 if self.num_inputs < FLOAT64_BELOW else torch.float32
        size = self.num_inputs if self.needs_hessian else 0
        self.hessian = torch.zeros(size, size, dtype=dtype, device=self.device)
        self.square_sum = torch.zeros(self.num_inputs, dtype=torch.float64, device=self.device)
        self.absmax = torch.zeros(self.num_inputs, device=self.device)

    def add(self, rows: Tensor) -> None:
        """Count valid tokens [N, I]."""
        if len(rows) == 0:
            return
        if self.needs_hessian:
            self._add_products(rows)
        self._add_squares(rows)
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=0)
        self.absmax = torch.maximum(self.absmax, largest.float())
        self.num_tokens += len(rows)

    def _add_products(self, rows: Tensor) -> None:
        """hessian += X^T X. Products of bf16 values are exact in float32, so that a GPU's tensor
        cores may form them; float32 values keep their precision."""
        if rows.is_cuda and rows.dtype == torch.bfloat16 and self.hessian.dtype == torch.float32:
            self.hessian += torch.mm(rows.T, rows, out_dtype=torch.float32)
        else:
            exact = rows.to(self.hessian.dtype)
            self.hessian.addmm_(exact.T, exact)

    def _add_squares(self, rows: Tensor) -> None:
        if rows.is_cuda:  # float64 copies of a large batch are a layer's worth of memory
            norm = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32)
            self.square_sum += norm.double().square()
        else:
            self.square_sum += rows.double().square().sum(0)

    @property
    def mean_square(self) -> Tensor:
        return (self.square_sum / max(self.num_tokens, 1)).float()


def share_statistics(statistics: Sequence[InputStatistics], ranks: Ranks) -> None:
    """Make statistics of a rank's tokens those of all ranks' tokens. In float32 or wider."""
    counts = torch.tensor([each.num_tokens for each in statistics])
    sums = [tensor for each in statistics for tensor in (each.hessian, each.square_sum)]
    ranks.add(counts, *sums)
    ranks.largest(*(each.absmax for each in statistics))
    for each, count in zip(statistics, counts.tolist(), strict=True):
        each.num_tokens = count


class _Reached(Exception):
    """The forward pass got to the module whose input was wanted: no need to go on."""


def collect_inputs(
    module: nn.Module,
    stream: Stream,
    run: Callable[[Tensor, Tensor], object],
    name: str,
    *,
    needs_hessian: bool,
) -> InputStatistics:
    """Statistics of what `module` reads while `run(hidden, mask)` is called on the whole stream.

    Each pass ends when the module is reached. NonFiniteError names the module and the sample.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    statistics = InputStatistics(
        num_inputs=weight.shape[1], device=weight.device, needs_hessian=needs_hessian
    )
    for batch, hidden in stream:
        inputs = first_input(module, partial(run, hidden, batch.mask))
        check_finite(inputs, batch, f"the input of {name}")
        statistics.add(inputs[batch.mask.to(inputs.device)])
    share_statistics([statistics], stream.ranks)
    return statistics


def first_input(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """The first argument that `module` is called with during `run()`, which is then cut short."""
    return first_arguments(module, run)[0]


def first_arguments(module: nn.Module, run: Callable[[], object]) -> tuple[Tensor, ...]:
    """What `module` is called with during `run()`, which is then cut short."""
    seen: list[tuple[Tensor, ...]] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args)
        raise _Reached

    handle = module.register_forward_pre_hook(stop, prepend=True)
    try:
        run()
    except _Reached:
        pass
    finally:
        handle.remove()
    assert seen, "the module was never called"
    return seen[0]


def collect_kv(
    attention: nn.Module,
    reader: nn.Module,
    stream: Stream,
    run: Callable[[Tensor, Tensor], object],
) -> tuple[Tensor, Tensor]:
    """Largest |k| (after rope) and |v| of each KV head, [kv heads] float32 on the CPU, over all
    valid tokens; `reader` follows the attention."""
    largest: list[Tensor] = []
    for batch, hidden in stream:
        seen: list[tuple[Tensor, Tensor]] = []

        def tap(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            seen.append((key, value))  # noqa: B023 - called before the next iteration
            return key, value

        with tapped(attention, tap):
            first_input(reader, partial(run, hidden, batch.mask))
        valid = batch.mask.to(seen[0][0].device)
        tops = [s.transpose(1, 2)[valid].abs().amax((0, 2)).float().cpu() for s in seen[0]]
        largest = [torch.maximum(a, b) for a, b in zip(largest or tops, tops, strict=True)]
    key, value = largest
    stream.ranks.largest(key, value)
    return key, value


def watched_call(
    attention: nn.Module, reader: nn.Module, run: Callable[[], object]
) -> AttentionCall:
    """What `attention` is called with during `run()`, which ends where `reader` is reached."""
    seen: list[AttentionCall] = []
    attention.attention_watch = seen.append  # type: ignore[assignment]
    try:
        first_input(reader, run)
    finally:
        del attention.attention_watch
    assert seen, "attention was never called"
    return seen[0]


@contextmanager
def tapped(
    attention: nn.Module, tap: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """`tap(key, value)` [B, kv heads, T, head dim] sees and may replace what attention reads."""
    attention.kv_tap = tap  # type: ignore[assignment]
    try:
        yield
    finally:
        del attention.kv_tap
