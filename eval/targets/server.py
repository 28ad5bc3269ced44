"""ServerTarget: any server with OpenAI's HTTP API, asked as an application asks it.

Nothing is retried and no failure becomes an answer: each one is counted by its kind, and a run
with failures cannot be judged. Chats go to /v1/chat/completions as messages, so the server's own
template is part of what is judged; that it reads them as the artifact does, the token count shows.
Likelihoods come from /v1/completions with `echo`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from eval.checks.base import printable
from eval.errors import TargetError, UsageError
from eval.targets.base import Advance, Answer, Finish, Keep, Prompt, forget
from runtime.text import TextProcessor

# What the server calls an answer's end, and what the checks call it.
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "tool_calls": "stop", "length": "length"}
_SHOWN = 160
DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT_S = 16, 300.0
MOST_SECONDS = 86_400.0
# No answer to one prompt is that long.
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where a server is and how it is asked. model: None takes the only one it serves."""

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def root(self) -> str:
        """The URL up to and including /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


class RequestFailed(Exception):
    """One request without a usable answer; `kind` is what it is counted under."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class ServerTarget:
    """A model behind a URL.

    UsageError: the URL is none. TargetError: nobody answers there, or it serves something else.
    """

    def __init__(self, service: Service, text: TextProcessor, digest: str) -> None:
        if not service.root.startswith(("http://", "https://")):
            raise UsageError(f"--against {service.url!r} is not a URL like http://127.0.0.1:8000")
        if not 0 < service.timeout_s <= MOST_SECONDS:
            raise UsageError(
                f"--timeout is {service.timeout_s:g}; expected more than 0 and at most "
                f"{MOST_SECONDS:g} seconds"
            )
        if not (service.api_key or "").isascii() or not (service.api_key or "a").isprintable():
            raise UsageError("--api-key holds what no HTTP header can: expected printable ASCII")
        self._text, self._digest = text, digest
        self.service = service
        key = {"Authorization": f"Bearer {service.api_key}"} if service.api_key else {}
        # One connection a request in flight, so that nothing waits on this side.
        self._client = httpx.Client(
            timeout=httpx.Timeout(service.timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None),
            headers=key,
        )
        self.service = replace(service, model=self._find_model(service, digest))
        self.description = f"{service.url}, model {self.service.model}"

    def at(self, concurrency: int) -> ServerTarget:
        """The same server, asked with so many requests in flight."""
        other: ServerTarget = object.__new__(ServerTarget)
        other.__dict__ |= self.__dict__
        other.service = replace(self.service, concurrency=concurrency)
        return other

    def require_unchanged(self) -> None:
        """TargetError when the server says by now that it serves something else."""
        self._find_model(self.service, self._digest)

    def generate(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """Greedy answers. TargetError, once all were asked, if any request failed."""
        return self._all(prompts, self._written, advance, keep)

    def choose(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """The log-likelihood of each choice. TargetError as in `generate`."""
        return self._all(prompts, self._chosen, advance, keep)

    def _all(
        self,
        prompts: Sequence[Prompt],
        ask: Callable[[Prompt], Answer],
        advance: Advance,
        keep: Keep,
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        failures: list[RequestFailed] = []
        with ThreadPoolExecutor(self.service.concurrency) as pool:
            places = {pool.submit(ask, prompt): i for i, prompt in enumerate(prompts)}
            try:
                for done in as_completed(places):
                    advance(1)
                    try:
                        answers[places[done]] = done.result()
                    except RequestFailed as failure:
                        failures.append(failure)
                    else:
                        keep(places[done], answers[places[done]])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if failures:
            raise TargetError(self._failed(failures, len(prompts)))
        return [answers[i] for i in range(len(prompts))]

    def _failed(self, failures: Sequence[RequestFailed], sent: int) -> str:
        kinds = Counter(failure.kind for failure in failures)
        counted = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
        words = next((f": {f.kind} says {f.detail!r}" for f in failures if f.detail), "")
        return (
            f"{self.service.url} failed {len(failures)} of {sent} requests ({counted}){words}; "
            "nothing is judged on the rest. What it did answer is kept: the same command asks only "
            "for what is missing"
        )

    def _written(self, prompt: Prompt) -> Answer:
        if self._text.chat_template is None:
            return self._completed(prompt)
        body = {"messages": list(prompt.messages), **_drawn(prompt)}
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        reply = self._post("/chat/completions", body)
        choice = _first_choice(reply)
        message = choice.get("message")
        if not isinstance(message, dict):
            raise RequestFailed("malformed", "no message in the choice")
        self._check_reading(prompt, reply)
        calls = _tool_calls(message)
        return self._answer(message.get("content"), choice, calls)

    def _completed(self, prompt: Prompt) -> Answer:
        body = {"prompt": list(prompt.token_ids), **_drawn(prompt)}
        choice = _first_choice(self._post("/completions", body))
        return self._answer(choice.get("text"), choice, None)

    def _answer(
        self,
        said: Any,
        choice: Mapping[str, Any],
        calls: tuple[dict[str, Any], ...] | None,
    ) -> Answer:
        if said is None and calls:
            said = ""
        if not isinstance(said, str):
            raise RequestFailed("malformed", "the answer holds no text")
        finish = _FINISHES.get(str(choice.get("finish_reason")))
        if finish is None:
            raise RequestFailed("unfinished", f"finish_reason {choice.get('finish_reason')!r}")
        if not _is_text(said):
            raise RequestFailed("malformed", "half of a surrogate pair in the answer")
        ids = self._text.encode(said, add_special_tokens=False)
        return Answer(token_ids=tuple(ids), finish=finish, text=said, tool_calls=calls)

    def _check_reading(self, prompt: Prompt, reply: Mapping[str, Any]) -> None:
        """The server counts the prompt's tokens as the artifact's own tokenizer and template do."""
        usage = reply.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int) and counted != len(prompt.token_ids):
            raise TargetError(
                f"{self.service.url} reads a prompt as {counted} tokens where the artifact's own "
                f"tokenizer and chat template make {len(prompt.token_ids)}: another template, or a "
                f"BOS or template applied twice. The prompt begins {prompt.messages[0]!r}"
            )

    def _chosen(self, prompt: Prompt) -> Answer:
        found = tuple(self._loglikelihood(prompt.token_ids, c) for c in prompt.choices)
        return Answer(token_ids=(), finish="stop", choice_logprobs=found)

    def _loglikelihood(self, context: Sequence[int], choice: Sequence[int]) -> float:
        ids = [*context, *choice]
        try:
            reply = self._post(
                "/completions", {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
            )
        except RequestFailed as failure:
            if failure.kind in {"http_400", "http_404", "http_422", "http_501"}:
                raise TargetError(
                    f"{self.service.url} gives no likelihoods of a prompt (echo with logprobs on "
                    f"/v1/completions: {failure.kind} {failure.detail}); judge `choice` items "
                    "without --against, or leave them out of the suite"
                ) from failure
            raise
        logprobs = _first_choice(reply).get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(values, list) or len(values) < len(ids):
            raise TargetError(
                f"{self.service.url} answers `echo` with "
                f"{len(values) if isinstance(values, list) else 'no'} log-probabilities for "
                f"{len(ids)} prompt tokens, so no choice can be scored; leave `choice` items out"
            )
        asked = values[len(context) : len(ids)]
        if not all(map(_is_logprob, asked)):
            raise RequestFailed("malformed", "a log-probability that is no number of at most 0")
        return float(sum(asked))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, start to end; RequestFailed for whatever goes wrong with it."""
        body = {"model": self.service.model, "temperature": 0.0, **body}
        try:
            response = self._whole("POST", path, body)
        except httpx.TimeoutException as error:
            raise RequestFailed("timeout") from error
        except httpx.ConnectError as error:
            raise RequestFailed("connect", str(error)) from error
        except httpx.TransportError as error:
            raise RequestFailed("cut") from error
        except httpx.RequestError as error:  # a body that is not encoded as its header says
            raise RequestFailed("malformed", str(error)) from error
        if response.status_code != 200:
            raise RequestFailed(f"http_{response.status_code}", _words(response))
        return _object(response)

    def _whole(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The response with its body, in all within the timeout and of a size that fits memory.

        httpx's own timeout is for each piece: a server that sends a byte now and then never ends.
        """
        ends, parts, size = time.monotonic() + self.service.timeout_s, list[bytes](), 0
        with self._client.stream(method, self.service.root + path, json=body) as response:
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("the answer never ended", request=response.request)
                if size > _MOST_BYTES:
                    raise httpx.DecodingError(
                        f"an answer of more than {_MOST_BYTES >> 20} MiB", request=response.request
                    )
        return httpx.Response(response.status_code, content=b"".join(parts))

    def _find_model(self, service: Service, digest: str) -> str:
        try:
            response = self._whole("GET", "/models")
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise TargetError(f"nobody answers at {service.url}: {error}") from error
        if response.status_code != 200:
            raise TargetError(
                f"{service.root}/models: HTTP {response.status_code} {_words(response)}"
            )
        try:
            data = _object(response).get("data")
        except RequestFailed:
            data = None
        served = {
            str(row.get("id")): row for row in data or () if isinstance(row, dict) and "id" in row
        }
        name = service.model or (next(iter(served)) if len(served) == 1 else None)
        if name is None or name not in served:
            raise UsageError(
                f"{service.url} serves {', '.join(served) or 'nothing'}; name the model with "
                "--served-model"
            )
        theirs = served[name].get("weighbridge")
        theirs = theirs.get("artifact_digest") if isinstance(theirs, dict) else None
        if theirs is not None and theirs != digest:
            raise TargetError(
                f"{service.url} serves the artifact {str(theirs)[:12]}, not {digest[:12]}, which "
                "is to be judged"
            )
        return name


def _drawn(prompt: Prompt) -> dict[str, Any]:
    """How long an answer may be and how it is drawn, in the API's words."""
    how = {"temperature": 0.0} if prompt.draw is None else asdict(prompt.draw)
    return {"max_tokens": prompt.max_tokens, **how}


def _words(response: httpx.Response) -> str:
    """What a server says of an error, cut short."""
    try:
        error = response.json().get("error")
        said = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        said = None
    return printable(str(said or response.text)[:_SHOWN])


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("error") is not None:
        raise RequestFailed("malformed", printable(response.text[:_SHOWN]))
    return value


def _is_text(said: str) -> bool:
    """Whether it can be written as UTF-8: JSON can spell half of a surrogate pair."""
    return not any(0xD800 <= ord(char) < 0xE000 for char in said)


def _is_logprob(value: Any) -> bool:
    """Rounding may leave a little more than 0; minus infinity would make a wrong answer of what the
    server left out."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -math.inf < value <= 1e-3


def _first_choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RequestFailed("malformed", "no choices in the answer")
    return choices[0]


def _tool_calls(message: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Calls the server parsed; None without any, so that the text is looked at."""
    listed = message.get("tool_calls")
    calls = [each.get("function") for each in listed or () if isinstance(each, dict)]
    return tuple(call for call in calls if isinstance(call, dict)) or None
