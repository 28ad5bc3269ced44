"""Options of the `runtime` command: names, help and ranges, so that the commands read as verbs.

Help must fit 80 columns with every option whole, hence one-letter value names, ranges checked
here instead of shown, and switches without a second name beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of integers in [low, high]."""

    def parse(text: str) -> int:
        return _within(_converted(text, int, "an integer"), low, high)

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """A parser of finite numbers in [low, high]."""

    def parse(text: str) -> float:
        return _within(_converted(text, float, "a number"), low, high)

    return parse


def _converted(text: str, kind: Callable[[str], T], words: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not {words}.") from None


def _within(value: Number, low: float, high: float | None) -> Number:
    if not low <= value <= (float("inf") if high is None else high):  # also refuses nan
        bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise typer.BadParameter(f"{value} is not {bounds}.")
    return value


ENGINE, SERVER, SAMPLING = "Engine", "Server", "Sampling"
API_KEY_VARIABLE = "RUNTIME_API_KEY"
COUNT = integer(1)

ArtifactDir = Annotated[Path, typer.Argument(metavar="ART", help="Artifact directory.")]

Host = Annotated[
    str,
    typer.Option(metavar="ADDR", rich_help_panel=SERVER,
                 help="Address to listen on; 0.0.0.0 for all."),
]  # fmt: skip
Port = Annotated[
    int,
    typer.Option(parser=integer(0, 65535), metavar="N", rich_help_panel=SERVER,
                 help="Port; 0 takes a free one."),
]  # fmt: skip
ServedModelName = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=SERVER, help="Name in the API.",
                 show_default="the directory's name"),
]  # fmt: skip
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", rich_help_panel=SERVER, envvar=API_KEY_VARIABLE,
                 help="Require `Authorization: Bearer KEY`.", show_default="none"),
]  # fmt: skip
MaxNumQueued = Annotated[
    int | None,
    typer.Option(parser=integer(0), metavar="N", rich_help_panel=SERVER,
                 help="Requests that may wait for a place; more get a 503.",
                 show_default="4 x max-num-seqs"),
]  # fmt: skip
ShutdownTimeout = Annotated[
    float,
    typer.Option(parser=number(0.0), metavar="X", rich_help_panel=SERVER,
                 help="Seconds that SIGTERM lets running requests finish."),
]  # fmt: skip
RequireAccepted = Annotated[
    bool,
    typer.Option("--require-accepted", metavar="", rich_help_panel=SERVER,
                 help="Refuse an artifact that `evaluate` did not accept as it is run here."),
]  # fmt: skip

Device = Annotated[
    str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.", rich_help_panel=ENGINE)
]
ComputeType = Annotated[
    str,
    typer.Option("--dtype", metavar="TYPE", rich_help_panel=ENGINE,
                 help="Compute type: auto, float32, bfloat16 or float16. auto: float32 on a CPU, "
                 "else the artifact's own."),
]  # fmt: skip
KVType = Annotated[
    str,
    typer.Option("--kv-cache-dtype", metavar="TYPE", rich_help_panel=ENGINE,
                 help="KV cache type: auto, float32, bfloat16, float16, fp8 or int8. auto: the "
                 "artifact's own scheme."),
]  # fmt: skip
MaxModelLen = Annotated[
    int | None,
    typer.Option(parser=COUNT, metavar="N", help="Longest sequence in tokens.",
                 rich_help_panel=ENGINE, show_default="the model's own limit"),
]  # fmt: skip
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(parser=COUNT, metavar="N", help="Most sequences running at once.",
                 rich_help_panel=ENGINE, show_default="GPU 256, CPU 64"),
]  # fmt: skip
MaxBatched = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", parser=COUNT, metavar="N", rich_help_panel=ENGINE,
                 help="Most tokens computed in one step.", show_default="GPU 8192, CPU 2048"),
]  # fmt: skip
LongPrefill = Annotated[
    int,
    typer.Option("--long-prefill-token-threshold", parser=integer(0), metavar="N",
                 rich_help_panel=ENGINE,
                 help="Most prompt tokens of one sequence in a step; 0: the whole budget."),
]  # fmt: skip
BlockSize = Annotated[
    int, typer.Option(metavar="N", help="KV tokens per block: 8, 16, 32.", rich_help_panel=ENGINE)
]
Utilization = Annotated[
    float,
    typer.Option("--gpu-memory-utilization", parser=number(0.01, 1.0), metavar="X",
                 rich_help_panel=ENGINE,
                 help="Share of the device's memory for weights, KV cache and workspace."),
]  # fmt: skip
KVBytes = Annotated[
    int | None,
    typer.Option("--kv-cache-memory-bytes", parser=COUNT, metavar="N", rich_help_panel=ENGINE,
                 help="Size of the KV pool; overrides the share.", show_default="from the share"),
]  # fmt: skip
KVBlocks = Annotated[
    int | None,
    typer.Option("--num-gpu-blocks-override", parser=COUNT, metavar="N", rich_help_panel=ENGINE,
                 help="Size of the KV pool in blocks (tests).", show_default="from the share"),
]  # fmt: skip
NoPrefixCaching = Annotated[
    bool,
    typer.Option("--no-enable-prefix-caching", metavar="", rich_help_panel=ENGINE,
                 help="Share no KV blocks between equal prompt beginnings."),
]  # fmt: skip
PrefixCaching = Annotated[bool, typer.Option("--enable-prefix-caching", hidden=True)]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", metavar="", rich_help_panel=ENGINE,
                 help="Answers that do not depend on what else runs, to the last bit (GPU)."),
]  # fmt: skip
EnforceEager = Annotated[
    bool,
    typer.Option("--enforce-eager", metavar="", rich_help_panel=ENGINE,
                 help="Capture no CUDA graphs: slower, for finding faults."),
]  # fmt: skip
Verify = Annotated[
    str,
    typer.Option(metavar="HOW", rich_help_panel=ENGINE,
                 help="full hashes every byte of the artifact at load; fast checks sizes."),
]  # fmt: skip
NoProbe = Annotated[
    bool,
    typer.Option("--no-probe", metavar="", rich_help_panel=ENGINE,
                 help="Do not re-check the artifact's probe answers at load."),
]  # fmt: skip
Probe = Annotated[bool, typer.Option("--probe", hidden=True)]
EngineSeed = Annotated[
    int,
    typer.Option("--seed", metavar="N", rich_help_panel=ENGINE,
                 help="Base of the random streams of requests that name no seed."),
]  # fmt: skip
NumThreads = Annotated[
    int | None,
    typer.Option("--num-threads", "--threads", parser=COUNT, metavar="N", help="CPU threads.",
                 rich_help_panel=ENGINE, show_default="torch's own"),
]  # fmt: skip

MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", parser=COUNT, metavar="N", rich_help_panel=SAMPLING,
                 help="Most new tokens."),
]  # fmt: skip
Temperature = Annotated[
    float,
    typer.Option(parser=number(0.0), metavar="X", rich_help_panel=SAMPLING, help="0 is greedy."),
]
TopP = Annotated[
    float,
    typer.Option("--top-p", parser=number(0.0, 1.0), metavar="X", rich_help_panel=SAMPLING,
                 help="Sample from the most likely tokens that together have this probability."),
]  # fmt: skip
SampleSeed = Annotated[
    int | None,
    typer.Option("--sampling-seed", metavar="N", rich_help_panel=SAMPLING,
                 help="Seed of this answer.", show_default="drawn"),
]  # fmt: skip
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", rich_help_panel=SAMPLING,
                 help="Stop string. Repeatable."),
]  # fmt: skip
