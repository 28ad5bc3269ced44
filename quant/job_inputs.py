"""Finds what the caller named: recipe, calibration files, model, adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quant.adapter import with_adapter
from quant.artifact.shipped import Kind, resolve_adapter, resolve_input
from quant.checkpoint import Source
from quant.errors import CalibrationError, QuantError, RecipeError, SourceError
from quant.foreign import QuantizedSource, is_quantized
from quant.recipe import Recipe
from quant.recipe_keys import CalibrationSettings
from quant.source import open_source

PathLike = str | Path


def load_recipe(recipe: PathLike, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe, found where given or among the shipped ones, with `overrides` applied."""
    loaded = Recipe.load(find_input(recipe, "recipes", RecipeError))
    sections = dict.fromkeys(CalibrationSettings.model_fields, "calibration.")
    changes = {f"{sections.get(key, '')}{key}": value for key, value in overrides.items()}
    return loaded.with_overrides(changes)


def find_input(name: PathLike, kind: Kind, error: type[QuantError]) -> Path:
    """`resolve_input`, with a missing file as one of our errors."""
    try:
        return resolve_input(str(name), kind)
    except FileNotFoundError as missing:
        raise error(str(missing)) from missing


def calibration_files(calib: PathLike | Sequence[PathLike] | None) -> tuple[Path, ...]:
    if calib is None:
        return ()
    names = [calib] if isinstance(calib, str | Path) else calib
    return tuple(find_input(name, "calib_data", CalibrationError) for name in names)


def recipe_model(recipe: Recipe) -> str:
    """The recipe's `model:`; a relative path counts from the recipe's folder when it is there."""
    if recipe.model is None:
        raise RecipeError("no model: give --model MODEL, or `model:` in the recipe")
    beside = Path(recipe.where().rpartition(":")[0]).parent / recipe.model
    return str(beside) if beside.exists() else recipe.model


def open_model(name: str, recipe: Recipe, *, keep_codes: bool) -> Source:
    adapter = _adapter(recipe)
    if keep_codes and Path(name).is_dir() and is_quantized(Path(name)):
        if adapter is not None:
            raise RecipeError(f"{name}: an adapter cannot be merged into codes; give the original")
        if recipe.dtype != "auto":
            raise RecipeError(f"{name}: --dtype would round the scales; codes are kept as they are")
        return QuantizedSource(Path(name))
    source = open_source(name)
    return source if adapter is None else with_adapter(source, adapter)


def _adapter(recipe: Recipe) -> Path | None:
    """The directory of `--adapter` or the recipe's `adapter:`, which counts from its folder; then
    the shipped one of that name."""
    if recipe.adapter is None:
        return None
    beside = Path(recipe.where().rpartition(":")[0]).parent / recipe.adapter
    in_recipe = "adapter" not in recipe.cli_overrides
    if in_recipe and beside.exists():
        return beside
    try:
        return resolve_adapter(recipe.adapter)
    except FileNotFoundError as missing:
        raise SourceError(str(missing)) from missing


def model_name(source: Source) -> str:
    path = source.path.resolve()
    name = path.stem if path.suffix == ".gguf" else path.name
    return f"{name}-{source.merged.name}" if source.merged else name
