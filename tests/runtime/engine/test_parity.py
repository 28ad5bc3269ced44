"""Dense float32 gives transformers' greedy tokens: alone, in a crowd, in chunks, preempted, cached.

Raw logits agree to 1e-3. Greedy output is right exactly when each token is the reference's most
likely one after the tokens before it, so the reference computes every engine's output in one plain
forward pass. A near-tie (top-2 gap below 1e-4 in the reference's own logits) may go either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_engine import run

from quant.gguf_reading import parsed_for_transformers
from runtime.config import EngineConfig
from runtime.engine.batch import Piece
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem
from runtime.model.kv_cache import KVCache
from runtime.request import Request, SamplingParams

NEAR_TIE = 1e-4
LOGIT_TOLERANCE = 1e-3
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3"]
MODES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunk 32": {"max_num_batched_tokens": 32},
    "preempted": {"num_blocks": 28, "max_num_batched_tokens": 48},
    "no cache, blocks of 8": {"num_blocks": 320, "enable_prefix_caching": False, "block_size": 8},
}

Prompts = list[tuple[int, ...]]
Outputs = list[list[int]]


def reference_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    if path.suffix == ".gguf":
        with parsed_for_transformers(path):
            return AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            ).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def departures(model: Any, prompts: Prompts, outputs: Outputs) -> list[str]:
    """Places where an output is not the reference's greedy choice, proven near-ties left out."""
    found: list[str] = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = torch.tensor([[*prompt, *output]])
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        for step in (best - chosen >= NEAR_TIE).nonzero().flatten().tolist():
            gap = (best[step] - chosen[step]).item()
            found.append(f"prompt {i}, token {step}: {gap:.2g} below the reference's choice")
    return found


def open_engine(path: Path, **config: Any) -> Engine:
    settings = {"max_num_seqs": 16, "num_gpu_blocks_override": 160, **config}
    return poisoned(Engine.from_artifact(path, EngineConfig(**settings)))


def variant(engine: Engine, **changes: Any) -> Engine:
    """A fresh engine on the same weights, some of its resolved values changed."""
    resolved = replace(engine.resolved, **changes)
    decoder = engine.runner.decoder
    kv = KVCache(
        decoder.spec, resolved.num_blocks, resolved.block_size, resolved.kv_cache_dtype, "cpu"
    )
    return poisoned(Engine(decoder, kv, resolved, engine.artifact))


def poisoned(engine: Engine) -> Engine:
    """The KV pool full of NaN: whatever reads a slot before it is written shows."""
    for pool in engine.runner._kv.pools:
        pool[: engine.resolved.num_blocks].fill_(float("nan"))
    return engine


def greedy(engine: Engine, prompts: Prompts, num_tokens: int) -> Outputs:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(id=str(i), prompt=p, sampling=sampling) for i, p in enumerate(prompts)]
    done = run(engine, requests)
    return [done[str(i)].token_ids for i in range(len(prompts))]


def outputs_by_mode(
    base: Engine, prompts: Prompts, num_tokens: int, modes: Iterable[str], num_alone: int
) -> dict[str, Outputs]:
    """Every mode cold and warm, and `num_alone` prompts one by one in a cold engine."""
    found: dict[str, Outputs] = {}
    for mode in modes:
        engine = variant(base, **MODES[mode])
        found[f"{mode}, cold"] = greedy(engine, prompts, num_tokens)
        found[f"{mode}, warm"] = greedy(engine, prompts, num_tokens)
        assert (engine.stats().preemptions_total > 0) == (mode == "preempted")
        assert mode == "preempted" or (engine.stats().prefix_hits_total > 0) == ("no" not in mode)
    engine = variant(base, enable_prefix_caching=False)
    one_by_one = [greedy(engine, [prompt], num_tokens)[0] for prompt in prompts[:num_alone]]
    found["alone"] = one_by_one + found["all at once, cold"][num_alone:]
    return found


def check_parity(model: Any, prompts: Prompts, found: dict[str, Outputs]) -> None:
    """The reference looks at each distinct output once."""
    checked: set[tuple[int, tuple[int, ...]]] = set()
    for mode, outputs in found.items():
        new = [i for i, output in enumerate(outputs) if (i, tuple(output)) not in checked]
        checked |= {(i, tuple(outputs[i])) for i in new}
        wrong = departures(model, [prompts[i] for i in new], [outputs[i] for i in new])
        assert wrong == [], mode


@torch.inference_mode()
def largest_logit_error(model: Any, engine: Engine, prompts: Prompts) -> float:
    """max |engine logits - reference logits|, every position, the prompts in one paged batch."""
    pieces: list[Piece] = []
    first_block = 0
    for prompt in prompts:
        last_block = first_block - (-len(prompt) // engine.resolved.block_size)
        blocks = range(first_block, last_block)
        pieces.append(Piece(tokens=prompt, start=0, block_ids=blocks, wanted=range(len(prompt))))
        first_block = last_block
    assert first_block <= engine.resolved.num_blocks
    ours = engine.runner.logits(engine.runner.forward(pieces))
    theirs = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def random_prompts(vocab: int) -> Prompts:
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 15, 16, 17, 31, 48, 64, 75, 90, 110]
    return [tuple(torch.randint(0, vocab, (n,), generator=generator).tolist()) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_each_family(
    family: str, tiny_model: Callable[..., Path], dense_artifact: Callable[[Path], Path]
) -> None:
    source = tiny_model(family)
    path = dense_artifact(source)
    model = reference_model(source)
    prompts = random_prompts(model.config.vocab_size)
    engine = open_engine(path)
    assert largest_logit_error(model, variant(engine), prompts) < LOGIT_TOLERANCE
    check_parity(model, prompts, outputs_by_mode(engine, prompts, 64, MODES, num_alone=4))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_reference_models(
    family: str, tiny_model: Callable[..., Path], dense_artifact: Callable[[Path], Path]
) -> None:
    source = tiny_model(family)
    model = reference_model(source)
    items = []
    for prompt in random_prompts(model.config.vocab_size)[1:]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, :-1]
        items.append(ScoreItem(token_ids=prompt, reference=logits.log_softmax(-1)))
    engine = open_engine(dense_artifact(source), max_num_batched_tokens=100)
    for item, score in zip(items, engine.score(items), strict=True):
        assert item.reference is not None
        targets = torch.tensor(item.token_ids[1:]).unsqueeze(1)
        expected = -item.reference.gather(1, targets).squeeze(1)
        assert score.nll == pytest.approx(expected.tolist(), abs=1e-4)
        assert max(score.kl or [1.0]) < 1e-6


@pytest.mark.parametrize("caching", [True, False])
def test_d07_fp8_kv_with_prefix_hits_and_chunks(
    caching: bool, tiny_model: Callable[..., Path], dense_artifact: Callable[[Path], Path]
) -> None:
    """Every path reads the stored, rounded values: each run equals the cold one in fp8."""
    path = dense_artifact(tiny_model("llama"))
    prompt = random_prompts(300)[-1][:100]
    variants = [
        prompt,
        prompt,
        prompt,
        (*prompt, 5),
        (*prompt, *range(40)),
        prompt[:96],
        prompt[:97],
    ]
    base = open_engine(path, kv_cache_dtype="fp8")
    assert base.resolved.kv_cache_dtype == "fp8"
    expected = [greedy(variant(base), [p], 24)[0] for p in variants]
    for chunk in (16, 32, 2048):
        engine = variant(base, max_num_batched_tokens=chunk, enable_prefix_caching=caching)
        assert [greedy(engine, [p], 24)[0] for p in variants] == expected
        assert (engine.stats().prefix_hits_total > 0) == caching


TOPICS = [
    "the termination clause of a supply agreement",
    "a refund for a parcel that never arrived",
    "how the tides follow the moon",
    "a Python function that merges two sorted lists",
    "bread that does not rise",
    "the governing law of a contract between two countries",
    "why the sky is dark at night",
    "a polite reminder of an unpaid invoice",
]
FRAMES = [
    "Explain {} in two sentences.",
    "The following note is about {}. It was written for readers in a hurry, so it begins with "
    "what matters most, then gives one example, and ends with a question.\n\n",
    "Q: What should everybody know about {}?\nA:",
    '{{"topic": "{}", "language": "en", "summary": "',
]


def real_prompts(path: Path) -> Prompts:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [frame.format(topic) for topic in TOPICS for frame in FRAMES]
    return [tuple(tokenizer(text)["input_ids"]) for text in texts]


@pytest.mark.e2e
def test_the_real_model(smollm2_gguf: Path, dense_artifact: Callable[[Path], Path]) -> None:
    path = dense_artifact(smollm2_gguf)
    engine = open_engine(path)
    prompts = real_prompts(path)[2::8]
    found = outputs_by_mode(engine, prompts, 20, ["all at once"], num_alone=1)
    small = variant(engine, num_blocks=5, max_num_batched_tokens=32)
    found["preempted, chunk 32"] = greedy(small, prompts, 20)
    assert small.stats().preemptions_total > 0
    model = reference_model(smollm2_gguf)
    check_parity(model, prompts, found)
    assert largest_logit_error(model, variant(engine), prompts) < LOGIT_TOLERANCE


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_in_all_modes(
    smollm2_gguf: Path, dense_artifact: Callable[[Path], Path]
) -> None:
    path = dense_artifact(smollm2_gguf)
    prompts = real_prompts(path)
    assert len(prompts) == 32
    found = outputs_by_mode(open_engine(path), prompts, 64, MODES, num_alone=32)
    check_parity(reference_model(smollm2_gguf), prompts, found)
