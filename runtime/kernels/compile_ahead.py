"""Compiling kernels side by side before they are needed, by going through the motions of a step.

Knows no kernel: whatever is launched within `compiling_ahead` is compiled and not run. What else
happens there (torch's own ops) does happen, on outputs that nobody has written.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from typing import Any


@contextmanager
def compiling_ahead(num_threads: int) -> Iterator[None]:
    """This thread's launches of Triton kernels compile in others and do nothing else; all are done
    at the end.

    Kernels that do not compile are left to their first real launch, which says why. Triton's
    compiler spends most of its time outside of Python, so threads do run side by side.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    plain, here = JITFunction.run, get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_dry = warmup or get_ident() == here
        return plain(self, *args, grid=grid, warmup=is_dry, **kwargs)

    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = plain
