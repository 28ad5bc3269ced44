"""A run report for people: the terminal summary, report.md and the model card README.md.

The same figures three times, computed in `quant.report`; nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quant.coverage import Coverage
from quant.module_names import join_layers
from quant.plan_table import duration, size
from quant.report import ModuleResult, RunReport, by_kind, chosen_candidate

Rows = list[tuple[str, ...]]
_KIND_HEADER = ("modules", "scheme", "method", "count", "error mean", "error max", "size")
_PLAN_HEADER = ("", "plan", "size", "KL predicted", "KL measured")
_WORST_HEADER = ("module", "scheme", "method", "error")


def render_summary(report: RunReport) -> Group:
    """What to print when a run is done; fits 100 columns."""
    parts: list[RenderableType] = [_named_lines(facts(report))]
    if report.plans:
        parts += [Text(), _table(_PLAN_HEADER, plan_rows(report)), Text(PLAN_MEANING, style="dim")]
    if report.quantized:
        parts += [Text(), _table(_KIND_HEADER, kind_rows(report))]
        parts += [Text(), Text("largest errors", style="bold"), *_worst(report)]
    parts += [Text(f"warning: {w}", style="yellow") for w in report.all_warnings()]
    return Group(*parts)


def report_markdown(report: RunReport) -> str:
    """report.md."""
    report = without_paths(report)
    lines = [f"# {report.artifact}", "", *_bullets(facts(report)), ""]
    if report.plans:
        lines += ["## Plans", "", PLAN_MEANING, ""]
        lines += [*_pipe_table(_PLAN_HEADER, plan_rows(report)), ""]
    if report.quantized:
        lines += ["## Error by kind of module", "", error_meaning(report), ""]
        lines += [*_pipe_table(_KIND_HEADER, kind_rows(report)), ""]
        lines += ["## Largest errors", "", *_pipe_table(_WORST_HEADER, worst_rows(report)), ""]
    if report.fallbacks:
        lines += ["## Fell back", "", *_bullets(fallback_rows(report)), ""]
    if report.coverage is not None:
        lines += ["## Calibration", "", *_coverage_tables(report.coverage), ""]
    warnings = list(report.all_warnings())
    if warnings:
        lines += ["## Warnings", "", *(f"- {warning}" for warning in warnings), ""]
    return "\n".join(lines)


def model_card(report: RunReport, recipe_text: str) -> str:
    """README.md of the artifact."""
    report = without_paths(report)
    return "\n".join(
        [
            f"# {report.artifact}",
            "",
            f"{report.architecture}, made from `{report.model}` with the recipe "
            f"`{report.recipe}`. {_layout(report)}",
            "",
            *_bullets(facts(report)),
            "",
            _judging(report),
            "",
            "```",
            *report.next_steps(report.artifact),
            "```",
            "",
            "The licence and intended use are those of the original model.",
            "",
            "## Recipe",
            "",
            "```yaml",
            recipe_text.rstrip(),
            "```",
            "",
            "Per-module errors and calibration coverage: `report.md` and `report.json`.",
            "",
        ]
    )


def _layout(report: RunReport) -> str:
    if not report.quantized:
        return "Nothing is quantized: any engine that reads safetensors can load this directory."
    return (
        "The weights are stored in the compressed-tensors layout, so engines that read that "
        "format can load this directory."
    )


def _judging(report: RunReport) -> str:
    if not report.runtime_serves:
        return (
            "Whether it is good enough is not said here, and `evaluate` cannot say it: it judges "
            "on our own runtime, which does not run mixtures of experts. Measure it on the engine "
            "that serves it."
        )
    return (
        "Whether it is good enough is not said here: run `evaluate` on this directory. Its "
        "verdict is written to `gate.json`, next to this file."
    )


def facts(report: RunReport) -> list[tuple[str, str]]:
    """The run in a few named lines."""
    found = [("model", f"{report.model} ({report.architecture})"), ("recipe", report.recipe)]
    if report.adapter:
        found.insert(
            1, ("adapter", f"{report.adapter} (LoRA), merged in float32 before quantizing")
        )
    found.append(("size", _size(report)))
    if report.quantized:
        count = f"{len(report.quantized)} of {len(report.modules)} linear modules"
        found.append(("quantized", f"{count}, {report.bits_per_weight():.2f} bits per weight"))
    if report.coverage is not None:
        found.extend(coverage_facts(report.coverage))
    found.append(("time", _time(report)))
    found.append(("memory", f"{size(report.peak_memory_bytes)} at the peak"))
    if judged := [m for m in report.quantized if m.candidates]:
        chosen = Counter(chosen_candidate(m.candidates) for m in judged)
        found.append(("auto chose", ", ".join(f"{k} {n:,}" for k, n in chosen.most_common())))
    if learned := {m.layer_error for m in report.quantized if m.layer_error}:
        before, after = (sum(errors) / len(learned) for errors in zip(*learned, strict=True))
        text = f"layers' outputs off by {before:.2%}, then {after:.2%}, on windows kept apart"
        found.append(("gradient", text))
    if report.fallbacks:
        found.append(("fell back", f"{len(report.fallbacks)} modules, listed in report.md"))
    return found


def render_coverage(coverage: Coverage) -> Group:
    """What of the calibration rows is used, for the terminal."""
    warnings = (Text(f"warning: {warning}", style="yellow") for warning in coverage.warnings())
    return Group(_named_lines(coverage_facts(coverage)), *warnings)


def coverage_facts(coverage: Coverage) -> list[tuple[str, str]]:
    """Calibration in up to three named lines: counts, sources, lengths."""
    found = [("calibration", coverage_line(coverage))]
    if len(coverage.by_source) > 1:
        sources = (f"{name} {s.samples:,}" for name, s in coverage.by_source.items())
        found.append(("sources", f"{', '.join(sources)} samples"))
    buckets = (f"{_bucket(bound)}: {count:,}" for bound, count in coverage.length_histogram.items())
    found.append(("lengths", f"tokens {', '.join(buckets)}"))
    return found


def _bucket(bound: int) -> str:
    return f"up to {bound:,}" if bound else "more"


def coverage_line(coverage: Coverage) -> str:
    """`16 samples, 16,384 tokens from 12 of 40 rows (3 blank, 1 duplicate)`."""
    dropped = [
        f"{count:,} {word}"
        for count, word in (
            (coverage.blank, "blank"),
            (coverage.duplicates, "duplicate"),
            (coverage.not_drawn, "not needed"),
            (coverage.windowed, "cut into windows"),
        )
        if count
    ]
    more = f" ({', '.join(dropped)})" if dropped else ""
    return (
        f"{coverage.samples:,} samples, {coverage.tokens:,} tokens from {coverage.used:,} of "
        f"{coverage.rows:,} rows{more}"
    )


def error_meaning(report: RunReport) -> str:
    """What the error columns measure."""
    bases = {m.error_of for m in report.modules if m.rel_error is not None}
    if bases == {"outputs"}:
        return "Error: relative change of a module's outputs on the calibration tokens."
    if bases == {"weights"}:
        return "Error: relative change of a module's weight (its method looks at no tokens)."
    return (
        "Error: relative change of a module's outputs, or of its weight where its method looks at "
        "no tokens."
    )


def kind_rows(report: RunReport) -> Rows:
    """One row per kind of quantized module and scheme."""
    return [_kind_row(name, kind) for (name, _), kind in by_kind(report.quantized).items()]


def _kind_row(name: str, kind: Sequence[ModuleResult]) -> tuple[str, ...]:
    errors = [m.rel_error for m in kind if m.rel_error is not None]
    mean = f"{sum(errors) / len(errors):.2%}" if errors else "-"
    methods = sorted({m.method for m in kind})
    return (
        name,
        kind[0].scheme,
        "+".join(methods),
        str(len(kind)),
        mean,
        f"{max(errors):.2%}" if errors else "-",
        size(sum(m.bytes for m in kind)),
    )


PLAN_MEANING = (
    "KL in nats per token: predicted from the sensitivity of each group to plain rounding; "
    "measured on calibration windows that were held out."
)


def plan_rows(report: RunReport) -> Rows:
    """One row per plan that was built: predicted and measured."""
    return [
        (
            ", ".join(filter(None, (plan.verdict, "chosen" if plan.chosen else ""))),
            f"{plan.bits_per_weight:.3f} bits per weight",
            size(plan.artifact_bytes),
            f"{plan.predicted_kl:.4f}",
            f"{plan.kl:.4f}" + (f" +- {plan.kl_error:.4f}" if plan.kl_error is not None else ""),
        )
        for plan in report.plans
    ]


def worst_rows(report: RunReport) -> Rows:
    """The five modules with the largest error."""
    return [(m.module, m.scheme, m.method, f"{m.rel_error or 0:.2%}") for m in report.worst()]


def fallback_rows(report: RunReport) -> list[tuple[str, str]]:
    """Modules that fell back, joined over layers, by reason."""
    reasons: dict[str, list[str]] = {}
    for m in report.fallbacks:
        reasons.setdefault(f"{m.fallback} (made with {m.method})", []).append(m.module)
    return [(", ".join(join_layers(names)), reason) for reason, names in reasons.items()]


def without_paths(report: RunReport) -> RunReport:
    """The report with names for paths: where things lay on one machine is nothing to pass on."""
    model = Path(report.model)
    return replace(
        report,
        model=model.name if model.is_absolute() else report.model,
        artifact=Path(report.artifact).name,
    )


def _size(report: RunReport) -> str:
    before, after = report.unpacked_bytes or report.source_bytes, report.artifact_bytes
    change = f" ({before / after:.2f}x smaller)" if after < before else ""
    packed = f"; the GGUF has {size(report.source_bytes)}" if report.unpacked_bytes else ""
    return f"{size(before)} -> {size(after)}{change}{packed}"


def _time(report: RunReport) -> str:
    stages = [f"{name} {duration(s)}" for name, s in report.seconds.items()]
    split = f" ({', '.join(stages)})" if len(stages) > 1 else ""
    resumed = f"; {report.resumed_layers} layers resumed" if report.resumed_layers else ""
    device = f"{report.device}, {report.threads} thread{'s' if report.threads > 1 else ''}"
    device += f" in each of {report.ranks} ranks" if report.ranks > 1 else ""
    return f"{duration(report.total_seconds)}{split} on {device}{resumed}"


def _named_lines(lines: Sequence[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in lines:
        grid.add_row(name, Text(text))
    return grid


def _worst(report: RunReport) -> Iterator[RenderableType]:
    yield _table(_WORST_HEADER, worst_rows(report))
    yield Text(error_meaning(report), style="dim")
    for names, reason in fallback_rows(report):
        yield Text(f"fell back: {names}: {reason}", style="yellow")


def _table(header: Sequence[str], rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index >= 3 else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _bullets(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"- **{name}**: {text}" for name, text in pairs]


def _pipe_table(header: Sequence[str], rows: Rows) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _coverage_tables(coverage: Coverage) -> Iterator[str]:
    yield from _bullets(_coverage_facts(coverage))
    yield ""
    sources: Rows = [
        (name, f"{s.rows:,}", f"{s.used:,}", f"{s.samples:,}", f"{s.tokens:,}")
        for name, s in coverage.by_source.items()
    ]
    yield from _pipe_table(("source", "rows", "used", "samples", "tokens"), sources)
    yield ""
    lengths: Rows = [
        (_bucket(bound), str(count)) for bound, count in coverage.length_histogram.items()
    ]
    yield from _pipe_table(("tokens", "samples"), lengths)


def _coverage_facts(coverage: Coverage) -> list[tuple[str, str]]:
    langs = ", ".join(f"{lang} {count}" for lang, count in coverage.by_lang.items())
    langs = "" if list(coverage.by_lang) == ["unknown"] else langs
    ignored = ", ".join(f"{key} ({count} rows)" for key, count in coverage.ignored_keys.items())
    found = [
        ("used", coverage_line(coverage)),
        ("files", ", ".join(coverage.files)),
        ("samples by language", langs),
        ("tokens from the chat template", f"{coverage.template_share:.0%}"),
        ("tokens in tails too short to keep", f"{coverage.tail_tokens:,}"),
        ("keys ignored", ignored),
    ]
    return [(name, text) for name, text in found if text]
