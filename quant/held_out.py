"""Calibration windows kept apart: what a method learns from must not be what it is judged on.

Works on streams of hidden states and on what a linear reads of them. Knows no methods.

Shape legend: B sequences of a batch, T tokens, H hidden size, N valid tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.capture import Batch, Stream, check_finite, first_input

# One window in so many is kept apart; tokens of them that a module is judged on.
SHARE, JUDGED_TOKENS = 16, 4096


def hold_out(stream: Stream) -> tuple[Stream, Stream]:
    """The stream without every sixteenth window (of few: every second or third), and those.

    Both see the same memory. Of fewer than four windows both are the stream itself.
    """
    count = sum(len(batch.samples) for batch in stream.batches)
    if count < 4:
        return stream, stream
    share = min(SHARE, count // 2)
    kept, held, seen = _empty(stream), _empty(stream), 0
    for batch, hidden in stream:
        rows = len(batch.samples)
        apart = sum((seen + row) % share == share // 2 for row in range(rows))
        seen += rows
        for part, rest in ((slice(0, rows - apart), kept), (slice(rows - apart, rows), held)):
            if part.stop > part.start:
                rest.batches.append(_rows(batch, part))
                rest.hidden.append(hidden[part])
    return kept, held


def _empty(stream: Stream) -> Stream:
    return replace(stream, batches=[], hidden=[])


def _rows(batch: Batch, part: slice) -> Batch:
    return Batch(
        samples=batch.samples[part], token_ids=batch.token_ids[part], mask=batch.mask[part]
    )


def sample_inputs(
    module: nn.Module,
    stream: Stream,
    run: Callable[[Tensor, Tensor], object],
    name: str,
) -> Tensor:
    """What `module` reads of the stream's valid tokens, [N, I]; at most `JUDGED_TOKENS`, evenly
    drawn. NonFiniteError names the module and the sample."""
    total = sum(int(batch.mask.sum()) for batch in stream.batches)
    stride = -(-total // JUDGED_TOKENS)
    found, seen = [], 0
    for batch, hidden in stream:
        inputs = first_input(module, partial(run, hidden, batch.mask))
        check_finite(inputs, batch, f"the input of {name}")
        valid = inputs[batch.mask.to(inputs.device)]
        found.append(valid[(-seen) % stride :: stride].clone())
        seen += len(valid)
    return torch.cat(found)
