"""The row of one module: its rule of the recipe, fitted to its shape.

Group sizes are the largest of 128, 64, 32 that divides a module's columns and is not above the one
asked for, else one scale per channel; what runs as one shares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quant.artifact.dialect import fused_group
from quant.artifact.scheme import BLOCK, DENSE, GROUP_SIZES, PRESETS, Scheme, with_group_size
from quant.errors import PlanError
from quant.module_names import HEAD, is_router, layer_index
from quant.recipe_keys import MethodName, ScaleSearch
from quant.recipe_rules import ModuleRule, statistics_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One linear module: weight shape [out, in], what it becomes, by which method and why.

    scale_search: what rtn's scales are searched for.
    """

    module: str
    shape: tuple[int, int]
    scheme: Scheme
    method: MethodName
    note: str = ""
    scale_search: ScaleSearch = "none"

    @property
    def layer(self) -> int | None:
        return layer_index(self.module)

    @property
    def statistics(self) -> Literal["none", "squares", "hessian"]:
        """What the method must know of the module's inputs."""
        return statistics_of(self.method, self.scale_search)


def make_row(
    name: str,
    shape: tuple[int, int],
    rule: ModuleRule,
    is_tied: bool,
    widths: frozenset[int] | None = None,
    scale_search: ScaleSearch = "none",
    blocks: str = "",
) -> PlanRow:
    """The row of a module; `widths` are the columns of what it must share its group size with, and
    `blocks` says what keeps it from blocks of 128 by 128."""
    if is_router(name):
        note = rule.reason if rule.reason.startswith("skip: ") else "routers stay dense"
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if name == HEAD and is_tied:
        if rule.scheme is not None:
            raise PlanError(
                "lm_head shares its weight with the embedding, which stays dense; put lm_head "
                "under `skip:`"
            )
        note = "tied to the embedding"
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if rule.scheme is None:
        note = "" if rule.reason == "recipe" else rule.reason
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if rule.scheme.weights is not None and rule.scheme.weights.strategy == "block":
        scheme, note = fit_blocks(rule.scheme, blocks)
    else:
        fits = [fit_group_size(rule.scheme, columns) for columns in sorted(widths or {shape[1]})]
        scheme, note = min(fits, key=_group_columns)
    reasons = [] if rule.reason == "recipe" else [rule.reason]
    note = "; ".join([*reasons, note] if note else reasons)
    return PlanRow(
        module=name, shape=shape, scheme=scheme, method=rule.method, note=note,
        scale_search=scale_search if rule.method == "rtn" else "none",
    )  # fmt: skip


def expert_widths(modules: Mapping[str, tuple[int, int]]) -> dict[str, frozenset[int]]:
    """Columns of all experts of a layer, by fused group: they share one scheme, group size too."""
    found: dict[str, set[int]] = {}
    for name, shape in modules.items():
        if ".experts." in name:
            found.setdefault(fused_group(name), set()).add(shape[1])
    return {group: frozenset(columns) for group, columns in found.items()}


def fit_group_size(scheme: Scheme, columns: int) -> tuple[Scheme, str]:
    """The scheme with a group size that divides `columns`, and a note if it had to change."""
    assert scheme.weights is not None
    asked = scheme.weights.group_size
    if asked is None or columns % asked == 0:
        return scheme, ""
    tried = [size for size in GROUP_SIZES if size <= asked]
    fitting = next((size for size in tried if columns % size == 0), None)
    note = f"{asked} does not divide {columns}"
    if fitting is None:
        note = f"no group of {'/'.join(map(str, tried))} divides {columns}"
    return with_group_size(scheme, fitting), note


def _group_columns(fit: tuple[Scheme, str]) -> float:
    """Columns of a group; infinite for whole channels that nothing forced: they fit everything."""
    weights = fit[0].weights
    assert weights is not None
    if weights.group_size is None:
        return 0.0 if fit[1] else math.inf
    return weights.group_size


def fit_blocks(scheme: Scheme, obstacle: str) -> tuple[Scheme, str]:
    """The scheme in blocks, or where something forbids them with a scale per channel and token."""
    if not obstacle:
        return scheme, ""
    return PRESETS["fp8"], f"{obstacle}, so one scale per channel"


def block_obstacles(shapes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """What keeps modules that run as one from blocks, by `fused_group`; those that nothing does
    have none. Inputs are cut every 128 channels, and so are rows where modules meet."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, shape in shapes.items():
        groups.setdefault(fused_group(name), []).append(shape)
    found = {}
    for group, members in groups.items():
        odd = [width for _, width in members if width % BLOCK]
        ragged = [rows for rows, _ in members if rows % BLOCK] if len(members) > 1 else []
        if odd:
            found[group] = f"{BLOCK} does not divide {odd[0]} columns"
        elif ragged:
            found[group] = f"{BLOCK} does not divide {ragged[0]} rows of what runs as one"
    return found
