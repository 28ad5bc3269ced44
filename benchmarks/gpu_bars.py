"""What the GPU engine must reach, and the table that says where it stands (README).

The bars are for one NVIDIA H200 and the Llama-3.1-8B shape, 1024 tokens in and 256 out per
sequence, lm_head and KV in bfloat16 unless the row says otherwise. The figures of vLLM 0.26.0 were
measured on the same card with the same work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_rows import newest

HARDWARE = "NVIDIA H200"
SHAPE = "llama-3.1-8b"
BEGIN, END = "<!-- gpu-results -->", "<!-- /gpu-results -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure to reach. `vllm` is None where the peer was not measured.

    is_lower_better: a time or a share. is_strict: the bar itself does not pass.
    """

    label: str
    metric: str
    scheme: str
    batch: int
    must: float
    goal: float
    vllm: str | None
    kv_dtype: str = "bf16"
    cache: str | None = None
    is_lower_better: bool = False
    is_strict: bool = False

    def is_met(self, value: float, bar: float) -> bool:
        if self.is_lower_better:
            return value < bar if self.is_strict else value <= bar
        return value >= bar


def _decode(scheme: str, batch: int, must: float, goal: float, vllm: str | None,
            kv_dtype: str = "bf16") -> Bar:  # fmt: skip
    kv = ", FP8 KV" if kv_dtype == "fp8" else ""
    return Bar(
        label=f"decode, {_SCHEMES[scheme]}{kv}, batch {batch}, tok/s",
        metric="decode_tok_s",
        scheme=scheme,
        batch=batch,
        must=must,
        goal=goal,
        vllm=vllm,
        kv_dtype=kv_dtype,
    )


def _prefill(scheme: str, must: float, goal: float, vllm: str | None) -> Bar:
    label = f"prefill, {_SCHEMES[scheme]}, 16 x 2048 tokens, tok/s"
    return Bar(label=label, metric="prefill_tok_s", scheme=scheme, batch=16, must=must, goal=goal,
               vllm=vllm)  # fmt: skip


_SCHEMES = {"w4a16": "W4A16", "fp8": "FP8", "w8a8": "W8A8"}
BARS = (
    _decode("w4a16", 1, 400, 500, "262"),
    _decode("w4a16", 8, 2_900, 3_400, "1,940"),
    _decode("w4a16", 32, 7_500, 8_500, "5,976"),
    _decode("w4a16", 64, 10_000, 11_500, "8,445"),
    _decode("w4a16", 128, 13_500, 15_000, "12,181"),
    _decode("w4a16", 256, 15_500, 17_000, "14,668"),
    _decode("w4a16", 128, 15_500, 18_000, "13,164", kv_dtype="fp8"),
    _decode("w4a16", 256, 20_000, 23_000, "16,359", kv_dtype="fp8"),
    _decode("fp8", 1, 340, 420, "283"),
    _decode("fp8", 64, 11_000, 12_500, "10,246"),
    _decode("fp8", 256, 16_500, 18_000, "15,790"),
    _decode("w8a8", 1, 340, 420, None),
    _decode("w8a8", 64, 11_000, 12_500, None),
    _decode("w8a8", 256, 16_500, 18_000, None),
    _prefill("w4a16", 45_800, 48_000, "45,750"),
    _prefill("fp8", 64_100, 75_000, "64,010"),
    _prefill("w8a8", 45_000, 64_000, None),
    Bar(label="first token of a 2048-token prompt, W4A16, ms", metric="ttft_ms", scheme="w4a16",
        batch=1, must=49, goal=46, vllm="49.9", is_lower_better=True),
    Bar(label="fresh process to first answer, kernel cache cold, s", metric="startup_s",
        scheme="w4a16", batch=1, must=40, goal=20, vllm="81-100", cache="cold",
        is_lower_better=True),
    Bar(label="fresh process to first answer, kernel cache warm, s", metric="startup_s",
        scheme="w4a16", batch=1, must=15, goal=8, vllm="57", cache="warm", is_lower_better=True),
    Bar(label="KV tokens at 0.90 of the memory, W4A16", metric="kv_tokens", scheme="w4a16",
        batch=1, must=970_700, goal=975_000, vllm="970,624"),
    Bar(label="no graph in flight, batch 1, % of the time", metric="gpu_idle_pct", scheme="w4a16",
        batch=1, must=3, goal=1, vllm=None, is_lower_better=True, is_strict=True),
)  # fmt: skip
_LENGTHS = {"decode_tok_s": (1024, 256), "prefill_tok_s": (2048, 1), "ttft_ms": (2048, 1)}
_GROUPS = {"w4a16": 128, "fp8": "channel", "w8a8": "channel"}


def counts(row: Mapping[str, Any], bar: Bar) -> bool:
    """Whether a row is a figure for this bar: same work, whole model, head in bfloat16."""
    extra = row["extra"]
    lengths = _LENGTHS.get(bar.metric)
    return (
        (row["metric"], row["scheme"], row["kv_dtype"], row["batch"])
        == (bar.metric, bar.scheme, bar.kv_dtype, bar.batch)
        and (row["shape"], row["hardware"]) == (SHAPE, HARDWARE)
        and extra.get("lm_head") == "bf16"
        and extra.get("layers") is None
        and not extra.get("deterministic")
        and extra.get("cache") == bar.cache
        and extra.get("group", _GROUPS.get(bar.scheme)) == _GROUPS.get(bar.scheme)
        and (lengths is None or (extra.get("input"), extra.get("output")) == lengths)
    )


def figures(rows: Iterable[dict[str, Any]]) -> list[tuple[Bar, dict[str, Any] | None]]:
    """Each bar with the newest row that counts for it, or None."""
    latest = list(reversed(newest(rows)))
    return [(bar, next((row for row in latest if counts(row, bar)), None)) for bar in BARS]


def render(rows: Iterable[dict[str, Any]]) -> str:
    """The table in Markdown, between its markers."""
    lines = [
        "| Llama-3.1-8B shape on one H200 | must | goal | vLLM 0.26.0 | Weighbridge | measured |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for bar, row in figures(rows):
        ours, where = "not measured", ""
        if row is not None:
            ours = _shown_value(bar, row["value"])
            where = f"{row['date'][:10]}, {row['commit'][:8]}"
        lines.append(
            f"| {bar.label} | {_number(bar.must)} | {_number(bar.goal)} | {bar.vllm or '-'} "
            f"| {ours} | {where} |"
        )
    return "\n".join([BEGIN, *lines, END]) + "\n"


def standing(rows: Iterable[dict[str, Any]]) -> tuple[str, bool]:
    """A line per bar for the terminal, how far the figure is from it; whether every must is met."""
    lines, all_met = [], True
    for bar, row in figures(rows):
        if row is None:
            lines.append(f"missing  {bar.label}: must {_number(bar.must)}")
            all_met = False
            continue
        value, is_met = row["value"], bar.is_met(row["value"], bar.must)
        all_met = all_met and is_met
        state = "goal" if bar.is_met(value, bar.goal) else "must" if is_met else "below"
        lines.append(
            f"{state:<8} {bar.label}: {_number(value)}, {100 * (value / bar.must - 1):+.1f} % of "
            f"must {_number(bar.must)}, {100 * (value / bar.goal - 1):+.1f} % of goal "
            f"{_number(bar.goal)}"
        )
    return "\n".join(lines), all_met


def _shown_value(bar: Bar, value: float) -> str:
    """Bold where the bar is met, a star more where the goal is."""
    shown = _number(value)
    if not bar.is_met(value, bar.must):
        return shown
    return f"**{shown}**" + (" *" if bar.is_met(value, bar.goal) else "")


def _number(value: float) -> str:
    if value >= 100 and float(value) != int(value):
        value = round(value)
    return f"{value:,.0f}" if float(value) == int(value) else f"{value:,.3g}"
