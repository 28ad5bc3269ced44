"""Amounts: how much of a suite one evaluation uses, and how answers are drawn. No dependencies."""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class SampledPasses:
    """Answers drawn besides the greedy ones: for each seed a pass over the items, by both models.

    temperature, top_p: of both models. seeds: each pass's own; an item's stream is made from it and
    the item's id, so that no two items and no two passes share their random numbers.
    """

    seeds: tuple[int, ...]
    temperature: float = 0.7
    top_p: float = 0.95


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Windows of `window_tokens` tokens, extraction items, and the seed that picks both.

    num_noise_items: how many of the items the base answers a second time, for the noise floor.
    sampled: answers drawn besides the greedy ones, None for none.
    """

    num_windows: int = 36
    window_tokens: int = 256
    num_items: int = 180
    num_noise_items: int = 16
    seed: int = 0
    sampled: SampledPasses | None = None
