"""Reading two folders of samples that lm-eval (or `evaluate lm-eval`) logged, and pairing them.

A pair is the same document, by doc_hash, asked with the same prompt, by prompt_hash, under the same
filter. What cannot be paired is refused with what differs: a comparison over what happens to match
would answer another question. Knows no statistics.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError, UsageError
from eval.rows import object_of

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)\.jsonl")
_NEEDED = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "metrics", "filter")
_NAMED = 3  # of the documents that differ


class MismatchError(EvaluationError):
    """Two runs that did not answer the same questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document's answer under one filter.

    key: what it is paired by. values: metric to its value for this document, as logged.
    settings: the generation settings it was asked with.
    """

    doc_id: int
    key: tuple[str, str, str, int]
    target_hash: str
    doc: Any
    target: str
    prompt: str
    answer: str
    num_choices: int
    values: dict[str, Any]
    settings: str

    @property
    def doc_hash(self) -> str:
        """What tells documents apart."""
        return self.key[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """One run: its newest samples of each task, and what its results file says of them.

    name: what it was of. higher_is_better: task to metric to direction, where known.
    """

    folder: Path
    name: str
    tasks: dict[str, tuple[Sample, ...]]
    higher_is_better: dict[str, dict[str, bool | None]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same question answered by both runs."""

    base: Sample
    candidate: Sample


def read_run(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> RunFolder:
    """Read a run's folder. wanted: which tasks.

    UsageError: no samples there, those of several models, or lines that are not lm-eval's.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected what --log-samples wrote")
    newest = _newest(folder)
    if not newest:
        raise UsageError(
            f"{folder} holds no samples_TASK_DATE.jsonl; run lm-eval with --log_samples, or "
            "evaluate lm-eval with --log-samples (artifacts and reports of `evaluate` are not "
            "compared with each other)"
        )
    known, newest = sorted(newest), {task: of for task, of in newest.items() if wanted(task)}
    if not newest:
        raise UsageError(
            f"{folder} holds no samples of the tasks asked for; there are {', '.join(known)}"
        )
    places = {path.parent for _, path in newest.values()}
    if len(places) > 1:
        raise UsageError(
            f"{folder} holds the samples of {len(places)} models; give one of "
            + ", ".join(str(place) for place in sorted(places))
        )
    place = places.pop()
    results = _results(place)
    return RunFolder(
        folder=place,
        name=_name(results, place),
        tasks={task: _samples(path) for task, (_, path) in sorted(newest.items())},
        higher_is_better=results.get("higher_is_better") or {},
        facts=_facts(results),
    )


def _newest(folder: Path) -> dict[str, tuple[str, Path]]:
    """The date and place of each task's newest samples."""
    newest: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        if match := _SAMPLES.fullmatch(path.name):
            task, date = match["task"], match["date"]
            newest[task] = max(newest.get(task, ("", path)), (date, path))
    return newest


def _results(place: Path) -> dict[str, Any]:
    """The newest results file beside the samples; nothing when there is none."""
    found = sorted(place.glob("results_*.json"))
    if not found:
        return {}
    try:
        value = json.loads(found[-1].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {found[-1]}: {error}") from error
    return value if isinstance(value, dict) else {}


def _name(results: dict[str, Any], place: Path) -> str:
    said = results.get("model_name")
    return str(said) if said else place.name


def _facts(results: dict[str, Any]) -> dict[str, Any]:
    config = results.get("config") or {}
    known = ("model", "artifact_digest", "engine", "chat_template_sha256", "limit")
    facts = {key: config[key] for key in known if config.get(key) is not None}
    return facts | {k: results[k] for k in ("lm_eval_version",) if results.get(k)}


def _samples(path: Path) -> tuple[Sample, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    seen: Counter[tuple[str, str, str]] = Counter()
    samples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            samples.append(_sample(_row(line, path, number), seen))
    if not samples:
        raise UsageError(f"{path} holds no samples")
    return tuple(samples)


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = object_of(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: {error}") from error
    if missing := [key for key in _NEEDED if key not in row]:
        raise UsageError(
            f"{path}:{number}: no {', '.join(missing)}; expected samples of lm-eval 0.4.3 or later"
        )
    return row


def _sample(row: dict[str, Any], seen: Counter[tuple[str, str, str]]) -> Sample:
    """seen: how often each question came before; a document may stand in a task twice."""
    question = (str(row["filter"]), str(row["doc_hash"]), str(row["prompt_hash"]))
    seen[question] += 1
    asked = row.get("arguments") or {}
    first = asked.get("gen_args_0") if isinstance(asked, dict) else None
    first = first if isinstance(first, dict) else {}
    settings = first.get("arg_1")
    answers = row.get("filtered_resps")
    return Sample(
        doc_id=int(row["doc_id"]),
        key=(*question, seen[question]),
        target_hash=str(row["target_hash"]),
        doc=row.get("doc"),
        target=str(row.get("target", "")),
        prompt=str(first.get("arg_0", "")),
        answer=_text(answers),
        num_choices=len(answers) if isinstance(answers, list) else 1,
        values={name: row.get(name) for name in row["metrics"]},
        settings=json.dumps(settings, sort_keys=True) if isinstance(settings, dict) else "",
    )


def _text(answers: Any) -> str:
    """The answer as one text: itself, or of several choices the one with the best score."""
    if not isinstance(answers, list) or not answers:
        return str(answers)
    if len(answers) == 1:
        return str(answers[0])
    scores = [_score(answer) for answer in answers]
    if None in scores:
        return str(answers)
    best = max(range(len(scores)), key=lambda n: scores[n] or 0.0)
    return f"choice {best}"


def _score(answer: Any) -> float | None:
    """The log-likelihood of one choice as lm-eval logs it: [value, is_greedy]."""
    try:
        return float(answer[0])
    except (TypeError, ValueError, IndexError, KeyError):
        return None


def pair_runs(base: RunFolder, candidate: RunFolder) -> dict[str, tuple[Pair, ...]]:
    """Task to its pairs.

    MismatchError: a task that only one run has, or samples that do not pair off.
    """
    if apart := sorted(base.tasks.keys() ^ candidate.tasks.keys()):
        lonely = [f"{task} (only in {_owner(task, base, candidate)})" for task in apart]
        raise MismatchError(
            f"the runs have different tasks: {', '.join(lonely)}; name those to compare with "
            "--tasks"
        )
    return {
        task: _pair(task, base.tasks[task], candidate.tasks[task]) for task in sorted(base.tasks)
    }


def _owner(task: str, base: RunFolder, candidate: RunFolder) -> Path:
    return (base if task in base.tasks else candidate).folder


def _pair(task: str, base: tuple[Sample, ...], candidate: tuple[Sample, ...]) -> tuple[Pair, ...]:
    if len(base) != len(candidate):
        raise MismatchError(
            f"task {task}: {len(base)} samples in A and {len(candidate)} in B; run both with the "
            "same --limit and the same data"
        )
    left, right = ({s.key: s for s in samples} for samples in (base, candidate))
    if left.keys() != right.keys():
        raise MismatchError(f"task {task}: {_difference(base, candidate)}")
    pairs = tuple(Pair(base=sample, candidate=right[key]) for key, sample in left.items())
    _check(task, pairs, "targets", lambda s: s.target_hash, "the task's answers were changed")
    _check(task, pairs, "generation settings", lambda s: s.settings, "they decide the answers")
    return pairs


def _difference(base: tuple[Sample, ...], candidate: tuple[Sample, ...]) -> str:
    """Which part of the keys does not match: filters, documents or prompts."""
    left, right = (Counter(s.key[0] for s in side) for side in (base, candidate))
    if left != right:
        names = ", ".join(sorted(left | right))
        return f"the filters {names} in A or B are not of both: the task was changed"
    left, right = (Counter(s.doc_hash for s in side) for side in (base, candidate))
    if left != right:
        lonely = [s for s in base if left[s.doc_hash] > right[s.doc_hash]]
        return (
            f"{_count('documents', lonely)} of A are not in B: the data was changed, or other "
            "documents were picked"
        )
    right_keys = {s.key for s in candidate}
    return (
        f"{_count('prompts', [s for s in base if s.key not in right_keys])} differ for the same "
        "documents: another chat template, system prompt, few-shot number or task wording"
    )


def _check(
    task: str, pairs: tuple[Pair, ...], what: str, of: Callable[[Sample], str], why: str
) -> None:
    differing = [p.base for p in pairs if of(p.base) != of(p.candidate)]
    if differing:
        raise MismatchError(f"task {task}: {_count(what, differing)} differ: {why}")


def _count(what: str, samples: Iterable[Sample]) -> str:
    ids = list(dict.fromkeys(s.doc_id for s in samples))
    more = ", ..." if len(ids) > _NAMED else ""
    return f"{len(ids)} {what} (doc_id {', '.join(map(str, ids[:_NAMED]))}{more})"
