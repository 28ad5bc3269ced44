"""Kernels run in Triton's interpreter here; it must be chosen before triton is first imported."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def patch_once_a_launch() -> None:
    """The interpreter walks and replaces all of triton.language for every call of a device
    function, hundreds of times a launch, which is most of its time. Nothing is put back before the
    launch ends, so the first time for each set of modules is enough.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[tuple[bool, bool]] = set()
    modules: dict[Any, tuple[bool, bool]] = {}

    def patch_lang(fn: Any) -> Any:
        if fn not in modules:
            values = [id(value) for value in fn.__globals__.values()]
            modules[fn] = (id(tl) in values, id(tl.core) in values)
        if modules[fn] in done:
            return None
        done.add(modules[fn])
        return patch(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    patch_once_a_launch()
