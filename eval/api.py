"""The Python door: `evaluate(artifact)` does what the command does and returns the verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval import report, stamping
from eval.amounts import FEWEST_PASSES, Amounts, SampledPasses
from eval.cache import default_directory
from eval.errors import EvaluationError, UsageError
from eval.evaluation import Evaluation
from eval.gate import Verdict
from eval.joining import remembering
from eval.opening import Job
from eval.places import beside, check_out
from eval.progress import Progress, Silent
from eval.runner import weighed
from eval.targets.server import DEFAULT_CONCURRENCY, Service
from quant.artifact.errors import ArtifactError, StorageError
from quant.artifact.shipped import resolve_input, shipped_dir
from runtime.config import ConfigError, DType, EngineConfig, KVCacheDType
from runtime.text import TextError

DEFAULT_GATES = "gates/default.yaml"
# Temperatures that draw: what the engine takes for greedy lies below, OpenAI's API ends above.
GREEDY_BELOW, HOTTEST = 0.01, 2.0
# More cores than any machine has: a slip, which would start as many threads.
MOST_THREADS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished evaluation and where its files lie. `stamp` is None when none was asked for."""

    evaluation: Evaluation
    markdown: Path
    json: Path
    stamp: Path | None

    @property
    def html(self) -> Path:
        """The page."""
        return self.json.with_name(report.HTML_NAME)


def evaluate(
    artifact: str | Path,
    base: str | None = None,
    gates: str | Path | None = None,
    *,
    suite: str | Path | None = None,
    items: int = Amounts.num_items,
    noise_items: int = Amounts.num_noise_items,
    windows: int = Amounts.num_windows,
    window_tokens: int = Amounts.window_tokens,
    seed: int = 0,
    sampled: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    dtype: DType = "auto",
    kv_cache_dtype: KVCacheDType = "auto",
    threads: int | None = None,
    stamp: bool = True,
    redact: bool = False,
    cache: str | Path | None = None,
    calib: Sequence[str | Path] | None = None,
    against: Service | None = None,
    concurrency: Sequence[int] = (DEFAULT_CONCURRENCY,),
) -> Verdict:
    """Judge an artifact against its base; write the report and the stamp.

    Args:
        artifact: the artifact's directory.
        base: model directory, GGUF file or hub id; None takes the path in artifact.json.
        gates: a gates file, looked up where given and then among the shipped recipes.
        suite: a directory with text.jsonl and extraction.jsonl; None takes the shipped gate half.
        noise_items: how many of the items the base answers again, alone, to tell noise from damage.
        items, windows, window_tokens, seed: how much of the suite is used, and which part.
        sampled, temperature, top_p: draw so many answers of each item by both models besides the
            greedy ones (0: none, else 3 or more), and how (by default at 0.7 and 0.95).
        out: where report.md and report.json go; None puts them into ARTIFACT-evaluation.
        device, dtype, kv_cache_dtype, threads: how the engine computes (EngineConfig's meaning).
        stamp: write gate.json into the artifact.
        redact: keep requests, answers and right values out of the reports.
        cache: where the base's answers are kept; None takes the default folder.
        calib: the calibration files; what stands in them must not stand in the suite. Without them
            the artifact's own sketch of them is used.
        against: a server that serves this artifact; its answers are judged instead of the engine's,
            and no stamp is written, because its numerics are its own.
        concurrency: how many requests the server gets at once, one round each; the last is judged.

    Returns the verdict; `verdict.exit_code` is the command's.

    Raises:
        UsageError: something given is wrong. EvaluationError: the artifact could not be judged.
    """
    job = make_job(
        artifact,
        base,
        gates,
        suite=suite,
        amounts=Amounts(
            num_windows=windows,
            window_tokens=window_tokens,
            num_items=items,
            num_noise_items=noise_items,
            seed=seed,
            sampled=sampled_passes(sampled, seed, temperature, top_p),
        ),
        engine=EngineConfig(
            device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=threads
        ),
        cache=cache,
        calib=calib,
        against=against,
        concurrency=concurrency,
    )
    return run(
        job, out=None if out is None else Path(out), stamp=stamp, redact=redact
    ).evaluation.verdict


def sampled_passes(
    count: int, seed: int, temperature: float | None, top_p: float | None
) -> SampledPasses | None:
    """`count` passes with seeds that follow `seed`; None for 0. UsageError: it cannot be drawn."""
    if count == 0:
        if temperature is not None or top_p is not None:
            raise UsageError("--temperature and --top-p are for drawn answers; pass --sampled K")
        return None
    temperature = SampledPasses.temperature if temperature is None else temperature
    top_p = SampledPasses.top_p if top_p is None else top_p
    if count < FEWEST_PASSES:
        raise UsageError(f"--sampled is {count}; expected 0 or at least {FEWEST_PASSES}")
    if not GREEDY_BELOW <= temperature <= HOTTEST:
        raise UsageError(
            f"--temperature is {temperature:g}; expected {GREEDY_BELOW:g} to {HOTTEST:g}: at 0 all "
            "drawn answers would be the greedy one"
        )
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p is {top_p:g}; expected more than 0 and at most 1")
    seeds = tuple(seed + number for number in range(1, count + 1))
    return SampledPasses(seeds=seeds, temperature=temperature, top_p=top_p)


def make_job(
    artifact: str | Path,
    base: str | None,
    gates: str | Path | None,
    *,
    suite: str | Path | None,
    amounts: Amounts,
    engine: EngineConfig,
    cache: str | Path | None = None,
    calib: Sequence[str | Path] | None = None,
    against: Service | None = None,
    concurrency: Sequence[int] = (DEFAULT_CONCURRENCY,),
) -> Job:
    """Resolve what was said into a Job: shipped defaults filled in, amounts checked."""
    for name, number, least in (
        ("items", amounts.num_items, 1),
        ("windows", amounts.num_windows, 1),
        ("window-tokens", amounts.window_tokens, 16),
        ("noise-items", amounts.num_noise_items, 0),
        ("seed", amounts.seed, 0),
        ("threads", engine.num_threads, 1),
        ("concurrency", min(concurrency, default=0), 1),
    ):
        if number is not None and number < least:
            raise UsageError(f"--{name} is {number}; expected at least {least}")
    if (engine.num_threads or 0) > MOST_THREADS:
        raise UsageError(f"--threads is {engine.num_threads}; expected at most {MOST_THREADS}")
    try:
        gates_path = resolve_input(str(gates or DEFAULT_GATES), "recipes", within="gates")
        suite_path = Path(suite) if suite else shipped_dir("calib_data") / "gate"
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    return Job(
        artifact=Path(artifact),
        base=base,
        gates=gates_path,
        suite=suite_path,
        amounts=amounts,
        engine=engine,
        cache=Path(cache) if cache else default_directory(),
        said=_said(base, gates, suite, amounts) | _said_of(against, concurrency),
        against=against,
        concurrencies=tuple(concurrency),
        calib=_calibration_files(calib or ()),
    )


def _calibration_files(calib: Sequence[str | Path]) -> tuple[Path, ...]:
    """As `quantize` looks them up: where given, then among the shipped ones."""
    try:
        return tuple(resolve_input(str(name), "calib_data") for name in calib)
    except FileNotFoundError as error:
        raise UsageError(f"--calib: {error}") from error


def _said(
    base: str | None, gates: str | Path | None, suite: str | Path | None, amounts: Amounts
) -> dict[str, str]:
    """What differs from the defaults, by option name."""
    given = {"base": base, "gates": gates, "suite": suite}
    plain = Amounts()
    numbers: dict[str, tuple[float, float]] = {
        "items": (amounts.num_items, plain.num_items),
        "windows": (amounts.num_windows, plain.num_windows),
        "window-tokens": (amounts.window_tokens, plain.window_tokens),
        "noise-items": (amounts.num_noise_items, plain.num_noise_items),
        "seed": (amounts.seed, plain.seed),
    }
    if how := amounts.sampled:
        numbers["sampled"] = (len(how.seeds), 0)
        numbers["temperature"] = (how.temperature, SampledPasses.temperature)
        numbers["top-p"] = (how.top_p, SampledPasses.top_p)
    return {name: str(said) for name, said in given.items() if said} | {
        name: str(number) for name, (number, default) in numbers.items() if number != default
    }


def _said_of(against: Service | None, concurrency: Sequence[int]) -> dict[str, str]:
    if against is None:
        return {}
    return {"against": against.url, "concurrency": ",".join(map(str, concurrency))}


def run(
    job: Job,
    *,
    out: Path | None,
    stamp: bool,
    redact: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Weigh, then write: the report first, the stamp last. Nothing is written when it fails."""
    artifact = job.artifact.resolve()
    folder = out or beside(artifact, "-evaluation")
    stamp = stamp and job.against is None  # how a server computes is not known well enough
    _check_places(artifact, folder, stamp=stamp)
    try:
        with weighed(job, progress or Silent()) as found:
            evaluation = remembering(found, folder)
            markdown, as_json = report.write_report(evaluation, folder, redact=redact)
            stamped = stamping.write(evaluation) if stamp else None
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except StorageError as error:
        raise UsageError(f"{error}; --no-stamp judges without writing into the artifact") from error
    except (ArtifactError, TextError) as error:
        raise EvaluationError(str(error)) from error
    return Written(evaluation=evaluation, markdown=markdown, json=as_json, stamp=stamped)


def _check_places(artifact: Path, folder: Path, *, stamp: bool) -> None:
    """Refuse before minutes are spent what could not be written after them."""
    check_out(folder)
    if artifact in folder.resolve().parents:
        raise UsageError(
            f"--out {folder} lies inside the artifact, which is sealed; pass a folder outside it"
        )
    if stamp and artifact.is_dir() and not os.access(artifact, os.W_OK):
        raise UsageError(f"{artifact} is read-only, so it cannot be stamped; pass --no-stamp")
