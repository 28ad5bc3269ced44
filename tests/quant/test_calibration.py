"""Calibration rows: nothing is lost in silence, nothing depends on order, errors name the line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quant.calibration import Calibration, load_calibration, windows_from_token_lists
from quant.coverage import shared_prefix
from quant.errors import CalibrationError
from quant.recipe_keys import CalibrationSettings

BOS = 1


class ByteTokenizer:
    """One id per byte (offset 2); plain text starts with BOS, chat markup does not."""

    bos_token_id = BOS
    chat_template: str | None = "yes"
    template_head = ""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        head = [BOS] if kwargs["add_special_tokens"] else []
        body = [BOS if piece == "\0" else 2 + ord(piece) % 250 for piece in text]
        return {"input_ids": head + body}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs["tokenize"] is False
        assert kwargs["add_generation_prompt"] is False
        if conversation[0]["role"] == "assistant":
            raise ValueError("conversation must start with a user")
        turns = (f"<{m['role']}>{m.get('content') or 'call'}</s>" for m in conversation)
        tools = "".join(f"<tool>{tool['name']}" for tool in kwargs["tools"] or ())
        return self.template_head + tools + "".join(turns)


class BosTemplateTokenizer(ByteTokenizer):
    template_head = "\0"  # the template itself emits BOS


class PlainTokenizer(ByteTokenizer):
    chat_template = None


Load = Callable[..., Calibration]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def run(*files: str | bytes | list[Any], tokenizer: Any = None, **settings: Any) -> Calibration:
        paths = [tmp_path / f"file{i}.jsonl" for i in range(len(files))]
        for path, content in zip(paths, files, strict=True):
            if isinstance(content, list):
                content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_calibration(
            paths, tokenizer or ByteTokenizer(), CalibrationSettings(**settings)
        )

    return run


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": turns}


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(count))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "file0.jsonl: empty"),
        ("\n\n \n", "all 3 are blank"),
        ('{"text": ""}\n{"text": "  "}\n', "all 2 are blank"),
        ('{"messages": []}', "all 1 are blank"),
        ('{"messages": [{"role": "user", "content": ""}]}', "all 1 are blank"),
        ('{"prompt": "", "completion": ""}', "all 1 are blank"),
        ('{"content": "x"}', 'file0.jsonl:1: found the fields content, expected {"text"}'),
        ('{"Text": "x"}', "'Text' looks like 'text'"),
        ('{"prompt": "x"}', "found the fields prompt"),
        ('{"text": "x", "messages": []}', "mix two shapes"),
        ('{"text": "a"}\n{"text: "b"}', "file0.jsonl:2: not JSON: Expecting ':' delimiter"),
        ('{"text": "a"}\n["b"]', "file0.jsonl:2: found a list"),
        ('[\n{"text": "a"}\n]', "the whole row on one line"),
        ('{"text": 3}', "file0.jsonl:1: text: found a number"),
        ('{"text": null}', "text: found null"),
        ('{"text": "a", "source": []}', "source: found a list"),
        ('{"messages": "hi"}', "messages: found a string"),
        ('{"messages": [{"content": "hi"}]}', "messages[0]: expected an object with a role"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: has no content"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "tools: found a number"),
        (b'{"text": "a"}\n{"text": "\xff"}', "file0.jsonl:2: not UTF-8: byte 0xff at column 11"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        ("[" * 100_000, "file0.jsonl:1: not JSON"),
    ],
)
def test_unusable_rows_name_file_line_and_fields(
    load: Load, content: str | bytes, part: str
) -> None:
    """cases.md A13 and its kin."""
    with pytest.raises(CalibrationError) as caught:
        load(content)
    assert part in str(caught.value)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    settings = CalibrationSettings()
    with pytest.raises(CalibrationError, match="is a directory"):
        load_calibration(tmp_path, ByteTokenizer(), settings)
    with pytest.raises(CalibrationError, match="cannot read"):
        load_calibration(tmp_path / "none.jsonl", ByteTokenizer(), settings)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_logs_are_for_sample(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    path.write_bytes(b"PAR1")
    with pytest.raises(CalibrationError, match=f"quantize sample --from .*log.{suffix}"):
        load_calibration(path, ByteTokenizer(), CalibrationSettings())


def test_bom_crlf_and_a_missing_last_newline_are_fine(load: Load) -> None:
    made = load('\ufeff{"text": "ab"}\r\n\r\n{"text": "cd"}')
    assert sorted(map(len, made.samples)) == [3, 3]
    assert (made.coverage.rows, made.coverage.blank) == (3, 1)


def test_a_gzipped_file_is_the_file(tmp_path: Path) -> None:
    text = "".join(json.dumps({"text": words(i, 20)}) + "\n" for i in range(4)).encode()
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    settings = CalibrationSettings()
    one, two = (load_calibration(path, ByteTokenizer(), settings) for path in (plain, packed))
    assert one.digest == two.digest
    assert one.coverage.by_source == two.coverage.by_source
    for damaged in (gzip.compress(text)[:-9], text, b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\xff" * 9):
        packed.write_bytes(damaged)
        with pytest.raises(
            CalibrationError, match=r"a\.jsonl\.gz: cannot read calibration rows: \w"
        ):
            load_calibration(packed, ByteTokenizer(), settings)


def test_one_huge_line_is_cut_into_windows(load: Load) -> None:
    made = load([{"text": words(0, 20_000)}], samples=10_000, max_tokens=512)
    assert sum(map(len, made.samples)) > 100_000
    assert made.coverage.windowed == 1


def test_long_rows_are_windowed_not_dropped(load: Load) -> None:
    """cases.md A11: 20 rows of 600 tokens under a limit of 512."""
    rows = [{"text": words(i, 200)[:599]} for i in range(20)]
    made = load(rows, samples=100, max_tokens=512)
    assert made.coverage.used == 20
    assert made.coverage.windowed == 20
    assert made.coverage.tail_tokens == 20 * (599 - 511)
    assert [len(s) for s in made.samples] == [512] * 20
    assert all(s[0] == BOS for s in made.samples)


@given(st.integers(1, 300), st.integers(2, 64))
def test_windows_lose_nothing_but_a_short_tail(length: int, max_tokens: int) -> None:
    from quant.calibration import _split

    ids = [BOS, *range(10, 10 + length)]
    windows, tail = _split(ids, max_tokens, [BOS])
    body = [token for window in windows for token in window[1:]]
    assert body + ids[len(ids) - tail :][:tail] == ids[1:]
    assert all(len(w) <= max_tokens and w[0] == BOS for w in windows)
    assert tail < max(1, 0.25 * max_tokens)


def test_bos_is_never_doubled(load: Load) -> None:
    rows = [chat("hi", "there"), {"text": "plain"}, chat(words(1, 40), "ok")]
    made = load(rows, tokenizer=BosTemplateTokenizer(), max_tokens=64)
    assert all(s[0] == BOS and BOS not in s[1:] for s in made.samples)
    bare = load([chat("hi", "there")])
    assert BOS not in bare.samples[0]


def test_prompt_and_completion_are_a_chat_where_there_is_a_template(load: Load) -> None:
    row = {"prompt": "ab", "completion": "cd"}
    assert load([row]).samples == load([chat("ab", "cd")]).samples
    assert load([row], tokenizer=PlainTokenizer()).samples == load([{"text": "abcd"}]).samples
    turns = chat("ab", "cd")["messages"]
    lists = {"prompt": turns[:1], "completion": turns[1:]}
    assert load([lists]).samples == load([chat("ab", "cd")]).samples


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        chat("a", "b"),
    ],
)
def test_tools_reach_the_template_whatever_the_shape(load: Load, row: dict[str, Any]) -> None:
    found = load([{**row, "tools": [{"name": "f"}]}])
    assert len(found.samples[0]) == len("<tool>f<user>a</s><assistant>b</s>")
    assert load([{"text": "a", "tools": [{"name": "f"}]}]).coverage.ignored_keys == {"tools": 1}


def test_arguments_of_tool_calls_are_not_quoted_twice(
    load: Load, tiny_model: Callable[..., Path]
) -> None:
    """As JSON text (OpenAI's logs) or as an object they make the same tokens; other text stays."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )

    def rendered(arguments: Any) -> str:
        call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
        row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
        return str(tokenizer.decode(load([row], tokenizer=tokenizer).samples[0]))

    assert rendered('{"city": "Oslo"}') == rendered({"city": "Oslo"}) == 'find {"city": "Oslo"}'
    assert rendered("Oslo") == 'find "Oslo"'
    assert rendered("[1]") == 'find "[1]"'


def test_chat_rows_need_a_template_that_takes_them(load: Load) -> None:
    with pytest.raises(CalibrationError, match=r"file0.jsonl:1: .* no chat template"):
        load([chat("hi")], tokenizer=PlainTokenizer())
    wrong = {"messages": [{"role": "assistant", "content": "hi"}]}
    with pytest.raises(CalibrationError, match=r"file0.jsonl:2: .*must start with a user"):
        load([chat("hi"), wrong])


def mixed_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(60):
        rows.append({"text": words(i, 3 + i), "source": "contracts", "lang": "en", "id": str(i)})
    for i in range(6):
        rows.append({**chat(words(100 + i, 5), "yes"), "source": "service", "lang": "zh"})
    return rows


def test_order_of_rows_and_files_does_not_matter(load: Load) -> None:
    """cases.md A27: content and seed decide."""
    rows = mixed_rows()
    first = load(rows, samples=16, max_tokens=64)
    shuffled = random.Random(1).sample(rows, len(rows))
    second = load(shuffled[:20], shuffled[20:], samples=16, max_tokens=64)
    assert first.digest == second.digest
    assert first.samples == second.samples
    assert first.digest != load(rows, samples=16, max_tokens=64, seed=1).digest


def test_sources_and_lengths_get_their_share(load: Load) -> None:
    made = load(mixed_rows(), samples=12, max_tokens=1024)
    by_source = made.coverage.by_source
    assert [by_source[s].samples for s in ("contracts", "service")] == [6, 6]
    # Contract rows have 18 to 372 ids; two of each third are drawn.
    lengths = sorted(len(s) for s in made.samples)[-6:]
    assert [sum(low < n <= low + 120 for n in lengths) for low in (15, 135, 255)] == [2, 2, 2]


def test_a_second_window_only_when_every_row_gave_one(load: Load) -> None:
    rows = [{"text": words(i, 100)} for i in range(4)]
    four = load(rows, samples=4, max_tokens=64).coverage
    assert (four.used, four.samples, four.windows_left) == (4, 4, 4 * 10 - 4)
    six = load(rows, samples=6, max_tokens=64).coverage
    assert (six.used, six.samples) == (4, 6)


def test_exact_duplicates_count_once(load: Load) -> None:
    rows = [{"text": "same", "source": "b"}, {"text": "same", "source": "a"}, {"text": "other"}]
    made = load(rows * 3)
    assert (made.coverage.duplicates, made.coverage.samples) == (7, 2)
    assert set(made.coverage.by_source) == {"a", "file0"}
    assert any("7 of 9 rows are exact duplicates" in w for w in made.coverage.warnings())
    assert load(rows * 3).digest == load(rows).digest


def test_the_account_of_rows_adds_up(load: Load) -> None:
    rows = [*mixed_rows(), {"text": ""}, mixed_rows()[0], {"text": "x", "extra": 1, "more": 2}]
    coverage = load(rows, samples=8, max_tokens=32).coverage
    dropped = coverage.blank + coverage.duplicates + coverage.not_drawn
    assert coverage.rows == dropped + coverage.used == len(rows)
    assert coverage.ignored_keys == {"extra": 1, "more": 1}
    assert sum(coverage.length_histogram.values()) == coverage.samples == 8
    assert sum(s.tokens for s in coverage.by_source.values()) == coverage.tokens
    assert set(coverage.by_lang) <= {"en", "zh", "unknown"}
    assert json.loads(json.dumps(coverage.to_json()))["rows"] == coverage.rows


def test_template_share(load: Load) -> None:
    """cases.md A17: what the template adds is known and, when it dominates, said."""
    coverage = load([chat("hi", "ok")]).coverage
    markup = len("<user></s><assistant></s>")
    assert coverage.template_share == pytest.approx(markup / (markup + 4))
    assert any("chat template" in warning for warning in coverage.warnings())
    assert load([{"text": "no template here"}]).coverage.template_share == 0


def test_a_prefix_shared_by_many_rows_is_reported(load: Load) -> None:
    """cases.md A17: 64 rows that repeat a 200-token system prompt."""
    system = words(9, 100)[:200]
    made = load([{"text": system + words(i, 4)} for i in range(64)])
    shared = made.coverage.shared_prefix
    assert shared is not None
    assert (shared.samples, shared.tokens) == (64, 201)
    assert any("begin with the same 201 tokens" in w for w in made.coverage.warnings())
    assert load([{"text": words(i, 60)} for i in range(64)]).coverage.shared_prefix is None
    assert shared_prefix([[5] * 40]) is None


def test_fewer_samples_than_asked_is_said(load: Load) -> None:
    warnings = list(load([{"text": "a"}], samples=256).coverage.warnings())
    assert any("256 samples were asked for and the data gives 1" in w for w in warnings)


def test_ready_made_windows() -> None:
    made = windows_from_token_lists([[1, 2, 3], [4, 5]])
    assert made.samples == [[1, 2, 3], [4, 5]]
    assert made.coverage.tokens == 5
    assert made.digest != windows_from_token_lists([[1, 2], [3, 4, 5]]).digest
    with pytest.raises(CalibrationError, match="at least one"):
        windows_from_token_lists([[]])


def test_with_a_real_tokenizer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    path = tmp_path / "c.jsonl"
    rows = [chat("What is due?", "30 days."), {"text": "The fee. " * 400}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = load_calibration(path, tokenizer, CalibrationSettings(max_tokens=64, samples=8))
    assert len(made.samples) == 8
    assert max(map(len, made.samples)) == 64
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chats = [s for s in made.samples if start in s]
    assert [s.count(start) for s in chats] == [2]
