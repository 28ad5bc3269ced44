"""Options of `evaluate` and its subcommands, each told once for all commands that have it.

What a command means by an option of the same name is one thing everywhere. Imports nothing heavy:
`--help` is built from these.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from runtime.config import EngineConfig


class DeviceKind(StrEnum):
    """Where the candidate and the base are computed."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ComputeKind(StrEnum):
    """The engine's compute type."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVKind(StrEnum):
    """The engine's KV cache type."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8 = "fp8"
    int8 = "int8"


ArtifactDir = Annotated[
    Path, typer.Argument(metavar="ART", help="The artifact's directory, as quantize made it.")
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The original: a model directory, a GGUF file or a hub id. "
        "[dim]Default: the path in ART/artifact.json.[/]",
    ),
]
Gates = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Metrics and limits (YAML); looked up where given, then among the shipped "
        "recipes. [dim]Default: gates/default.yaml.[/]",
    ),
]
SuiteDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Held-out data: a directory with text.jsonl and *.jsonl files of tasks. "
        "[dim]Default: the shipped gate half of calib_data.[/]",
    ),
]
Items = Annotated[
    int, typer.Option(metavar="N", help="Items both models answer, of each task file.")
]
NoiseItems = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Items that the base answers a second time, alone: what changes there is noise.",
    ),
]
Windows = Annotated[
    int, typer.Option(metavar="N", help="Windows of held-out text, over all domains.")
]
WindowTokens = Annotated[int, typer.Option(metavar="N", help="Tokens per window.")]
Device = Annotated[
    DeviceKind,
    typer.Option(metavar="DEVICE", help="auto, cpu or cuda; auto takes CUDA when there is one."),
]
DType = Annotated[
    ComputeKind,
    typer.Option(
        metavar="TYPE",
        help="The engine's compute type: auto, float32, bfloat16 or float16. What is measured "
        "holds for it only.",
    ),
]
KVCacheDType = Annotated[
    KVKind,
    typer.Option(
        metavar="TYPE",
        help="The engine's KV cache: auto (follows the artifact), float32, bfloat16, float16, fp8 "
        "or int8.",
    ),
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads of both models.")]
Seed = Annotated[
    int,
    typer.Option(metavar="N", help="Picks the documents and items; seeds the bootstrap."),
]


def engine_config(
    device: DeviceKind,
    dtype: ComputeKind,
    kv_cache_dtype: KVKind,
    threads: int | None,
    *,
    max_model_len: int | None = None,
) -> EngineConfig:
    """The engine as the options ask for it."""
    from runtime.config import EngineConfig

    return EngineConfig(
        device=device.value,
        dtype=dtype.value,
        kv_cache_dtype=kv_cache_dtype.value,
        max_model_len=max_model_len,
        num_threads=threads,
    )
