"""What crosses the pipe between the server and its engine process: one columnar message a step.

Plain values of `runtime.request` and `runtime.config`; knows neither engines nor HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.config import ResolvedConfig
from runtime.request import EngineStats, Request, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Parent to child: everything asked for since the last message. Adds come before aborts."""

    add: list[Request] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    shutdown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Child to parent, any number of times before Ready: `layers` of `num_layers` are in place."""

    layers: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Child to parent, once: the engine is loaded. `numerics` is what a stamp is compared with."""

    resolved: ResolvedConfig
    stats: EngineStats
    numerics: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """Child to parent instead of Ready. `expected`: a mistake of the user's, not ours."""

    message: str
    expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """Child to parent after each step or each batch of commands.

    `admitted` and `refused` answer the adds of the commands just read; a refusal is (message,
    param) of the engine's RequestError. `output` is None when no step ran.
    """

    stats: EngineStats
    output: StepOutput | None = None
    admitted: list[str] = field(default_factory=list)
    refused: dict[str, tuple[str, str | None]] = field(default_factory=dict)
