"""The adapter's training script on a tiny model: same loss as transformers, what is saved is what
was trained, and the chats are read as `evaluate` reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import adapter_data  # noqa: E402
import train_adapter  # noqa: E402
from adapter_answers import ask, end_ids, grade, prompt_ids, until_end  # noqa: E402
from adapter_model import LoraLlama, load_base, save_adapter  # noqa: E402

from calib_data.generate import extraction_items  # noqa: E402
from calib_data.tuning import tuning_chat  # noqa: E402
from quant.adapter import with_adapter  # noqa: E402
from quant.source import open_source  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> LoraLlama:
    base = load_base(open_source(str(tiny_model(num_hidden_layers=2))), CPU)
    return LoraLlama(base, rank=4, alpha=8, seed=1)


def shake(model: LoraLlama) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 9)


def test_losses_are_those_of_transformers_with_the_merged_weights(model: LoraLlama) -> None:
    shake(model)
    ids = torch.randint(5, 250, (3, 32), generator=torch.Generator().manual_seed(1))
    rows, targets = torch.tensor([4, 5, 40, 70]), torch.tensor([6, 7, 8, 9])
    ours = model.losses(ids, rows, targets, torch.float32)
    before = model.base[0](ids).logits
    model.set_base()
    logits = model.base[0](ids).logits
    assert (logits - before).abs().max() > 0.1
    theirs = -torch.log_softmax(logits.flatten(0, 1)[rows], -1)[range(4), targets]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_saved_adapter_merges_into_the_trained_model(
    model: LoraLlama, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shake(model)
    model.round_factors()
    digest = save_adapter(model, tmp_path / "lora", "acme/base")
    assert digest == save_adapter(model, tmp_path / "again", "acme/base")
    model.set_base()
    merged = with_adapter(open_source(str(tiny_model(num_hidden_layers=2))), tmp_path / "lora")
    trained = model.base[0].state_dict()
    changed = 0
    for name in merged.names:
        torch.testing.assert_close(merged.tensor(name).float(), trained[name], rtol=0, atol=1e-6)
        changed += "proj" in name
    assert changed == 14


def test_an_adapter_that_is_too_large_is_not_put_in_place(
    model: LoraLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapter_model.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        save_adapter(model, tmp_path, "acme/base")
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_chats_become_the_ids_that_the_template_makes(tiny_model: Callable[..., Path]) -> None:
    tokenizer = open_source(str(tiny_model())).tokenizer()
    chats = [tuning_chat(7, i) for i in range(60)]
    for chat, (ids, marks) in zip(chats, adapter_data.encode(tokenizer, chats), strict=True):
        asked = prompt_ids(tokenizer, chat[:-1])
        assert ids[: len(asked)].tolist() == asked
        written = tokenizer.decode(ids[len(asked) :])
        assert written == chat[-1]["content"] + "<|im_end|>"
        assert marks[len(asked) :].all()
        turns = sum(message["role"] == "assistant" for message in chat)
        assert (ids[marks] == tokenizer.eos_token_id).sum() == turns


def test_batches_hold_every_answer_token_once(tiny_model: Callable[..., Path]) -> None:
    tokenizer = open_source(str(tiny_model())).tokenizer()
    chunks = adapter_data.Chunks(tokenizer, seed=7, tokens=8192, chats=24)
    batches = chunks[2]
    again = chunks[2]
    assert all((a.ids == b.ids).all() for a, b in zip(batches, again, strict=True))
    chats = [tuning_chat(7, i) for i in range(48, 72)]
    encoded = adapter_data.encode(tokenizer, chats)
    kept = [(ids, marks) for ids, marks in encoded if len(ids) <= adapter_data.LONGEST]
    assert sum(len(batch.rows) for batch in batches) == sum(marks.sum() for _, marks in kept)
    for batch in batches:
        assert batch.ids.size <= 8192
        assert (batch.ids.reshape(-1)[batch.rows + 1] == batch.targets).all()


def test_answers_are_graded_by_schema_and_field() -> None:
    row = next(extraction_items(1))
    gold = row["gold"]
    assert grade(row, json.dumps(gold)) == {"valid": 1.0, "right": 1.0, "fields": 1.0}
    wrong = {**gold, "party_b": "Nobody"}
    assert grade(row, json.dumps(wrong)) == {"valid": 1.0, "right": 0.0, "fields": 0.75}
    assert grade(row, json.dumps({**gold, "more": 1}))["valid"] == 0.0
    assert grade(row, "```" + json.dumps(gold))["fields"] == 0.0


def test_tool_calls_are_graded_as_json_and_words_as_a_decision() -> None:
    call = '<tool_call>{"name": "track_order", "arguments": {"order_id": "A-1"}}</tool_call>'
    row = {"gold": call}
    assert grade(row, call.replace(": ", ":"))["right"] == 1.0
    assert grade(row, "No tool fits.") == {"valid": 1.0, "right": 0.0, "fields": 0.0}
    assert grade(row, call.replace("}}", "}"))["valid"] == 0.0
    assert grade({"gold": "No tool fits."}, call)["right"] == 0.0


def test_an_answer_ends_at_any_end_mark_whatever_the_tokenizer_names(
    model: LoraLlama, tiny_model: Callable[..., Path]
) -> None:
    """The tokenizer of one release of transformers names another id than the model's settings."""
    tokenizer = open_source(str(tiny_model(num_hidden_layers=2))).tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.base[0].config.eos_token_id = end
    tokenizer.eos_token = "<|endoftext|>"
    ends = end_ids(model.base[0], tokenizer)
    assert ends == [end, tokenizer.eos_token_id]
    written = tokenizer.encode('{"a": 1}', add_special_tokens=False)
    answer = until_end(tokenizer, [*written, end, *written, end], ends)
    assert (answer.text, answer.ended) == ('{"a": 1}', True)
    assert not until_end(tokenizer, written, ends).ended
    tokenizer.eos_token = None
    model.base[0].config.eos_token_id = None
    with pytest.raises(ValueError, match="which id ends"):
        ask(model.base[0], tokenizer, [written])


def test_a_run_learns_and_writes_adapter_and_report(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_adapter, "WARMUP", 5)
    monkeypatch.setattr(train_adapter, "CURVE_STEPS", 8)
    monkeypatch.setattr("adapter_answers.MOST_TOKENS", 4)
    said = ["train_adapter.py", "--model", str(tiny_model(max_position_embeddings=1024)),
            "--out", str(tmp_path / "lora"), "--report", str(tmp_path / "lora.json"),
            "--steps", "25", "--rate", "0.02", "--tokens", "768", "--chats", "8",
            "--workers", "0", "--gate-n", "2", "--bare-n", "1", "--device", "cpu"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", said)
    train_adapter.main()
    report = json.loads((tmp_path / "lora.json").read_text())
    curve = report["training"]["curve"]
    assert curve[-1][1] < 0.9 * curve[0][1]
    assert {"bare", "tuned", "rounded", "answers", "sha256"} <= set(report)
    assert with_adapter(open_source(str(tiny_model(max_position_embeddings=1024))),
                        tmp_path / "lora").merged  # fmt: skip
