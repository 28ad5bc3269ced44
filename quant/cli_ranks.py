"""What `quantize --ranks` and torchrun mean to the command line: who starts, joins and speaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quant.parallel_launch import MAX_RANKS, world_size

if TYPE_CHECKING:
    from quant.parallel import Ranks

USAGE_ERROR: Any = typer.BadParameter.__base__

NumRanks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, max=MAX_RANKS, metavar="N",
                 help="Processes that share the calibration windows and the work; with --device "
                 "cuda a GPU each. torchrun works too.", show_default="1"),
]  # fmt: skip


def is_to_launch(ranks: int | None) -> bool:
    """Whether this process is to start the ranks, being none of them."""
    if world_size() == 1:
        return ranks is not None and ranks > 1
    if ranks not in (None, world_size()):
        raise USAGE_ERROR(
            f"--ranks {ranks} contradicts the {world_size()} processes that were started"
        )
    return False


def refuse_ranks(command: str) -> None:
    """A usage error for a subcommand that several ranks were started with."""
    if world_size() > 1:
        raise USAGE_ERROR(
            f"{command} runs as one process; several ranks share the making of an artifact only: "
            "quantize --recipe ..."
        )


@contextmanager
def joined_ranks(device: str) -> Iterator[tuple[Ranks | None, str]]:
    """The ranks (None: this process alone), and the device of this one."""
    if world_size() == 1:
        yield None, device
        return
    # Not at the top: torch takes seconds, and --help has none of them.
    from quant.machine import check_device, named_device
    from quant.parallel_group import joined, rank_device

    own = rank_device(named_device(device))
    check_device(own)
    with joined(own) as ranks:
        yield ranks, own
