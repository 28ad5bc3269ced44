"""`quantize sample`: the command line of `quant.sampling`. Parses, calls, prints."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from quant.errors import CalibrationError

_NAMED = 5  # of the files that are not read
HELP = """
Draw a calibration set from logs: no near duplicates, every source and length, e-mail, telephone, \
identity and card numbers and keys replaced (names are not found).

Reads OpenAI request logs and batch files, rows of text, messages or prompt +
completion (.jsonl, .jsonl.gz), .txt and .md (folders too), .csv, .parquet and
.arrow; - is stdin (JSONL). The same rows and seed give the same set, in
whatever order they come. Beside OUT an account is written, OUT with
.report.json, which holds counts and hashes and no text.

[bold]Examples[/bold]

  [cyan]quantize sample --from requests.jsonl --out calib.jsonl[/cyan]
    256 rows: a quarter from the longest ones, the rest by traffic

  [cyan]quantize sample --from logs/ --from deals/ --tokens 500000 -m M --out c.jsonl[/cyan]
    half a million tokens as this model counts them

  [cyan]quantize sample --from a.jsonl --against gate.jsonl --drop-leaks --out c.jsonl[/cyan]
    nothing that the gate will ask
"""

From = Annotated[
    list[str], typer.Option("--from", metavar="PATH", help="Log file or folder. Repeatable.")
]
Against = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH", help="Gate data (JSONL, text, folder) that must not be drawn. Repeatable."
    ),
]


def sample_command(
    from_: From,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The calibration file (JSONL).")
    ],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Rows to draw.")] = 256,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw up to so many tokens instead.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Count tokens as this model does.",
            show_default="estimated from characters",
        ),
    ] = None,
    against: Against = None,
    drop_leaks: Annotated[
        bool, typer.Option("--drop-leaks", help="Leave out rows the gate holds; else an error.")
    ] = False,
    pii: Annotated[
        Literal["on", "report", "off"],
        typer.Option(
            metavar="on|report|off",
            help="Personal data: replace by [EMAIL_1] and so on, count, or do not look.",
        ),
    ] = "on",
    similarity: Annotated[
        float,
        typer.Option(
            min=0.3,
            max=1.0,
            metavar="X",
            help="Jaccard similarity of word triples from which rows "
            "are duplicates; 1 drops equal rows only.",
        ),
    ] = 0.8,
    long_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, metavar="X", help="Part reserved for the longest rows."),
    ] = 0.25,
    balance: Annotated[
        Literal["traffic", "equal"],
        typer.Option(metavar="traffic|equal", help="How the sources share the rest."),
    ] = "traffic",
    text_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Field that holds the text or messages (a.b.c)."),
    ] = None,
    source_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Field that names the source, such as metadata.team."),
    ] = None,
    split_text: Annotated[
        bool, typer.Option("--split-text", help="Blank lines part text files into documents.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on when over 1 % of the rows are malformed.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Which rows are drawn.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    from quant.sampling.readers import left_out
    from quant.sampling.report import render
    from quant.sampling.sample import SampleSettings, draw_sample, report_path

    for path in (out, report_path(out)):
        if path.exists() and not overwrite:
            raise CalibrationError(f"{path}: is there already; name another --out or --overwrite")
    settings = SampleSettings(
        samples=samples, tokens=tokens, seed=seed, similarity=similarity, long_share=long_share,
        balance=balance, pii=pii, text_field=text_field, source_field=source_field,
        split_text=split_text, skip_bad=skip_bad, drop_leaks=drop_leaks,
    )  # fmt: skip
    screen = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as spool, screen.status("reading") as status:
        inputs = _inputs(from_, Path(spool))
        report = draw_sample(
            inputs,
            out,
            settings,
            against=against or (),
            length=_length(model) if model else None,
            progress=lambda step, rows: status.update(f"{step}: {rows:,} rows"),
        )
    Console(highlight=False).print(render(report))
    if unread := left_out(inputs):
        names = ", ".join(path.name for path in unread[:_NAMED])
        more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
        typer.echo(f"not read  {names}{more}: of no kind that is read")
    typer.echo(f"\nwritten   {out}\naccount   {report_path(out)}")


def _inputs(names: list[str], spool: Path) -> list[Path]:
    """The files; stdin, which can be read only once, is kept in `spool` for the second pass."""
    paths = [Path(name) for name in names if name != "-"]
    if "-" in names:
        kept = spool / "stdin.jsonl"
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        paths.append(kept)
    return paths


def _length(model: str) -> Callable[[Mapping[str, Any]], int]:
    """Tokens of a row as `model` counts them, chat template included."""
    from quant.calibration import count_tokens
    from quant.calibration_rows import parse_row
    from quant.source import open_source

    tokenizer = open_source(model).tokenizer()

    def count(row: Mapping[str, Any]) -> int:
        where = f"{model}: --model, row {row['id']}" if "id" in row else f"{model}: --model"
        parsed = parse_row(dict(row), where, stem="")
        return 1 if parsed is None else max(1, count_tokens(parsed, tokenizer))

    return count
