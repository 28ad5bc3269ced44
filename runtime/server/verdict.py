"""What the stamp on an artifact is worth here: its verdict, and whether the numerics are those
it was judged by. Knows the manifest and the stamp, not how either was made.
"""

from __future__ import annotations

from pathlib import Path

from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.stamp import STAMP_NAME, MetricRecord, Stamp
from runtime.config import ConfigError
from runtime.engine.precheck import check_artifact

NOT_JUDGED = "not judged"
_FOREIGN = f"its {STAMP_NAME} was given on other bytes than these"
MAX_METRICS_SHOWN = 3


def open_for_serving(path: Path) -> Artifact:
    """The artifact at `path`, headers checked. ConfigError when it is something else."""
    check_artifact(path)
    return open_artifact(path, verify="fast")


def why_not_judged(artifact: Artifact) -> str:
    """Why an artifact without a stamp of its own has none."""
    if (artifact.path / STAMP_NAME).is_file():
        return f"{_FOREIGN}; run: evaluate ART"
    return "nobody measured what this artifact lost; run: evaluate ART"


def judge(
    stamp: Stamp | None,
    numerics: dict[str, str],
    chat_template_sha256: str | None,
    *,
    without: str = "nobody measured it",
) -> tuple[str, str | None]:
    """(verdict, warning). The warning says why the artifact may not be as good as it should.

    without: the warning where there is no stamp, as `why_not_judged` gives it.
    """
    if stamp is None:
        return NOT_JUDGED, without
    if stamp.verdict != "accepted":
        return stamp.verdict, deciding(stamp)
    here = {**numerics, "chat_template_sha256": chat_template_sha256}
    judged = stamp.numerics.model_dump()
    different = [
        f"{name} {judged[name]} (here {here[name]})"
        for name in judged
        if name in here and (judged[name] or None) != (here[name] or None)
    ]
    if different:
        return stamp.verdict, "judged by other numerics: " + ", ".join(different)
    return stamp.verdict, None


def judged_with(stamp: Stamp | None, engine: dict[str, str]) -> str | None:
    """A remark when another build of the engine was judged; None when it is this one, or unknown.

    No warning: it should compute the same, and the probe is checked at each load.
    """
    if stamp is None or not stamp.engine or stamp.engine == engine:
        return None
    names = [name for name in engine if stamp.engine.get(name) != engine[name]]
    parts = (f"{name} {stamp.engine.get(name, 'none')} (here {engine[name]})" for name in names)
    return "judged with another engine build: " + ", ".join(parts)


def deciding(stamp: Stamp) -> str:
    """Why the verdict is what it is: the stamp's summary, else the metrics that decided."""
    if stamp.summary:
        return stamp.summary
    metrics = [metric for metric in stamp.metrics if metric.verdict == stamp.verdict]
    if not metrics:
        return "the stamp does not say why; see the report of `evaluate`"
    rest = len(metrics) - MAX_METRICS_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"decided by {', '.join(map(_shown, metrics[:MAX_METRICS_SHOWN]))}{more}"


def _shown(metric: MetricRecord) -> str:
    value = "" if metric.value is None else f" {metric.value:.4g}"
    limit = "" if metric.threshold is None else f" (limit {metric.threshold:g})"
    return f"{metric.name}{value}{limit}"


def refuse_unless_accepted(stamp: Stamp | None, path: Path) -> None:
    """ConfigError unless the stamp says accepted (numerics are compared once they are known)."""
    if stamp is None:
        foreign = f" ({_FOREIGN})" if (path / STAMP_NAME).is_file() else ""
        raise ConfigError(
            f"--require-accepted: this artifact was {NOT_JUDGED}{foreign}; run: evaluate {path}"
        )
    if stamp.verdict != "accepted":
        why = deciding(stamp).rstrip(".")
        raise ConfigError(
            f"--require-accepted: the verdict on this artifact is {stamp.verdict}: {why}. "
            f"{_way_out(stamp, path)}"
        )


def _way_out(stamp: Stamp, path: Path) -> str:
    if stamp.verdict == "inconclusive" and stamp.review is not None and stamp.review.required:
        return (
            "The report of its evaluation says what comes next; where only people are missing: "
            "evaluate review score PACK --evaluation DIR"
        )
    return f"The report of its evaluation says more; to judge again, run: evaluate {path}"
