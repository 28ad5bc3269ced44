"""`evaluate lm-eval ART --tasks ...`: any lm-eval task on the engine that will serve."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.cli_options import (
    ArtifactDir,
    ComputeKind,
    Device,
    DeviceKind,
    DType,
    KVCacheDType,
    KVKind,
    Threads,
    engine_config,
)
from eval.errors import EvaluationError, UsageError

if TYPE_CHECKING:
    from eval.lm_eval_adapter import TaskResults, TaskRun
    from runtime.config import EngineConfig

NAME = "lm-eval"
HELP = (
    "Run tasks of lm-evaluation-harness on an artifact, on the very kernels that serve it: one "
    "model load for all tasks, log-likelihood, rolling and generation tasks alike.\n\n"
    "TASKS are names, groups or tags that lm-eval knows, or YAML files of your own. A file's data "
    "(dataset_path: json, dataset_kwargs: {data_files: {test: FILE}}) is looked for beside it; no "
    "network is needed. Needs the extra lm-eval: pip install 'weighbridge\\[lm-eval]'."
)
EPILOG = (
    "[bold]Exit codes:[/] 0 the tasks ran (whatever the scores: compare two runs with [bold]"
    "evaluate compare A B[/]), 2 wrong usage or a broken task, 4 it could not be measured.\n\n"
    "[bold]Examples:[/]\n\n"
    "evaluate lm-eval smollm2-w4a16 --tasks tasks/intent.yaml --log-samples runs/w4a16\n\n"
    "evaluate lm-eval smollm2-w4a16 --tasks arc_easy,hellaswag --limit 200 --num-fewshot 5\n\n"
    "python -m eval.lm_eval_adapter run --model weighbridge --model_args artifact=smollm2-w4a16 "
    "--tasks ... is lm-eval's own command line with this model known to it."
)


def command(
    artifact: ArtifactDir,
    tasks: Annotated[
        str,
        typer.Option(metavar="TASKS", help="Names or YAML files, separated by commas."),
    ],
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with task files of your own.")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(metavar="N", help="Documents per task; below 1, the share of them."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(metavar="N", help="Examples in each prompt.")
    ] = None,
    log_samples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the results and every sample into DIR, in lm-eval's own layout.",
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the chat template.")
    ] = False,
    system_instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system turn before each prompt.")
    ] = None,
    max_gen_toks: Annotated[
        int, typer.Option(metavar="N", help="Tokens per answer where a task names no number.")
    ] = 256,
    device: Device = DeviceKind.auto,
    dtype: DType = ComputeKind.auto,
    kv_cache_dtype: KVCacheDType = KVKind.auto,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", help="Context in tokens. [dim]Default: the model's own.[/]"),
    ] = None,
    threads: Threads = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code", help="Let tasks run code that the model wrote (HumanEval)."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what lm-eval says while it works.")
    ] = False,
) -> None:
    """Run lm-eval tasks; the text of --help is HELP."""
    _prepare(verbose)
    from eval.lm_eval_adapter import TaskRun

    run = TaskRun(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        samples=log_samples,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    config = engine_config(device, dtype, kv_cache_dtype, threads, max_model_len=max_model_len)
    _show(_run(artifact, config, run, max_gen_toks))


def _prepare(verbose: bool) -> None:
    """Before `datasets` is imported: where it keeps its files, and that lm-eval is there at all."""
    if not sys.stderr.isatty():  # tqdm reads this once, when it is imported
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if find_spec("lm_eval") is None:
        raise UsageError("lm-eval is not installed: pip install 'weighbridge[lm-eval]'")
    from eval.cache import default_directory
    from eval.lm_eval_tasks import keep_data_in

    keep_data_in(default_directory())
    from eval.lm_eval_adapter import hush

    hush(verbose)


def _run(artifact: Path, config: EngineConfig, run: TaskRun, max_gen_toks: int) -> TaskResults:
    """Tasks first, they are cheap to refuse; then the model."""
    from eval.lm_eval_adapter import WeighbridgeLM, load_tasks, run_tasks
    from eval.lm_eval_scoring import EngineScorer
    from eval.preflight import open_judgeable
    from quant.artifact.errors import ArtifactError
    from runtime.config import ConfigError
    from runtime.text import TextError

    _check(run, max_gen_toks)
    try:
        open_judgeable(artifact)
        tasks = load_tasks(run)
        lm = WeighbridgeLM.of(EngineScorer(artifact, config), max_gen_toks)
        return run_tasks(lm, artifact.resolve().name, tasks, run)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except (ArtifactError, TextError) as error:
        raise EvaluationError(str(error)) from error


def _check(run: TaskRun, max_gen_toks: int) -> None:
    if not run.tasks:
        raise UsageError("--tasks is empty; expected names or YAML files, separated by commas")
    if run.limit is not None and run.limit <= 0:
        raise UsageError(f"--limit is {run.limit:g}; expected more than 0")
    for name, number, least in (
        ("num-fewshot", run.num_fewshot, 0),
        ("max-gen-toks", max_gen_toks, 1),
    ):
        if number is not None and number < least:
            raise UsageError(f"--{name} is {number}; expected at least {least}")
    if run.include_path is not None and not run.include_path.is_dir():
        raise UsageError(f"--include-path {run.include_path} is not a folder")
    if run.samples is not None and run.samples.exists() and not run.samples.is_dir():
        raise UsageError(f"--log-samples {run.samples} is a file; expected a folder")


def _show(found: TaskResults) -> None:
    typer.echo(found.table)
    info = found.results["config"]
    typer.echo(f"{info['engine']}; artifact {info['artifact_digest'][:12]}")
    if info["limit"] is not None:
        typer.echo("with --limit: good for a look, not for a figure to publish")
    if info["num_truncated"]:
        typer.echo(
            f"{info['num_truncated']} requests lost the beginning of their context: the model "
            f"reads {info['max_length']} tokens"
        )
    for path in found.files:
        typer.echo(f"wrote {path}")
