"""Gathering the rows of many steps into one Completion per request."""

from __future__ import annotations

from runtime.request import Completion, FinishReason, Request, StepOutput, TokenLogprobs

NO_TOKEN = -1  # in StepOutput.token_ids: the row carries no token


class Collected:
    """The rows of one request so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.error: str | None = None

    def completion(self, request: Request) -> Completion:
        assert self.finish_reason is not None, f"{request.id} left the engine without a reason"
        return Completion(
            id=request.id,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=None if request.sampling.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            error=self.error,
        )


def distribute(output: StepOutput, rows: dict[str, Collected]) -> None:
    """Add a step's rows to those of their requests."""
    columns = (output.request_ids, output.token_ids, output.finish_reasons, output.logprobs)
    for request_id, token_id, reason, logprobs in zip(*columns, strict=True):
        row = rows[request_id]
        if token_id != NO_TOKEN:
            row.token_ids.append(token_id)
        if logprobs is not None:
            row.logprobs.append(logprobs)
        row.finish_reason = reason
    for request_id, cached in output.cached_tokens.items():
        rows[request_id].cached_tokens = cached
    for request_id, entries in output.prompt_logprobs.items():
        rows[request_id].prompt_logprobs = entries
    for request_id, message in output.errors.items():
        rows[request_id].error = message
