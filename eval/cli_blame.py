"""`evaluate blame ART`: which layers carry the loss, and the recipe override that mends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from eval.cli_options import (
    ArtifactDir,
    Base,
    ComputeKind,
    Device,
    DeviceKind,
    DType,
    KVCacheDType,
    KVKind,
    Seed,
    SuiteDir,
    Threads,
    Windows,
    WindowTokens,
    engine_config,
)
from eval.errors import EvaluationError, UsageError

if TYPE_CHECKING:
    from eval.blame_run import Blamed, BlameJob

NAME = "blame"
_SHARED_OUT = (
    "Bits for every module by what it loses: quantize --recipe mixed-auto.yaml --max-kl NATS, or "
    "--until-accepted GATES"
)
HELP = (
    "Name the layers that carry an artifact's loss.\n\n"
    "Weights are put back to the original ones, half of the layers at a time, then a quarter, down "
    "to the linears of one layer, and the KL divergence from the base on held-out text is measured "
    "each time. What wins most back is named, with the recipe override that mends it. Computed by "
    "transformers in float32 with both sets of weights in memory; the engine's own divergence "
    "stands beside it, because what kernels or a KV cache lose is not the weights' fault."
)
EPILOG = (
    "[bold]Exit codes:[/] 0 the named modules carry the loss (putting them back reaches the "
    "target), 2 wrong usage, 3 no few modules carry it, 4 it could not be measured.\n\n"
    "[bold]Examples:[/]\n\n"
    "evaluate blame smollm2-w4a16\n\n"
    "evaluate blame smollm2-w4a16 --base models/smollm2 --target 0.02 --budget 120 --json"
)


def command(
    artifact: ArtifactDir,
    base: Base = None,
    gates: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Whose limit for kl_mean is aimed at. [dim]Default: gates/default.yaml.[/]",
        ),
    ] = None,
    suite: SuiteDir = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="KL to reach. [dim]Default: the limit for kl_mean, or half of the loss where "
            "that is kept.[/]",
        ),
    ] = None,
    windows: Windows = 10,
    window_tokens: WindowTokens = 96,
    budget: Annotated[
        int, typer.Option(metavar="N", help="Measurements, and a few more to finish.")
    ] = 48,
    device: Device = DeviceKind.auto,
    dtype: DType = ComputeKind.auto,
    kv_cache_dtype: KVCacheDType = KVKind.auto,
    threads: Threads = None,
    seed: Seed = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the text.")
    ] = False,
) -> None:
    """Look for what carries the loss; the text of --help is HELP."""
    from eval.blame_run import BlameJob, beside_the_base
    from eval.cache import default_directory
    from eval.gate_spec import load_gates
    from eval.suites import load_suite
    from eval.terminal import TerminalProgress

    _check(windows, window_tokens, budget, target)
    gates_path, suite_path = _inputs(gates, suite)
    said = engine_config(device, dtype, kv_cache_dtype, threads)
    job = BlameJob(
        artifact=artifact,
        base=base,
        suite=load_suite(suite_path),
        gates=load_gates(gates_path).spec,
        engine=beside_the_base(said),
        cache=default_directory(),
        num_windows=windows,
        window_tokens=window_tokens,
        seed=seed,
        target=target,
        budget=budget,
    )
    with TerminalProgress(Console(stderr=True, highlight=False)) as progress:
        found = _run(job, progress)
    typer.echo(json.dumps(as_data(found), indent=2) if as_json else as_text(found))
    raise typer.Exit(0 if found.blame.is_fixed else 3)


def _check(windows: int, window_tokens: int, budget: int, target: float | None) -> None:
    for name, number, least in (
        ("windows", windows, 1), ("window-tokens", window_tokens, 16), ("budget", budget, 4),
    ):  # fmt: skip
        if number < least:
            raise UsageError(f"--{name} is {number}; expected at least {least}")
    if target is not None and target <= 0:
        raise UsageError(f"--target is {target:g}; expected more than 0")


def _inputs(gates: str | None, suite: Path | None) -> tuple[Path, Path]:
    from eval.api import DEFAULT_GATES
    from quant.artifact.shipped import resolve_input, shipped_dir

    try:
        path = resolve_input(gates or DEFAULT_GATES, "recipes", within="gates")
        return path, suite or shipped_dir("calib_data") / "gate"
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


def _run(job: BlameJob, progress: Any) -> Blamed:
    from eval.blame_run import run
    from quant.artifact.errors import ArtifactError
    from runtime.config import ConfigError
    from runtime.text import TextError

    try:
        return run(job, progress)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except (ArtifactError, TextError) as error:
        raise EvaluationError(str(error)) from error


def as_text(found: Blamed) -> str:
    """What a person reads."""
    blame = found.blame
    lines = [
        f"Mean KL from the base: {blame.loss:.4f} nats by the weights, {found.engine:.4f} in the "
        f"engine ({found.num_tokens:,} tokens; {found.description})",
    ]
    if found.is_engine_worse:
        lines.append(
            "The engine loses clearly more than its weights do: look at the KV cache, the compute "
            "type and the kernels first (evaluate with --kv-cache-dtype and --dtype float32)."
        )
    for culprit in blame.culprits:
        share = culprit.gain / blame.loss
        lines.append(
            f"  {culprit.unit.name} ({found.schemes[culprit.unit.name]}): put back alone it wins "
            f"{culprit.gain:.4f} of {blame.loss:.4f} ({share:.0%})"
        )
    return "\n".join([*lines, *_outcome(found)])


def _outcome(found: Blamed) -> list[str]:
    blame = found.blame
    if not blame.culprits:
        return [
            f"No module wins back a noticeable share by itself ({blame.num_measured} "
            "measurements): the loss is spread. Give all of it more bits, or a better method.",
            _SHARED_OUT,
        ]
    lines = [
        f"All of these put back: {blame.restored:.4f} nats (target {blame.target:.4f}), in "
        f"{blame.num_measured} measurements"
    ]
    if found.with_8_bits is not None:
        lines.append(f"At 8 bits instead: {found.with_8_bits:.4f} nats")
    if not blame.is_fixed:
        lines += [
            "That is not enough: the rest is spread over other modules, or --budget was used up.",
            _SHARED_OUT,
        ]
    if found.overrides:
        lines += ["", "For the recipe (entries go to the end of its overrides):", "",
                  found.overrides.rstrip()]  # fmt: skip
    return lines


def as_data(found: Blamed) -> dict[str, Any]:
    """What a program reads."""
    blame = found.blame
    return {
        "format_version": "1.0",
        "kl_weights": blame.loss,
        "kl_engine": found.engine,
        "is_engine_worse": found.is_engine_worse,
        "kl_restored": blame.restored,
        "kl_with_8_bits": found.with_8_bits,
        "target": blame.target,
        "is_fixed": blame.is_fixed,
        "num_measured": blame.num_measured,
        "num_tokens": found.num_tokens,
        "culprits": [
            {
                "name": c.unit.name,
                "modules": sorted(c.unit.names),
                "scheme": found.schemes[c.unit.name],
                "gain": c.gain,
            }
            for c in blame.culprits
        ],
        "overrides": found.overrides,
    }
