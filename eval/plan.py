"""Planning: what a number of items can show under the gate's rule for paired pass-or-fail metrics.

Exact: the probability of an outcome is the sum of the trinomial over all tables (lost, gained) with
that outcome, under the very rule of `eval.gate` (a test holds the two together). Assumes items that
do not depend on each other: several items of one document count for less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.gate import ALARM_P
from eval.gate_rules import FEW_DISCORDANT, RETENTION_MARGINS
from eval.stats import PairedCounts, drop_upper

Bools = NDArray[np.bool_]

POWER = 0.8
MOST_ITEMS = 50_000
# Tables further from the expected one than this many standard deviations have no weight.
_REACH = 9.0
_LARGEST_DROP = 0.5
_BISECTIONS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A paired comparison as planned. Rates are shares of all items.

    lost, gained: true rates of items that only the base, only the candidate gets right.
    base: share that the base gets right; retention is judged among these.
    safeguards: False judges by the score test alone, as sample-size tables in print do.
    """

    num_items: int
    lost: float
    gained: float
    margin: float
    confidence: float = 0.95
    base: float = 1.0
    safeguards: bool = True

    @property
    def num_base_ok(self) -> int:
        """Items that the base gets right, as expected."""
        return round(self.num_items * self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What `num_items` can do for one margin; drops are true ones, shares of 1.

    accepts_equal: probability that a candidate without any true drop passes. flawless: the bound
    that a run without one changed item proves. noticed, rejected: the smallest drop that raises the
    alarm, that fails the rule, with probability `power`; None when none up to 50 pp does.
    """

    num_items: int
    margin: float
    discordance: float
    power: float
    accepts_equal: float
    flawless: float
    noticed: float | None
    rejected: float | None


def equal(discordance: float, margin: float, **more: Any) -> Trial:
    """A candidate as good as its base, whose answers change either way at the rate `discordance`.

    num_items is 1 until it is planned.
    """
    return Trial(num_items=1, lost=discordance / 2, gained=discordance / 2, margin=margin, **more)


def pass_probability(trial: Trial) -> float:
    """Probability that the rule passes."""
    return _probability(trial, _passes)


def fail_probability(trial: Trial) -> float:
    """Probability that the rule fails (rejects), as opposed to staying undecided."""
    return _probability(trial, _fails)


def alarm_probability(trial: Trial, num_metrics: int = 1) -> float:
    """Probability that the exact one-sided McNemar test speaks, at Holm's strictest level."""
    return _probability(trial, lambda t, lost, gained: _alarms(lost, gained, ALARM_P / num_metrics))


def items_to_pass(trial: Trial, power: float = POWER) -> int | None:
    """The smallest number of items (to about 1 %) with which the rule passes with this probability.

    None when no number up to MOST_ITEMS does: the true drop reaches the margin.
    """
    return _fewest(trial, lambda t: pass_probability(t) >= power)


def items_to_notice(trial: Trial, power: float = POWER) -> int | None:
    """The smallest number of items (to about 1 %) with which McNemar's alarm is raised."""
    return _fewest(trial, lambda t: alarm_probability(t) >= power)


def smallest_drop(trial: Trial, speaks: Callable[[Trial], float], power: float) -> float | None:
    """The smallest true drop, beside `trial.gained`, of which `speaks` has this probability."""

    def at(drop: float) -> bool:
        lost = drop + trial.gained
        return speaks(replace(trial, lost=min(lost, 1 - trial.gained))) >= power

    low, high = 0.0, _LARGEST_DROP
    if not at(high):
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) else (middle, high)
    return high


def ability(trial: Trial, *, power: float = POWER, num_metrics: int = 1) -> Ability:
    """What `trial.num_items` can show; `trial` is the candidate that loses nothing in truth."""
    n = trial.num_items
    flawless = PairedCounts(num_items=n, num_base_ok=n, lost=0, gained=0)
    return Ability(
        num_items=n,
        margin=trial.margin,
        discordance=trial.lost + trial.gained,
        power=power,
        accepts_equal=pass_probability(trial),
        flawless=drop_upper(flawless, trial.confidence),
        noticed=smallest_drop(trial, lambda t: alarm_probability(t, num_metrics), power),
        rejected=smallest_drop(trial, fail_probability, power),
    )


def unpaired_items(base: float, candidate: float, power: float = POWER) -> int:
    """Items per model for a one-sided z-test of two independent rates: what pairing saves."""
    z = NormalDist().inv_cdf(1 - ALARM_P) + NormalDist().inv_cdf(power)
    variance = base * (1 - base) + candidate * (1 - candidate)
    return math.ceil(z**2 * variance / (base - candidate) ** 2)


_Region = Callable[[Trial, np.ndarray, np.ndarray], Bools]


def _probability(trial: Trial, region: _Region) -> float:
    lost, gained, weights = _tables(trial)
    return float(weights[region(trial, lost, gained)].sum())


def _tables(trial: Trial) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lost [B, 1], gained [1, C] and the probability [B, C] of each table."""
    n = trial.num_items
    lost = _likely(n, trial.lost)[:, None]
    gained = _likely(n, trial.gained)[None, :]
    same = n - lost - gained
    logs = _log_factorials(n)
    kept = np.maximum(same, 0)
    log_weight = logs[n] - logs[lost] - logs[gained] - logs[kept]
    log_weight = log_weight + _times_log(lost, trial.lost) + _times_log(gained, trial.gained)
    log_weight = log_weight + _times_log(kept, 1 - trial.lost - trial.gained)
    return lost, gained, np.where(same >= 0, np.exp(log_weight), 0.0)


def _likely(n: int, rate: float) -> np.ndarray:
    middle, reach = n * rate, _REACH * math.sqrt(n * rate * (1 - rate)) + (10 if rate else 0)
    return np.arange(max(0, math.floor(middle - reach)), min(n, math.ceil(middle + reach)) + 1)


def _times_log(counts: np.ndarray, rate: float) -> np.ndarray:
    if rate > 0:
        return counts * math.log(rate)
    return np.where(counts == 0, 0.0, -np.inf)


@lru_cache(maxsize=4)
def _log_factorials_up_to(size: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])


def _log_factorials(n: int) -> np.ndarray:
    return _log_factorials_up_to(max(1024, 1 << n.bit_length()))


def _z(n: int, lost: np.ndarray, gained: np.ndarray, margin: float) -> np.ndarray:
    """`eval.stats.drop_z` for many tables, positive margins only."""
    linear = (lost + gained) * (1 - margin) - 2 * gained * margin
    linear = linear - 2 * (n - lost - gained) * margin
    root = np.sqrt(np.maximum(linear**2 + 8 * n * gained * margin * (1 - margin), 0))
    p = np.clip((linear + root) / (4 * n), 0, (1 - margin) / 2)
    found: np.ndarray = ((lost - gained) / n - margin) / np.sqrt((2 * p + margin - margin**2) / n)
    return found


def _passes(trial: Trial, lost: np.ndarray, gained: np.ndarray) -> Bools:
    critical = NormalDist().inv_cdf(trial.confidence)
    found: Bools = _z(trial.num_items, lost, gained, trial.margin) < -critical
    if not trial.safeguards:
        return found
    rare = lost <= _most(trial.num_items, trial.margin, trial.confidence)
    kept = lost <= _most(trial.num_base_ok, RETENTION_MARGINS * trial.margin, trial.confidence)
    passed: Bools = found & (rare | (lost + gained >= FEW_DISCORDANT)) & kept
    return passed


def _fails(trial: Trial, lost: np.ndarray, gained: np.ndarray) -> Bools:
    critical = NormalDist().inv_cdf(trial.confidence)
    found: Bools = _z(trial.num_items, lost, gained, trial.margin) > critical
    if not trial.safeguards:
        return found
    allowed = RETENTION_MARGINS * trial.margin
    failed: Bools = found | (lost >= _least(trial.num_base_ok, allowed, trial.confidence))
    return failed


def _most(trials: int, rate: float, confidence: float) -> int:
    """The most successes whose Clopper-Pearson upper bound lies below `rate`; -1 for none."""
    return int(np.searchsorted(_cumulated(trials, rate), 1 - confidence)) - 1


def _least(trials: int, rate: float, confidence: float) -> int:
    """The fewest successes whose Clopper-Pearson lower bound lies above `rate`."""
    return int(np.searchsorted(_cumulated(trials, rate), confidence, side="right")) + 1


def _cumulated(trials: int, rate: float) -> np.ndarray:
    """P(X <= k) for k = 0, 1, ... of a binomial."""
    if rate >= 1:
        return np.zeros(trials + 1)
    k = np.arange(trials + 1)
    logs = _log_factorials(trials)
    log_weight = logs[trials] - logs[k] - logs[trials - k]
    return np.cumsum(np.exp(log_weight + k * math.log(rate) + (trials - k) * math.log1p(-rate)))


def _alarms(lost: np.ndarray, gained: np.ndarray, level: float) -> Bools:
    flips = lost + gained
    least = np.array([_fewest_lost(f, level) for f in range(int(flips.max()) + 1)])
    found: Bools = lost >= least[flips]
    return found


@lru_cache(maxsize=100_000)
def _fewest_lost(flips: int, level: float) -> int:
    """The fewest losses among `flips` with P(Binom(flips, 1/2) >= losses) < level."""
    logs = _log_factorials(flips)
    k = np.arange(flips + 1)
    tail = np.cumsum(np.exp(logs[flips] - logs[k] - logs[flips - k] - flips * math.log(2)))
    return flips + 1 - int(np.searchsorted(tail, level))


def _fewest(trial: Trial, is_enough: Callable[[Trial], bool]) -> int | None:
    """Counts go up and down in steps with n, so this takes the first that is enough."""
    low, high = 1, 2
    while not is_enough(replace(trial, num_items=high)):
        low, high = high, high + max(1, high // 4)
        if high > MOST_ITEMS:
            return None
    return next(n for n in _steps(low, high) if is_enough(replace(trial, num_items=n)))


def _steps(low: int, high: int) -> Iterator[int]:
    """From a tenth below `low` up to `high` in steps of half a per cent."""
    n = max(1, low - low // 10)
    while n < high:
        yield n
        n += max(1, n // 200)
    yield high
