"""What a mixed-precision plan may choose: groups, their schemes, what each costs, and how a choice
is written down as an ordinary recipe.

A group is what engines load as one (q|k|v, gate|up, the experts of a layer); it is free unless the
recipe skips it or an override takes any of its modules. What a scheme becomes in a module (a group
size that fits its columns, say) is asked of `quant.plan`, by planning the recipe that writes the
choice down. So a plan made here can be nothing that a recipe could not say.

Works on names and shapes only: no tensors, no scores of its own but a guess from sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from quant.allocation import Allocation, Allocator, Group, Option
from quant.artifact.dialect import fused_group
from quant.artifact.scheme import Scheme
from quant.budget import LAST_RESORT, Budget, default_candidates, known_labels
from quant.errors import PlanError
from quant.module_names import HEAD, general_name
from quant.plan import Plan
from quant.plan_rows import PlanRow
from quant.recipe import Recipe
from quant.stored_size import DTYPE_BYTES, row_bytes

MIXED_KEYS = ("budget", "max_kl", "candidates", "mixed")
Planner = Callable[[Recipe], Plan]
# Relative error that one scale's share of columns leaves, for the guess: finer scales fit better.
_GRAIN = {None: 1.6, 128: 1.15, 64: 1.0, 32: 0.85}


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGroup:
    """Modules that share a choice, and the choices: label in the recipe, scheme of each module as
    it fits, bytes of all of them on disk."""

    modules: tuple[str, ...]
    layer: int
    num_weights: int
    labels: tuple[str, ...]
    schemes: tuple[tuple[Scheme, ...], ...]
    num_bytes: tuple[int, ...]

    @property
    def name(self) -> str:
        """`layers.3.self_attn.q_proj|k_proj|v_proj`, `layers.3.mlp.experts`."""
        parent, _, _ = self.modules[0].rpartition(".")
        if ".experts." in self.modules[0]:
            return fused_group(self.modules[0]).removeprefix("model.")
        leaves = "|".join(name.rpartition(".")[2] for name in self.modules)
        return f"{parent.removeprefix('model.')}.{leaves}"

    def shown(self, option: int) -> str:
        """The scheme as it fits: what tables and reports call it."""
        return self.schemes[option][0].label


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All choices of a recipe for one model, and what does not depend on them.

    num_weights, pinned_bytes: weights that bits are counted over (free groups and linears that
    the recipe itself quantizes), bytes of the latter. other_bytes: the rest of the artifact.
    """

    groups: tuple[FreeGroup, ...]
    num_weights: int
    pinned_bytes: int
    other_bytes: int

    def limit(self, budget: Budget) -> int:
        """Bytes that a budget leaves to the free groups (negative where it leaves none)."""
        if budget.unit == "bpw":
            return int(budget.value * self.num_weights / 8) - self.pinned_bytes
        return int(budget.value) - self.pinned_bytes - self.other_bytes

    def bits(self, free_bytes: int) -> float:
        """Bits per weight when the free groups take `free_bytes`."""
        return 8 * (free_bytes + self.pinned_bytes) / self.num_weights

    def artifact_bytes(self, free_bytes: int) -> int:
        """Bytes of all weights of the artifact then."""
        return free_bytes + self.pinned_bytes + self.other_bytes

    @property
    def least_bytes(self) -> int:
        return sum(min(group.num_bytes) for group in self.groups)

    @property
    def most_bytes(self) -> int:
        return sum(max(group.num_bytes) for group in self.groups)

    def candidates(self) -> dict[str, tuple[Scheme, ...]]:
        """Schemes of every free module, in the order of its group's choices."""
        return {
            module: tuple(option[i] for option in group.schemes)
            for group in self.groups
            for i, module in enumerate(group.modules)
        }

    def scored(self, scores: Mapping[str, Sequence[float]]) -> tuple[Group, ...]:
        """The groups as a knapsack; scores by the name of a group, one for each choice."""
        return tuple(
            Group(
                name=group.name,
                options=tuple(
                    Option(scheme=label, num_bytes=size, score=score)
                    for label, size, score in zip(
                        group.labels, group.num_bytes, scores[group.name], strict=True
                    )
                ),
            )
            for group in self.groups
        )

    def guesses(self) -> dict[str, list[float]]:
        """Scores from sizes alone: every weight counts the same, each bit quarters its error."""
        return {
            group.name: [group.num_weights * _guess(option[0]) for option in group.schemes]
            for group in self.groups
        }


def survey(recipe: Recipe, planner: Planner, beside: Callable[[Plan], int]) -> Space:
    """The choices that `recipe` leaves; `planner` applies a recipe to the model.

    beside: bytes that a plan's artifact holds beside quantized linears (`other_bytes`). Raises
    PlanError when nothing is free, and what planning raises.
    """
    base = planner(recipe)
    free = _free_groups(recipe, base)
    if not free:
        raise PlanError(
            "no module is left to choose a scheme for: overrides and `skip:` take all of them; "
            "drop `budget:` and `max_kl:`, or leave them some"
        )
    labels = recipe.candidates or default_candidates(_preset_name(recipe))
    space = _space(recipe, base, planner, free, labels, beside(base))
    budget = Budget.parse(recipe.budget) if recipe.budget else None
    is_weights_only = recipe.candidates is None and labels == default_candidates(None)
    if budget and is_weights_only and space.limit(budget) < space.least_bytes:
        space = _space(recipe, base, planner, free, (*LAST_RESORT, *labels), beside(base))
    return space


def other_bytes(
    plan: Plan, parameters: Mapping[str, Sequence[int]], extra_bytes: int, kv_heads: int
) -> int:
    """Bytes of everything but quantized linears: embedding, norms, biases, dense linears, KV
    scales, and `extra_bytes` of tensors that are copied. parameters: name -> shape."""
    quantized = {f"{row.module}.weight" for row in plan.rows if not row.scheme.is_dense}
    tied = {f"{HEAD}.weight"} if plan.is_tied else set()
    kept = (shape for name, shape in parameters.items() if name not in quantized | tied)
    values = sum(math.prod(shape) for shape in kept)
    if plan.kv_cache.startswith("fp8"):
        values += 2 * len(plan.kv_layers) * (kv_heads if plan.kv_cache == "fp8-head" else 1)
    return values * DTYPE_BYTES[plan.dtype] + extra_bytes


def guess_plan(recipe: Recipe, space: Space, planner: Planner) -> Plan:
    """A plan of about the size that is to come, before any score is known: the best one within the
    budget if every weight were equally sensitive; the recipe's own scheme without a budget."""
    if recipe.budget is None:
        plan = planner(written_out(recipe, []))
    else:
        limit = space.limit(Budget.parse(recipe.budget))
        allocation = Allocator(space.scored(space.guesses()), limit=limit).within(limit)
        plan = planner(written_out(recipe, chosen_labels(space, allocation)))
    added = len(plan.overrides) - len(recipe.overrides)
    rows = tuple(replace(row, note=_own_note(row.note, added)) for row in plan.rows)
    return replace(plan, rows=rows, overrides=plan.overrides[added:], needs_calibration=True)


def _own_note(note: str, added: int) -> str:
    """A row's note without the overrides that a plan added, and the recipe's own renumbered."""

    def renumbered(part: str) -> str:
        found = re.fullmatch(r"override (\d+)", part)
        if found is None:
            return part
        number = int(found[1]) - added
        return f"override {number}" if number > 0 else ""

    return "; ".join(filter(None, map(renumbered, note.split("; "))))


def check_reachable(space: Space, budget: Budget, where: str, *, wide_scales: bool = False) -> None:
    """PlanError with the smallest reachable figure when the budget is below it.

    wide_scales: they are stored in float32, which another dtype would halve.
    """
    if space.limit(budget) >= space.least_bytes:
        return
    if budget.unit == "bpw":
        least = f"{_ceil(space.bits(space.least_bytes), 100):.2f}bpw"
    else:
        least = f"{_ceil(space.artifact_bytes(space.least_bytes) / 1e6, 1000):.3f}MB"
    raise PlanError(
        f"{where}: budget: {budget.text} cannot be met: the smallest plan takes {least} with "
        "these candidates; raise the budget, list smaller schemes under `candidates:`, or quantize "
        "what is skipped or pinned"
        + ("; scales are float32 here: --dtype bfloat16 halves them" if wide_scales else "")
    )


def _ceil(value: float, steps: int) -> float:
    """The value rounded up to a multiple of 1 / steps: the figure shown can itself be met."""
    return math.ceil(value * steps) / steps


def _preset_name(recipe: Recipe) -> str | None:
    """The preset that the recipe's scheme is, also where it is spelled out."""
    weights, inputs = recipe.weights, recipe.activations
    if weights is None or inputs is None:
        return recipe.scheme
    if weights.num_bits == 4:
        return "w4a8" if inputs.kind == "int" else "w4a8-fp8"
    return "w8a8" if inputs.kind == "int" else "fp8"


def _free_groups(recipe: Recipe, base: Plan) -> list[list[PlanRow]]:
    """Rows of each group whose scheme neither `skip:` nor an override fixes."""
    found: dict[str, list[PlanRow]] = {}
    for row in base.rows:
        if row.layer is not None:
            found.setdefault(fused_group(row.module), []).append(row)
    return [rows for rows in found.values() if all(_is_free(recipe, base, row) for row in rows)]


def _is_free(recipe: Recipe, base: Plan, row: PlanRow) -> bool:
    rule = recipe.module_rule(row.module, base.num_layers)
    return not row.scheme.is_dense and rule.override is None


def _space(
    recipe: Recipe,
    base: Plan,
    planner: Planner,
    free: Sequence[Sequence[PlanRow]],
    labels: Sequence[str],
    other_bytes: int,
) -> Space:
    names = [tuple(row.module for row in rows) for rows in free]
    rows_by_label = {
        label: {r.module: r for r in planner(written_out(recipe, [(n, label) for n in names])).rows}
        for label in dict.fromkeys(labels)
    }
    groups = tuple(_group(group, rows_by_label, base) for group in names)
    taken = {name for group in names for name in group}
    pinned = [r for r in base.rows if r.module not in taken and not r.scheme.is_dense]
    return Space(
        groups=groups,
        num_weights=sum(g.num_weights for g in groups) + sum(_weights(r) for r in pinned),
        pinned_bytes=sum(row_bytes(row, base.dtype) for row in pinned),
        other_bytes=other_bytes,
    )


def _group(
    modules: tuple[str, ...], rows_by_label: Mapping[str, Mapping[str, PlanRow]], base: Plan
) -> FreeGroup:
    """The group's distinct choices: labels that come to the same once they fit count once."""
    distinct: dict[tuple[Scheme, ...], str] = {}
    for label, rows in rows_by_label.items():
        distinct.setdefault(tuple(rows[name].scheme for name in modules), label)
    any_rows = next(iter(rows_by_label.values()))
    layer = any_rows[modules[0]].layer
    assert layer is not None
    sizes = (
        sum(row_bytes(rows_by_label[label][name], base.dtype) for name in modules)
        for label in distinct.values()
    )
    return FreeGroup(
        modules=modules, layer=layer, labels=tuple(distinct.values()), schemes=tuple(distinct),
        num_weights=sum(_weights(any_rows[name]) for name in modules), num_bytes=tuple(sizes),
    )  # fmt: skip


def _weights(row: PlanRow) -> int:
    return row.shape[0] * row.shape[1]


def _guess(scheme: Scheme) -> float:
    w = scheme.weights
    if w is None:
        return 0.0
    return float(4.0**-w.num_bits * _GRAIN[w.group_size] * (1.0 if w.symmetric else 0.8))


def written_out(
    recipe: Recipe,
    choices: Iterable[tuple[Sequence[str], str]],
    *,
    name: str | None = None,
    comment: str = "",
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """The ordinary recipe that gives each group of modules its label; overrides of `recipe` follow
    and so win. name: of the file it will be; comment: lines at its top; changes: keys to replace
    (of a section, by its key: {"calibration": {"samples": 64}})."""
    data = {key: value for key, value in recipe.data.items() if key not in MIXED_KEYS}
    own = data.pop("overrides", None) or []
    for key, value in (changes or {}).items():
        is_section = isinstance(value, dict)
        data[key] = {**(data.get(key) or {}), **value} if is_section else value
    data["overrides"] = [*_overrides(choices), *own]
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    text += yaml.dump(
        data, Dumper=_Plain, sort_keys=False, allow_unicode=True, default_flow_style=None,
        width=100,
    )  # fmt: skip
    return Recipe.parse(text, recipe.where().rpartition(":")[0] if name is None else name)


def chosen_labels(space: Space, allocation: Allocation) -> list[tuple[Sequence[str], str]]:
    """What `written_out` wants of an allocation."""
    pairs = zip(space.groups, allocation.choices, strict=True)
    return [(group.modules, option.scheme) for group, option in pairs]


class _Plain(yaml.SafeDumper):
    """Without anchors, which recipes refuse."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _overrides(choices: Iterable[tuple[Sequence[str], str]]) -> list[dict[str, Any]]:
    """An override for each kind of group and label, naming its layers."""
    layers: dict[tuple[str, str], list[int]] = {}
    for modules, label in choices:
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", modules[0])
        assert found is not None
        layers.setdefault((_pattern(modules), label), []).append(int(found[1]))
    known = known_labels()
    return [
        {"match": pattern, "layers": sorted(indices), **known[label]}
        for (pattern, label), indices in layers.items()
    ]


def _pattern(modules: Sequence[str]) -> str:
    """`re:` and an expression that takes these modules of any layer and no others."""
    names = dict.fromkeys(general_name(name) for name in modules)
    parents: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        parents.setdefault(parent, []).append(leaf)
    parts = [
        re.escape(parent).replace(r"\*", r"\d+") + r"\." + _either(map(re.escape, leaves))
        for parent, leaves in parents.items()
    ]
    return "re:" + _either(parts)


def _either(parts: Iterable[str]) -> str:
    found = list(parts)
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"
