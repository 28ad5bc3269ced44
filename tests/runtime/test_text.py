"""runtime.text: exact incremental detokenizing, stop strings, chat templates, one BOS."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text import ChatTemplateError, TextError, TextProcessor, TextStream
from runtime.text.pieces import read_pieces
from tests.runtime.server.tiny_tokenizers import STRICT, byte_level, sentencepiece

SINGLE_BYTES = [bytes([i]) for i in range(256)]
WORDS = [b"alpha", b" beta", b" gam", b"ma", b" b", b"eta gamma delta", b"", b" "]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(byte_level(tmp_path_factory.mktemp("chatml")))


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    directory = tmp_path_factory.mktemp("strict")
    return TextProcessor.load(byte_level(directory, bos=True, template=STRICT))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(sentencepiece(tmp_path_factory.mktemp("llama2")))


def play(stream: TextStream, ids: list[int], sizes: list[int]) -> list[str]:
    """Push `ids` in portions of the given sizes (then the rest), collect what is sent."""
    sent, at = [], 0
    for size in [*sizes, len(ids)]:
        sent.append(stream.push(ids[at : at + size]))
        at += size
        if stream.stopped is not None:
            return sent
    return [*sent, stream.finish()]


@given(data=st.binary(max_size=40), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_bytes_of_any_kind_come_out_as_one_decode_would_give(data: bytes, sizes: list[int]) -> None:
    sent = play(TextStream(SINGLE_BYTES), list(data), sizes)
    assert "".join(sent) == data.decode("utf-8", "replace")


@given(text=st.text(max_size=30))
def test_no_replacement_character_while_a_character_is_unfinished(text: str) -> None:
    stream = TextStream(SINGLE_BYTES)
    sent = [stream.push([byte]) for byte in text.encode()]
    assert "".join(sent) == text
    assert stream.finish() == ""


def test_a_character_cut_off_by_the_end_is_replaced_once() -> None:
    stream = TextStream(SINGLE_BYTES)
    assert stream.push(list("a\U0001f600".encode()[:-1])) == "a"
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([0, 1, 2, 3], ["a g"], "alpha bet"),  # spans tokens, begins and ends inside them
        ([0, 1, 2, 3], ["beta gamma"], "alpha "),
        ([0, 1, 2, 3], ["alpha"], ""),  # the first characters of the answer
        ([0, 1, 2, 3], ["gamma", "a gam"], "alpha bet"),  # the other one completes first
        ([0, 4, 5], ["gamma", "beta gamma"], "alpha "),  # both in one token: earliest begins first
        ([0, 1, 2, 3], ["omega"], "alpha beta gamma"),
    ],
)
def test_stop_strings_cut_before_the_match(ids: list[int], stop: list[str], text: str) -> None:
    for size in (1, 2, len(ids)):
        stream = TextStream(WORDS, stop)
        sent = play(stream, ids, [size] * len(ids))
        assert "".join(sent) == text
        assert (stream.stopped is not None) == (text != "alpha beta gamma")


def test_include_stop_sends_the_match_and_nothing_after_it() -> None:
    stream = TextStream(WORDS, ["a g"], include_stop=True)
    assert "".join(play(stream, [0, 1, 2, 3], [1] * 4)) == "alpha beta g"
    assert stream.stopped == "a g"
    assert stream.num_tokens == 3


@given(
    ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=12),
    stop=st.lists(st.sampled_from(["a", "a b", "beta g", "mama", " gam", "aa", "ta"]), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=12),
)
@settings(max_examples=300)
def test_text_does_not_depend_on_the_step_size(
    ids: list[int], stop: list[str], sizes: list[int]
) -> None:
    one, many = TextStream(WORDS, stop), TextStream(WORDS, stop)
    text = "".join(play(one, ids, [1] * len(ids)))
    assert "".join(play(many, ids, sizes)) == text
    assert (one.stopped, one.num_tokens) == (many.stopped, many.num_tokens)
    assert not any(s in text for s in stop)
    settled = one.take_settled()
    assert b"".join(settled).decode() == text
    assert len(settled) == one.num_tokens == len(many.take_settled())


def test_tokens_settle_only_with_their_text() -> None:
    stream = TextStream(WORDS, ["beta gamma"])
    assert stream.push([0]) == "alpha"
    assert stream.take_settled() == [b"alpha"]
    assert stream.push([1]) == " "
    assert stream.take_settled() == []
    assert stream.push([7]) == ""
    assert stream.push([0]) == "beta alpha"
    assert stream.take_settled() == [b" beta", b" ", b"alpha"]


TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_characters="\u2581"), st.sampled_from("ab \n"))
)


@given(text=TEXTS)
def test_byte_level_round_trip(chatml: TextProcessor, text: str) -> None:
    ids = chatml.encode(text, add_special_tokens=False)
    assert chatml.decode(ids, skip_special_tokens=False) == text
    stream = chatml.stream(skip_special_tokens=False)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == text
    assert b"".join(chatml.token_bytes(i) for i in ids) == text.encode()


@given(text=TEXTS)
def test_sentencepiece_round_trip(llama2: TextProcessor, text: str) -> None:
    if "<s>" in text or "<|" in text:
        return
    ids = llama2.encode(text)
    assert llama2.decode(ids) == text
    stream = llama2.stream()
    streamed = "".join(stream.push([i]) for i in ids) + stream.finish()
    assert streamed == (" " + text if text else text)


def test_special_tokens_are_not_shown(chatml: TextProcessor) -> None:
    ids = chatml.encode("a<|im_end|>b")
    assert chatml.decode(ids) == "ab"
    assert chatml.token_bytes(ids[1]) == b"<|im_end|>"


def test_ids_beyond_the_tokenizer_add_nothing(chatml: TextProcessor) -> None:
    assert chatml.stream().push([chatml.vocab_size + 5]) == ""
    assert chatml.token_bytes(chatml.vocab_size + 5) == b""


@pytest.mark.parametrize("name", ["strict", "llama2"])
def test_exactly_one_bos(name: str, request: pytest.FixtureRequest) -> None:
    text: TextProcessor = request.getfixturevalue(name)
    for ids in (
        text.encode("hi"),
        text.encode("<s>hi"),
        text.encode_chat([{"role": "user", "content": "hi"}]),
    ):
        assert ids.count(0) == 1
        assert ids[0] == 0


def test_no_bos_where_the_tokenizer_adds_none(chatml: TextProcessor) -> None:
    assert 0 not in chatml.encode("hi")
    assert 0 not in chatml.encode_chat([{"role": "user", "content": "hi"}])


def test_the_template_answers_a_bad_conversation(strict: TextProcessor) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        strict.encode_chat(twice)
    with pytest.raises(ChatTemplateError, match="not alien"):
        strict.encode_chat([{"role": "alien", "content": "a"}])


def test_template_hash_follows_the_template(chatml: TextProcessor, strict: TextProcessor) -> None:
    assert chatml.chat_template_sha256 not in (None, strict.chat_template_sha256)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages.nope() }}"])
def test_a_broken_template_is_found_at_load(tmp_path: Path, template: str) -> None:
    with pytest.raises(TextError, match="broken chat template"):
        TextProcessor.load(byte_level(tmp_path, template=template))


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    text = TextProcessor.load(byte_level(tmp_path, template=None))
    assert text.chat_template_sha256 is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        text.encode_chat([{"role": "user", "content": "hi"}])


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=str(tmp_path)):
        TextProcessor.load(tmp_path)


_BEFORE = [
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
]
_BYTES = {"type": "ByteLevel"}


def test_sentencepiece_steps_before_a_byte_level_one_change_nothing() -> None:
    vocab = {"a": 0, "\u0120b": 1, "\u00e4": 2}
    chain = {"type": "Sequence", "decoders": [*_BEFORE, _BYTES]}
    found = read_pieces(vocab, {3: "<end>"}, frozenset({3}), chain)
    assert found == read_pieces(vocab, {3: "<end>"}, frozenset({3}), _BYTES)
    assert found.raw == [b"a", b" b", b"\xe4", b"<end>"]


@pytest.mark.parametrize("token", ["\u2581a", "<0x0A>"])
def test_such_a_chain_is_refused_where_it_would_change_a_token(token: str) -> None:
    chain = {"type": "Sequence", "decoders": [*_BEFORE, _BYTES]}
    with pytest.raises(ValueError, match="byte-level BPE and SentencePiece"):
        read_pieces({token: 0}, {}, frozenset(), chain)
