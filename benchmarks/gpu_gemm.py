"""Linear layers alone: ours through the front door, beside what torch offers for the same types.

The four shapes are those of one layer; `batch` of a row is M, the number of input rows. Inputs of
w8a8 and fp8 come quantized, since the engine quantizes them in the kernel before. Every product is
checked against float32 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_rows import Origin, Subject, row
from benchmarks.gpu_timing import BYTES_PER_US, call_us, num_copies
from quant.artifact.layout import QuantizedWeight, dequantize, quantize_activations
from quant.artifact.scheme import Scheme, preset, with_group_size
from runtime.kernels.linear import expected_activations, linear, pack_dense, pack_quantized
from runtime.kernels.quantize import QuantizedActivations
from runtime.kernels.workspace import KernelOptions, Workspace

# (N, K): qkv, o, gate and up, down.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "tiny": ((256, 128), (128, 256)),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
TOLERANCE = 6e-3  # of a bfloat16 output; a wrong kernel is off by far more
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to compute x W^T: its name, its calls (each with weights of its own), bytes read.

    reference: the first call's output in float32, [M, N].
    """

    kernel: str
    calls: tuple[Call, ...]
    num_bytes: int
    reference: Tensor


def measure(
    shape: str, schemes: Sequence[str], rows: Sequence[int], device: torch.device,
    origin: Origin, group: int | None, say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row per scheme, shape, M and contender. Contenders that fail are named and left out."""
    if shape not in SHAPES:
        raise ValueError(f"no GEMMs of shape {shape!r}; known: {', '.join(SHAPES)}")
    options = KernelOptions(workspace=Workspace(device), deterministic=False)
    for scheme in schemes:
        for n, k in SHAPES[shape]:
            bench = Bench(scheme, n, k, device, options, group)
            for m in rows:
                yield from _rows(bench, shape, m, origin, say)


class Bench:
    """Weights of one scheme and shape, as many copies as the cache demands."""

    def __init__(
        self, scheme: str, n: int, k: int, device: torch.device, options: KernelOptions,
        group: int | None,
    ) -> None:  # fmt: skip
        self.scheme, self.n, self.k, self.device = scheme, n, k, device
        self.group = (
            (group or 128) if scheme == "w4a16" else ("channel" if scheme != "bf16" else None)
        )
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._generator = torch.Generator(device).manual_seed(n * k)
        if scheme == "bf16":
            weights: list[Any] = [self._dense() for _ in range(self._copies(2 * n * k))]
            self.packed: list[Any] = [pack_dense(w, self.dtype, device, options) for w in weights]
        else:
            found = _scheme(scheme, k, group)
            assert found.weights is not None
            copies = self._copies(n * k * found.weights.num_bits // 8)
            weights = [self._quantized(found) for _ in range(copies)]
            self.packed = [pack_quantized(w, self.dtype, device, options) for w in weights]
        self.weights = weights

    def contenders(self, m: int) -> Iterator[Callable[[], Contender]]:
        """Ours first, then what torch has for these types."""
        x = torch.randn(m, self.k, generator=self._generator, device=self.device).to(self.dtype)
        yield lambda: self._ours(x)
        if self.device.type != "cuda":
            return
        if self.scheme == "bf16":
            yield lambda: self._torch_dense(x)
        if self.scheme == "fp8":
            yield lambda: self._torch_scaled(x)
        if self.scheme == "w8a8" and m > 16:
            yield lambda: self._torch_int(x)

    def _ours(self, x: Tensor) -> Contender:
        given, reference = self._inputs(x)
        return Contender(
            kernel="weighbridge",
            calls=tuple(partial(linear, given, w) for w in self.packed),
            num_bytes=self._num_bytes(),
            reference=reference @ self._floats(self.weights[0]).T,
        )

    def _inputs(self, x: Tensor) -> tuple[Any, Tensor]:
        """What the layer is given, and the numbers it multiplies with in float32."""
        act = None if self.scheme == "bf16" else self.weights[0].scheme.activations
        if act is None:
            return x, x.float()
        codes, scale = quantize_activations(x, act)
        if expected_activations(self.packed[0]) is None:
            return x, codes.float() * scale
        given = QuantizedActivations(codes_TK=codes, scale_T=scale.flatten(), dtype=self.dtype)
        return given, codes.float() * scale

    def _torch_dense(self, x: Tensor) -> Contender:
        return Contender(
            kernel="torch",
            calls=tuple(partial(torch.nn.functional.linear, x, w) for w in self.weights),
            num_bytes=self._num_bytes(),
            reference=x.float() @ self.weights[0].float().T,
        )

    def _torch_scaled(self, x: Tensor) -> Contender:
        given, reference = self._inputs(x)
        scale = given.scale_T[:, None]

        def call(w: QuantizedWeight, scale_b: Tensor) -> Tensor:
            return torch._scaled_mm(
                given.codes_TK, w.codes.T, scale, scale_b, out_dtype=torch.bfloat16
            )

        pairs = [(w, w.scale.float().T.contiguous()) for w in self.weights]
        return Contender(
            kernel="torch-scaled-mm",
            calls=tuple(partial(call, w, s) for w, s in pairs),
            num_bytes=self._num_bytes(),
            reference=reference @ self._floats(self.weights[0]).T,
        )

    def _torch_int(self, x: Tensor) -> Contender:
        """Sums alone: scales would take a kernel more."""
        given, _ = self._inputs(x)
        codes = self.weights[0].codes.float()
        return Contender(
            kernel="torch-int-mm",
            calls=tuple(partial(torch._int_mm, given.codes_TK, w.codes.T) for w in self.weights),
            num_bytes=self._num_bytes(),
            reference=given.codes_TK.float() @ codes.T,
        )

    def _copies(self, num_bytes: int) -> int:
        return num_copies(num_bytes, self.device)

    def _num_bytes(self) -> int:
        if self.scheme == "bf16":
            return 2 * self.n * self.k
        weight: QuantizedWeight = self.weights[0]
        assert weight.scheme.weights is not None
        bits = weight.scheme.weights.num_bits
        return self.n * self.k * bits // 8 + 2 * weight.scale.numel()

    def _floats(self, weight: Any) -> Tensor:
        return (weight if isinstance(weight, Tensor) else dequantize(weight)).float()

    def _dense(self) -> Tensor:
        w = torch.randn(self.n, self.k, generator=self._generator, device=self.device)
        scaled: Tensor = (w / self.k**0.5).to(self.dtype)
        return scaled

    def _quantized(self, scheme: Scheme) -> QuantizedWeight:
        assert scheme.weights is not None
        groups = self.k // (scheme.weights.group_size or self.k)
        draw: dict[str, Any] = {"generator": self._generator, "device": self.device}
        if scheme.weights.kind == "float":
            values = torch.randn(self.n, self.k, **draw)
            codes, spread = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), 100.0
        else:
            half = 1 << (scheme.weights.num_bits - 1)
            codes = torch.randint(-half, half, (self.n, self.k), dtype=torch.int8, **draw)
            spread = half / 1.8
        size = torch.rand(self.n, groups, **draw) + 0.5
        scale = (size / (spread * self.k**0.5)).to(torch.bfloat16)
        return QuantizedWeight(scheme=scheme, codes=codes, scale=scale)


def _scheme(name: str, k: int, group: int | None) -> Scheme:
    found = preset(name)
    if name == "w4a16":
        return with_group_size(found, min(group or 128, k))
    return with_group_size(found, None) if name == "w8a16" else found


def _rows(
    bench: Bench, shape: str, m: int, origin: Origin, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    for make in bench.contenders(m):
        try:
            contender = make()
            error = relative_error(contender.calls[0](), contender.reference)
            times = call_us(contender.calls, bench.device)
        except Exception as problem:  # one kernel's failure is a finding, not the end of the run
            say(f"{bench.scheme} {bench.n}x{bench.k} M={m}: {type(problem).__name__}: {problem}")
            continue
        if not error < TOLERANCE:
            say(f"{bench.scheme} {bench.n}x{bench.k} M={m} {contender.kernel}: off by {error:.2g}")
        subject = Subject(
            suite="gemm", shape=shape, scheme=bench.scheme, kv_dtype="bf16", batch=m,
            extra={"group": bench.group, "n": bench.n, "k": bench.k, "kernel": contender.kernel},
        )  # fmt: skip
        yield row(
            subject, "gemm_us", times, origin, relative_error=float(f"{error:.3g}"),
            floor_us=round(contender.num_bytes / BYTES_PER_US, 2), copies=len(contender.calls),
        )  # fmt: skip


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; NaN for an output that holds one."""
    return float((out.float() - reference).norm() / reference.norm())


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds by scheme, kernel and shape over M."""
    sizes = sorted({found["batch"] for found in rows})
    lines = ["scheme kernel              shape        " + "".join(f"{m:>8}" for m in sizes)]
    groups: dict[tuple[str, str, int, int], dict[int, float]] = {}
    for found in rows:
        e = found["extra"]
        key = (found["scheme"], e["kernel"], e["n"], e["k"])
        groups.setdefault(key, {})[found["batch"]] = median(found["repeats"])
    for (scheme, kernel, n, k), times in groups.items():
        cells = "".join(f"{times[m]:8.1f}" if m in times else " " * 8 for m in sizes)
        lines.append(f"{scheme:<6} {kernel:<18} {n:>6}x{k:<6} {cells}")
    return "\n".join(lines)
