"""`quantize report`: the page of an artifact made anew from its report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    artifact: Annotated[Path, typer.Argument(metavar="ART", help="Artifact directory.")],
) -> None:
    """Make report.html of an artifact anew from its report.json."""
    from quant.report_html import rerender

    typer.echo(rerender(artifact))
