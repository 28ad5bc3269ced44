"""Speed on a GPU: kernels, engine, start; and the table that compares it with the bars.

    python -m benchmarks.gpu --only engine --schemes w4a16,fp8 --artifacts /tmp/synth
    python -m benchmarks.gpu --only gemm,attention
    python -m benchmarks.gpu --only start --schemes w4a16
    python -m benchmarks.gpu table                  the table of README's results, in Markdown
    python -m benchmarks.gpu table --into README.md the same, put between its markers there
    python -m benchmarks.gpu bars                   where each bar stands; exit code 1 below a must

Artifacts are random weights of the shape (benchmarks.synth), made below --artifacts where they are
missing. Rows are appended to --out as they are measured, so a run cut short keeps what it has. The
exit code is 1 when a part failed, 2 for a device that is not there, a file that cannot be read or
written, or one of results with a row that is none. Nothing but a whole model on the reference card
counts for the table: a run with --layers, another shape or a quantized head is reported beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_artifacts import RECIPES, Subject, artifact_of
from benchmarks.gpu_bars import BARS, BEGIN, END, render, standing
from benchmarks.gpu_profile import describe as describe_profile
from benchmarks.gpu_rows import REPO, SUITES, BadRow, append, origin, problems, read
from benchmarks.gpu_rows import Subject as RowSubject
from benchmarks.gpu_worker import Spec
from quant.errors import QuantError

RESULTS = REPO / "benchmarks" / "results" / "gpu.jsonl"
ALL_BATCHES = (1, 8, 32, 64, 128, 256)
DECODES = {(bar.scheme, bar.kv_dtype) for bar in BARS if bar.metric == "decode_tok_s"}
Rows = Iterator[dict[str, Any]]


class Run:
    """One invocation: what it may still do, what it wrote, what failed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = None if args.time_limit is None else time.time() + args.time_limit
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.time()

    def take(self, what: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Write rows as they come; a part that fails is named and the next one begins."""
        left = self.seconds_left()
        if left is not None and left <= 0:
            self.fail(f"{what}: left out, no time is left")
            return
        began = time.perf_counter()
        try:
            for found in rows():
                assert not problems(found), problems(found)
                append(self.args.out, [found])
                self.rows.append(found)
                say(line(found))
                for part in (found["extra"], found["extra"].get("prompt", {})):
                    if "kernels" in part:
                        say(describe_profile(part))
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            self.fail(f"{what}: {type(error).__name__}: {error}")
        say(f"{what}: {time.perf_counter() - began:.1f} s")

    def fail(self, text: str) -> None:
        self.failures.append(text)
        say(text)


def run_engine(run: Run) -> None:
    """A process for each scheme and KV type, so that each has the device to itself."""
    args = run.args
    for scheme in args.schemes:
        for kv in args.kv or [kv for s, kv in sorted(DECODES) if s == scheme] or ["bf16"]:
            spec = engine_spec(args, scheme, kv, run.deadline)
            run.take(f"engine {spec.model.name} {kv}", partial(worker_rows, spec, run))


def engine_spec(args: argparse.Namespace, scheme: str, kv: str, deadline: float | None) -> Spec:
    """All sizes are the bars' own; prompts are measured once per scheme, with the plain KV."""
    kind = ("decode_tok_s", scheme, kv)
    barred = tuple(b.batch for b in BARS if (b.metric, b.scheme, b.kv_dtype) == kind)
    batches = args.batches or barred or ALL_BATCHES
    is_plain = kv in ("bf16", "float32")
    has_profile = is_plain and "profile" in args.parts and args.device.startswith("cuda")
    return Spec(
        model=model_of(args, scheme),
        kv_dtype=kv,
        device=args.device,
        folder=str(args.artifacts),
        commit=args.commit,
        batches=batches if "decode" in args.parts else (),
        tokens=args.tokens,
        prefill=args.prefill if is_plain and "prefill" in args.parts else None,
        repeats=args.repeats,
        repeat_below=args.repeat_below,
        profile_batches=args.profile_batches if has_profile else (),
        profile_steps=args.profile_steps,
        deadline=deadline,
        deterministic=args.deterministic,
    )


def worker_rows(spec: Spec, run: Run) -> Rows:
    """The rows of one worker; it is ended when no time is left for it."""
    command = [sys.executable, "-m", "benchmarks.gpu_worker", spec.to_json()]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = run.seconds_left()
    watch = _Watch(process, None if left is None else left + 20)
    try:
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
        if process.wait():
            raise RuntimeError(f"the worker ended with code {process.returncode}")
    finally:
        watch.stop()
        process.kill()
        process.communicate()


class _Watch:
    """Kills a process after some seconds."""

    def __init__(self, process: subprocess.Popen[str], seconds: float | None) -> None:
        self._timer = None if seconds is None else threading.Timer(seconds, process.kill)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def run_start(run: Run) -> None:
    from benchmarks.gpu_start import measure

    args = run.args
    for scheme in args.schemes:
        model = model_of(args, scheme)
        subject = RowSubject(
            suite="start", shape=args.shape, scheme=scheme, kv_dtype=_plain_kv(args), batch=1,
            extra=model.extra(),
        )  # fmt: skip

        def rows(model: Subject = model, subject: RowSubject = subject) -> Rows:
            path = artifact_of(model, args.artifacts, args.device)
            found = origin(args.device, args.commit)
            yield from measure(path, subject, found, args.device, args.tokens, args.starts, say)

        run.take(f"start {model.name}", rows)


def run_gemm(run: Run) -> None:
    import torch

    from benchmarks.gpu_gemm import ROWS, describe, measure

    args, before = run.args, len(run.rows)
    for scheme in args.schemes:
        run.take(
            f"gemm {scheme}",
            partial(
                measure, args.shape, [scheme], args.batches or ROWS, torch.device(args.device),
                origin(args.device, args.commit), args.group, say,
            ),
        )  # fmt: skip
    print(describe(run.rows[before:]), flush=True)


def run_attention(run: Run) -> None:
    import torch

    from benchmarks.gpu_attention import DECODES as CASES
    from benchmarks.gpu_attention import PREFILLS, Case, describe, measure

    args, before = run.args, len(run.rows)
    cases = (*CASES, *PREFILLS)
    if args.shape == "tiny":
        cases = (Case(batch=2, context=40), Case(batch=1, context=40, queries=40))
    run.take(
        "attention",
        lambda: measure(
            args.shape, args.kv or ["bf16", "fp8", "int8"], cases, torch.device(args.device),
            origin(args.device, args.commit), say,
        ),
    )  # fmt: skip
    print(describe(run.rows[before:]), flush=True)


RUNNERS = {"engine": run_engine, "gemm": run_gemm, "attention": run_attention, "start": run_start}


def model_of(args: argparse.Namespace, scheme: str) -> Subject:
    group = args.group if scheme == "w4a16" else None
    return Subject(
        shape=args.shape, scheme=scheme, group=group, lm_head=args.lm_head, layers=args.layers
    )


def _plain_kv(args: argparse.Namespace) -> str:
    return "bf16" if args.device.startswith("cuda") else "float32"


def line(found: dict[str, Any]) -> str:
    """A row for the terminal."""
    extra = {k: v for k, v in found["extra"].items() if not isinstance(v, list | dict)}
    about = " ".join(f"{k}={v}" for k, v in extra.items())
    return (
        f"{found['scheme']} kv={found['kv_dtype']} batch={found['batch']} {found['metric']} "
        f"{found['value']:,.5g} {found['unit']} of {found['repeats'][:6]} {about}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(results: Path, into: Path | None) -> None:
    """Print the table, or put it between its markers in a file."""
    text = render(read(results))
    if into is None:
        print(text, end="")
        return
    if not into.is_file():
        raise FileNotFoundError(f"{into}: no file to put the table into")
    page = into.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"error: {into} does not have one {BEGIN} and one {END}")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    made = into.with_name(f"{into.name}.partial")
    try:
        made.write_text(head + text.removesuffix("\n") + tail, encoding="utf-8")
        made.replace(into)
    finally:
        made.unlink(missing_ok=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("action", nargs="?", default="run", choices=["run", "table", "bars"])
    parser.add_argument("--only", type=_names(SUITES), default=SUITES, help=",".join(SUITES))
    parser.add_argument("--schemes", type=_names(RECIPES), default=("w4a16", "fp8", "w8a8"),
                        help=f"of {','.join(RECIPES)} (default: w4a16,fp8,w8a8)")  # fmt: skip
    parser.add_argument("--kv", type=_names(("bf16", "fp8", "int8", "float32")),
                        help="KV types (default: those that have bars)")  # fmt: skip
    parser.add_argument("--batches", type=_numbers, help="batch sizes; rows M for gemm")
    parser.add_argument("--parts", type=_names(("decode", "prefill", "profile")),
                        default=("decode", "prefill", "profile"),
                        help="of the engine suite: decode,prefill,profile")  # fmt: skip
    parser.add_argument("--shape", default="llama-3.1-8b", help="a shape of synth, or tiny")
    parser.add_argument("--layers", type=_count, help="only so many layers; never counts")
    parser.add_argument("--group", type=_count, help="group size of w4a16 (default: 128)")
    parser.add_argument(
        "--lm-head",
        default="bf16",
        choices=["bf16", "w8a16"],
        help="scheme of the head (default: bf16)",
    )
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant kernels")
    parser.add_argument("--tokens", type=_pair, default=(1024, 256), metavar="IN/OUT",
                        help="lengths of decodes (default: 1024/256)")  # fmt: skip
    parser.add_argument("--prefill", type=_pair, default=(16, 2048), metavar="N/LEN",
                        help="prompts and their length (default: 16/2048)")  # fmt: skip
    parser.add_argument("--repeats", type=_count, default=3, help="of prompts and small decodes")
    parser.add_argument("--repeat-below", type=int, default=64, metavar="BATCH",
                        help="decodes of so many run once (default: 64)")  # fmt: skip
    parser.add_argument(
        "--starts", type=_count, default=1, help="cold and warm starts (default: 1)"
    )
    parser.add_argument("--profile-batches", type=_numbers, default=(1,),
                        help="batches to look at with the profiler (default: 1)")  # fmt: skip
    parser.add_argument("--profile-steps", type=_count, default=48)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--artifacts", type=Path, default=REPO / ".cache" / "synth")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--time-limit", type=float, help="seconds; nothing is begun after them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON Lines, appended to")
    parser.add_argument("--into", type=Path, help="with table: the file that has the markers")
    return parser.parse_args(argv)


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    numbers = text.split("/")
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two whole numbers such as 16/2048")
    return _count(numbers[0]), _count(numbers[1])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return _act(args)
    except (QuantError, BadRow, OSError) as error:
        say(f"error: {error}")
        return 2


def _act(args: argparse.Namespace) -> int:
    if args.action == "table":
        table(args.out, args.into)
        return 0
    if args.action == "bars":
        text, all_met = standing(read(args.out))
        print(text)
        return 0 if all_met else 1
    _check_device(args.device)
    run = Run(args)
    for suite in args.only:
        RUNNERS[suite](run)
    for failure in run.failures:
        say(f"failed: {failure}")
    return 1 if run.failures else 0


def _check_device(name: str) -> None:
    """Makes no context where the device is there: it would take memory that workers measure."""
    import torch

    from quant.machine import check_device

    number = name.partition(":")[2] or "0"
    is_cuda = name.partition(":")[0] == "cuda" and number.isdecimal()
    if not (is_cuda and int(number) < torch.cuda.device_count()):
        check_device(name)


if __name__ == "__main__":
    sys.exit(main())
