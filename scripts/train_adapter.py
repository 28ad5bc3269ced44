"""Train the business adapter: LoRA on a small chat model, by tuning chats without end.

    python scripts/train_adapter.py --model MODEL --out recipes/adapters/business [--seconds N]

One pass over distinct chats, loss on what the assistant writes. The number of steps is fixed from
the speed of the first ones so that training ends in time, and is written down: `--steps` repeats a
run on any machine (up to the order of a GPU's sums). Afterwards both models answer the gate half
greedily in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

BEGAN = time.monotonic()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from adapter_answers import ask, grade, prompt_ids, table  # noqa: E402
from adapter_data import Batch, Chunks, batches  # noqa: E402
from adapter_model import LoraLlama, load_base, save_adapter  # noqa: E402

from calib_data.banks import Lang  # noqa: E402
from calib_data.generate import Row, extraction_items  # noqa: E402
from calib_data.records import seeded  # noqa: E402
from calib_data.tools import tool_item  # noqa: E402
from quant.source import open_source  # noqa: E402

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GATE_SEED = 20260101
MEASURED_STEPS = (10, 30)  # these tell the speed
SAVE_EVERY_S = 60
WARMUP, FLOOR = 60, 0.02
CURVE_STEPS = 50  # losses are averaged over as many


@dataclass(kw_only=True)
class Progress:
    """What training has seen so far."""

    steps: int = 0
    tokens: int = 0
    chats: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)


def main() -> None:
    said = arguments()
    torch.manual_seed(said.seed)
    source = open_source(str(said.model))
    tokenizer = source.tokenizer()
    stream = batches(Chunks(tokenizer, seed=said.seed, tokens=said.tokens, chats=said.chats),
                     said.workers)  # fmt: skip
    # The workers start here, before the device is touched, since they are forked.
    stream = itertools.chain([next(stream)], stream)
    device = torch.device(said.device)
    base = load_base(source, device)
    note(f"base loaded; {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}")
    model = LoraLlama(base, rank=said.rank, alpha=said.alpha, seed=said.seed)
    rows = gate_rows(said.gate_n)
    report: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(said).items()}}
    report["bare"] = answer(base, tokenizer, rows[: said.bare_n], "bare model")[0]
    progress = train(model, stream, said, device)
    model.round_factors()
    report["sha256"] = save_adapter(model, said.out, BASE_NAME)
    report["training"] = vars(progress)
    note(f"saved {said.out} sha256 {report['sha256']}")
    write(said.report, report)
    model.set_base()
    report["tuned"], report["answers"] = answer(base, tokenizer, rows, "tuned model")
    write(said.report, report)
    show(report["tuned"])
    weakened(model, tokenizer, rows, said, report)
    write(said.report, report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or model directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--report", type=Path, default=Path("lora.json"))
    parser.add_argument("--seconds", type=float, default=420, help="for everything")
    parser.add_argument("--reserve", type=float, default=60, help="of these, for the answers")
    parser.add_argument("--steps", type=int, default=0, help="instead of as many as fit --seconds")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--alpha", type=int, default=24)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=20480, help="of a batch, padding included")
    parser.add_argument("--chats", type=int, default=1024, help="sorted by length at a time")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--gate-n", type=int, default=960, help="gate tasks to answer")
    parser.add_argument("--bare-n", type=int, default=120, help="of these for the bare model")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    return parser.parse_args()


def note(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def train(
    model: LoraLlama, stream: Any, said: argparse.Namespace, device: torch.device
) -> Progress:
    """AdamW with warm-up and cosine; saves now and then, so that a cut run leaves something."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=said.rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    total, progress = said.steps, Progress()
    began = saved = measured = time.monotonic()
    deadline = math.inf if said.steps else BEGAN + said.seconds - said.reserve
    recent: list[torch.Tensor] = []
    for step in itertools.count():
        if step == MEASURED_STEPS[0]:
            measured = synced(device)
        if step == MEASURED_STEPS[1] and not total:
            total = steps_in_time(synced(device), measured, step, deadline)
            note(f"{total} steps will fit")
        if step >= (total or math.inf) or time.monotonic() > deadline:
            break
        for group in optimizer.param_groups:
            group["lr"] = said.rate * factor(step, total)
        batch = next(stream)
        recent.append(one_step(model, optimizer, batch, device))
        progress.steps, progress.chats = step + 1, progress.chats + len(batch.ids)
        progress.tokens += batch.ids.size
        if len(recent) == CURVE_STEPS or step == 0:
            progress.curve.append((step, torch.stack(recent).mean().item()))
            recent = []
            if len(progress.curve) % 5 == 2:
                speed = progress.tokens / (time.monotonic() - began)
                note(f"step {step} loss {progress.curve[-1][1]:.4f} {speed:,.0f} tokens/s")
        if time.monotonic() - saved > SAVE_EVERY_S:
            saved = time.monotonic()
            note(f"step {step} saved, sha256 {save_adapter(model, said.out, BASE_NAME)[:16]}")
    progress.seconds = synced(device) - began
    last = progress.curve[-1][1] if progress.curve else math.nan
    note(f"{progress.steps} of {total} steps, {progress.chats} chats, {progress.tokens} tokens, "
         f"{progress.seconds:.0f} s, last loss {last:.4f}")  # fmt: skip
    return progress


def one_step(model: LoraLlama, optimizer: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """Mean loss before the step. A gradient that is not finite changes nothing."""
    ids, rows, targets = batch.tensors(device)
    loss = model.losses(ids, rows, targets, torch.bfloat16).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.masked_fill_(~torch.isfinite(norm), 0.0)
    optimizer.step()
    return loss.detach()


def factor(step: int, total: int) -> float:
    """Share of the highest rate: warm-up, then cosine to FLOOR. total 0: not known yet."""
    warm = min(1.0, (step + 1) / WARMUP)
    if not total:
        return warm
    share = min(1.0, step / total)
    return warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def synced(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def steps_in_time(now: float, since: float, step: int, deadline: float) -> int:
    """All steps that fit, three in a hundred kept back."""
    one = (now - since) / (MEASURED_STEPS[1] - MEASURED_STEPS[0])
    return step + max(1, int(0.97 * (deadline - now) / one))


def gate_rows(count: int) -> list[Row]:
    """Gate tasks, the shipped suite first, and one tool task for each eight of them."""
    rows = list(extraction_items(count, GATE_SEED, half="gate"))
    for index in range(count // 8):
        lang: Lang = "zh" if index % 5 == 4 else "en"
        item = tool_item(seeded(GATE_SEED, "gate", "tools", index), "gate", lang)
        row: Row = {"id": f"gate-tools-{index:05d}", "task": "tool_call", "lang": lang}
        rows.append(row | {"messages": item.messages, "gold": item.answer})
    return rows


def answer(
    model: torch.nn.Module, tokenizer: Any, rows: list[Row], what: str
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """The table of means, and each answer with its grades."""
    if not rows:
        return {}, []
    prompts: list[Any] = [row["messages"] for row in rows]
    answers = ask(model, tokenizer, [prompt_ids(tokenizer, messages) for messages in prompts])
    grades = [
        grade(row, one.text) | {"ended": float(one.ended)}
        for row, one in zip(rows, answers, strict=True)
    ]
    found = table(rows, grades)
    if not found["all"]["ended"]:
        note(f"{what}: NO ANSWER ENDED; either it never stops, or its end mark is not known")
    note(f"{what}: n {len(rows)} " + line(found["all"]))
    kept = [
        {"id": row["id"], "text": one.text} | marks
        for row, one, marks in zip(rows, answers, grades, strict=True)
    ]
    return found, kept


def line(means: dict[str, float]) -> str:
    return " ".join(
        f"{key} {100 * means[key]:5.1f} %" for key in ("ended", "valid", "right", "fields")
    )


def show(found: dict[str, dict[str, float]]) -> None:
    for name, means in found.items():
        print(f"  {name:16s} n {means['n']:4.0f}  {line(means)}")


def weakened(
    model: LoraLlama, tokenizer: Any, rows: list[Row], said: argparse.Namespace, report: Any
) -> None:
    """Answers after rounding the weights, while time is left: what a gate should tell apart."""
    part = Random(said.seed).sample(rows, min(len(rows), 240))
    report["rounded"] = {}
    for bits, group in ((8, 0), (4, 32), (4, 128), (3, 128)):
        if time.monotonic() - BEGAN > said.seconds - 8:
            note("no time left for rounded weights")
            return
        model.set_base(partial(rounded, bits=bits, group=group))
        name = f"int{bits} " + (f"g{group}" if group else "per row")
        report["rounded"][name] = answer(model.base[0], tokenizer, part, name)[0]["all"]


def rounded(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric round-to-nearest of [out, in] in groups that divide the row; group 0: the row."""
    size = math.gcd(group, weight.shape[1])
    parts = weight.reshape(weight.shape[0], -1, size)
    most = 2 ** (bits - 1) - 1
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-8) / most
    return ((parts / scale).round().clamp(-most - 1, most) * scale).reshape(weight.shape)


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
