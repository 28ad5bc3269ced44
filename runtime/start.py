"""The console script `runtime`; Ctrl-C ends it without a traceback from the start."""

from __future__ import annotations

from quant.artifact.signals import silent_end


def main() -> None:
    """Import the command and run it."""
    with silent_end():
        from runtime.cli import main as command
    command()
