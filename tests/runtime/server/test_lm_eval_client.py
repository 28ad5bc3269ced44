"""lm-eval's own API clients against our server: the scores and texts of its `hf` model come out.

The real engine on a tiny model, over real HTTP; only the processes are threads of this one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

os.environ.setdefault("TQDM_DISABLE", "1")
pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval.api.instance import Instance

from runtime.config import EngineConfig
from runtime.server.app import ModelInfo, ServedModel, create_app
from runtime.server.engine_client import EngineClient
from runtime.server.engine_process import load_engine, serve_commands
from runtime.server.messages import Ready
from runtime.text import TextProcessor

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CONTEXTS = [
    f"Clause {n}: the customer shall pay the fee" + " within thirty days" * n for n in range(8)
]
CONTINUATIONS = [" of the invoice date.", " the", "\u00e9 \u5408\u540c", ' {"amount": 1200}']


@contextmanager
def serving(art: Path, api_key: str | None = None) -> Iterator[str]:
    """The server's URL. Its engine loop and its event loop run on threads of this process."""
    engine, numerics = load_engine(art, EngineConfig(device="cpu"), lambda _: None)
    ours, theirs = Pipe()
    ready = Ready(resolved=engine.resolved, stats=engine.stats(), numerics=numerics)
    loop = threading.Thread(target=serve_commands, args=(theirs, engine))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config("", log_level="error", lifespan="off"))

    async def run() -> None:
        client = EngineClient(ours, ready, max_in_flight=320)
        info = ModelInfo(name="tiny", root="tiny", digest="d" * 64, verdict="not judged")
        client.run()
        server.config.app = create_app(ServedModel(client, TextProcessor.load(art), info), api_key)
        await server.serve(sockets=[listener])
        await asyncio.to_thread(client.close)

    http = threading.Thread(target=lambda: asyncio.run(run()))
    loop.start()
    http.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        http.join()
        loop.join()


@pytest.fixture(scope="module")
def model_dir(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(max_position_embeddings=192)


@pytest.fixture(scope="module")
def url(model_dir: Path, dense_artifact: Callable[[Path], Path]) -> Iterator[str]:
    with serving(dense_artifact(model_dir)) as address:
        yield address


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model_dir), dtype="float32", device="cpu", batch_size=4)


def completions(url: str, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    options = {"batch_size": 4, "max_retries": 1, "max_length": 193, **options}
    return LocalCompletionsAPI(model="tiny", base_url=f"{url}/v1/completions", **options)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=n, task_name="t")
        for n, one in enumerate(arguments)
    ]


PAIRS = requests("loglikelihood", *[(a, b) for a in CONTEXTS for b in CONTINUATIONS])


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": "DIR"},
        {"tokenizer": "DIR", "tokenized_requests": False},
        {"tokenizer": "DIR", "num_concurrent": 3},
        {"tokenizer": "DIR", "batch_size": 1},
        {},  # the server's own tokenizer, through /tokenizer_info and /tokenize
    ],
    ids=["ids", "strings", "concurrent", "one by one", "remote tokenizer"],
)
def test_log_likelihoods_are_those_of_lm_evals_hf_model(
    url: str, reference: Any, model_dir: Path, options: dict[str, Any]
) -> None:
    if "tokenizer" in options:
        options = options | {"tokenizer": str(model_dir)}
    # One by one, and by a tokenizer over HTTP, a quarter of them will do.
    pairs = PAIRS[:8] if "tokenizer" not in options or options.get("batch_size") == 1 else PAIRS
    found = completions(url, **options).loglikelihood(pairs, disable_tqdm=True)
    wanted = reference.loglikelihood(pairs, disable_tqdm=True)
    for (ours, is_greedy), (theirs, was_greedy) in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-6)
        assert is_greedy == was_greedy


def test_greedy_continuations_are_seen_as_greedy(url: str, reference: Any, model_dir: Path) -> None:
    """is_greedy compares floats for equality, so top_logprobs must hold the value unrounded."""
    until = {"until": [], "max_gen_toks": 3, "do_sample": False}
    asked = requests("generate_until", *[(text, until) for text in CONTEXTS])
    said = reference.generate_until(asked, disable_tqdm=True)
    pairs = requests("loglikelihood", *zip(CONTEXTS, said, strict=True))
    lm = completions(url, tokenizer=str(model_dir))
    flags = [greedy for _, greedy in lm.loglikelihood(pairs, disable_tqdm=True)]
    assert flags == [greedy for _, greedy in reference.loglikelihood(pairs, disable_tqdm=True)]
    assert any(flags)


def test_rolling_log_likelihoods(url: str, reference: Any, model_dir: Path) -> None:
    texts = requests("loglikelihood_rolling", *[(text,) for text in CONTEXTS[:4]])
    # Its remote tokenizer takes a BOS of id 0, which ours is, for none.
    lm = completions(url, tokenizer=str(model_dir), custom_prefix_token_id=0)
    found = lm.loglikelihood_rolling(texts, True)
    wanted = reference.loglikelihood_rolling(texts, True)
    assert found == pytest.approx(wanted, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("until", [[], ["e", "\n"]])
def test_answers_of_completions(
    url: str, reference: Any, model_dir: Path, until: list[str]
) -> None:
    options = {"until": until, "max_gen_toks": 24, "do_sample": False}
    asked = requests("generate_until", *[(text, options) for text in CONTEXTS[:4]])
    found = completions(url, tokenizer=str(model_dir)).generate_until(asked, disable_tqdm=True)
    assert found == reference.generate_until(asked, disable_tqdm=True)


def test_answers_of_chat_completions(url: str, reference: Any) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion

    lm = LocalChatCompletion(
        model="tiny", base_url=f"{url}/v1/chat/completions", num_concurrent=2, max_retries=1
    )
    chats = [[{"role": "user", "content": text}] for text in CONTEXTS]
    # Five stop strings: the client sends the first four.
    options = {"until": ["zq", "\n\n", "e", "xx", "yy"], "max_gen_toks": 16}
    asked = requests(
        "generate_until", *[(lm.apply_chat_template(chat), dict(options)) for chat in chats]
    )
    plain = requests(
        "generate_until",
        *[(reference.apply_chat_template(chat), dict(options)) for chat in chats],
    )
    found = lm.generate_until(asked, disable_tqdm=True)
    assert found == reference.generate_until(plain, disable_tqdm=True)
    assert any(found)


def test_the_reply_holds_what_the_client_counts_on(url: str, model_dir: Path) -> None:
    text = TextProcessor.load(model_dir)
    prompts = [text.encode(CONTEXTS[2]), text.encode(CONTEXTS[0])]
    body = {"prompt": prompts, "model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True}  # fmt: skip
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, prompts, strict=True):
        values = choice["logprobs"]["token_logprobs"]
        tops = choice["logprobs"]["top_logprobs"]
        assert len(values) == len(tops) == len(prompt) + 1  # and one generated token
        assert values[0] is tops[0] is None
        for token, value, top in zip(
            choice["logprobs"]["tokens"][1:], values[1:], tops[1:], strict=True
        ):
            assert top[token] == value
            assert value <= max(top.values()) < 0


def test_tokenizer_routes_are_each_others_inverse(url: str, model_dir: Path) -> None:
    from lm_eval.utils import RemoteTokenizer

    theirs, ours = RemoteTokenizer(f"{url}/v1/completions"), TextProcessor.load(model_dir)
    assert (theirs.bos_token, theirs.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert theirs.eos_token_id == 2
    for sample in (*CONTEXTS, "\u5408\u540c caf\u00e9 \U0001f600", "<|im_start|>user\n"):
        assert theirs.encode(sample) == ours.encode(sample, add_special_tokens=False)
        assert theirs.decode(theirs.encode(sample)) == sample
    chat = [{"role": "user", "content": "Hello"}]
    assert theirs.apply_chat_template(chat) == ours.render_chat(chat)


def test_what_cannot_be_scored_is_an_error_and_no_score(url: str, model_dir: Path) -> None:
    lm = completions(url, tokenizer=str(model_dir), max_length=4096)
    long = requests("loglikelihood", (" the fee" * 400, " is due"))
    with pytest.raises(Exception, match="context_length_exceeded|400"):
        lm.loglikelihood(long, disable_tqdm=True)


def test_an_api_key_reaches_every_route_the_client_asks(
    model_dir: Path, dense_artifact: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(dense_artifact(model_dir), api_key="secret") as url:
        lm = completions(url, auth_token="secret")
        assert lm.tokenizer_backend == "remote"
        assert len(lm.loglikelihood(PAIRS[:2], disable_tqdm=True)) == 2
