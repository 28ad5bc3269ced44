"""What would only fail later in a run: refused before anything is read or written."""

from __future__ import annotations

from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.errors import PipelineError
from quant.folds import MAPPINGS
from quant.parallel import Ranks
from quant.plan import Plan

# What several ranks can share: their statistics are sums over tokens.
SHARED_METHODS = frozenset({"none", "rtn", "gptq", "awq"})


def check_run(source: Source, plan: Plan, calibration: Calibration | None) -> None:
    """PipelineError for what would only fail later."""
    planned = {row.module for row in plan.rows}
    assert planned == set(source.module_shapes), "the plan was made for another model"
    blind = next((row for row in plan.rows if row.statistics != "none"), None)
    if calibration is None and blind is not None:
        how = (
            f"rtn with scale_search {blind.scale_search}" if blind.method == "rtn" else blind.method
        )
        raise PipelineError(f"{how} needs calibration text; give --calib FILE, or use method rtn")
    check_smoothing(plan)
    if calibration is None and plan.smoothing != "none":
        raise PipelineError(
            "smoothing needs calibration text; give --calib FILE, or set `smoothing: none`"
        )


def check_ranks(plan: Plan, calibration: Calibration | None, ranks: Ranks) -> None:
    """PipelineError for what several ranks cannot do together."""
    if ranks.size == 1:
        return
    alone = sorted({row.method for row in plan.rows} - SHARED_METHODS)
    if alone:
        raise PipelineError(
            f"method {alone[0]} runs on one rank only (several can share "
            f"{', '.join(sorted(SHARED_METHODS))}); leave --ranks away"
        )
    windows = 0 if calibration is None else len(calibration.samples)
    if plan.needs_calibration and windows < ranks.size:
        raise PipelineError(
            f"{windows} calibration windows are too few for {ranks.size} ranks: each needs one at "
            "least; use fewer ranks, or more --samples"
        )


def check_smoothing(plan: Plan) -> None:
    """PipelineError when the plan smooths a model whose folds are not known."""
    if plan.is_smoothed and plan.architecture not in MAPPINGS:
        what, instead = "smoothing", "set `smoothing: none` (--smoothing none)"
        if plan.smoothing == "none":
            what, instead = "awq", "use `method: gptq` (--method gptq)"
        raise PipelineError(
            f"{what} does not know where scales fold in {plan.architecture} (it knows "
            f"{', '.join(MAPPINGS)}); {instead}"
        )
