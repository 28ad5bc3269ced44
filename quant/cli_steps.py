"""What the `quantize` commands do one after another: prepare, show, carry out. Prints what
`quant.api` and its parts give; decides nothing.

Heavy libraries are imported inside the steps, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from quant.parallel_launch import is_follower

if TYPE_CHECKING:
    from quant.calibration import Calibration
    from quant.job import Job
    from quant.parallel import Ranks
    from quant.report import RunReport

EXIT_PROBLEMS, EXIT_BAD_INPUT = 1, 2
# Of several ranks, rank 0 speaks: an error of another reaches it (`quant.parallel_group`).
out_console = Console(highlight=False, quiet=is_follower())
err_console = Console(stderr=True, highlight=False, quiet=is_follower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line says of a run. changes: to keys of the recipe; limits: memory of the GPU
    and of the host; gate: the gates file, and what judges by it where that is not `evaluate`."""

    model: str | None
    recipe: str
    calib: Sequence[str] | None = None
    out: Path | None = None
    strict: bool = False
    device: str = "cpu"
    threads: int | None = None
    changes: Mapping[str, Any]
    limits: tuple[str | None, str | None] = (None, None)
    keep_codes: bool = False
    gate: tuple[str, str | None] | None = None


def fail(message: str) -> int:
    """Say what went wrong, in one line; the exit code."""
    err_console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return EXIT_BAD_INPUT


def recipe_changes(*, group_size: str | None, **keys: Any) -> dict[str, Any]:
    """Keys of the recipe as the options over it say; None changes nothing."""
    is_number = group_size in ("32", "64", "128")
    return {"group_size": int(group_size or 0) if is_number else group_size, **keys}


def prepare_job(asked: Asked, ranks: Ranks | None = None) -> Job:
    """Read everything that can be wrong, and plan. `ranks`: of which this process is one."""
    with err_console.status("reading the model"):
        _quiet_libraries()
        from quant.api import prepare
        from quant.machine import chosen_device, parse_bytes
        from quant.mixed_ask import make_gate
        from quant.spill import MemoryLimits

        device = chosen_device(asked.device)
        gpu, host = (None if text is None else parse_bytes(text) for text in asked.limits)
        if asked.threads is not None:
            import torch

            torch.set_num_threads(asked.threads)
        return prepare(
            asked.model, asked.recipe, asked.calib or None, asked.out, strict=asked.strict,
            device=device, memory=MemoryLimits(gpu_bytes=gpu, host_bytes=host),
            overrides=asked.changes, keep_codes=asked.keep_codes,
            gate=None if asked.gate is None else make_gate(*asked.gate, device),
            ranks=ranks,
        )  # fmt: skip


def _quiet_libraries() -> None:
    """Progress bars and advice of transformers would tear ours apart."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def show_plan(job: Job, *, every_module: bool) -> None:
    from quant.plan_table import render_plan

    out_console.rule(Text(f"plan: {job.source.path.name} -> {job.recipe.name}"), align="left")
    gguf_bytes = job.source.num_bytes if job.source.kind == "gguf" else None
    table = render_plan(
        job.plan, job.cost, tokens=job.tokens, every_module=every_module, gguf_bytes=gguf_bytes
    )
    out_console.print(table)
    show_notes(job)


def show_notes(job: Job) -> None:
    for note in job.notes:
        out_console.print(f"note: {note}", style="yellow", markup=False)


def show_coverage(job: Job) -> None:
    if not (job.calib and job.plan.needs_calibration):
        return
    from quant.report_render import render_coverage

    out_console.print()
    out_console.print(render_coverage(_calibrate(job).coverage))


def _calibrate(job: Job) -> Calibration:
    from quant.job import calibrate

    with err_console.status("reading calibration rows"):
        calibration = calibrate(job)
    assert calibration is not None, "asked for only when the plan needs it"
    return calibration


def is_done_already(job: Job, *, overwrite: bool, is_fresh: bool) -> bool:
    """Whether this very command has made its artifact: whoever restarts a killed run cannot know.
    If not, refuse what cannot be carried out before a long plan is printed above the error."""
    from quant.job import check_calibration
    from quant.job_out import check_out, is_done

    if not (overwrite or is_fresh) and is_done(job):
        done = f"nothing left to do: {job.out} is the complete artifact of this very command"
        err_console.print(f"{done} (--overwrite makes it anew)", markup=False, soft_wrap=True)
        return True
    check_out(job, overwrite=overwrite)
    check_calibration(job)
    return False


def carry_out_job(job: Job, *, overwrite: bool, resume: bool) -> None:
    from quant.api import carry_out
    from quant.progress import make_progress
    from quant.report_render import coverage_line, render_summary

    calibration = None
    if job.plan.needs_calibration:
        calibration = _calibrate(job)
        err_console.print(f"calibrating on {coverage_line(calibration.coverage)}")
    progress = make_progress(err_console)
    try:
        report = carry_out(job, calibration, progress=progress, overwrite=overwrite, resume=resume)
    finally:
        progress.stop()
    out_console.rule(Text(f"done: {report.artifact}"), align="left")
    out_console.print(render_summary(report))
    out_console.print(_next_steps(job, report), markup=False, highlight=False, soft_wrap=True)


def _next_steps(job: Job, report: RunReport) -> str:
    from quant.report_html import HTML_NAME, how_to_install, missing_libraries

    missing, out = missing_libraries(), job.out
    page = how_to_install(missing) if missing else f"{out}/{HTML_NAME}"
    adapter = job.recipe.adapter
    steps = report.next_steps(
        shlex.quote(str(out)),
        model=shlex.quote(job.source.name),
        adapter=shlex.quote(str(adapter)) if adapter else None,
    )
    lines = (
        ("report", f"{out}/report.md"),
        ("", page),
        *zip(("next", *[""] * len(steps)), steps, strict=False),
    )
    return "\n" + "\n".join(f"{name:<10}{text}" for name, text in lines)
