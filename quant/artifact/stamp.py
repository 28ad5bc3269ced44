"""gate.json: the verdict `evaluate` stamps beside an artifact, bound to its digest and numerics.

It lies outside the digest, so judging does not change what was judged. This module reads and
writes the stamp; it does not decide verdicts.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quant.artifact.errors import ManifestError, StorageError
from quant.artifact.jsonio import (
    canonical_json,
    check_version,
    is_newer_minor,
    parse_object,
    validation_message,
)
from quant.artifact.shipped import shipped_dir
from quant.artifact.staging import replace_files

STAMP_NAME = "gate.json"
STAMP_VERSION = "1.2"
DEFAULT_GATES = "gates/default.yaml"
_AGAIN = "run `evaluate` again"
Verdict = Literal["accepted", "rejected", "inconclusive"]


class MetricRecord(BaseModel):
    """One judged metric: its value and interval, the bound it was held to, and the outcome."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    suite: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    base: float | None = None
    threshold: float | None = None
    verdict: Verdict
    num_samples: int = 0
    note: str = ""


class Numerics(BaseModel):
    """How the judged engine computed; the server warns when it runs otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_class: str
    compute_dtype: str
    kv_cache_dtype: str
    lm_head_scheme: str
    chat_template_sha256: str | None = None


class ReviewRecord(BaseModel):
    """Layer 3: what people who compared the answers blind found.

    verdict: "pending" where the gates demand a review that nobody finished. num_raters: those whose
    ratings count. preference: net share of requests in which people prefer the candidate; critical:
    share in which it alone is critically at fault; each with its one-sided bounds, None while
    pending. The digests name the pack that was rated and the answers it was drawn from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    verdict: Literal["accepted", "rejected", "inconclusive", "pending"]
    required: bool
    num_raters: int = 0
    num_requests: int = 0
    preference: float | None = None
    preference_low: float | None = None
    preference_high: float | None = None
    critical: float | None = None
    critical_low: float | None = None
    critical_high: float | None = None
    pack_sha256: str | None = None
    samples_sha256: str | None = None
    summary: str = ""


class Stamp(BaseModel):
    """A verdict on the artifact with digest `artifact_digest`. `judged_at` is ISO 8601, UTC.

    suites: sha256 of each file that was asked. seeds: what picked from them, and the bootstrap's.
    engine: the build that computed (version, digest of its code, libraries). These came with
    version 1.1 and are empty in older stamps. review: layer 3, None where the gates do not demand
    it and nobody gave it; came with version 1.2.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: str = STAMP_VERSION
    artifact_digest: str
    verdict: Verdict
    judged_at: str
    base: str
    gates_sha256: str
    metrics: tuple[MetricRecord, ...] = ()
    numerics: Numerics
    suites: dict[str, str] = Field(default_factory=dict)
    seeds: dict[str, int] = Field(default_factory=dict)
    engine: dict[str, str] = Field(default_factory=dict)
    summary: str = ""
    review: ReviewRecord | None = None

    @model_validator(mode="after")
    def _accepts_only_what_passed(self) -> Self:
        """A stamp that was edited by hand shows where it contradicts itself."""
        if self.verdict != "accepted":
            return self
        if not self.metrics:
            raise ValueError("it says accepted, but names nothing that was judged")
        failed = [metric.name for metric in self.metrics if metric.verdict == "rejected"]
        if failed:
            raise ValueError(f"it says accepted, but {failed[0]} is rejected")
        review = self.review
        if review is not None and (
            review.verdict == "rejected" or review.required and review.verdict != "accepted"
        ):
            raise ValueError(f"it says accepted, but the review is {review.verdict}")
        return self


def judged_by(stamp: Stamp) -> str:
    """By which gates the verdict was given: `default gates`, or `own gates (sha256 0123abcd...)`.

    The default ones are those shipped with this installation, compared by the bytes of the file.
    """
    try:
        default = (shipped_dir("recipes") / DEFAULT_GATES).read_bytes()
    except OSError:  # an installation without its recipes can still show a stamp
        return f"gates with sha256 {stamp.gates_sha256[:8]}..."
    if stamp.gates_sha256 == hashlib.sha256(default).hexdigest():
        return "default gates"
    return f"own gates (sha256 {stamp.gates_sha256[:8]}...)"


def read_stamp(directory: Path) -> Stamp | None:
    """The stamp in `directory`, None when there is none.

    ManifestError when gate.json is garbled, FormatVersionError when it is of a newer version.
    Whether it belongs to these very bytes is for the caller to check (`Artifact.stamp` does).
    """
    path = Path(directory) / STAMP_NAME
    if not path.is_file():
        return None
    try:
        data = parse_object(path)
        check_version(path, data, STAMP_VERSION, again=_AGAIN)
    except ManifestError as error:
        raise ManifestError(f"{error}; {_AGAIN}") from None
    if is_newer_minor(data["format_version"], STAMP_VERSION):
        data = {name: data[name] for name in data if name in Stamp.model_fields}
    try:
        return Stamp.model_validate(data)
    except ValidationError as error:
        problem = validation_message(error)
        raise ManifestError(f"{path}: {problem}; {_AGAIN}") from None


def write_stamp(directory: Path, stamp: Stamp) -> None:
    """Write gate.json atomically; StorageError when the disk refuses."""
    content = canonical_json(stamp.model_dump(mode="json"))
    try:
        if not Path(directory).is_dir():  # whoever removed it must not find a folder there again
            raise NotADirectoryError(errno.ENOTDIR, "the artifact is not there any more")
        replace_files(Path(directory), {STAMP_NAME: content})
    except OSError as error:
        path = Path(directory) / STAMP_NAME
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
