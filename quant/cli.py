"""The `quantize` command. Parses, calls `quant.api`, prints; decides nothing.

Heavy libraries are imported inside the commands, so that `--help` answers at once. Exit codes:
0 done, 1 `verify` found problems or the gate accepted no plan, 2 bad input or usage, 130
interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from quant.artifact.errors import ArtifactError
from quant.artifact.signals import EXIT_INTERRUPTED, EXIT_TERMINATED, raised_signals
from quant.cli_options import (
    EPILOG,
    HELP,
    AdapterDir,
    ArtifactDir,
    BudgetOption,
    Calib,
    Device,
    DType,
    EveryModule,
    GateCommand,
    GroupSize,
    MaxGPUMemory,
    MaxHostMemory,
    MaxKL,
    MaxTokens,
    Method,
    Model,
    NoResume,
    Out,
    Overwrite,
    RecipeFile,
    Samples,
    Seed,
    Smoothing,
    Strict,
    Threads,
    UntilAccepted,
)
from quant.cli_ranks import NumRanks, is_to_launch, joined_ranks, refuse_ranks
from quant.cli_report import report_command
from quant.cli_sample import HELP as SAMPLE_HELP
from quant.cli_sample import sample_command
from quant.cli_steps import (
    EXIT_PROBLEMS,
    Asked,
    carry_out_job,
    fail,
    is_done_already,
    out_console,
    prepare_job,
    recipe_changes,
    show_coverage,
    show_notes,
    show_plan,
)
from quant.errors import NotAcceptedError, QuantError
from quant.parallel_launch import is_launched, launch, own_command, watch_parent

# Click's UsageError, whichever click this typer brings.
USAGE_ERROR: Any = typer.BadParameter.__base__
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
    device: Device = "auto",
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
        if not _said(context):
            typer.echo(context.get_help())
            raise typer.Exit
        raise USAGE_ERROR("give --recipe FILE (shipped: w4a16.yaml, w8a8.yaml, fp8.yaml, ...)")
    if gate_command is not None and until_accepted is None:
        raise USAGE_ERROR("--gate-command goes with --until-accepted GATES")
    gate = (until_accepted, gate_command) if until_accepted is not None else None
    if is_to_launch(ranks):
        raise typer.Exit(_launch(ranks or 1, context.obj))
    changes = recipe_changes(
        samples=samples, max_tokens=max_tokens, seed=seed, group_size=group_size, method=method,
        smoothing=smoothing, dtype=dtype, adapter=adapter, budget=budget, max_kl=max_kl,
    )  # fmt: skip
    with joined_ranks(device) as (ours, device):
        asked = Asked(
            model=model, recipe=recipe, calib=calib, out=out, strict=strict, device=device,
            threads=threads, changes=changes, limits=(max_gpu_memory, max_host_memory), gate=gate,
        )  # fmt: skip
        job = prepare_job(asked, ours)
        if not dry_run and is_done_already(job, overwrite=overwrite, is_fresh=no_resume):
            return
        show_plan(job, every_module=False)
        if dry_run:
            show_coverage(job)
        else:
            carry_out_job(job, overwrite=overwrite, resume=not no_resume)


def _said(context: typer.Context) -> list[str]:
    """The options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and not source.name.startswith("DEFAULT")
    ]


@app.command("plan")
def plan_command(
    recipe: Annotated[str, typer.Option("--recipe", "-r", metavar="FILE", help="Recipe (YAML).")],
    calib: Calib = None,
    model: Model = None,
    out: Out = None,
    strict: Strict = False,
    every_module: EveryModule = False,
    device: Device = "auto",
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
    changes = recipe_changes(
        samples=samples, max_tokens=max_tokens, seed=seed, group_size=group_size, method=method,
        smoothing=smoothing, dtype=dtype, adapter=adapter, budget=budget, max_kl=max_kl,
    )  # fmt: skip
    asked = Asked(
        model=model, recipe=recipe, calib=calib, out=out, strict=strict, device=device,
        threads=threads, changes=changes, limits=(max_gpu_memory, max_host_memory),
    )  # fmt: skip
    job = prepare_job(asked)
    show_plan(job, every_module=every_module)
    show_coverage(job)


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

    A GPTQ, AWQ or compressed-tensors checkpoint of another tool keeps its codes,
    bit for bit. The runtime runs artifacts only; this is how a plain checkpoint
    or GGUF becomes one.
    """
    changes = {"dtype": dtype, "adapter": adapter}
    asked = Asked(model=model, recipe="none.yaml", out=out, changes=changes, keep_codes=True)
    job = prepare_job(asked)
    if not is_done_already(job, overwrite=overwrite, is_fresh=no_resume):
        show_notes(job)
        carry_out_job(job, overwrite=overwrite, resume=not no_resume)


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


def _refuse_misplaced(context: typer.Context) -> None:
    given = _said(context)
    if given:
        raise USAGE_ERROR(
            f"{given[0]} stands before {context.invoked_subcommand!r}; options of a subcommand "
            f"come after it: quantize {context.invoked_subcommand} {given[0]} ..."
        )


def _launch(ranks: int, arguments: Sequence[str]) -> int:
    code, message = launch(ranks, own_command(arguments))
    return fail(message) if message else code


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; turns errors into one line and an exit code."""
    # Read when torch is imported. OpenMP threads that spin at barriers make a shared 2-core machine
    # 10 to 17 times slower: 30 x 4 small linears, M=16, 2 threads, took 999 ms spinning and 106 ms
    # passive under load.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    watch_parent()
    words = sys.argv[1:] if arguments is None else list(arguments)
    with raised_signals() as ending:
        try:
            code = app(args=words, obj=words, standalone_mode=False, prog_name="quantize") or 0
        except BaseException as error:  # a signal's may be in the clothes of any other
            code = ending.code or _explained(error)
        # The former is typer's answer to Ctrl-C; where there is a launcher, it speaks.
        if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) and not is_launched():
            fail(f"interrupted; {_what_is_left(words)}")
    sys.exit(code)


def _what_is_left(words: Sequence[str]) -> str:
    if words[:1] and words[0] in ("plan", "sample", "inspect", "verify", "report"):
        return "nothing was written"
    return "layers that were finished are kept, and the same command goes on from there"


def _explained(error: BaseException) -> int:
    """Tell an error that the user can mend, for its exit code; any other goes on."""
    if isinstance(error, USAGE_ERROR):
        command = error.ctx.command_path if error.ctx is not None else "quantize"
        return fail(f"{error.format_message()} ({command} --help shows every option)")
    if isinstance(error, NotAcceptedError):
        fail(str(error))
        return EXIT_PROBLEMS
    if isinstance(error, QuantError | ArtifactError):
        return fail(str(error))
    if isinstance(error, OSError):  # the system refused: unreadable file, full disk behind stdout
        return fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    if isinstance(error, MemoryError):
        return fail("out of memory; use fewer --samples or shorter --max-tokens")
    raise error


if __name__ == "__main__":
    main()
