"""Launches that are found by key are those that Triton would have found; no GPU needed to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.kernels.fast_launch import install


def kernel_body(x_ptr: Any, num: Any, scale: Any, WIDTH: Any, FLAG: Any = None) -> None:
    """Never compiled: only its signature counts."""


kernel_body.__annotations__ = {"WIDTH": "tl.constexpr", "FLAG": "tl.constexpr"}


class Recorder:
    """Triton's own launch, and what the quick one hands to the device."""

    def __init__(self) -> None:
        self.slow: list[Any] = []
        self.quick: list[Any] = []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    seen = Recorder()

    class Made(CompiledKernel):
        def __init__(self) -> None:
            self.function, self.packed_metadata = "function", "metadata"

        def run(self, *args: Any) -> None:
            seen.quick.append(args)

        def __del__(self) -> None:
            pass

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert not warmup
        seen.slow.append((grid, args, kwargs))
        return Made()

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "__getitem__", JITFunction.__getitem__)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 70 + i, raising=False)
    install(torch.device("cuda", 1))
    function = JITFunction(kernel_body)
    function.module = "runtime.kernels.some.kernel"
    return function, seen


def test_a_launch_like_an_earlier_one_is_quick(launched: tuple[Any, Recorder]) -> None:
    kernel, seen = launched
    x, y = torch.zeros(64), torch.ones(64)
    kernel[(3,)](x, 32, 0.5, WIDTH=8, num_warps=4)
    kernel[(5, 2)](y, 48, 0.7, WIDTH=8, num_warps=4)
    assert len(seen.slow) == 1
    (args,) = seen.quick
    assert args[:9] == (5, 2, 1, 71, "function", "metadata", None, None, None)
    assert args[9] is y
    assert args[10:] == (48, 0.7, 8, None), "in the order of the signature, defaults included"


def different() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.zeros(64)
    settings = {"WIDTH": 8, "num_warps": 4}
    return [
        ((x, 32, 0.5), settings),
        ((x, 33, 0.5), settings),  # not a multiple of 16
        ((x, 1, 0.5), settings),  # a constant
        ((x, 2**40, 0.5), settings),  # 64 bits
        ((x[1:], 32, 0.5), settings),  # not aligned
        ((x.half(), 32, 0.5), settings),
        ((None, 32, 0.5), settings),
        ((x, 32, 0.5), {"WIDTH": 16, "num_warps": 4}),
        ((x, 32, 0.5), {"WIDTH": 8, "num_warps": 8}),
        ((x, 32, 0.5), {"WIDTH": 8, "FLAG": True, "num_warps": 4}),
        ((x, 32, 0.5), {"WIDTH": 8, "FLAG": 1, "num_warps": 4}),
    ]


def test_whatever_triton_compiles_apart_is_kept_apart(launched: tuple[Any, Recorder]) -> None:
    kernel, seen = launched
    for args, kwargs in different():
        kernel[(1,)](*args, **kwargs)
    assert len(seen.slow) == len(different())
    for args, kwargs in different():
        kernel[(1,)](*args, **kwargs)
    assert len(seen.slow) == len(seen.quick) == len(different())


def test_descriptors_are_told_apart_by_their_blocks(launched: tuple[Any, Recorder]) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel, seen = launched
    wide, narrow = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.float16)
    for tensor, block in ((wide, [8, 8]), (wide, [8, 16]), (narrow, [8, 8]), (wide[:32], [8, 8])):
        kernel[(1,)](TensorDescriptor.from_tensor(tensor, block), 2, 0.5, WIDTH=8)
    assert (len(seen.slow), len(seen.quick)) == (3, 1)
    assert seen.quick[0][9].shape == (32, 64), "the descriptor itself is handed on"


def test_what_is_not_known_takes_tritons_way(launched: tuple[Any, Recorder]) -> None:
    kernel, seen = launched
    for _ in range(2):
        kernel[(1,)](torch.zeros(4), True, 0.5, WIDTH=8)
        kernel[lambda meta: (1,)](torch.zeros(4), 2, 0.5, WIDTH=8)
    kernel.module = "somebody.else"
    kernel[(1,)](torch.zeros(4), 2, 0.5, WIDTH=8)
    assert (len(seen.slow), len(seen.quick)) == (5, 0)


def test_compiling_ahead_sees_every_launch(launched: tuple[Any, Recorder]) -> None:
    from triton.runtime.jit import JITFunction

    kernel, seen = launched
    kernel[(1,)](torch.zeros(4), 2, 0.5, WIDTH=8)
    plain, dry = JITFunction.run, []
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: dry.append(args)
    kernel[(1,)](torch.zeros(4), 2, 0.5, WIDTH=8)
    JITFunction.run = plain
    kernel[(1,)](torch.zeros(4), 2, 0.5, WIDTH=8)
    assert (len(seen.slow), len(dry), len(seen.quick)) == (1, 1, 1)
