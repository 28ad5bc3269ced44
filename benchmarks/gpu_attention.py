"""Paged attention alone: decodes by batch, length and KV type; prefills by length.

Heads are those of the shape. Blocks are scattered over the pool, and each call reads a pool of its
own, as the layers of a model do. Every case is checked against float32 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_gemm import TOLERANCE, relative_error
from benchmarks.gpu_rows import Origin, Subject, row
from benchmarks.gpu_timing import BYTES_PER_US, call_us, num_copies
from runtime.kernels.attention import PagedBatch, attention, plan_attention
from runtime.kernels.workspace import Workspace

# heads, KV heads, head_dim
SHAPES = {"llama-3.1-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64), "tiny": (4, 2, 32)}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
          "float32": torch.float32}  # fmt: skip
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`batch` sequences of `context` stored tokens, the last `queries` of which are asked."""

    batch: int
    context: int
    queries: int = 1


DECODES = tuple(Case(batch=b, context=n) for b in (1, 8, 64, 256) for n in (1024, 1280, 8192)
                if b * n <= 2**20)  # fmt: skip
PREFILLS = tuple(Case(batch=b, context=n, queries=n) for b, n in ((1, 2048), (4, 2048), (1, 8192)))


class Bench:
    """Pools, queries and tables of one case."""

    def __init__(self, shape: str, case: Case, kv_dtype: str, device: torch.device) -> None:
        self.case, self.device, self.kv_dtype = case, device, kv_dtype
        self.heads, self.kv_heads, self.head_dim = SHAPES[shape]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._generator = torch.Generator(device).manual_seed(case.batch * case.context)
        per_sequence = -(-case.context // BLOCK_SIZE)
        self.num_blocks = case.batch * per_sequence
        order = torch.randperm(self.num_blocks, generator=self._generator, device=device)
        self.tables_SB = order.view(case.batch, per_sequence).to(torch.int32)
        per_token = 2 * self.kv_heads * self.head_dim * DTYPES[kv_dtype].itemsize
        self.num_bytes = case.batch * case.context * per_token
        pools = [self._pool() for _ in range(num_copies(self.num_bytes, device))]
        self.pools = [pool for pool, _ in pools]
        self.scales = [scales for _, scales in pools]
        num_tokens = case.batch * case.queries
        self.head_scales_2K = None
        if kv_dtype == "fp8" and device.type == "cuda":
            self.head_scales_2K = torch.ones(2, self.kv_heads, device=device)
        self.q_THD = self._draw(num_tokens, self.heads, self.head_dim).to(self.dtype)

    def calls(self) -> tuple[Callable[[], Tensor], ...]:
        plan = plan_attention(self._batch(), None)
        scale = self.head_dim**-0.5
        return tuple(
            lambda p=p, s=s: attention(
                self.q_THD, p, plan, scale=scale, head_scales_2K=self.head_scales_2K, token_scales=s
            )
            for p, s in zip(self.pools, self.scales, strict=True)
        )

    def _batch(self) -> PagedBatch:
        case, is_cuda = self.case, self.device.type == "cuda"
        device: dict[str, Any] = {}
        if is_cuda:
            lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=self.device)
            starts = case.queries * torch.arange(
                case.batch + 1, dtype=torch.int32, device=self.device
            )
            device = {
                "query_starts_S1": starts,
                "seq_lens_S": lens,
                "num_decodes": case.batch if case.queries == 1 else 0,
                "heads": self.heads,
                "num_tokens": case.batch * case.queries,
            }
        return PagedBatch(
            block_tables_SB=self.tables_SB if is_cuda else self.tables_SB.long(),
            query_lens=(case.queries,) * case.batch,
            seq_lens=(case.context,) * case.batch,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE,
            blank_block=self.num_blocks,
            dtype=self.dtype,
            pool_dtype=DTYPES[self.kv_dtype],
            workspace=Workspace(self.device),
            **device,
        )

    def reference(self) -> Tensor:
        """What the last sequence's last query sees, in float32: [H * D]."""
        values = self.pools[0][self.tables_SB[-1].long()].float()
        if self.scales[0] is not None:
            values *= self.scales[0][self.tables_SB[-1].long()][..., None]
        kv_2KLD = values.permute(1, 2, 0, 3, 4).reshape(2, self.kv_heads, -1, self.head_dim)
        q_KGD = self.q_THD[-1].float().view(self.kv_heads, -1, self.head_dim)
        k_KLD, v_KLD = kv_2KLD[:, :, : self.case.context]
        return scaled_dot_product_attention(q_KGD, k_KLD, v_KLD).flatten()

    def _pool(self) -> tuple[Tensor, Tensor | None]:
        shape = (self.num_blocks + 1, 2, self.kv_heads, BLOCK_SIZE, self.head_dim)
        dtype = DTYPES[self.kv_dtype]
        if self.kv_dtype != "int8":
            return self._draw(*shape).to(dtype), None
        draw: dict[str, Any] = {"generator": self._generator, "device": self.device}
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, **draw)
        return codes, (torch.rand(shape[:-1], **draw) + 0.5) / 64

    def _draw(self, *shape: int) -> Tensor:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype)


def measure(
    shape: str, kv_dtypes: Sequence[str], cases: Sequence[Case], device: torch.device,
    origin: Origin, say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row per case and KV type; one that fails is named and left out."""
    if shape not in SHAPES:
        raise ValueError(f"no attention of shape {shape!r}; known: {', '.join(SHAPES)}")
    for kv_dtype in kv_dtypes:
        for case in cases:
            try:
                yield _row(shape, case, kv_dtype, device, origin, say)
            except Exception as problem:  # a finding, not the end of the run
                say(f"attention {kv_dtype} {case}: {type(problem).__name__}: {problem}")


def _row(
    shape: str, case: Case, kv_dtype: str, device: torch.device, origin: Origin,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    bench = Bench(shape, case, kv_dtype, device)
    calls = bench.calls()
    error = relative_error(calls[0]()[-1], bench.reference())
    if not error < TOLERANCE:
        say(f"attention {kv_dtype} {case}: off by {error:.2g}")
    times = call_us(calls, device)
    kind = "decode" if case.queries == 1 else "prefill"
    subject = Subject(
        suite="attention", shape=shape, scheme="bf16", kv_dtype=kv_dtype, batch=case.batch,
        extra={"context": case.context, "phase": kind},
    )  # fmt: skip
    extra: dict[str, Any] = {"relative_error": float(f"{error:.3g}"), "copies": len(calls)}
    if kind == "decode":
        extra["floor_us"] = round(bench.num_bytes / BYTES_PER_US, 2)
    else:
        operations = 4 * bench.heads * bench.head_dim * case.batch * case.context**2 / 2
        extra["tflops"] = round(operations / min(times) / 1e6, 1)
    return row(subject, "attention_us", times, origin, **extra)


def describe(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["phase    kv      batch context       us   floor  error"]
    for found in rows:
        e = found["extra"]
        floor = f"{e['floor_us']:7.1f}" if "floor_us" in e else f"{e['tflops']:5.0f}TF"
        lines.append(
            f"{e['phase']:<8} {found['kv_dtype']:<7} {found['batch']:>5} {e['context']:>7} "
            f"{found['value']:8.1f} {floor} {e['relative_error']:.2g}"
        )
    return "\n".join(lines)
