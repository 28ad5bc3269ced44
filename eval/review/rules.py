"""What layer 3 asks for: a pack's rules, and what a gates file may demand. Knows no pack."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Limits(BaseModel):
    """margin: the largest net share of requests in which people may prefer the base. max_critical:
    the largest share in which the candidate alone may be critically at fault.
    """

    model_config = _STRICT
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.15
    max_critical: Annotated[float, Field(gt=0, lt=1)] = 0.03


class Rules(Limits):
    """What a pack asks for, fixed before the first rating. confidence: one-sided."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95


class ReviewDemand(Limits):
    """The key `review` of a gates file. required: without a passed review, nothing is accepted."""

    required: bool = True

    def rules(
        self, confidence: float, margin: float | None = None, max_critical: float | None = None
    ) -> Rules:
        """A pack's rules: the demand, stricter where said so.

        ValueError: what was said is laxer, so that the pack could not meet the demand.
        """
        said = {"margin": margin, "max_critical": max_critical}
        for name, value in said.items():
            demanded = getattr(self, name)
            if value is not None and value > demanded:
                raise ValueError(
                    f"{name} {value:g} is laxer than the {demanded:g} that the evaluation's gates "
                    "demand; leave it out, or evaluate with other gates"
                )
        given = {name: value for name, value in said.items() if value is not None}
        return Rules(
            **{"margin": self.margin, "max_critical": self.max_critical, **given},
            confidence=confidence,
        )

    def laxer(self, rules: Rules, confidence: float) -> str:
        """In what a pack's rules ask less than this demand, in words; "" when they suffice."""
        least = self.rules(confidence)
        said = [
            f"{name} {getattr(rules, name):g} (demanded {getattr(least, name):g})"
            for name in ("margin", "max_critical")
            if getattr(rules, name) > getattr(least, name)
        ]
        if rules.confidence < least.confidence:
            said.append(f"confidence {rules.confidence:g} (demanded {least.confidence:g})")
        return ", ".join(said)
