"""report.html: one file, from report.json alone, whatever the model and the texts are called."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from quant import report_html as page
from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import ArtifactError
from quant.artifact.scheme import WeightScheme
from quant.calibration import windows_from_token_lists
from quant.errors import PipelineError
from quant.outliers import input_outliers, weight_outliers
from quant.report import KVLayerResult, ModuleResult, RunReport, SensitivityRow, report_json

EVIL = "<script>alert(1)</script>\"'&$x^2$\x1b"


def make_report(layers: int = 4, name: str = "tiny") -> RunReport:
    modules = tuple(
        ModuleResult(
            module=f"model.layers.{i}.{leaf}", shape=(64, 64), scheme="w4a16-g32", method="gptq",
            bytes=2400, rel_error=0.1, damping=1.0 if i == 3 else 0.1, tokens_seen=96,
            fallback=f"not possible: {name}" if i == 1 else None, dead_columns=int(i == 2),
            weight_outliers=(2.0, 3.0, 4.0), input_outliers=((5, 30.0), (6, 8.0)),
        )
        for i in range(layers)
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj",
                     "mlp.gate_proj", "self_attn.k_proj", "self_attn.v_proj")
    )  # fmt: skip
    return RunReport(
        model=name, architecture=name, recipe=name, artifact="out/art", artifact_digest="ab" * 32,
        dtype="bfloat16", source_bytes=4_000_000, artifact_bytes=1_250_000, modules=modules,
        seconds={"layers": 63.0, name: 3.0}, peak_memory_bytes=1_500_000_000,
        coverage=windows_from_token_lists([[1, 2, 3]] * 3).coverage, warnings=(name,),
        recipe_text=f"scheme: w4a16 # {name}\n", overrides={"seed": name}, tools={name: name},
        sensitivity=(
            SensitivityRow(group=name, scheme="w4a16", loss=0.01, chosen=True),
            SensitivityRow(group=name, scheme=name, loss=0.001),
            SensitivityRow(group="model.layers.1.mlp.down_proj", scheme="w4a16", loss=0.02),
            SensitivityRow(
                group="model.layers.1.mlp.down_proj", scheme="w8a16", loss=0.004, chosen=True
            ),
        ),
        kv_layers=tuple(
            KVLayerResult(
                layer=i, cache="fp8" if i else "bfloat16", key_scales=(1.25,), value_scales=(1.0,),
                error=0.01 / (i + 1), error_of_one=0.02, longest_text=4096,
            )
            for i in range(layers)
        ),
    )  # fmt: skip


def html_of(report: RunReport) -> str:
    pytest.importorskip("matplotlib")
    return page.html_files(report)["report.html"]


class Tags(HTMLParser):
    """Every tag and every attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(key, value or "") for key, value in attrs]


def test_the_page_says_what_happened() -> None:
    text = re.sub(r"\s+", " ", html_of(make_report()))
    for part in (
        "tiny (tiny), prepared with the recipe tiny.",
        "4 MB became 1.25 MB, 4.69 bits per weight in 28 of 28 linear modules.",
        "<title>mlp.down_proj, layer 3: 20.0 dB</title>",
        "evaluate art",
        "fell back to gptq: not possible: tiny",
        "damping raised to 1 because",
        "1 inputs were always 0",
        "5 (30.0)",
        "3 samples, 9 tokens from 3 of 3 rows",
        "ab" * 32,
    ):
        assert part in text, part
    assert text.count("<svg") == 8
    assert text.count('role="img"') == text.count('aria-label="') - 1 == 8


def test_the_page_is_one_file_and_trusts_no_name() -> None:
    text = html_of(make_report(name=EVIL))
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.tags
    assert "link" not in tags.tags
    for key, value in tags.attributes:
        assert not key.startswith("on")
        if key in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,"))
    ids = [value for key, value in tags.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text


def test_mixed_schemes_smoothing_and_remarks_are_told_once() -> None:
    """What differs in layer and number alone is one line, not one for every module."""
    notes = ("alpha 0.5 into x, output error 0.2 -> 0.1, 3 dead channels left alone",
             "none: folding into x would change the output by 0.02",
             "none: folding into x would change the output by 0.3")  # fmt: skip
    plain = make_report()
    modules = tuple(
        replace(
            module, smoothing=notes[i % 3], scheme="w8a16-channel" if i < 7 else module.scheme,
            dead_columns=i // 7, fallback=None,
        )
        for i, module in enumerate(plain.modules)
    )  # fmt: skip
    text = re.sub(r"\s+", " ", html_of(replace(plain, modules=modules)))
    for part in (
        "not smoothed: folding into x would change the output by 0.02 to 0.3<",
        "1 to 3 inputs were always 0",
        "<title>mlp.down_proj, layer 0: w8a16-channel</title>",
        "w4a16-g32 (21)",
        '<td class="n">0.50</td><td class="n">0.50</td>',
    ):
        assert part in text, part
    assert text.count("not smoothed") == 1
    assert "No fallback" not in text


def test_colours_can_be_read_in_light_and_dark() -> None:
    """WCAG 2.1, 1.4.3: text stands out by 4.5 to 1 at least."""
    style = html_of(make_report()).split("</style>")[0]
    themes = re.findall(r":root \{([^}]*)\}", style)
    assert len(themes) == 3
    for theme in themes:
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", theme))
        for ink, paper in (
            ("ink", "paper"), ("ink", "pale"), ("soft", "paper"), ("soft", "pale"),
            ("link", "paper"), ("ink", "warn-paper"),
        ):  # fmt: skip
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_thirty_layers_take_less_than_three_seconds() -> None:
    html_of(make_report())
    report = make_report(30)
    began = time.process_time()
    html_of(report)
    assert time.process_time() - began < 3


def test_eighty_layers_are_quick_and_small() -> None:
    html_of(make_report())
    report = make_report(80)
    began = time.process_time()
    text = html_of(report)
    assert len(text) < 2_000_000
    assert time.process_time() - began < 10


def test_a_lean_install_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_NEEDED", ("jinja2", "no_such_library"))
    assert page.html_files(make_report()) == {}
    advice = page.how_to_install(page.missing_libraries())
    assert "no_such_library (pip install" in advice
    assert "quantize report ART" in advice
    with pytest.raises(PipelineError, match="no_such_library"):
        page.rerender(Path("art"))


def test_an_artifact_has_its_page_and_it_can_be_made_anew(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    pytest.importorskip("matplotlib")
    path = artifact(tiny_model("llama"), scheme="w4a16", group_size=32, method="gptq")
    made = (path / "report.html").read_text()
    first = json.loads((path / "report.json").read_text())["modules"][0]
    assert len(first["input_outliers"]) == 3
    (path / "report.html").unlink()
    digest = open_artifact(path).digest
    assert page.rerender(path).read_text() == made
    assert open_artifact(path).digest == digest
    assert verify(path) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"report_version": "9.0"}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises((PipelineError, ArtifactError), match=r"report\.json"):
        page.read_report(tmp_path / "report.json")


def test_the_report_of_an_evaluation_is_sent_to_its_command(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"format_version": "1.3", "gates": {}}')
    with pytest.raises(PipelineError, match="`evaluate report DIR`"):
        page.read_report(tmp_path / "report.json")


def test_a_report_of_the_older_version_is_shown(tmp_path: Path) -> None:
    """Whatever has a default may be missing; warnings stand once."""
    pytest.importorskip("matplotlib")
    data = json.loads(report_json(make_report()))
    for key in [f.name for f in fields(RunReport) if f.name not in ("coverage", "warnings")]:
        if is_optional(RunReport, key):
            del data[key]
    for module in data["modules"]:
        for key in [f.name for f in fields(ModuleResult) if is_optional(ModuleResult, f.name)]:
            module.pop(key)
    data["report_version"] = "1.0"
    (tmp_path / "report.json").write_text(json.dumps(data))
    page.rerender(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Activations were not looked at" in text
    assert text.count("<li>tiny</li>") == 1


def is_optional(kind: Any, name: str) -> bool:
    found = next(f for f in fields(kind) if f.name == name)
    return found.default is not MISSING or found.default_factory is not MISSING


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model: Input should be a valid string"),
        ({"modules": [{"module": 3}]}, r"modules.0.module: .*\(found 3\), and 4 more"),
        ({"seconds": {"a": "b"}}, "seconds.a: Input should be a valid number"),
        ({"coverage": []}, "coverage: "),
        ({"sensitivity": [{}]}, "sensitivity.0.group: Field required"),
    ],
)
def test_a_damaged_report_is_refused_with_the_path_to_the_fault(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = {**json.loads(report_json(make_report())), **change}
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(PipelineError, match=rf"report\.json: {message}"):
        page.read_report(tmp_path / "report.json")


def test_figures_that_are_no_numbers_are_shown_all_the_same() -> None:
    """Nothing was measured, an error is infinite, a run took no time: a page, not a traceback."""
    odd = replace(
        make_report().modules[0], rel_error=math.nan, weight_outliers=(0.0, 0.0, 0.0),
        input_outliers=(), bytes=0,
    )  # fmt: skip
    far = replace(odd, module="model.layers.1.mlp.up_proj", rel_error=math.inf)
    report = replace(make_report(), modules=(odd, far), seconds={}, artifact_bytes=0)
    assert "</html>" in html_of(report)
    assert "</html>" in html_of(replace(report, modules=(), sensitivity=()))


def test_results_survive_the_journal() -> None:
    for module in make_report().modules:
        assert ModuleResult.from_json(json.loads(json.dumps(asdict(module)))) == module


def test_outliers_by_hand() -> None:
    scheme = WeightScheme(num_bits=4, kind="int", symmetric=True, strategy="group", group_size=32)
    weight = torch.zeros(3, 32)
    weight[0] = 1.0
    weight[1, 4] = 2.0
    middle, high, most = weight_outliers(weight, scheme)
    assert (middle, high, most) == pytest.approx((1.0, 32**0.5, 32**0.5))
    assert weight_outliers(torch.zeros(2, 32), scheme) == (0.0, 0.0, 0.0)
    found = input_outliers(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 7.0]))
    assert found == ((1, 2.0), (0, 0.5))
    assert input_outliers(torch.zeros(2), torch.zeros(2)) == ()
