"""Launching a compiled Triton kernel without working out anew which one it is.

Triton's own launch binds, specializes and looks up its arguments in some 40 us; a step outside of a
graph launches 300 kernels. Here the same launch is found by a key of what Triton specializes on:
types, constants, pointers and integers that are multiples of 16, integers that are 1, blocks of
tensor descriptors. Whatever the key does not cover takes Triton's own way. Launch hooks are not
called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OURS = "runtime.kernels."
_MISSING = object()


def install(device: torch.device) -> None:
    """From here on kernels of ours are launched this way, on the current stream of `device`."""
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    plain_run, plain_getitem = JITFunction.run, JITFunction.__getitem__
    if getattr(plain_getitem, "__module__", None) == __name__:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    tables: dict[int, LaunchTable] = {}  # by id: a function's own hash is of its source

    def getitem(self: Any, grid: Any) -> Any:
        # Somebody else's run (compiling ahead) must see the launch.
        if not self.module.startswith(_OURS) or JITFunction.run is not plain_run or callable(grid):
            return plain_getitem(self, grid)
        table = tables.get(id(self))
        if table is None:
            table = tables[id(self)] = LaunchTable(self)

        def launch(*args: Any, **kwargs: Any) -> None:
            key = table.key(args, kwargs)
            kernel = table.kernels.get(key)
            if kernel is None:
                made = plain_run(self, *args, grid=grid, warmup=False, **kwargs)
                if key is not None and isinstance(made, CompiledKernel):
                    table.kernels[key] = made
                return
            grid_3 = (*grid, 1, 1)
            stream = torch._C._cuda_getCurrentRawStream(index)
            kernel.run(
                grid_3[0], grid_3[1], grid_3[2], stream, kernel.function, kernel.packed_metadata,
                None, None, None, *args, *table.rest(len(args), kwargs),
            )  # fmt: skip

        return launch

    getitem.__module__ = __name__
    JITFunction.__getitem__ = getitem


class LaunchTable:
    """The compiled kernels of one Triton function, by key."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.kernels: dict[Any, Any] = {}
        self._is_constant = tuple(bool(p.is_constexpr) for p in function.params)
        self._constants = frozenset(p.name for p in function.params if p.is_constexpr)
        self._names = tuple(p.name for p in function.params)
        self._defaults = {p.name: p.default if p.has_default else _MISSING for p in function.params}

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells kernels of this function apart; None where Triton has to look itself.

        Constants are compared with their types, since 1 is not True to a compiler.
        """
        parts: list[Any] = []
        for value, is_constant in zip(args, self._is_constant, strict=False):
            part = (type(value), value) if is_constant else _trait(value)
            if part is None:
                return None
            parts.append(part)
        for name, value in kwargs.items():
            is_plain = name in self._constants or name not in self._defaults
            part = (type(value), value) if is_plain else _trait(value)
            if part is None:
                return None
            parts += (name, part)
        return tuple(parts)

    def rest(self, num_given: int, kwargs: dict[str, Any]) -> list[Any]:
        """The arguments behind the first `num_given`, in the function's order."""
        defaults = self._defaults
        return [
            kwargs[name] if name in kwargs else defaults[name] for name in self._names[num_given:]
        ]


def _trait(value: Any) -> Any:
    """What Triton specializes on of an argument that is no constant; None if not known here."""
    kind = type(value)
    if kind is Tensor:
        return (value.dtype, value.data_ptr() & 15 == 0)
    if kind is int:
        return (kind, value == 1, value & 15 == 0, -(2**31) <= value < 2**31)
    if kind is float:
        return kind
    if value is None:
        return (kind, value)
    if kind.__name__ == "TensorDescriptor":  # Triton has two: Gluon's also says how it is laid out
        layout = getattr(value, "layout", None)
        return (kind, value.base.dtype, tuple(value.block_shape), layout)
    return None
