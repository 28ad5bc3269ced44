"""Is this request one the engine can run? Stdlib only; every refusal names field, value and bound.

The one bound on token ids is the model's: [0, vocab). Ids beyond the tokenizer but below the head's
size are the model's own and are let through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isfinite

from runtime.request import Request, RequestError, SamplingParams

MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """vocab: size of the output head. max_model_len: most tokens of a sequence, prompt and output.
    num_pool_tokens: tokens of KV the whole pool holds."""

    vocab: int
    max_model_len: int
    num_pool_tokens: int


def check_request(request: Request, bounds: Bounds) -> None:
    """Raise RequestError unless `request` can run within `bounds`."""
    if len(request.prompt) <= bounds.max_model_len:
        check_ids("prompt", request.prompt, bounds.vocab)
    check_sampling(request.sampling, bounds.vocab)
    _check_length(request, bounds)
    if type(request.priority) is not int:
        raise RequestError(f"priority is an integer, not {request.priority!r}", "priority")


def max_length(request: Request, bounds: Bounds) -> int:
    """Total tokens at which the request ends with `length`.

    The last token's own KV is never needed, hence one more than the pool holds.
    """
    asked = request.sampling.max_tokens
    room = bounds.max_model_len - len(request.prompt)
    wanted = len(request.prompt) + (room if asked is None else asked)
    return min(wanted, bounds.max_model_len, bounds.num_pool_tokens + 1)


def check_sampling(params: SamplingParams, vocab: int) -> None:
    """Raise RequestError unless every sampling parameter is in its range."""
    for name, low, high in _FLOAT_RANGES:
        _check_float(name, getattr(params, name), low, high)
    if params.top_p == 0 or params.repetition_penalty == 0:
        name = "top_p" if params.top_p == 0 else "repetition_penalty"
        raise RequestError(f"{name} must be greater than 0", name)
    for name in ("top_k", "min_tokens"):
        _check_int(name, getattr(params, name), 0, None)
    _check_optional_ints(params, vocab)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) is greater than max_tokens ({params.max_tokens})",
            "min_tokens",
        )
    check_ids("stop_token_ids", params.stop_token_ids, vocab)
    check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab)
    for _, bias in params.logit_bias:
        _check_float("logit_bias", bias, -1e4, 1e4)


def check_can_go_on(stop_ids: Collection[int], params: SamplingParams, vocab: int) -> None:
    """Raise RequestError if min_tokens masks every id: there would be nothing to draw."""
    if params.min_tokens and len(stop_ids) >= vocab:
        raise RequestError(
            f"stop_token_ids and end-of-text are all {vocab} ids, so min_tokens "
            f"{params.min_tokens} leaves nothing to draw",
            "stop_token_ids",
        )


_FLOAT_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e4),
    ("presence_penalty", -1e4, 1e4),
    ("frequency_penalty", -1e4, 1e4),
)


def _check_optional_ints(params: SamplingParams, vocab: int) -> None:
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 0, None)
    if params.seed is not None:
        _check_int("seed", params.seed, -MAX_SEED, MAX_SEED - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(name, getattr(params, name), 0, vocab)


def _check_length(request: Request, bounds: Bounds) -> None:
    num_prompt = len(request.prompt)
    asked = request.sampling.max_tokens
    if num_prompt == 0:
        raise RequestError("the prompt is empty; it needs at least one token", "prompt")
    needed = num_prompt + (1 if asked is None else asked)
    if needed > bounds.max_model_len:
        wish = "at least 1 token" if asked is None else f"max_tokens {asked}"
        lower = asked is not None and num_prompt < bounds.max_model_len  # else it would not help
        way_out = "shorten the prompt" + (" or set a lower max_tokens" if lower else "")
        raise RequestError(
            f"the prompt has {num_prompt} tokens; with {wish} to generate that is {needed}, but "
            f"the context holds {bounds.max_model_len}; {way_out}",
            "prompt" if asked is None or num_prompt >= bounds.max_model_len else "max_tokens",
        )
    least = num_prompt + request.sampling.min_tokens
    if asked is None and least > bounds.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; with min_tokens {request.sampling.min_tokens} "
            f"that is {least}, but the context holds {bounds.max_model_len}",
            "min_tokens",
        )
    if num_prompt > bounds.num_pool_tokens:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but the whole KV pool holds "
            f"{bounds.num_pool_tokens}; shorten the prompt or give the engine a larger KV pool",
            "prompt",
        )


def check_ids(name: str, ids: Iterable[object], vocab: int) -> None:
    """Raise RequestError, about the field `name`, unless every id is an int in [0, vocab)."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError(
                f"{name} holds {_brief(token)}; token ids are integers from 0 to {vocab - 1}", name
            )


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is an integer {bound}, not {_brief(value)}", name)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        raise RequestError(
            f"{name} is a number from {low:g} to {high:g}, not {_brief(value)}", name
        )


def _brief(value: object) -> str:
    """A value as shown in a message: never more of it than helps."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
