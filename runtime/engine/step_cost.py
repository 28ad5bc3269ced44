"""What a step costs, as measured on this machine: seconds by decoding rows and by prompt tokens.

A plain value: who plans ahead (admission, chunk sizes, swap or recompute, Retry-After) asks it, and
nobody measures twice. The figures are of short contexts: reading long KV comes on top. Stdlib only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Measured points, each list by rising size.

    decode: (rows, seconds) of steps in which every sequence decodes.
    prefill: (tokens, seconds) of steps that hold prompt tokens.
    """

    decode: Points
    prefill: Points

    def decode_s(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows` decodes."""
        return interpolated(self.decode, num_rows)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens` tokens, some of them of prompts."""
        return interpolated(self.prefill, num_tokens)

    def step_s(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Seconds of a step; decodes beside a prompt cost as much as its tokens do."""
        if not num_prompt_tokens:
            return self.decode_s(num_decodes)
        return self.prefill_s(num_decodes + num_prompt_tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in the largest step measured."""
        num_tokens, seconds = self.prefill[-1]
        return num_tokens / seconds


def interpolated(points: Points, size: int) -> float:
    """Linear between the points, level below the first, proportional beyond the last."""
    sizes = [point[0] for point in points]
    at = bisect_left(sizes, size)
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1] * size / points[-1][0]
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return low_s + (high_s - low_s) * (size - low) / (high - low)


def measure(sizes: Iterable[int], seconds_of: Callable[[int], float], budget_s: float) -> Points:
    """(size, best of up to three runs) for `sizes` in rising order, within about `budget_s`.

    The first run of a size may compile or capture and is not counted, unless time runs out.
    Measured times never fall with the size: a smaller step cannot cost more than a larger one.
    """
    points: list[tuple[int, float]] = []
    spent = 0.0
    for size in sorted(set(sizes)):
        first = seconds_of(size)
        runs: list[float] = []
        while len(runs) < 3 and (not runs or spent + runs[-1] < budget_s):
            runs.append(seconds_of(size))
            spent += runs[-1]
        points.append((size, min([*runs, first])))
    for at in range(len(points) - 2, -1, -1):
        points[at] = (points[at][0], min(points[at][1], points[at + 1][1]))
    return tuple(points)
