"""The shipped adapter: it fits the model it names, its card tells its bytes, and it answers."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.adapter import Adapter, with_adapter
from quant.artifact.shipped import resolve_adapter
from quant.checkpoint import Source
from quant.source import open_source

FOLDER = resolve_adapter("business")
WEIGHTS = FOLDER / "adapter_model.safetensors"
SHAPES = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576), "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576), "mlp.down_proj": (576, 1536),
}  # fmt: skip


def test_it_is_small_and_its_card_names_these_very_bytes() -> None:
    assert WEIGHTS.stat().st_size <= 8_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() in card
    for said in ("Apache-2.0", "SmolLM2-135M-Instruct", "train_adapter.py", "seed 7"):
        assert said in card


def test_every_linear_of_every_layer_has_finite_factors_of_the_right_shape() -> None:
    adapter = Adapter(FOLDER)
    rank = adapter.config.r
    assert set(adapter.parts) == {f"model.layers.{i}.{part}" for i in range(30) for part in SHAPES}
    for module, parts in adapter.parts.items():
        rows, width = SHAPES[re.sub(r"model\.layers\.\d+\.", "", module)]
        assert adapter.shape(module, "lora_A.weight") == (rank, width)
        assert adapter.shape(module, "lora_B.weight") == (rows, rank)
        assert all(adapter.tensor(module, part).abs().max() > 0 for part in parts)


@pytest.fixture(scope="module")
def merged(smollm2_gguf: Path) -> Source:
    return with_adapter(open_source(str(smollm2_gguf)), FOLDER)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_merged_model_answers_unseen_tasks(merged: Source) -> None:
    """24 of the gate's tasks, two of each kind; the card's figures come from 960."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from adapter_answers import ask, grade, prompt_ids
    from adapter_model import load_base

    from calib_data.generate import extraction_items

    rows: list[Any] = list(extraction_items(24))
    shipped = resolve_adapter("business").parents[2] / "calib_data" / "gate" / "extraction.jsonl"
    assert rows == [json.loads(line) for line in shipped.read_text().splitlines()[:24]]
    tokenizer = merged.tokenizer()
    model = load_base(merged, torch.device("cpu"))
    prompts = [prompt_ids(tokenizer, row["messages"]) for row in rows]
    grades = [grade(r, a.text) for r, a in zip(rows, ask(model, tokenizer, prompts), strict=True)]
    assert sum(one["valid"] for one in grades) >= 23
    assert sum(one["fields"] for one in grades) >= 0.85 * len(rows)
