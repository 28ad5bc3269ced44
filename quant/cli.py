"""The `quantize` command. Parses, calls `quant.api`, prints; decides nothing.

Heavy libraries are imported inside the commands, so that `--help` answers at once. Exit codes:
0 done, 1 `verify` found problems or the gate accepted no plan, 2 bad input or usage, 130
interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quant.artifact.errors import ArtifactError
from quant.cli_ranks import NumRanks, is_to_launch, joined_ranks, refuse_ranks
from quant.cli_report import report_command
from quant.cli_sample import HELP as SAMPLE_HELP
from quant.cli_sample import sample_command
from quant.cli_signals import EXIT_TERMINATED, Terminated, raised_sigterm
from quant.errors import NotAcceptedError, QuantError
from quant.parallel_launch import is_follower, is_launched, launch, own_command, watch_parent

if TYPE_CHECKING:
    from quant.api import Job
    from quant.calibration import Calibration
    from quant.parallel import Ranks
    from quant.report import RunReport

EXIT_PROBLEMS, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
# Click's UsageError, whichever click this typer brings.
USAGE_ERROR: Any = typer.BadParameter.__base__

HELP = """
Make a small model out of a checkpoint: RECIPE says how, CALIB shows what it will be used for.

The result is an artifact: a directory that `evaluate` judges and `runtime serve` runs.
One layer is in memory at a time. After an interruption the same command goes on.

[bold]Examples[/bold]

  [cyan]quantize --recipe w4a16.yaml --calib contracts.jsonl --model ./my-model[/cyan]
    4-bit weights by GPTQ, into ./my-model-w4a16

  [cyan]quantize plan --recipe mixed.yaml --model model.gguf[/cyan]
    what would become of every module, with size, memory and time; writes nothing

  [cyan]quantize --recipe mixed-auto.yaml --calib contracts.jsonl --model M --budget 4.5bpw[/cyan]
    4 or 8 bits for each layer, by measured sensitivity, in 4.5 bits per weight

  [cyan]quantize --recipe w4a16.yaml --calib my.jsonl --until-accepted gates.yaml --model M[/cyan]
    the smallest artifact that `evaluate` accepts by gates.yaml

  [cyan]quantize --recipe w4a16.yaml --calib a.jsonl --calib b.jsonl --samples 512 --out art[/cyan]
    two calibration files, 512 windows

  [cyan]quantize convert model.gguf --out dense[/cyan]
    the same weights as an artifact, nothing quantized
"""
EPILOG = """
RECIPE and CALIB are looked up where given, then among the shipped ones:
w4a16.yaml w8a16.yaml w8a8.yaml fp8.yaml mixed.yaml mixed-auto.yaml none.yaml;
contracts.jsonl service.jsonl code.jsonl.
MODEL is a Hugging Face directory, a hub id, or a GGUF file.
Exit codes: 0 done, 1 verify found problems or the gate accepted no plan, 2 bad input or usage,
130 interrupted, 143 terminated.
"""

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Checkpoint: directory, hub id or GGUF file.",
                 show_default="the recipe's model:"),
]  # fmt: skip
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", "-r", help="How to quantize (YAML).", metavar="FILE")
]
Calib = Annotated[
    list[str] | None,
    typer.Option("--calib", "-c", metavar="FILE",
                 help="Calibration rows (JSONL of text, messages, or prompt + completion). "
                 "Repeatable."),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Artifact directory.", show_default="./NAME-RECIPE"),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse group sizes that do not divide a module's columns.")
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Calibration windows.", rich_help_panel="Over the recipe"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per window.", rich_help_panel="Over the recipe"),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Which rows and windows are drawn.", rich_help_panel="Over the recipe"),
]
GroupSize = Annotated[
    str | None,
    typer.Option(metavar="32|64|128|channel", help="Columns that share a scale.",
                 rich_help_panel="Over the recipe"),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(metavar="none|rtn|gptq|awq|auto|gradient", help="How codes are chosen.",
                 rich_help_panel="Over the recipe"),
]  # fmt: skip
Smoothing = Annotated[
    str | None,
    typer.Option(metavar="none|auto|search",
                 help="Scales folded into norms, so that weights and inputs round well.",
                 rich_help_panel="Over the recipe"),
]  # fmt: skip
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="4.5bpw|5.2GiB",
                 help="Choose schemes by sensitivity, within so many bits per quantized weight or "
                 "so much for the whole artifact.", rich_help_panel="Mixed precision"),
]  # fmt: skip
MaxKL = Annotated[
    float | None,
    typer.Option("--max-kl", metavar="NATS",
                 help="Choose the smallest plan whose mean KL, measured on held-out calibration "
                 "windows, is at most this.", rich_help_panel="Mixed precision"),
]  # fmt: skip
UntilAccepted = Annotated[
    str | None,
    typer.Option("--until-accepted", metavar="GATES",
                 help="Find the smallest plan (within --budget, if given) that `evaluate` accepts "
                 "by this gates file; ends with the table of what was tried, and exit code 1, when "
                 "it accepts none.", rich_help_panel="Mixed precision"),
]  # fmt: skip
GateCommand = Annotated[
    str | None,
    typer.Option("--gate-command", metavar="COMMAND",
                 help="What judges instead of `evaluate`, or evaluate with options: it is given "
                 "ART --gates FILE --out DIR; exits with 0 accepted, 1 rejected, 3 inconclusive.",
                 show_default="evaluate", rich_help_panel="Mixed precision"),
]  # fmt: skip
DType = Annotated[
    str | None,
    typer.Option("--dtype", metavar="auto|float32|float16|bfloat16",
                 help="Type of scales and dense tensors.", rich_help_panel="Over the recipe"),
]  # fmt: skip
AdapterDir = Annotated[
    str | None,
    typer.Option("--adapter", metavar="LORA_DIR",
                 help="LoRA adapter (PEFT) to merge into the model first, in float32."),
]  # fmt: skip
Device = Annotated[str, typer.Option(help="Where layers are computed: cpu, cuda, cuda:1.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="CPU threads of a rank. Part of what fixes the exact bytes.",
                 show_default="torch's own"),
]  # fmt: skip
MaxGPUMemory = Annotated[
    str | None,
    typer.Option(metavar="24GB", help="GPU memory to take at most; hidden states that do not fit "
                 "go to host memory.", show_default="what is free"),
]  # fmt: skip
MaxHostMemory = Annotated[
    str | None,
    typer.Option(metavar="12GB", help="Host memory to make do with; hidden states that do not fit "
                 "go to a file beside --out.", show_default="what is free"),
]  # fmt: skip
EveryModule = Annotated[
    bool, typer.Option("--all", help="One line per module instead of one per kind.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an artifact at --out.")]
NoResume = Annotated[
    bool, typer.Option("--no-resume", help="Start over instead of continuing an interrupted run.")
]
ArtifactDir = Annotated[Path, typer.Argument(metavar="ART", help="Artifact directory.")]

app = typer.Typer(
    name="quantize",
    help=HELP,
    epilog=EPILOG,
    rich_markup_mode="rich",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Of several ranks, rank 0 speaks: an error of another reaches it (`quant.parallel_group`).
out_console = Console(highlight=False, quiet=is_follower())
err_console = Console(stderr=True, highlight=False, quiet=is_follower())


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("weighbridge")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"quantize (weighbridge) {number}")
        raise typer.Exit


@app.callback()
def quantize_command(
    context: typer.Context,
    recipe: RecipeFile = None,
    calib: Calib = None,
    model: Model = None,
    out: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its cost; write nothing.")
    ] = False,
    strict: Strict = False,
    overwrite: Overwrite = False,
    no_resume: NoResume = False,
    device: Device = "cpu",
    ranks: NumRanks = None,
    threads: Threads = None,
    max_gpu_memory: MaxGPUMemory = None,
    max_host_memory: MaxHostMemory = None,
    samples: Samples = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    group_size: GroupSize = None,
    method: Method = None,
    smoothing: Smoothing = None,
    dtype: DType = None,
    adapter: AdapterDir = None,
    budget: BudgetOption = None,
    max_kl: MaxKL = None,
    until_accepted: UntilAccepted = None,
    gate_command: GateCommand = None,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
        refuse_ranks(context.invoked_subcommand)
        return
    if recipe is None:
        if _nothing_was_said(context):
            typer.echo(context.get_help())
            raise typer.Exit
        raise USAGE_ERROR("give --recipe FILE (shipped: w4a16.yaml, w8a8.yaml, fp8.yaml, ...)")
    changes = _changes(samples, max_tokens, seed, group_size, method, smoothing, dtype, adapter)
    changes |= {"budget": budget, "max_kl": max_kl}
    if gate_command is not None and until_accepted is None:
        raise USAGE_ERROR("--gate-command goes with --until-accepted GATES")
    gate = (until_accepted, gate_command) if until_accepted is not None else None
    if is_to_launch(ranks):
        raise typer.Exit(_launch(ranks or 1, context.obj))
    with joined_ranks(device) as (ours, device):
        job = _prepare(
            model, recipe, calib, out, strict, device, threads, changes, gate=gate, ranks=ours,
            limits=(max_gpu_memory, max_host_memory),
        )  # fmt: skip
        if not dry_run and _is_done(job, overwrite=overwrite, is_fresh=no_resume):
            return
        _show_plan(job, every_module=False)
        if dry_run:
            _show_coverage(job)
        else:
            _carry_out(job, overwrite=overwrite, resume=not no_resume)


def _nothing_was_said(context: typer.Context) -> bool:
    sources = (context.get_parameter_source(name) for name in context.params)
    return all(source is None or source.name.startswith("DEFAULT") for source in sources)


@app.command("plan")
def plan_command(
    recipe: Annotated[str, typer.Option("--recipe", "-r", metavar="FILE", help="Recipe (YAML).")],
    calib: Calib = None,
    model: Model = None,
    out: Out = None,
    strict: Strict = False,
    every_module: EveryModule = False,
    device: Device = "cpu",
    threads: Threads = None,
    max_gpu_memory: MaxGPUMemory = None,
    max_host_memory: MaxHostMemory = None,
    samples: Samples = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    group_size: GroupSize = None,
    method: Method = None,
    smoothing: Smoothing = None,
    dtype: DType = None,
    adapter: AdapterDir = None,
    budget: BudgetOption = None,
    max_kl: MaxKL = None,
) -> None:
    """Print what would become of every module, and what it would cost. Writes nothing.

    With --calib the rows are read too, and what would be used of them is shown.
    """
    changes = _changes(samples, max_tokens, seed, group_size, method, smoothing, dtype, adapter)
    changes |= {"budget": budget, "max_kl": max_kl}
    limits = max_gpu_memory, max_host_memory
    job = _prepare(model, recipe, calib, out, strict, device, threads, changes, limits=limits)
    _show_plan(job, every_module=every_module)
    _show_coverage(job)


app.command("sample", help=SAMPLE_HELP)(sample_command)


@app.command("convert")
def convert_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, hub id or GGUF file.")],
    out: Out = None,
    dtype: DType = None,
    adapter: AdapterDir = None,
    overwrite: Overwrite = False,
    no_resume: NoResume = False,
) -> None:
    """Make an artifact of the weights as they are: nothing is quantized.

    A GPTQ, AWQ or compressed-tensors checkpoint of another tool keeps its codes, bit for bit.
    The runtime runs artifacts only; this is how a plain checkpoint or GGUF becomes one.
    """
    changes = _changes(None, None, None, None, None, None, dtype, adapter)
    job = _prepare(model, "none.yaml", None, out, False, "cpu", None, changes, keep_codes=True)
    if not _is_done(job, overwrite=overwrite, is_fresh=no_resume):
        _show_notes(job)
        _carry_out(job, overwrite=overwrite, resume=not no_resume)


@app.command("inspect")
def inspect_command(artifact: ArtifactDir) -> None:
    """Show what an artifact holds: schemes, sizes, origin, verdict."""
    from quant.artifact.artifact import open_artifact
    from quant.artifact.summary import inspect
    from quant.inspect_table import render_inspection

    out_console.print(render_inspection(inspect(open_artifact(artifact))))


@app.command("verify")
def verify_command(artifact: ArtifactDir) -> None:
    """Hash every byte of an artifact and list everything that is wrong (exit 1 if anything is)."""
    from quant.artifact.artifact import verify

    problems = verify(artifact)
    for problem in problems:
        out_console.print(f"problem: {problem}", soft_wrap=True, markup=False)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        out_console.print(f"{artifact}: {count}; do not use this copy", markup=False)
        raise typer.Exit(EXIT_PROBLEMS)
    out_console.print(f"{artifact}: every byte is as it was sealed", markup=False)


app.command("report")(report_command)


def _changes(
    samples: int | None,
    max_tokens: int | None,
    seed: int | None,
    group_size: str | None,
    method: str | None,
    smoothing: str | None,
    dtype: str | None,
    adapter: str | None,
) -> dict[str, Any]:
    is_size = group_size in ("32", "64", "128")
    size = int(group_size) if group_size and is_size else group_size
    return {
        "samples": samples,
        "max_tokens": max_tokens,
        "seed": seed,
        "group_size": size,
        "method": method,
        "smoothing": smoothing,
        "dtype": dtype,
        "adapter": adapter,
    }


def _refuse_misplaced(context: typer.Context) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in context.params.items()
        if value not in (None, False, [], ()) and name != "device"
    ]
    if given:
        raise USAGE_ERROR(
            f"{given[0]} stands before {context.invoked_subcommand!r}; options of a subcommand "
            f"come after it: quantize {context.invoked_subcommand} {given[0]} ..."
        )


def _launch(ranks: int, arguments: Sequence[str]) -> int:
    code, message = launch(ranks, own_command(arguments))
    return _fail(message) if message else code


def _prepare(
    model: str | None,
    recipe: str,
    calib: Sequence[str] | None,
    out: Path | None,
    strict: bool,
    device: str,
    threads: int | None,
    changes: dict[str, Any],
    *,
    limits: tuple[str | None, str | None] = (None, None),
    keep_codes: bool = False,
    gate: tuple[str, str | None] | None = None,
    ranks: Ranks | None = None,
) -> Job:
    with err_console.status("reading the model"):
        _quiet_libraries()
        from quant.api import prepare
        from quant.machine import parse_bytes
        from quant.mixed_ask import make_gate
        from quant.spill import MemoryLimits

        gpu, host = (None if text is None else parse_bytes(text) for text in limits)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        return prepare(
            model,
            recipe,
            calib or None,
            out,
            strict=strict,
            device=device,
            memory=MemoryLimits(gpu_bytes=gpu, host_bytes=host),
            overrides=changes,
            keep_codes=keep_codes,
            gate=None if gate is None else make_gate(*gate, device),
            ranks=ranks,
        )


def _quiet_libraries() -> None:
    """Progress bars and advice of transformers would tear ours apart."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _show_plan(job: Job, *, every_module: bool) -> None:
    from quant.plan_table import render_plan

    out_console.rule(Text(f"plan: {job.source.path.name} -> {job.recipe.name}"), align="left")
    gguf_bytes = job.source.num_bytes if job.source.kind == "gguf" else None
    table = render_plan(
        job.plan, job.cost, tokens=job.tokens, every_module=every_module, gguf_bytes=gguf_bytes
    )
    out_console.print(table)
    _show_notes(job)


def _show_notes(job: Job) -> None:
    for note in job.notes:
        out_console.print(f"note: {note}", style="yellow", markup=False)


def _show_coverage(job: Job) -> None:
    if not (job.calib and job.plan.needs_calibration):
        return
    from quant.report_render import render_coverage

    out_console.print()
    out_console.print(render_coverage(_calibrate(job).coverage))


def _calibrate(job: Job) -> Calibration:
    from quant.api import calibrate

    with err_console.status("reading calibration rows"):
        calibration = calibrate(job)
    assert calibration is not None, "asked for only when the plan needs it"
    return calibration


def _is_done(job: Job, *, overwrite: bool, is_fresh: bool) -> bool:
    """Whether this very command has made its artifact: whoever restarts a killed run cannot know.
    If not, refuse what cannot be carried out before a long plan is printed above the error."""
    from quant.api import check_calibration, check_out, is_done

    if not (overwrite or is_fresh) and is_done(job):
        done = f"nothing left to do: {job.out} is the complete artifact of this very command"
        err_console.print(f"{done} (--overwrite makes it anew)", markup=False, soft_wrap=True)
        return True
    check_out(job, overwrite=overwrite)
    check_calibration(job)
    return False


def _carry_out(job: Job, *, overwrite: bool, resume: bool) -> None:
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
    out_console.print(_next_steps(job.out, report), markup=False, highlight=False, soft_wrap=True)


def _next_steps(out: Path, report: RunReport) -> str:
    from quant.report_html import HTML_NAME, how_to_install, missing_libraries

    missing = missing_libraries()
    page = how_to_install(missing) if missing else f"{out}/{HTML_NAME}"
    steps = report.next_steps(shlex.quote(str(out)))
    lines = (
        ("report", f"{out}/report.md"),
        ("", page),
        *zip(("next", *[""] * len(steps)), steps, strict=False),
    )
    return "\n" + "\n".join(f"{name:<10}{text}" for name, text in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; turns errors into one line and an exit code."""
    # Read when torch is imported. OpenMP threads that spin at barriers make a shared 2-core machine
    # 10 to 17 times slower: 30 x 4 small linears, M=16, 2 threads, took 999 ms spinning and 106 ms
    # passive under load.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    watch_parent()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with raised_sigterm():
            code = app(args=words, obj=words, standalone_mode=False, prog_name="quantize") or 0
    except (KeyboardInterrupt, Terminated) as end:
        code = EXIT_TERMINATED if isinstance(end, Terminated) else EXIT_INTERRUPTED
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx is not None else "quantize"
        sys.exit(_fail(f"{error.format_message()} ({command} --help shows every option)"))
    except NotAcceptedError as error:
        _fail(str(error))
        sys.exit(EXIT_PROBLEMS)
    except (QuantError, ArtifactError) as error:
        sys.exit(_fail(str(error)))
    except OSError as error:  # the system refused: an unreadable file, a full disk behind stdout
        sys.exit(_fail(f"{error.filename or 'the output'}: {error.strerror or error}"))
    except MemoryError:
        sys.exit(_fail("out of memory; use fewer --samples or shorter --max-tokens"))
    # The former is typer's answer to Ctrl-C; where there is a launcher, it speaks.
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) and not is_launched():
        _fail("interrupted; finished layers are kept, and the same command goes on from there")
    sys.exit(code)


def _fail(message: str) -> int:
    err_console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    main()
