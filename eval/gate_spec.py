"""GateSpec: a gates file (YAML) as a checked value. Errors name the line and the nearest key.

Knows which metrics exist and what kind of limit each takes; knows no measurement.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from eval.checks.catalogue import TASK_METRICS, length_drift, pass_k, sampled
from eval.errors import GateSpecError
from eval.metrics.lengths import LENGTH_EDGES
from eval.review.rules import ReviewDemand

LimitKind = Literal["max", "min", "max_drop"]

# Strict: a quoted number or a `yes` where a limit belongs is a slip, not a limit of 1.
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

_STRATUM = re.compile(r"\w+:\S.*")

# The base must score this many margins above its floor for a loss to show.
FLOOR_MARGINS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What a gates file may say about a metric, and what a person calls it.

    by_item: each item passes or fails, and the score test always judges bounds.
    difference: of two drops, so neither model has a value of its own.
    variant: another metric looked at in another way.
    """

    label: str
    limit: LimitKind
    by_item: bool = False
    difference: bool = False
    variant: bool = False


METRICS: dict[str, MetricInfo] = {
    "perplexity_ratio": MetricInfo(label="PPL(Q)/PPL(base)", limit="max"),
    "kl_mean": MetricInfo(label="Mean KLD", limit="max"),
    "kl_p99": MetricInfo(label="99.0% KLD", limit="max"),
    "top1_agreement": MetricInfo(label="Same top p", limit="min"),
    "kl_drift": MetricInfo(label="KLD drift", limit="max"),
    "nll_drift": MetricInfo(label="NLL drift", limit="max"),
    "load_text_agreement": MetricInfo(label="Same text, load", limit="min"),
    "load_check_agreement": MetricInfo(label="Same under load", limit="min"),
    **{
        name: MetricInfo(label=m.label, limit="max_drop", by_item=m.shape != "rate")
        for name, m in TASK_METRICS.items()
    },
    **{
        length_drift(name): MetricInfo(
            label=f"{m.label}, drift", limit="max_drop", difference=True, variant=True
        )
        for name, m in TASK_METRICS.items()
    },
    **{
        sampled(name): MetricInfo(label=f"{m.label}, sampled", limit="max_drop", variant=True)
        for name, m in TASK_METRICS.items()
        if m.shape != "kept"
    },
    **{
        pass_k(name): MetricInfo(
            label=f"{m.label}, pass^k", limit="max_drop", by_item=True, variant=True
        )
        for name, m in TASK_METRICS.items()
        if m.shape == "pass"
    },
}


class StratumRule(BaseModel):
    """A limit within one stratum: exactly one of `max`, `min`, `max_drop`.

    judge: "bound" lets the metric pass only with its whole interval inside the limit; "estimate"
        compares the point estimate and leaves the interval to the reader.
    required: an undecided rule keeps the artifact from being accepted.
    floor: what a model without the skill scores (chance); a base near it cannot show a loss.
    at_least: what the candidate itself must score, whatever the base does.
    """

    model_config = _STRICT

    max: float | None = Field(default=None, gt=0)
    min: float | None = Field(default=None, ge=0, le=1)
    max_drop: float | None = Field(default=None, gt=0, lt=1)
    judge: Literal["bound", "estimate"] = "bound"
    required: bool = True
    floor: float = Field(default=0.0, ge=0, lt=1)
    at_least: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if len(self.kinds) != 1:
            raise ValueError("give exactly one of max, min, max_drop")
        if self.max_drop and self.floor + FLOOR_MARGINS * self.max_drop > 1:
            raise ValueError(
                f"floor + {FLOOR_MARGINS} x max_drop must not exceed 1: no base could show the loss"
            )
        return self

    @property
    def kinds(self) -> tuple[LimitKind, ...]:
        """The limits that were given (one, once validated)."""
        given: dict[LimitKind, float | None] = {
            "max": self.max,
            "min": self.min,
            "max_drop": self.max_drop,
        }
        return tuple(kind for kind, value in given.items() if value is not None)

    @property
    def kind(self) -> LimitKind:
        """Which of the three limits this rule has."""
        return self.kinds[0]

    @property
    def limit(self) -> float:
        """The limit's value, in the metric's unit."""
        value: float = getattr(self, self.kind)
        return value


class MetricRule(StratumRule):
    """One metric's limit over all items, and the limits within strata that have their own.

    domains: also reject when the metric certainly breaks the limit within one domain.
    if_measured: judge only where the suite's checks give the metric; else its absence is an error.
    strata: stratum ("lang:zh", "length:2-4k", or "source:*" for each of its kind) to its rule.
    """

    domains: bool = False
    if_measured: bool = False
    strata: dict[str, StratumRule] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _strata_have_kinds(self) -> Self:
        for name in self.strata:
            if not _STRATUM.fullmatch(name):
                raise ValueError(f"stratum {name!r}: expected KIND:VALUE, for instance lang:zh")
        return self


class GateSpec(BaseModel):
    """A whole gates file. `confidence` is one-sided; `draws` is for the bootstrap; `review` is what
    people must find (layer 3), None when they need not be asked.

    length_edges: where one bucket of input lengths ends, in tokens (`length:0-1k`, ...).
    """

    model_config = _STRICT

    version: int = Field(ge=1, le=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    draws: int = Field(default=10_000, ge=1000, le=1_000_000)
    # A list is how YAML writes a tuple.
    length_edges: tuple[Annotated[int, Field(strict=True, gt=0)], ...] = Field(
        default=LENGTH_EDGES, min_length=1, strict=False
    )
    metrics: dict[str, MetricRule] = Field(min_length=1)
    review: ReviewDemand | None = None

    @field_validator("length_edges")
    @classmethod
    def _edges_rise(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError("expected rising numbers of tokens, such as [1024, 2048, 4096]")
        return edges

    @model_validator(mode="after")
    def _something_required(self) -> GateSpec:
        if not any(rule.required and not rule.if_measured for rule in self.metrics.values()):
            raise ValueError(
                "no metric is required whatever the suite holds, so nothing would have to be "
                "shown: require one"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGates:
    """A gates file with where it came from and the sha256 of its bytes."""

    spec: GateSpec
    path: Path
    sha256: str


def load_gates(path: Path) -> LoadedGates:
    """Read and check a gates file; GateSpecError names the file, the line and what was expected."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GateSpecError(f"cannot read the gates file {path}: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise GateSpecError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return LoadedGates(
        spec=parse_gates(text, str(path)),
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def parse_gates(text: str, where: str = "gates file") -> GateSpec:
    """The GateSpec in YAML text; `where` begins the error messages."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise GateSpecError(f"{where}: not valid YAML: {error}") from error
    except RecursionError:
        raise GateSpecError(f"{where}: not valid YAML: nested too deeply") from None
    if not isinstance(content, dict) or root is None:
        raise GateSpecError(f"{where}: expected a mapping with the keys version and metrics")
    try:
        _refuse_duplicates(root, where)
    except RecursionError as error:
        raise GateSpecError(f"{where}: an anchor that contains itself") from error
    try:
        spec = GateSpec.model_validate(content)
    except ValidationError as error:
        raise GateSpecError(_explain(error.errors()[0], root, where)) from error
    for name, rule in spec.metrics.items():
        place = f"{where}:{_line(root, ('metrics', name))}"
        if name not in METRICS:
            raise GateSpecError(f"{place}: unknown metric {name!r}{_nearest_metric(name)}")
        _check_metric(name, rule, place)
        for stratum, within in rule.strata.items():
            line = _line(root, ("metrics", name, "strata", stratum))
            _check_metric(name, within, f"{where}:{line}")
    return spec


def _check_metric(name: str, rule: StratumRule, where: str) -> None:
    if rule.kind != METRICS[name].limit:
        raise GateSpecError(
            f"{where}: {name} takes the limit {METRICS[name].limit!r}, found {rule.kind!r}"
        )

    # What would have no effect is refused: its author believes that it has one.
    if METRICS[name].difference and (rule.floor or rule.at_least is not None):
        raise GateSpecError(f"{where}: {name} is a difference of two drops: no floor, no at_least")
    if METRICS[name].difference and isinstance(rule, MetricRule) and (rule.strata or rule.domains):
        raise GateSpecError(f"{where}: {name} is over all lengths, it has no strata or domains")
    if METRICS[name].by_item and rule.judge == "estimate":
        raise GateSpecError(f"{where}: {name} is always judged by its bounds, not by its estimate")
    if rule.kind != "max_drop" and rule.floor:
        raise GateSpecError(f"{where}: only max_drop metrics have a floor, {name} has none")
    if rule.kind != "max_drop" and rule.at_least is not None:
        raise GateSpecError(f"{where}: only max_drop metrics take at_least; {name} takes a limit")


def _explain(error: ErrorDetails, root: yaml.Node, where: str) -> str:
    loc = error["loc"]
    place = f"{where}:{_line(root, loc)}"
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        known: type[BaseModel] = StratumRule
        if loc[0] == "review" and len(loc) > 1:
            known = ReviewDemand
        elif len(loc) < 4:
            known = GateSpec if len(loc) == 1 else MetricRule
        return f"{place}: unknown key {key!r}{_nearest(str(loc[-1]), tuple(known.model_fields))}"
    if error["type"] == "missing":
        return f"{place}: the key {key!r} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {key or 'file'}: {message} (found {_short(error['input'])})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _nearest_metric(name: str) -> str:
    """Of all metrics the nearest; where none is near, those that are no variant of another."""
    close = difflib.get_close_matches(name, METRICS, n=1)
    own = tuple(known for known, info in METRICS.items() if not info.variant)
    return _nearest(name, own if not close else tuple(METRICS))


def _line(root: yaml.Node, loc: tuple[int | str, ...]) -> int:
    """The 1-based line of the deepest key of `loc` that exists."""
    node, line = root, root.start_mark.line
    for part in loc:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((k, v) for k, v in pairs if k.value == str(part)), None)
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return line + 1


def _refuse_duplicates(node: yaml.Node, where: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if key.value in seen:
            raise GateSpecError(f"{where}:{key.start_mark.line + 1}: key {key.value!r} twice")
        seen.add(key.value)
        _refuse_duplicates(value, where)
