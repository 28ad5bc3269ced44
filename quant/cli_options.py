"""What `quantize --help` says: the command's words, and its options, each told once for all
commands that have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


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

  [cyan]quantize --recipe w4a16.yaml --calib my.jsonl -m M --until-accepted my-gates.yaml[/cyan]
    the smallest artifact that `evaluate` accepts by my-gates.yaml

  [cyan]quantize --recipe w4a16.yaml --calib a.jsonl --calib b.jsonl --samples 512 --out art[/cyan]
    two calibration files, 512 windows

  [cyan]quantize convert model.gguf --out dense[/cyan]
    the same weights as an artifact, nothing quantized
"""
EPILOG = """
RECIPE and CALIB are looked up where given, then among the shipped ones:
w4a16.yaml w8a16.yaml w8a8.yaml fp8.yaml mixed.yaml mixed-auto.yaml none.yaml;
contracts.jsonl service.jsonl code.jsonl.
MODEL is a Hugging Face directory, a hub id, a GGUF file, or synth:SHAPE (random weights).
GATES is looked up likewise: gates/default.yaml is what `evaluate` judges by.
Exit codes: 0 done, 1 verify found problems or the gate accepted no plan, 2 bad input or usage,
130 interrupted, 143 terminated.
"""
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", show_default="the recipe's model:",
                 help="Checkpoint: directory, hub id or GGUF file."),
]  # fmt: skip
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", "-r", help="How to quantize (YAML).", metavar="FILE")
]
Calib = Annotated[
    list[str] | None,
    typer.Option("--calib", "-c", metavar="FILE",
                 help="Calibration rows (JSONL, .gz too, of text, messages, or prompt + "
                 "completion). Repeatable."),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", help="Artifact directory.", show_default="./NAME-RECIPE"
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse group sizes that do not divide a module's columns.")
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Calibration windows.", rich_help_panel="Over the recipe"
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens per window.", rich_help_panel="Over the recipe"),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Which rows and windows are drawn.", rich_help_panel="Over the recipe"
    ),
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
                 help="LoRA adapter (PEFT) to merge into the model first, in float32; a directory, "
                      "or a shipped one (business)."),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Where layers are computed: auto, cpu, cuda, cuda:1; auto takes CUDA when there is "
        "some.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, metavar="N", show_default="torch's own",
                 help="CPU threads of a rank. Part of what fixes the exact bytes."),
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
