"""`evaluate`: the acceptance gate on the command line. Parses and shows; `eval.api` works."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from errno import EDQUOT, EIO, ENOSPC
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from eval import (
    cli_blame,
    cli_compare,
    cli_lm_eval,
    cli_plan,
    cli_report,
    cli_review,
    cli_self_test,
)
from eval.amounts import Amounts
from eval.cli_options import (
    ArtifactDir,
    Base,
    ComputeKind,
    Device,
    DeviceKind,
    DType,
    Gates,
    Items,
    KVCacheDType,
    KVKind,
    NoiseItems,
    Seed,
    SuiteDir,
    Threads,
    Windows,
    WindowTokens,
    engine_config,
)
from eval.errors import EvaluationError
from quant.artifact.signals import EXIT_INTERRUPTED, EXIT_TERMINATED, raised_signals

DEFAULT_COMMAND = "judge"
# What a shell reports of a command that wrote to a pipe which nobody reads any more.
BROKEN_PIPE = 141
CUT_OFF = "the output was cut off (what was done until then lies in its files)"
INTERRUPTED = "interrupted; the same command goes on where this one stopped"
# Click's UsageError, whichever click this typer brings.
USAGE_ERROR: Any = typer.BadParameter.__base__


class ArtifactFirst(TyperGroup):
    """`evaluate ART ...` without a verb judges ART; a subcommand wins over a directory so named."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if not args or args[0] not in self.commands:
            _refuse_misspelt(args, self.commands, ctx)
            args = [DEFAULT_COMMAND, *(args or ["--help"])]
        return super().parse_args(ctx, args)


def _refuse_misspelt(args: Sequence[str], commands: Iterable[str], ctx: typer.Context) -> None:
    """`evaluate rewiev ...`: nobody's artifact, and nearly a command."""
    known = [name for name in commands if name != DEFAULT_COMMAND]
    close = get_close_matches(args[0], known, n=1, cutoff=0.66) if args else []
    if close and not Path(args[0]).exists():
        raise USAGE_ERROR(
            f"{args[0]!r} is no artifact and no command; did you mean {close[0]!r}?", ctx
        )


class Unnamed(TyperCommand):
    """The command that needs no name: its usage line is the program's."""

    def get_usage(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """`Usage: evaluate [OPTIONS] ART`."""
        return super().get_usage(ctx).replace(f" {DEFAULT_COMMAND} ", " ", 1)


app = typer.Typer(
    cls=ArtifactFirst,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(cli_review.app, name="review")


@app.callback()
def _group() -> None:
    """Weigh an artifact against the model it was made from."""


HELP = (
    "Weigh an artifact against the model it was made from, and stamp the verdict.\n\n"
    "Both models read the same held-out text (perplexity, KL divergence, top-1 agreement) and "
    "answer the same tasks (JSON and schemas, fields, tool calls, choices, code, instructions, "
    "dialogs; and for every answer loops, language, refusals, length, leaked tokens). The "
    "base is computed by transformers in float32, the artifact by the engine that will serve it. "
    "Every metric is judged with its interval: [green]accepted[/] means the loss is shown to be "
    "within the limits, [red]rejected[/] that it is not, [yellow]inconclusive[/] that there is too "
    "little evidence to tell."
)
EPILOG = (
    "[bold]Other commands[/] (each has its own --help):\n\n"
    "evaluate plan        how many items your margins need, and what yours can show\n\n"
    "evaluate self-test   whether the gate, on your data, accepts the base and rejects planted "
    "defects\n\n"
    "evaluate review      blind review by people: pack, serve, score\n\n"
    "evaluate report      all pages anew: with the review, with speed, or redacted\n\n"
    "evaluate blame       the layers that carry a loss, and the recipe that mends it\n\n"
    "evaluate lm-eval     tasks of lm-evaluation-harness on the kernels that serve\n\n"
    "evaluate compare     what the second of two such runs lost\n\n"
    "[bold]Exit codes:[/] 0 accepted, 1 rejected, 2 wrong usage, 3 inconclusive (the report says "
    "how many items would decide), 4 could not judge (damaged artifact, base that does not fit, "
    "NaN, nothing scored, gate data that also calibrated).\n\n"
    "[bold]Environment:[/] WEIGHBRIDGE_CACHE is the folder for the base's answers and hidden "
    "states (default ~/.cache/weighbridge). They are kept by digest, so judging a second artifact "
    "of the same base is faster, and a run that was killed goes on where it stopped; deleting the "
    "folder loses only time.\n\n"
    "[bold]Examples:[/]\n\n"
    "evaluate smollm2-w4a16\n\n"
    "evaluate smollm2-w4a16 --base models/smollm2 --gates strict.yaml --out report\n\n"
    "evaluate smollm2-w4a16 --against http://127.0.0.1:8000 --concurrency 1,16\n\n"
    "evaluate smollm2-w4a16 --gates gates/full.yaml --suite gate-900/gate --items 900"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("weighbridge")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"evaluate (weighbridge) {number}")
        raise typer.Exit


@app.command(name=DEFAULT_COMMAND, cls=Unnamed, help=HELP, epilog=EPILOG, hidden=True)
def judge(
    artifact: ArtifactDir,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    base: Base = None,
    gates: Gates = None,
    suite: SuiteDir = None,
    calib: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The calibration data (repeatable): an error when the suite holds any of it. "
            "[dim]Default: the artifact's sketch of it.[/]",
        ),
    ] = None,
    items: Items = Amounts.num_items,
    noise_items: NoiseItems = Amounts.num_noise_items,
    sampled: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Besides the greedy answer, draw K answers (3 or more) of each item by both "
            "models with shared seeds: METRIC_sampled and METRIC_pass_k.",
        ),
    ] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="Of --sampled, both models. [dim]Default: 0.7.[/]"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", help="Of --sampled, both models. [dim]Default: 0.95.[/]"),
    ] = None,
    windows: Windows = Amounts.num_windows,
    window_tokens: WindowTokens = Amounts.window_tokens,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the reports go: report.html, .md and .json, junit.xml, summary.md. "
            "[dim]Default: ART-evaluation.[/]",
        ),
    ] = None,
    device: Device = DeviceKind.auto,
    dtype: DType = ComputeKind.auto,
    kv_cache_dtype: KVCacheDType = KVKind.auto,
    threads: Threads = None,
    stamp: Annotated[
        bool,
        typer.Option(
            "--stamp/--no-stamp", help="Write the verdict into ART as gate.json, for the server."
        ),
    ] = True,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact", help="Keep requests, answers and right values out of the reports."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Judge the answers of a server with OpenAI's API that serves ART. Held-out text "
            "is still read by the engine here; no stamp is written.",
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="Requests the server gets at once. 1,16 asks all twice, judges the answers given "
            "under load and how far they agree. [dim]Default: 16.[/]",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model's name there, where it serves several."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Sent to the server as a bearer token.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds one request may take. [dim]Default: 300.[/]"),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Judge one artifact; the text of --help is HELP."""
    from eval.api import make_job, run, sampled_passes
    from eval.targets.server import DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT_S, Service
    from eval.terminal import TerminalProgress, show

    if against is None:
        _refuse_without_against(
            concurrency=concurrency, served_model=served_model, api_key=api_key, timeout=timeout
        )
    console = Console(highlight=False)
    job = make_job(
        artifact,
        base,
        gates,
        suite=suite,
        amounts=Amounts(
            num_windows=windows,
            window_tokens=window_tokens,
            num_items=items,
            num_noise_items=noise_items,
            sampled=sampled_passes(sampled, seed, temperature, top_p),
            seed=seed,
        ),
        engine=engine_config(device, dtype, kv_cache_dtype, threads),
        calib=calib,
        against=None
        if against is None
        else Service(
            url=against,
            model=served_model,
            api_key=api_key,
            timeout_s=DEFAULT_TIMEOUT_S if timeout is None else timeout,
        ),
        concurrency=(DEFAULT_CONCURRENCY,) if concurrency is None else _numbers(concurrency),
    )
    with TerminalProgress(console) as progress:
        written = run(job, out=out, stamp=stamp, redact=redact, progress=progress)
    show(console, written, redact=redact)
    raise typer.Exit(written.evaluation.verdict.exit_code)


def _refuse_without_against(**given: object) -> None:
    """An option that would have no effect is refused: its author believes that it has one."""
    said = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if said:
        raise typer.BadParameter(f"{said[0]} is of a server; pass --against URL too")


def _numbers(text: str) -> tuple[int, ...]:
    """`1,16` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--concurrency {text!r}: expected a number, or two as in 1,16"
        ) from None


app.command("plan", help=cli_plan.HELP, epilog=cli_plan.EPILOG)(cli_plan.plan)
app.command(cli_blame.NAME, help=cli_blame.HELP, epilog=cli_blame.EPILOG)(cli_blame.command)
app.command(cli_compare.NAME, help=cli_compare.HELP, epilog=cli_compare.EPILOG)(cli_compare.command)
app.command(cli_lm_eval.NAME, help=cli_lm_eval.HELP, epilog=cli_lm_eval.EPILOG)(cli_lm_eval.command)
app.command("report")(cli_report.report)
app.command(cli_self_test.NAME, help=cli_self_test.HELP, epilog=cli_self_test.EPILOG)(
    cli_self_test.command
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; anything wrong is one line on stderr and its exit code."""
    # Before torch is imported: OpenMP threads that spin at barriers make a machine shared with
    # anything else ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with raised_signals() as ending:
        try:
            code = app(args=arguments, standalone_mode=False, prog_name="evaluate") or 0
        except BaseException as error:  # a signal's may be in the clothes of any other
            code = ending.code or _explained(error)
        # The former is typer's answer to Ctrl-C.
        if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            _fail(INTERRUPTED, code)
    _let_go_of_output()
    sys.exit(code)


def _explained(error: BaseException) -> int:
    """Tell what went wrong; the exit code, which must not be Python's 1: that says "rejected"."""
    if isinstance(error, USAGE_ERROR):
        return _usage(error)
    if isinstance(error, EvaluationError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, SystemExit | BrokenPipeError):  # the former is rich's
        return _fail(CUT_OFF, BROKEN_PIPE)
    if isinstance(error, MemoryError):
        return _fail("out of memory; use fewer --windows or a smaller --window-tokens", 4)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError) and error.filename is not None:
        return _fail(f"{error.filename}: {error.strerror}", 4)
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EIO):
        return _fail(f"{CUT_OFF}: {error.strerror}", 4)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a card; torch is not imported here
        found = str(error).partition(". ")[0]
        advice = "free it, use a smaller --window-tokens, or pass --device cpu"
        return _fail(f"the card is out of memory ({found}); {advice}", 4)
    with suppress(OSError):
        traceback.print_exception(error)
    return _fail(f"a fault of evaluate itself, please report it: {error!r}", 4)


def _let_go_of_output() -> None:
    """Python would end with 120 for what it cannot write any more."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _usage(error: Any) -> int:
    """Wrong usage, with the help of the command that was meant. Without a message it is shown."""
    if error.format_message():
        command = "evaluate" if error.ctx is None else error.ctx.command_path
        command = command.removesuffix(f" {DEFAULT_COMMAND}")
        return _fail(f"{error.format_message()} ({command} --help shows every option)", 2)
    return 2


def _fail(message: str, code: int) -> int:
    console = Console(stderr=True, highlight=False)
    # What a server or a file says must not drive the reader's terminal.
    said = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in message)
    with suppress(OSError):  # the code says it all the same
        console.print(f"error: {said}", style="red", markup=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
