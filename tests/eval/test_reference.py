"""The reference target: independent numbers, padding that moves nothing, answers from the cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.cache import Cache
from eval.errors import TargetError, UsageError
from eval.targets.base import Prompt
from eval.targets.checkpoint import locate
from eval.targets.reference import ReferenceTarget, load_tokenizer

WINDOWS = [tuple(range(5, 45)), tuple(range(50, 90)), (7, 9, 11, 13, 200, 201, 4, 4, 4)]


def reference(model: Path, cache: Path | None = None) -> ReferenceTarget:
    return ReferenceTarget(locate(str(model)), device="cpu", cache=Cache(cache))


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


def nothing(count: int) -> None:
    """No progress wanted."""


def test_logprobs_are_transformers_own(tiny_model: Callable[..., Path], loaded: Any) -> None:
    rows = list(reference(tiny_model()).logprobs(WINDOWS))
    for window, found in zip(WINDOWS, rows, strict=True):
        with torch.no_grad():
            logits = loaded(torch.tensor([window])).logits[0, :-1]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_cached_hidden_states_give_the_same_bits(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    cold = list(reference(tiny_model(family), tmp_path).logprobs(WINDOWS))
    assert len(list(tmp_path.rglob("*.tensor"))) == len(WINDOWS)
    warm_target = reference(tiny_model(family), tmp_path)
    warm_target._model.base_model.forward = None  # would fail if the body were run again
    warm_target._can_replay = True
    assert all(map(torch.equal, cold, warm_target.logprobs(WINDOWS)))


def test_left_padding_does_not_change_answers(tiny_model: Callable[..., Path]) -> None:
    """Lengths 1 to 30 in one batch, alone and in another order give the same tokens."""
    prompts = [Prompt(token_ids=tuple(range(5, 6 + n)), max_tokens=12) for n in range(0, 30, 4)]
    target = reference(tiny_model())
    together = target.generate(prompts, [2], nothing)
    alone = [target.generate([prompt], [2], nothing)[0] for prompt in prompts]
    assert together == alone
    assert target.generate(prompts[::-1], [2], nothing) == together[::-1]


def test_answers_are_plain_argmax_and_end_at_their_own_limit(
    tiny_model: Callable[..., Path], loaded: Any
) -> None:
    prompts = [
        Prompt(token_ids=(9, 30, 40), max_tokens=3),
        Prompt(token_ids=(9, 30, 41, 42), max_tokens=9),
    ]
    answers = reference(tiny_model()).generate(prompts, [], nothing)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt.token_ids)
        for _ in range(prompt.max_tokens):
            with torch.no_grad():
                ids.append(int(loaded(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer.token_ids == tuple(ids[len(prompt.token_ids) :])
        assert answer.finish == "length"
    stop = answers[1].token_ids[4]
    stopped = reference(tiny_model()).generate(prompts, [stop], nothing)[1]
    first = answers[1].token_ids.index(stop)
    assert stopped.token_ids == answers[1].token_ids[:first]
    assert stopped.finish == "stop"


def test_sampling_defaults_of_the_model_do_not_touch_greedy_answers(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    copy = shutil.copytree(tiny_model(), tmp_path / "model")
    settings = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 5.0, "max_length": 9}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    prompts = [Prompt(token_ids=(9, 30, 40), max_tokens=8)]
    assert reference(copy).generate(prompts, [2], nothing) == reference(tiny_model()).generate(
        prompts, [2], nothing
    )


def test_answers_come_from_the_cache_one_by_one(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [Prompt(token_ids=(9, 30, 40 + n), max_tokens=4) for n in range(3)]
    first = reference(tiny_model(), tmp_path).generate(prompts[:2], [2], nothing)
    target = reference(tiny_model(), tmp_path)
    asked: list[int] = []
    generate_batch = target._generate_batch
    target._generate_batch = lambda batch, stop: (  # type: ignore[method-assign]
        asked.append(len(batch)) or generate_batch(batch, stop)
    )
    assert target.generate(prompts, [2], nothing)[:2] == first
    assert asked == [1]
    for entry in tmp_path.rglob("*.json"):
        entry.write_text("{garbled")
    assert reference(tiny_model(), tmp_path).generate(prompts[:2], [2], nothing) == first


def test_locating_a_base(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; pass --base"):
        locate("no-such-model")
    with pytest.raises(UsageError, match=r"no config\.json and 0 GGUF files"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"nope")
    with pytest.raises(UsageError, match="not a GGUF file"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF....")
    assert locate(str(tmp_path)).gguf_file == "a.gguf"
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(TargetError, match=r"itself quantized \(gptq\).* with --base$"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nbase_model:\n- owner/float\n---\n# A model\n")
    with pytest.raises(TargetError, match=r"--base \(its model card names owner/float\)$"):
        locate(str(tmp_path))
    one, other = locate(str(tiny_model())), locate(str(tiny_model("qwen2")))
    assert one.kind == "hf"
    assert one.digest != other.digest
    assert one.digest == locate(str(tiny_model())).digest


def test_a_base_without_tokenizer_or_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TargetError, match="no usable tokenizer"):
        load_tokenizer(locate(str(tmp_path)))
    with pytest.raises(TargetError, match="cannot be loaded"):
        reference(tmp_path)


@pytest.mark.parametrize("how", ["written into", "replaced", "removed"])
def test_a_base_that_changes_while_it_is_read(
    tiny_model: Callable[..., Path], tmp_path: Path, how: str
) -> None:
    """Its digest would be another model's, and so would all that is stored under it."""
    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    found = locate(str(base))
    weights = base / "model.safetensors"
    data = weights.read_bytes()
    if how == "written into":
        with weights.open("r+b") as file:
            file.seek(-4, 2)
            file.write(bytes(4))
    else:
        weights.rename(base / "old")
        if how == "replaced":
            weights.write_bytes(data)
    with pytest.raises(
        TargetError, match="cannot be loaded" if how == "removed" else "changed while"
    ):
        ReferenceTarget(found, device="cpu", cache=Cache(tmp_path / "cache"))


def test_a_base_that_is_overwritten_once_it_was_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_model(), tmp_path / "base"))
    loaded = reference(base)
    before = [rows.clone() for rows in loaded.logprobs(WINDOWS)]
    with (base / "model.safetensors").open("r+b") as file:
        file.seek(file.seek(0, 2) // 2)
        file.write(bytes(2000))
    for rows, again in zip(before, loaded.logprobs(WINDOWS), strict=True):
        assert torch.equal(rows, again)


def test_a_file_that_is_written_and_given_its_old_time(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = locate(str(shutil.copytree(tiny_model(), tmp_path / "base")))
    found.require_unchanged()
    weights = tmp_path / "base" / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    weights.write_bytes(bytes(weights.stat().st_size))
    os.utime(weights, ns=times)
    with pytest.raises(TargetError, match="changed while it was read"):
        found.require_unchanged()
