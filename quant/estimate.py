"""What a plan will cost, from shapes alone: bytes on disk, peak memory, time.

Disk is exact but for headers and biases; memory is the account of `quant.peak_memory`, time that of
`quant.run_time`. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from quant.peak_memory import Workload, is_half, peak_memory
from quant.plan import Plan
from quant.run_time import Speed, run_seconds
from quant.stored_size import DTYPE_BYTES, outside_weights, row_bytes, stored_rows, weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes and seconds a plan will take; `seconds` is None where no speed was given.

    quantized_bytes and num_quantized (weights) count the quantized modules alone. host_bytes is
    anonymous memory (pages of mapped files can be dropped); gpu_bytes is 0 without one;
    spilled_bytes is a file of hidden states beside the artifact while the run lasts.
    """

    source_bytes: int
    artifact_bytes: int
    quantized_bytes: int
    num_quantized: int
    num_weights: int
    host_bytes: int
    gpu_bytes: int
    spilled_bytes: int
    seconds: float | None

    @property
    def quantized_bits(self) -> float:
        """Bits per weight of the quantized modules: codes, scales and zero points."""
        return 8 * self.quantized_bytes / self.num_quantized if self.num_quantized else 0.0

    @property
    def total_bits(self) -> float:
        """Bits per weight of the whole model, dense parts included."""
        return 8 * self.artifact_bytes / self.num_weights

    @property
    def disk_bytes(self) -> int:
        """The artifact, which grows layer by layer, and what lies beside it meanwhile."""
        return self.artifact_bytes + self.spilled_bytes


def estimate(
    plan: Plan, work: Workload, speed: Speed | None = None, *, opening_s: float = 0.0
) -> Estimate:
    """The cost of `plan` on this work (no tokens: no calibration) at this speed.

    opening_s: how long it took to open the source. Its tokenizer takes about as long to load (a
    GGUF's is rebuilt from the same tables), and that comes before the first layer.
    """
    seconds = None
    if speed is not None:
        seconds = opening_s + run_seconds(
            plan, speed, tokens=work.tokens, window_tokens=work.window_tokens,
            is_half=is_half(plan, work),
        )  # fmt: skip
    quantized = [row for row in plan.rows if not row.scheme.is_dense]
    stored, outside = stored_rows(plan), outside_weights(plan)
    num_weights = sum(map(weights_of, stored)) + outside
    peak = peak_memory(plan, work)
    return Estimate(
        source_bytes=num_weights * DTYPE_BYTES[plan.source_dtype],
        artifact_bytes=sum(row_bytes(row, plan.dtype) for row in stored)
        + outside * DTYPE_BYTES[plan.dtype],
        quantized_bytes=sum(row_bytes(row, plan.dtype) for row in quantized),
        num_quantized=sum(map(weights_of, quantized)),
        num_weights=num_weights,
        host_bytes=peak.host_bytes,
        gpu_bytes=peak.gpu_bytes,
        spilled_bytes=peak.spilled_bytes,
        seconds=seconds,
    )
