"""What is asked of the engine and what it answers: plain values, stdlib only.

Knows no text, no tensors and no scheduling. Stop *strings* are a matter of text and live in
`runtime.text`; `n` choices are n requests (the prefix cache shares their prompt).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RequestError(ValueError):
    """A request the engine refuses. The message says what was found, expected and what to do.

    `param` names the offending field in the words of the HTTP API (`prompt`, `logit_bias`, ...).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    """Why a sequence ended. `stop` and `length` are OpenAI's words; the others are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. Defaults follow OpenAI's API; 0 or 1.0 switch a filter off.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest id); otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this mass; 1.0 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 keeps all.
        seed: the request's own random stream; None draws one at admission.
        repetition_penalty: over prompt and output (CTRL, section 4.1).
        presence_penalty, frequency_penalty: over the output only (OpenAI).
        logit_bias: (token id, bias added to its logit) pairs.
        max_tokens: the most tokens to generate; None means the room left in the context.
        min_tokens: stop ids are masked until this many tokens were generated.
        stop_token_ids: ids that end the sequence besides the model's own end-of-text ids.
        ignore_eos: the model's end-of-text ids do not end the sequence.
        logprobs: number of alternatives to report per generated token (0: the chosen one only).
        prompt_logprobs: the same for every prompt token; None reports nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. `id` is unique among live requests of an engine.

    `prompt` holds token ids with every special token already in place. `cache_salt` separates
    tenants in the prefix cache: blocks are shared only between equal salts. Lower `priority`
    runs first (vLLM's meaning).
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position.

    They are of the model's own distribution: before penalties, bias, masks, temperature and filters
    (vLLM's `raw_logprobs`). `rank` counts from 1. `top_ids`/`top_values` are the most likely tokens
    in falling order (ties: lowest id first) and need not hold the chosen one. All values are
    finite: anything lower is floored at -9999.0.
    """

    token_id: int
    value: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one engine step produced, column by column (cheap to pickle).

    Row i says: sequence `request_ids[i]` got `token_ids[i]` and, if `finish_reasons[i]` is set,
    ended with it. A request has at most one row a step until drafts exist, then several in order.
    A row whose token is -1 carries no token (an error, or max_tokens 0). `logprobs[i]` is None
    unless asked for. `prompt_logprobs` comes once per request, before or with its first token: one
    entry per prompt token, the first None. `cached_tokens` (prompt tokens found in the prefix
    cache) comes with a request's first row. `errors` explains rows that ended with `error`.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All that a request gave. The stop id that ended it, if any, is the last of `token_ids`.

    `logprobs` is None unless asked for, else one entry per token; `prompt_logprobs` likewise with
    one entry per prompt token, the first None. `error` explains a finish_reason of `error`.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start (`*_total`) and gauges of this moment; what /metrics is made from.

    `num_used_blocks` are owned by live requests; cached blocks nobody owns count as free. The
    prefix counters count tokens of admitted prompts. `prompt_tokens_total` counts prompts when they
    were computed to the end, whatever part of them came from the cache. `step_s_total` counts a
    step from when its making began, or from the end of the step before it if that came later, to
    when its tokens were there: no second counts twice where steps overlap.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    prefix_queries_total: int
    prefix_hits_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    steps_total: int
    step_s_total: float
