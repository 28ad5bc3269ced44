"""A base that can be judged: a tiny model taught one JSON answer, and a suite asking for it.

A random model answers nothing, so a gate on it would be empty. This one is trained for a few
seconds on `ANSWER` after any prompt of the suite's kind, which leaves something to lose.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before `datasets` is imported, by lm-eval: its copies of test data are nobody's to keep.
os.environ.setdefault(
    "HF_DATASETS_CACHE", str(Path(tempfile.gettempdir()) / "weighbridge-tests-datasets")
)

import pytest
import torch
from suite_rows import ANSWER, document_row, item_row, write_rows


@pytest.fixture(scope="session")
def suite_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of 24 documents and 70 items."""
    folder = tmp_path_factory.mktemp("suite")
    write_rows(folder / "text.jsonl", [document_row(n) for n in range(24)])
    write_rows(folder / "extraction.jsonl", [item_row(n) for n in range(70)])
    return folder


@pytest.fixture(scope="session")
def taught_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that answers every item of the suite rightly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    prompts = [
        tokenizer.apply_chat_template(
            item_row(n)["messages"], tokenize=False, add_generation_prompt=True
        )
        for n in range(100)
    ]
    answer = tokenizer(json.dumps(ANSWER) + "<|im_end|>", add_special_tokens=False)["input_ids"]
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = [1.0]
    while max(losses[-10:]) > 0.02:
        assert len(losses) < 400, f"the fixture model did not learn its answer: {losses[-10:]}"
        ids = tokenizer(prompts[len(losses) % 100], add_special_tokens=False)["input_ids"]
        labels = torch.tensor([[-100] * len(ids) + answer])
        loss = model(input_ids=torch.tensor([ids + answer]), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    folder = tmp_path_factory.mktemp("taught")
    for file in source.iterdir():
        shutil.copy(file, folder / file.name)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of a session, as one user has."""
    return tmp_path_factory.mktemp("cache")
