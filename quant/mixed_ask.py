"""What is asked of mixed precision: which windows are for what, which gate, what cannot be meant.

It does not know how a plan is found (`quant.mixed`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from quant.artifact.shipped import resolve_input
from quant.calibration import Calibration, Tokenizer, load_calibration
from quant.closed_loop import Gate, default_command
from quant.errors import CalibrationError, RecipeError
from quant.mixed_plan import Space
from quant.recipe import Recipe


def draw_windows(
    files: Sequence[Path], tokenizer: Tokenizer, recipe: Recipe, *, longest: int
) -> tuple[Calibration, list[list[int]]]:
    """Windows to calibrate on, and the windows after them in the order of the draw, which judge.

    Where there are not enough for both, a quarter of all judges. What is drawn for fewer windows is
    the beginning of what is drawn for more, so that a recipe can ask for the first part alone.
    longest: tokens of the longest text that KV scales are measured on. CalibrationError when there
    is only one window.
    """
    asked, wanted = recipe.calibration, recipe.mixed.heldout
    more = asked.model_copy(update={"samples": asked.samples + wanted})
    drawn = load_calibration(files, tokenizer, more).samples
    if len(drawn) < 2:
        raise CalibrationError(
            "a budget needs two calibration windows at least, one to judge plans on; found "
            f"{len(drawn)}: give more --calib rows, or shorter --max-tokens"
        )
    heldout = min(wanted, max(1, len(drawn) // 4))
    first = asked.model_copy(update={"samples": min(asked.samples, len(drawn) - heldout)})
    fit = load_calibration(files, tokenizer, first, longest=longest)
    assert fit.samples == drawn[: first.samples]
    return fit, drawn[first.samples :][:wanted]


def make_gate(gates: str | Path, command: str | None, device: str) -> Gate:
    """The gate of a gates file; `command` (words as a shell splits them) instead of `evaluate`."""
    try:
        file = Path(resolve_input(str(gates), "recipes", within="gates")).absolute()
    except FileNotFoundError as missing:
        raise RecipeError(f"--until-accepted: {missing}") from missing
    try:
        words = tuple(shlex.split(command)) if command else default_command(device)
    except ValueError as error:
        raise RecipeError(f"--gate-command {command!r}: {error}") from error
    return Gate(command=words, gates=file)


def check_keys(recipe: Recipe, gate: Gate | None) -> None:
    """RecipeError for choices without a goal, and for two goals at once."""
    if recipe.candidates is not None and not recipe.is_mixed and gate is None:
        raise RecipeError(
            f"{recipe.where('candidates')}: candidates: given without a goal; add `budget:` or "
            "`max_kl:` (--budget, --max-kl, --until-accepted), or take it out"
        )
    if gate is None:
        return
    if recipe.max_kl is not None:
        raise RecipeError(
            f"{recipe.where('max_kl')}: max_kl: given with --until-accepted, which sets the loss "
            "by the gate; take one of them out"
        )
    if recipe.scheme == "dense" or recipe.method == "none":
        raise RecipeError("--until-accepted: the recipe quantizes nothing; name another --recipe")


def plans_to_build(recipe: Recipe, gate: Gate | None) -> int:
    """How many plans a run builds, at most."""
    return recipe.mixed.plans if gate is None else recipe.mixed.evaluations


def notes_of(recipe: Recipe, space: Space | None, gate: Gate | None) -> Iterator[str]:
    """What to know before a plan is chosen; nothing where none is."""
    if space is None:
        return
    plans = plans_to_build(recipe, gate)
    least, most = space.bits(space.least_bytes), space.bits(space.most_bytes)
    yield (
        f"which scheme goes where is decided by sensitivity, measured when it is carried out; "
        f"shown is a guess from sizes alone. Plans can take {least:.2f} to {most:.2f} bits per "
        f"weight; {'up to ' if gate else ''}{plans} are built and judged, so expect about "
        f"{plans + 1} times the time shown"
    )
