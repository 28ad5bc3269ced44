"""Sensitivity scores of a space of choices, measured a few windows at a time and kept on disk.

The sums of windows that are done are in one JSON file, replaced whole after every few windows: a
run that is killed loses those it was at. The file names what the scores are of (model, windows,
choices, settings); another model's are measured anew, another budget's are read. Knows no budgets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.artifact.durable import write_file
from quant.checkpoint import Source
from quant.errors import PipelineError
from quant.mixed_plan import Space
from quant.provenance import device_class
from quant.sensitivity import Tell, fisher_sensitivity

SCORES_VERSION = 1
# Hidden states at every layer's door are in memory for so many tokens.
TOKENS_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """dtype: of scales. draws: gradients per window; batch_tokens: run through a layer at once."""

    dtype: torch.dtype
    device: str
    draws: int
    seed: int
    batch_tokens: int


def measure_scores(
    source: Source,
    space: Space,
    windows: Sequence[Sequence[int]],
    settings: ScoreSettings,
    cache: Path,
    tell: Tell,
) -> dict[str, list[float]]:
    """KL in nats per token of each group in each of its choices, by the group's name.

    cache: the file that finished sums are read from and written to. PipelineError when a score is
    not finite.
    """
    key = _key(source, space, windows, settings)
    parts = parts_of(windows)
    done, sums = _read(cache, key)
    for index in range(done, len(parts)):
        found = _scores(source, space, parts[index], settings, index, len(parts), tell)
        tokens = sum(map(len, parts[index]))
        for name, values in found.items():
            before = sums.get(name, [0.0] * len(values))
            sums[name] = [old + tokens * new for old, new in zip(before, values, strict=True)]
        _write(cache, key, index + 1, sums)
    total = sum(map(len, windows))
    return {name: [value / total for value in values] for name, values in sums.items()}


def parts_of(windows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Windows in order, at most TOKENS_AT_ONCE tokens together (a longer one alone)."""
    found: list[list[Sequence[int]]] = []
    room = 0
    for window in windows:
        if not found or len(window) > room:
            found.append([])
            room = TOKENS_AT_ONCE
        found[-1].append(window)
        room -= len(window)
    return found


def _scores(
    source: Source,
    space: Space,
    windows: Sequence[Sequence[int]],
    settings: ScoreSettings,
    index: int,
    parts: int,
    tell: Tell,
) -> dict[str, list[float]]:
    entries = fisher_sensitivity(
        source, windows, space.candidates(), dtype=settings.dtype, device=settings.device,
        seed=settings.seed + index, draws=settings.draws, batch_tokens=settings.batch_tokens,
        tell=lambda text: tell(f"sensitivity, part {index + 1} of {parts}: {text}"),
    )  # fmt: skip
    names = {module: group.name for group in space.groups for module in group.modules}
    found: dict[str, list[float]] = {}
    for entry in entries:
        found.setdefault(names[entry.modules[0]], []).append(entry.score)
    bad = [name for name, values in found.items() if not all(map(_is_finite, values))]
    if bad:
        raise PipelineError(
            f"the sensitivity of {bad[0]} is NaN or infinite: the model overflows on the "
            "calibration text; check the checkpoint, or use other text"
        )
    return found


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _key(
    source: Source, space: Space, windows: Sequence[Sequence[int]], settings: ScoreSettings
) -> str:
    identity: list[Any] = [
        SCORES_VERSION, source.digest, [list(window) for window in windows],
        [[g.modules, [[s.label for s in option] for option in g.schemes]] for g in space.groups],
        str(settings.dtype), device_class(settings.device), settings.draws, settings.seed,
        settings.batch_tokens, torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _read(cache: Path, key: str) -> tuple[int, dict[str, list[float]]]:
    """Parts done and their sums; none where the file is of something else or cannot be read."""
    try:
        data = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0, {}
    if not isinstance(data, dict) or data.get("key") != key:
        return 0, {}
    return int(data["parts"]), dict(data["sums"])


def _write(cache: Path, key: str, parts: int, sums: Mapping[str, Sequence[float]]) -> None:
    data = {"key": key, "parts": parts, "sums": sums}
    write_file(cache, json.dumps(data).encode())
