"""Runs of the `quantize` command that are killed at drawn moments and started again.

Two ways to start one: `console`, the command as a user starts it, and `Nursery`, which forks it out
of a process that has imported everything, so that a test can afford many. `survive` draws the
moments, starts the same command again after each kill, and returns what happened; what the
artifact's files must be is `contents`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import ArtifactError
from quant.artifact.manifest import MANIFEST_NAME

REPO = Path(__file__).resolve().parents[3]
# A kill falls some time after one of these: the process, its first staged file, its last one.
Phase = Literal["start", "work", "seal"]
PHASES: tuple[Phase, ...] = ("start", "work", "seal")
REPORTS = {"README.md", "report.json", "report.md"}
_PATIENCE_S = 600.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended: return code (negative: the signal), and what it printed."""

    code: int
    output: str = ""

    @property
    def is_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def error(self) -> str:
        """The one line that tells what was wrong."""
        assert "Traceback" not in self.output, self.output
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.output
        return lines[0]


class Running(Protocol):
    """A run that was started."""

    @property
    def pid(self) -> int: ...

    def is_over(self) -> bool: ...

    def wait(self) -> Ended: ...


Start = Callable[[Sequence[str]], Running]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to kill: `seconds` after `phase` began."""

    phase: Phase
    seconds: float


def environment() -> dict[str, str]:
    """The same thread count as this process, and our packages from this checkout."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(REPO)}


class Console:
    """`python -m quant.cli ARGUMENTS` in a process of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quant.cli", *arguments],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> Ended:
        output, _ = self._process.communicate(timeout=_PATIENCE_S)
        return Ended(code=self._process.returncode, output=output)


class Nursery:
    """A process with everything imported; each run is a fork of it that calls the command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import survival; survival.serve_runs()"],
            env={**environment(), "PYTHONPATH": f"{REPO}{os.pathsep}{Path(__file__).parent}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._outputs = Path(tempfile.mkdtemp(prefix="runs-"))
        self._begun = 0

    def start(
        self, arguments: Sequence[str], *, slowly: bool = False, limit: int | None = None
    ) -> Forked:
        """slowly: 0.2 s are spent before each layer. limit: bytes that a file may have."""
        self._begun += 1
        output = self._outputs / str(self._begun)
        output.touch()  # the fork may be killed before it opens it
        pid = self.ask("start", list(arguments), str(output), slowly, limit)
        return Forked(nursery=self, pid=pid, output=output)

    def ask(self, *request: Any) -> Any:
        """One answer of the loop in `serve_runs`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery died"
        return json.loads(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        for path in self._outputs.iterdir():
            path.unlink()
        self._outputs.rmdir()


@dataclass(slots=True, kw_only=True)
class Forked:
    """A run of the nursery's."""

    nursery: Nursery
    pid: int
    output: Path
    _code: int | None = None

    def is_over(self) -> bool:
        if self._code is None:
            self._code = self.nursery.ask("poll", self.pid)
        return self._code is not None

    def wait(self) -> Ended:
        limit = time.monotonic() + _PATIENCE_S
        while not self.is_over():
            assert time.monotonic() < limit
            time.sleep(_POLL_S)
        assert self._code is not None
        return Ended(code=self._code, output=self.output.read_text())


@contextmanager
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    try:
        yield started
    finally:
        started.close()


def serve_runs() -> None:
    """The nursery's loop: a request as a line of JSON in, an answer as a line of JSON out."""
    import quant.api
    import quant.cli
    import quant.progress  # noqa: F401  what a run imports

    for line in sys.stdin:
        match json.loads(line):
            case ["start", arguments, output, slowly, limit]:
                answer: int | None = fork_run(arguments, output, slowly, limit)
            case ["poll", pid]:
                found, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if found else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def fork_run(arguments: list[str], output: str, slowly: bool, limit: int | None) -> int:
    """Call the command in a fork that prints to the file `output`; its process id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        file = os.open(output, os.O_RDWR | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run_command(arguments, slowly)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_command(arguments: list[str], slowly: bool) -> None:
    import quant.cli
    import quant.pipeline

    real = quant.pipeline.stored_layer

    def slow(*job: Any) -> Any:
        time.sleep(0.2)
        return real(*job)

    if slowly:
        quant.pipeline.stored_layer = slow
    quant.cli.main(arguments)


def strike(moment: Moment, out: Path, run: Running) -> None:
    """Wait for `moment` of the run that writes `out`, then kill it -9; nothing if it ends first."""
    limit = time.monotonic() + _PATIENCE_S
    while not has_begun(moment.phase, out):
        if run.is_over():
            return
        assert time.monotonic() < limit, f"{moment} never came"
        time.sleep(_POLL_S)
    due = time.monotonic() + moment.seconds
    while time.monotonic() < due and not run.is_over():
        time.sleep(_POLL_S)
    if not run.is_over():
        os.kill(run.pid, signal.SIGKILL)


def has_begun(phase: Phase, out: Path) -> bool:
    staging = staging_of(out)
    seen = {"work": staging / "job.json", "seal": staging / "artifact" / MANIFEST_NAME}
    return phase == "start" or seen[phase].exists()


def staging_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@dataclass(slots=True, kw_only=True)
class Survived:
    """What happened: kills by phase, artifacts completed, runs it took in all."""

    kills: Counter[str] = field(default_factory=Counter)
    artifacts: int = 0
    runs: int = 0


def survive(
    start: Start, arguments: Sequence[str], folder: Path, *, kills: int, seed: int
) -> Survived:
    """Kill `kills` runs of one command, each followed by the same command again, until each
    artifact is complete; every artifact must be, file by file, what an undisturbed run makes."""
    began = time.monotonic()
    calm = start([*arguments, "--out", str(folder / "whole")]).wait()
    whole_s = time.monotonic() - began
    assert calm.code == 0, calm.output
    expected = contents(folder / "whole")
    draw, happened = random.Random(seed), Survived()
    while happened.kills.total() < kills:
        out = folder / f"run-{happened.artifacts}"
        while not came_to_its_end(
            start, arguments, out, happened, moment(draw, whole_s, kills, happened)
        ):
            assert happened.runs < 10 * kills, happened
        assert verify(out) == []
        assert contents(out) == expected
        assert {p.name for p in out.iterdir()} >= REPORTS, "a finished run has written its reports"
        assert not staging_of(out).exists()
        happened.artifacts += 1
    return happened


def moment(draw: random.Random, whole_s: float, kills: int, happened: Survived) -> Moment | None:
    """When the next run is to be killed; None when there were kills enough."""
    if happened.kills.total() >= kills:
        return None
    phase = draw.choice(PHASES)
    longest = {"start": 1.05 * whole_s, "work": 0.5 * whole_s, "seal": 0.1}[phase]
    return Moment(phase=phase, seconds=draw.uniform(0, longest))


def came_to_its_end(
    start: Start, arguments: Sequence[str], out: Path, happened: Survived, when: Moment | None
) -> bool:
    """One run; whatever a killed one leaves, nobody can take something half-written for an
    artifact."""
    run = start([*arguments, "--out", str(out)])
    if when is not None:
        strike(when, out, run)
    ended = run.wait()
    happened.runs += 1
    if not ended.is_killed:
        assert ended.code == 0, (when, ended.output)
        return True
    assert when is not None
    happened.kills[when.phase] += 1
    try:
        open_artifact(out, verify="full").reader.close()
    except ArtifactError:
        assert not out.exists(), "something half-written can be seen"
    return False


def contents(artifact: Path) -> dict[str, str]:
    """sha256 of every file that the artifact's digest covers, artifact.json's being the digest."""
    opened = open_artifact(artifact, verify="full")
    opened.reader.close()
    names = [*opened.manifest.files, MANIFEST_NAME]
    return {name: hashlib.sha256((artifact / name).read_bytes()).hexdigest() for name in names}
