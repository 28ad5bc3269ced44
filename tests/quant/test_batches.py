"""How much of the calibration is computed at once, in what, and where it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quant.capture import choose_home, make_batches
from quant.modelling import compute_dtype
from quant.pipeline import tokens_at_once
from quant.plan import Plan, make_plan
from quant.random_model import RandomModel
from quant.recipe import Recipe

RECIPE = "scheme: w4a16\nmethod: gptq\n"


def plan_of(shape: str) -> Plan:
    model = RandomModel(f"synth:{shape}?layers=1")
    return make_plan(
        Recipe.parse(RECIPE, "test"), model.module_shapes, 1, model.config,
        source_dtype="bfloat16", is_tied=model.is_tied,
    )  # fmt: skip


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
    ("free", "home"), [(3 * 10 * 64 * 4, "cuda"), (3 * 10 * 64 * 4 - 1, "cpu")]
)
def test_hidden_states_stay_on_the_gpu_while_there_is_room(
    free: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info(device: Any) -> tuple[int, int]:
        return free, 10 * free

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    batches = make_batches([[1] * 5, [2] * 5], 10)
    assert choose_home(batches, 64, torch.float32, "cuda") == home
    assert choose_home(batches, 64, torch.float32, "cpu") == "cpu"
