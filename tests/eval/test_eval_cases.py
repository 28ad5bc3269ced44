"""Known faults of evaluation tools: templates and BOS twice (E01), windows weighted wrongly (E03),
perplexities without a unit (E05), batch and order that change scores (E07). test_case_table.py says
where the others are."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from suite_rows import document_row, item_row, write_rows

from eval.amounts import Amounts
from eval.api import make_job, run
from eval.cache import Cache
from eval.metrics import divergence
from eval.metrics.divergence import WindowScores
from eval.progress import Silent
from eval.runner import score_windows
from eval.stats import Sampling
from eval.suites import Document, load_suite
from eval.targets.base import Answer, Prompt
from eval.targets.checkpoint import locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import ReferenceTarget
from eval.targets.server import ServerTarget, Service
from eval.windows import SHORTEST, Window, cut
from eval.workload import prepare
from runtime.config import EngineConfig
from runtime.server.app import create_app
from runtime.text import TextProcessor
from tests.runtime.server.in_process import served
from tests.runtime.server.scripted import Script
from tests.runtime.server.tiny_tokenizers import STRICT, byte_level


def silent(count: int) -> None:
    pass


class Bridge:
    """httpx.Client's one call that is used, over an app in this process, from another thread."""

    def __init__(self, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    @contextmanager
    def stream(self, method: str, url: str, json: Any) -> Iterator[httpx.Response]:
        yield self._wait(self._client.request(method, url, json=json))

    def _wait(self, coroutine: Any) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


@pytest.mark.parametrize("has_template", [True, False])
def test_e01_the_same_ids_in_process_over_chat_and_over_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_template: bool
) -> None:
    """A template that writes BOS, a tokenizer that adds one: exactly one on every path."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    template = STRICT if has_template else None
    text = TextProcessor.load(byte_level(folder, bos=True, template=template))
    write_rows(tmp_path / "text.jsonl", [document_row(0)])
    choice = {"kind": "choice", "choices": [" yes", " no"], "gold": 0}
    asks = [{"role": "user", "content": "Is it so?"}]
    choice_row = {"id": "c", "source": "s", "lang": "en", "messages": asks, "checks": [choice]}
    write_rows(tmp_path / "tasks.jsonl", [item_row(0), item_row(1), choice_row])
    suite = load_suite(tmp_path)
    work = prepare(suite, text, Amounts(num_windows=1, window_tokens=32))
    written = [p for p in work.prompts if not p.choices]
    [weighed] = [p for p in work.prompts if p.choices]
    got: list[tuple[int, ...]] = []

    async def main() -> None:
        with served(text, Script(say=(5, 2))) as (model, engine):
            add = engine.add
            engine.add = lambda request: (got.append(tuple(request.prompt)), add(request))[1]
            model.client.run()
            transport = httpx.ASGITransport(create_app(model))
            async with httpx.AsyncClient(transport=transport) as client:
                bridge = Bridge(client, asyncio.get_running_loop())
                monkeypatch.setattr(httpx, "Client", lambda **options: bridge)
                await asyncio.to_thread(ask)

    def ask() -> None:
        target = ServerTarget(Service(url="http://test", concurrency=1), text, "d" * 64)
        target.generate(written, silent)
        target.choose([weighed], silent)

    asyncio.run(main())
    whole = [(*weighed.token_ids, *choice) for choice in weighed.choices]
    assert got == [*(p.token_ids for p in written), *whole]
    assert all(ids.count(0) == 1 and ids[0] == 0 for ids in got)


def test_e03_perplexity_is_the_total_over_the_count_not_a_mean_of_windows() -> None:
    """Windows of 63, 64 and 9 scored tokens; the short one must not weigh as much."""
    rng = np.random.default_rng(0)
    scores = []
    for size in (63, 64, 9):
        window = Window(document=f"d{size}", source="s", lang="en", start=0,
                        token_ids=tuple(range(size + 1)), num_context=1)  # fmt: skip
        base = rng.random(size) * (20 if size == 9 else 2)
        scores.append(WindowScores(window=window, base_nll=base, candidate_nll=base + 0.1,
                                   kl=base * 0, agrees=base * 0))  # fmt: skip
    found = {m.name: m for m in divergence.measure(scores, Sampling(draws=1000))}
    every = np.concatenate([score.base_nll for score in scores])
    ratio = found["perplexity_ratio"]
    assert ratio.num_scored == len(every) == 136
    assert ratio.base == pytest.approx(float(np.exp(every.sum() / 136)))
    assert ratio.base != pytest.approx(
        float(np.exp(np.mean([s.base_nll.mean() for s in scores]))), rel=0.05
    )
    assert ratio.estimate == pytest.approx(float(np.exp(0.1)))


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 32, 64])
def test_e03_every_token_but_the_first_is_scored_once_at_any_width(
    taught_model: Path, dense_artifact: Callable[[Path], Path], width: int
) -> None:
    """500 tokens: the count, and the total against a plain loop over forwards of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(taught_model, dtype=torch.float32).eval()
    text = TextProcessor.load(taught_model)
    ids = text.encode("The supplier delivers within thirty days, and pays. " * 60)[:500]
    document = Document(id="d", source="s", lang="en", text=text.decode(ids))
    tokens = text.encode(document.text)
    windows = cut(document, text, width)
    engine = EngineTarget(dense_artifact(taught_model), EngineConfig())
    reference = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    scores = score_windows(windows, reference, engine, Silent())
    scored = {w.start + i for w in windows for i in range(w.num_context, len(w.token_ids))}
    left = (len(tokens) - 1) % (width - 1)
    end = len(tokens) - (left if left + 1 < SHORTEST else 0)
    assert scored == set(range(1, end))
    assert sum(len(s.base_nll) for s in scores) == end - 1
    expected, place = 0.0, 1
    while place < end:
        stop = min(place + width - 1, end)
        logits = model(torch.tensor([tokens[place - 1 : stop]])).logits[0].double()
        for row, token in zip(logits.log_softmax(-1), tokens[place:stop], strict=False):
            expected -= float(row[token])
        place = stop
    for found in (
        sum(s.base_nll.sum() for s in scores),
        sum(s.candidate_nll.sum() for s in scores),
    ):
        assert found == pytest.approx(expected, rel=1e-5)


def test_e05_a_perplexity_says_how_it_was_computed(
    taught_model: Path, dense_artifact: Callable[[Path], Path], suite_dir: Path, cache_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Unit, windows, BOS, data and the base's own value by the same code in the same run."""
    job = make_job(
        dense_artifact(taught_model), None, None, suite=suite_dir, engine=EngineConfig(),
        amounts=Amounts(num_windows=24, window_tokens=48, num_items=6), cache=cache_dir,
    )  # fmt: skip
    written = run(job, out=tmp_path / "out", stamp=False)
    report = json.loads(written.json.read_text())
    unit = report["method"]["unit"]
    for said in ("per token", "share no scored token", "BOS", "scored once", "total NLL / tokens"):
        assert said in unit
    assert report["method"]["window_tokens"] == 48
    assert len(report["suite"]["sha256"]["text.jsonl"]) == 64
    found = report["measurements"]["perplexity_ratio"]
    assert found["base"] == pytest.approx(found["candidate"], rel=1e-4)
    assert found["num_tokens"] == 24 * 47

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(taught_model, dtype=torch.float32).eval()
    text = TextProcessor.load(taught_model)
    nll = []
    for window in prepare(load_suite(suite_dir), text, job.amounts).windows:
        ids = torch.tensor([window.token_ids])
        with torch.no_grad():
            rows = model(ids).logits[0, :-1].double().log_softmax(-1)
        nll += (-rows.gather(1, ids[0, 1:, None])[:, 0]).tolist()
    assert found["base"] == pytest.approx(float(np.exp(np.mean(nll))), rel=1e-5)


def test_e07_batch_size_and_order_change_nothing(
    taught_model: Path, dense_artifact: Callable[[Path], Path]
) -> None:
    """Prompts of very unequal length, so that padding on the wrong side would show."""
    text = TextProcessor.load(taught_model)
    prompts = []
    for number in range(12):
        messages = [{"role": "user", "content": f"Case {number * 37 % 100}? " + "so " * number**2}]
        prompts.append(Prompt(token_ids=tuple(text.encode_chat(messages)), max_tokens=24))
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    base = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    engine = EngineTarget(dense_artifact(taught_model), EngineConfig())

    def by_base(asked: list[Prompt], rows: int) -> list[Answer]:
        base.limits = replace(base.limits, rows=rows)
        return base.generate(asked, engine.stop_ids, silent)

    alone = by_base(prompts, 1)
    assert by_base(prompts, 2) == by_base(prompts, 16) == alone
    shuffled = by_base([prompts[i] for i in order], 5)
    assert [shuffled[order.index(i)] for i in range(len(prompts))] == alone
    crowd = engine.generate([prompts[i] for i in order], silent)
    one_by_one = [engine.generate([prompt], silent)[0] for prompt in prompts]
    assert [crowd[order.index(i)] for i in range(len(prompts))] == one_by_one


def test_e07_likelihoods_of_text_do_not_depend_on_the_batch(
    taught_model: Path, dense_artifact: Callable[[Path], Path]
) -> None:
    text = TextProcessor.load(taught_model)
    windows = [tuple(text.encode("The fee is due in " + "some " * n)) for n in range(2, 34, 2)]
    reference = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    engine = EngineTarget(dense_artifact(taught_model), EngineConfig())
    rows = list(reference.logprobs(windows))
    alone = [engine.score([w], [r])[0].nll for w, r in zip(windows, rows, strict=True)]
    order = list(range(len(windows)))
    random.Random(2).shuffle(order)
    for size in (2, 16):
        for at in range(0, len(order), size):
            part = order[at : at + size]
            found = engine.score([windows[i] for i in part], [rows[i] for i in part])
            for i, scores in zip(part, found, strict=True):
                assert scores.nll == pytest.approx(alone[i], abs=1e-4)
    together = reference.logprobs_together([windows[i] for i in order])
    for i, found_rows in zip(order, together, strict=True):
        assert torch.allclose(found_rows, rows[i], atol=1e-4)


def test_e07_likelihoods_of_choices_agree_with_a_plain_forward(
    taught_model: Path, dense_artifact: Callable[[Path], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(taught_model, dtype=torch.float32).eval()
    text = TextProcessor.load(taught_model)
    prompts = [
        Prompt(token_ids=tuple(text.encode(f"The fee {'of it ' * n}is")), max_tokens=0,
               choices=tuple(tuple(text.encode(c)) for c in (" due", " payable within days", ".")))
        for n in (0, 3, 11)
    ]  # fmt: skip
    base = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    engine = EngineTarget(dense_artifact(taught_model), EngineConfig())
    answers = zip(
        prompts, base.choose(prompts, silent), engine.choose(prompts, silent), strict=True
    )
    for prompt, by_base, by_engine in answers:
        expected = [plain(model, prompt.token_ids, choice) for choice in prompt.choices]
        assert by_base.choice_logprobs == pytest.approx(expected, abs=1e-4)
        assert by_engine.choice_logprobs == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def plain(model: Any, context: tuple[int, ...], choice: tuple[int, ...]) -> float:
    """Token by token, each from a forward of its own."""
    total = 0.0
    for at in range(len(choice)):
        logits = model(torch.tensor([[*context, *choice[:at]]])).logits[0, -1]
        total += float(logits.double().log_softmax(-1)[choice[at]])
    return total
