"""From a checked body to jobs: tokenize, apply the chat template, check the engine's bounds.

Everything a request can be refused for is found here, before anything is queued; what cannot
possibly fit is refused before it costs anything. Safe to call from several threads: the app runs
it on a worker for large bodies.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runtime.config import ResolvedConfig
from runtime.engine.validation import Bounds, check_request
from runtime.request import Request, RequestError, SamplingParams
from runtime.server.answers import EchoedPrompt
from runtime.server.errors import BadRequest
from runtime.server.generation import Job
from runtime.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    Prompt,
    Sampling,
    parse_messages,
    parse_prompts,
)
from runtime.text import ChatTemplateError, TextProcessor


class Intake:
    """Makes jobs for one model. `max_sequences`: the most an HTTP request may ask for."""

    def __init__(self, text: TextProcessor, resolved: ResolvedConfig, max_sequences: int) -> None:
        self._text = text
        self._max_sequences = max_sequences
        self._max_model_len = resolved.max_model_len
        self._bounds = Bounds(
            vocab=resolved.vocab_size,
            max_model_len=resolved.max_model_len,
            num_pool_tokens=resolved.num_blocks * resolved.block_size,
        )

    def completion_jobs(self, body: CompletionBody) -> tuple[list[Job], list[EchoedPrompt]]:
        """Jobs in the order prompt x n, and what to echo for each (empty without `echo`)."""
        prompts = parse_prompts(body.prompt)
        self._check_count(len(prompts), body.n)
        ids = [self._prompt_ids(prompt, body.add_special_tokens) for prompt in prompts]
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            raise BadRequest("max_tokens 0 makes sense with echo: true only", "max_tokens")
        scored = body.logprobs if body.echo else None
        params = self._params(body, limit, body.logprobs, scored)
        jobs = [job for tokens in ids for job in self._jobs(body, tokens, params)]
        return jobs, self._echoes(prompts, ids, body.n) if body.echo else []

    def chat_jobs(self, body: ChatBody) -> list[Job]:
        """n jobs of one conversation."""
        self._check_count(1, body.n)
        messages = parse_messages(body.messages)
        ids = self.chat_ids(messages, body.add_generation_prompt, body.chat_template_kwargs)
        limit = body.max_completion_tokens or body.max_tokens
        if limit is None and body.max_tokens == 0:
            limit = 0
        if limit == 0:
            raise BadRequest("max_tokens must be at least 1", "max_tokens")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._jobs(body, ids, self._params(body, limit, logprobs, None))

    def chat_ids(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a parsed conversation. BadRequest carries the template's own message."""
        if len(messages) > self._max_model_len:
            raise _too_long(
                f"messages has {len(messages)} entries", self._max_model_len, "messages"
            )
        self._check_chars(sum(len(m["content"] or "") for m in messages), "messages")
        self._check_tool_calls(messages)
        try:
            text = self._text.render_chat(
                messages, add_generation_prompt=add_generation_prompt, **(template_kwargs or {})
            )
        except ChatTemplateError as error:
            raise BadRequest(str(error)[:500], "messages", "chat_template") from error
        self._check_chars(len(text), "messages")
        return self._text.encode_rendered(text)

    def _check_tool_calls(self, messages: Sequence[dict[str, Any]]) -> None:
        """A template that never looks at the calls would leave them out without a word."""
        if "tool_calls" in (self._text.chat_template or ""):
            return
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                raise BadRequest(
                    f"messages[{index}]: this model's chat template has no place for tool_calls; "
                    "write the call into the content",
                    f"messages[{index}].tool_calls",
                    "unsupported",
                )

    def _prompt_ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_chars(len(prompt), "prompt")
            return self._text.encode(prompt, add_special_tokens)
        if len(prompt) > self._max_model_len:
            raise _too_long(f"the prompt has {len(prompt)} tokens", self._max_model_len, "prompt")
        return prompt

    def _check_chars(self, num_chars: int, param: str) -> None:
        least = num_chars // max(1, self._text.longest_token)
        if least > self._max_model_len:
            found = f"{param} has {num_chars} characters, at least {least} tokens"
            raise _too_long(found, self._max_model_len, param)

    def _check_count(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self._max_sequences:
            raise BadRequest(
                f"{num_prompts} prompts x n {n} are more than the {self._max_sequences} sequences "
                "this server holds at once; send several requests",
                "prompt" if num_prompts > 1 else "n",
            )

    def _echoes(
        self, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], n: int
    ) -> list[EchoedPrompt]:
        """One entry per choice; the choices of a prompt share theirs."""
        once = [self._echoed(prompt, tokens) for prompt, tokens in zip(prompts, ids, strict=True)]
        return [echoed for echoed in once for _ in range(n)]

    def _echoed(self, prompt: Prompt, ids: Sequence[int]) -> EchoedPrompt:
        if isinstance(prompt, str):
            return EchoedPrompt(text=prompt, ids=tuple(ids))
        data = b"".join(self._text.token_bytes(i) for i in ids)
        return EchoedPrompt(text=data.decode("utf-8", "replace"), ids=tuple(ids))

    def _params(
        self, body: Sampling, max_tokens: int | None, logprobs: int | None, scored: int | None
    ) -> SamplingParams:
        return SamplingParams(
            temperature=body.temperature,
            top_k=max(0, body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            seed=body.seed,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.bias(),
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=scored,
        )

    def _jobs(self, body: Sampling, ids: Sequence[int], params: SamplingParams) -> list[Job]:
        return [
            Job(
                request=self._request(body, ids, params, choice),
                stream=self._text.stream(
                    body.stop_strings,
                    body.include_stop_str_in_output,
                    min_tokens=body.min_tokens,
                    skip_special_tokens=body.skip_special_tokens,
                ),
                keep_all_tokens=params.prompt_logprobs is not None,
                include_stop_token=body.include_stop_str_in_output,
            )
            for choice in range(body.n)
        ]

    def _request(
        self, body: Sampling, ids: Sequence[int], params: SamplingParams, choice: int
    ) -> Request:
        request = Request(
            id=f"{uuid.uuid4().hex}-{choice}",
            prompt=tuple(ids),
            sampling=with_choice_seed(params, choice),
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        try:
            check_request(request, self._bounds)
        except RequestError as error:
            code = "context_length_exceeded" if "context holds" in str(error) else None
            raise BadRequest(str(error), _param(error.param, body), code) from error
        return request


def _param(param: str | None, body: Sampling) -> str | None:
    """The field of the HTTP request that an engine's refusal is about."""
    if isinstance(body, ChatBody):
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names.get(param or "", param)
    return param


def _too_long(found: str, max_model_len: int, param: str) -> BadRequest:
    message = f"{found}; the context holds {max_model_len} tokens; shorten it"
    return BadRequest(message, param, "context_length_exceeded")


def with_choice_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """Each choice of a seeded request has a stream of its own: seed + choice, within int64."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice + 2**63) % 2**64 - 2**63)
