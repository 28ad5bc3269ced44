"""Compiling kernels side by side before they are needed, by going through the motions of a step.

Knows no kernel: whatever is launched within `compiling_ahead` is compiled and not run. What else
happens there (torch's own ops) does happen, on outputs that nobody has written.

Most of a compilation is Python, so threads hardly run side by side. Processes do: what Triton's
cache on disk lacks is compiled by forks, which leave it there and never touch a device; then it is
as if it had been there before. Whatever a fork does not manage is compiled here after all.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

from runtime.kernels.fast_launch import LaunchTable

# Few kernels at a time are compiled sooner than processes are made.
WORTH_FORKING = 4
# No kernel takes a tenth of it: whatever a fork hangs at, it is not waited for longer.
KERNEL_SECONDS = 60


def look_up_compiler() -> Thread:
    """Have Triton find out in another thread which version it is (it hashes itself, half a second)
    and build what it drives the device with, beside other work. To be joined before a launch."""
    from triton.runtime.cache import triton_key
    from triton.runtime.driver import driver

    def look_up() -> None:
        triton_key()
        with suppress(RuntimeError):  # without a device: whoever launches is told
            driver.active.utils  # noqa: B018

    thread = Thread(target=look_up, name="compiler", daemon=True)
    thread.start()
    return thread


@contextmanager
def compiling_ahead(num_workers: int) -> Iterator[None]:
    """This thread's launches of Triton kernels do nothing; at the end all of their kernels are
    compiled, and are on the device.

    Kernels that do not compile are left to their first real launch, which says why. Forks are made
    by this thread, while none of the others compiles.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    plain, here = JITFunction.run, get_ident()
    jobs, seen = _Jobs(num_workers), _Seen()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if get_ident() != here:
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        if seen.is_new(self, args, kwargs):
            plain(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    with AsyncCompileMode(jobs, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        except BaseException:
            jobs.drop()
            raise
        finally:
            JITFunction.run = plain
        jobs.run()


class _Seen:
    """The launches so far: a step has many alike, and Triton takes long to see that they are."""

    def __init__(self) -> None:
        self._tables: dict[int, LaunchTable] = {}
        self._keys: set[Any] = set()

    def is_new(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if id(function) not in self._tables:
            self._tables[id(function)] = LaunchTable(function)
        key = self._tables[id(function)].key(args, kwargs)
        if key is None:
            return True
        is_new = (id(function), key) not in self._keys
        self._keys.add((id(function), key))
        return is_new


class _Jobs(Executor):
    """Compilations, none of which begins before `run`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Do all of them; afterwards every future has its kernel, or why there is none."""
        if not self._jobs:
            return
        try:
            missing = [job for future, job in self._jobs if not _is_cached(future)]
            if len(missing) >= WORTH_FORKING:
                compile_in_forks(missing, self._num_workers)
            with ThreadPoolExecutor(
                self._num_workers, thread_name_prefix="compile", initializer=_on_device()
            ) as pool:
                list(pool.map(_settle, *zip(*self._jobs, strict=True)))
        finally:
            self.drop()

    def drop(self) -> None:
        """Whoever waits for a kernel that there will not be waits no longer."""
        for future, _ in self._jobs:
            if not future.done():
                future.set_exception(CancelledError())


def _is_cached(future: Future[Any]) -> bool:
    """Triton's cache on disk has the kernel; also where it is kept in another way."""
    from triton.runtime.cache import get_cache_manager

    key = getattr(future, "_key", "")
    folder = getattr(get_cache_manager(sha256(key.encode()).hexdigest()), "cache_dir", None)
    return folder is None or any(Path(folder).glob("__grp__*"))


def _on_device() -> Callable[[], None]:
    """Makes this thread's device the one of another."""
    from triton.runtime.driver import driver

    device = driver.active.get_current_device()
    return lambda: driver.active.set_current_device(device)


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        kernel = job()
        kernel.run  # noqa: B018 (makes the launcher and loads the kernel)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(kernel)


def compile_in_forks(jobs: Sequence[Callable[[], Any]], num_workers: int) -> None:
    """Do compilations in processes, for what they leave on disk.

    A fork has this thread alone: what it needs must not be locked by another one. It ends without
    cleaning up, since what there would be to clean up is its parent's; nor may it collect garbage,
    for freeing what a dropped engine left on the device is a CUDA call, which aborts a fork.
    """
    queue, feed = os.pipe()
    numbers = b"".join(number.to_bytes(2, "little") for number in range(len(jobs)))
    os.write(feed, numbers)
    os.close(feed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        children: list[int] = []
        with suppress(OSError):  # no more processes or no more memory: so many, then
            while len(children) < min(num_workers, len(jobs)):
                children.append(_fork(jobs, queue))
    os.close(queue)
    for child in children:
        with suppress(ChildProcessError):  # where nobody is to hear of children's ends
            os.waitpid(child, 0)


def _fork(jobs: Sequence[Callable[[], Any]], queue: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        gc.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        while number := os.read(queue, 2):
            signal.alarm(KERNEL_SECONDS)
            with suppress(Exception):
                _leave_on_disk(jobs[int.from_bytes(number, "little")])
    finally:
        os._exit(0)


def _leave_on_disk(job: Callable[[], Any]) -> None:
    """The kernel, and the launcher that some versions of Triton build for it with a C compiler."""
    from triton.runtime.driver import driver

    kernel = job()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
