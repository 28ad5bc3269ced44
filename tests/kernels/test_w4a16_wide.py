"""W4A16 of many rows on Hopper: who multiplies and adds up what, and which weights it serves.

The kernel itself runs on a card only (`tests/gpu`); `test_compile` compiles it.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.layout import QuantizedWeight
from quant.artifact.scheme import preset, with_group_size
from runtime.kernels.backend import KernelTarget
from runtime.kernels.w4a16 import pack_w4a16
from runtime.kernels.w4a16.tile import choose, scratch_of, share_out
from runtime.kernels.w4a16.wide import serves
from runtime.kernels.workspace import KernelOptions

H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)
SCALARS = SimpleNamespace(minimum=min, maximum=max, where=lambda when, a, b: a if when else b)


@pytest.fixture(scope="module")
def kernel() -> Any:
    """The kernel's module with its arithmetic on Python's numbers."""
    pytest.importorskip("triton")
    from runtime.kernels.w4a16 import wide_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_kernel, "gl", SCALARS)
        yield wide_kernel


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 140))
@settings(max_examples=200, deadline=None)
def test_programs_share_out_all_work(
    kernel: Any, num_tiles: int, num_kb: int, num_sms: int
) -> None:
    """Every K-block of every tile is one program's; a tile's parts lie where they are looked for,
    by every program that has one."""
    shares = share_out(num_tiles, num_kb, num_sms)
    programs, sharers_of_all = shares.programs, shares.sharers
    assert programs <= num_sms
    num_whole = num_tiles // programs
    num_shared = (num_tiles - num_whole * programs) * num_kb
    done: Counter[tuple[int, int]] = Counter()
    parts: dict[int, set[int]] = {}
    slots: dict[int, int] = {}
    for program in range(programs):
        begin = kernel._share_begin.fn(program, sharers_of_all, num_shared)
        end = kernel._share_begin.fn(program + 1, sharers_of_all, num_shared)
        units = [
            kernel._locate.fn(i, program, programs, num_kb, num_whole, begin)
            for i in range(num_whole * num_kb + end - begin)
        ]
        assert units
        done.update(units)
        by_tile = Counter(tile for tile, _ in units)
        for tile in (tile for tile, count in by_tile.items() if count < num_kb):
            parts.setdefault(tile - num_whole * programs, set()).add(program)
            slot = 2 * program + ((tile, 0) in units)
            assert slot not in slots
            slots[slot] = tile - num_whole * programs
    assert len(done) == num_tiles * num_kb
    assert set(done.values()) == {1}
    for tile, sharers in parts.items():
        first = kernel._sharer_of.fn(tile * num_kb, sharers_of_all, num_shared)
        last = kernel._sharer_of.fn(tile * num_kb + num_kb - 1, sharers_of_all, num_shared)
        assert sharers == set(range(first, last + 1))
        assert 1 < len(sharers) <= shares.max_parts
        assert [slots[2 * first + 1], *(slots[2 * p] for p in range(first + 1, last + 1))] == (
            [tile] * len(sharers)
        )


@pytest.mark.parametrize(
    ("width", "group_size", "factor", "served"),
    [
        (256, 128, 1.0, True),
        (256, None, 1.0, True),
        (128, 32, 1.0, True),
        (192, 64, 1.0, False),  # K-blocks of 64
        (256, 128, 1.0 + 2**-20, False),  # scales that 16 bits do not hold
    ],
)
def test_what_is_served(width: int, group_size: int | None, factor: float, served: bool) -> None:
    groups = 1 if group_size is None else width // group_size
    weight = QuantizedWeight(
        scheme=with_group_size(preset("w4a16"), group_size),
        codes=torch.zeros(32, width, dtype=torch.int8),
        scale=torch.full((32, groups), 0.5 * factor),
        zero_point=None,
    )
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cpu"), KernelOptions())
    assert serves(packed) is served


@pytest.mark.parametrize("rows", [65, 128, 200, 300, 512])
@pytest.mark.parametrize("shape", [(6144, 4096), (28672, 4096), (4096, 14336), (4096, 4096)])
def test_scratch_covers_every_number_of_rows(rows: int, shape: tuple[int, int]) -> None:
    sums, counters = scratch_of(shape, 128, H200, False)
    tile = choose(rows, shape, 128, H200)
    if tile.kernel == "wide":
        programs = H200.num_sms
        assert 2 * programs * tile.block_m * tile.block_n <= sums
        assert 2 * programs <= counters
