"""How much of the calibration is computed at once, in what, and where it is kept."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from quant import spill
from quant.artifact.errors import StorageError
from quant.errors import PipelineError
from quant.machine import anonymous_bytes, chosen_device, free_memory_bytes, parse_bytes
from quant.modelling import compute_dtype
from quant.plan import Plan, make_plan
from quant.random_model import RandomModel
from quant.recipe import Recipe
from quant.run_start import tokens_at_once
from quant.spill import MemoryLimits, choose_place, shelf

RECIPE = "scheme: w4a16\nmethod: gptq\n"


def plan_of(shape: str) -> Plan:
    model = RandomModel(f"synth:{shape}?layers=1")
    return make_plan(
        Recipe.parse(RECIPE, "test"), model.module_shapes, 1, model.config,
        source_dtype="bfloat16", is_tied=model.is_tied,
    )  # fmt: skip


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        with monkeypatch.context() as patch:
            checked: list[str] = []
            patch.setattr("quant.machine.check_device", checked.append)
            assert chosen_device("auto") == expected
            assert checked == [expected]
    assert chosen_device("cpu") == "cpu"
    with pytest.raises(PipelineError, match="--device tpu: not usable here"):
        chosen_device("tpu")


def test_a_gpu_takes_larger_batches_unless_the_recipe_says() -> None:
    small, large = plan_of("smollm2-135m"), plan_of("llama-3.1-8b")
    recipe = Recipe.parse(RECIPE, "test")
    told = Recipe.parse(RECIPE + "calibration:\n  batch_tokens: 1024\n", "test")
    assert tokens_at_once(recipe, small, "cpu") == recipe.calibration.batch_tokens
    assert tokens_at_once(recipe, small, "cuda") == 32768
    assert tokens_at_once(recipe, large, "cuda") == 2**28 // 14336
    assert tokens_at_once(told, small, "cuda") == 1024


@pytest.mark.parametrize(
    ("hidden", "device", "dtype"),
    [(4096, "cuda", torch.bfloat16), (4096, "cpu", torch.float32), (576, "cuda", torch.float32)],
)
def test_wide_models_compute_in_bfloat16_on_a_gpu(
    hidden: int, device: str, dtype: torch.dtype
) -> None:
    assert compute_dtype({"hidden_size": hidden}, device) == dtype


@pytest.mark.parametrize(
    ("gpu", "host", "place"),
    [(300, 0, "gpu"), (299, 300, "host"), (299, 299, "disk")],
)
def test_hidden_states_lie_in_the_fastest_place_that_has_room(
    gpu: int, host: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "free_gpu_bytes", lambda device, limit: min(gpu, limit))
    monkeypatch.setattr(spill, "free_memory_bytes", lambda limit: min(host, limit))
    wide = MemoryLimits(gpu_bytes=1000, host_bytes=1000)
    assert choose_place(100, "cuda", wide) == place
    assert choose_place(100, "cpu", wide) == ("disk" if host < 300 else "host")
    assert choose_place(100, "cuda", MemoryLimits(gpu_bytes=299, host_bytes=299)) == "disk"


def test_a_limit_counts_what_the_process_holds_already() -> None:
    held = anonymous_bytes()
    assert free_memory_bytes(held // 2) == 0
    assert 0 < free_memory_bytes(held + (64 << 20)) <= 96 << 20
    assert free_memory_bytes() > 0


@pytest.mark.parametrize(
    ("text", "expected"), [("24GB", 24 * 10**9), ("1.5GiB", 3 << 29), ("800 MB", 8 * 10**8)]
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "1e9B", "24gb"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(PipelineError, match="expected such as 24GB"):
        parse_bytes(text)


def test_a_file_for_hidden_states_takes_its_space_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = shelf([(2, 3, 4), (1, 5, 4)], torch.float32, "disk", tmp_path / "h", pinned=False)
    pieces[1].fill_(7)
    assert [piece.shape for piece in pieces] == [(2, 3, 4), (1, 5, 4)]
    assert (tmp_path / "h").stat().st_size == 4 * 44
    stored = torch.frombuffer(bytearray((tmp_path / "h").read_bytes()), dtype=torch.float32)
    assert bool(stored[24:].eq(7).all())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageError, match="disk is full"):
        shelf([(2, 3, 4)], torch.float32, "disk", tmp_path / "h", pinned=False)
