"""What a device offers kernels: whether Triton serves it, and what a kernel may use there.

Asks the device only when called; importing this module touches no GPU and does not need triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTarget:
    """The properties of a card that decide how a kernel is built for it.

    Attributes:
        name: the card's name, the key of its tile table; "interpreter" for a CPU tensor.
        arch: compute capability as 10 * major + minor on CUDA; 0 elsewhere.
        num_sms: multiprocessors, the number of programs that run at once.
        has_pdl: a kernel may start before the one ahead of it ends (programmatic dependent launch).
        has_fp8: e4m3 values exist in hardware.
        has_ptx: inline PTX is understood.
    """

    name: str
    arch: int
    num_sms: int
    has_pdl: bool
    has_fp8: bool
    has_ptx: bool

    @property
    def has_large_shared(self) -> bool:
        """A program may have 227 KB of shared memory: Hopper and Blackwell for data centres. Other
        cards have 163 KB (sm_80), 99 KB (sm_86, sm_89, and Blackwell's sm_120 too) or less."""
        return 90 <= self.arch < 120


INTERPRETER = KernelTarget(
    name="interpreter", arch=0, num_sms=4, has_pdl=False, has_fp8=False, has_ptx=False
)


def uses_triton(device: torch.device) -> bool:
    """True where the Triton kernels run: a CUDA or ROCm device with triton installed."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def target_of(device: torch.device) -> KernelTarget:
    """The target of a device; a CPU device stands for Triton's interpreter (tests)."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_target(index: int) -> KernelTarget:
    properties = torch.cuda.get_device_properties(index)
    is_nvidia = torch.version.hip is None
    arch = 10 * properties.major + properties.minor if is_nvidia else 0
    return KernelTarget(
        name=properties.name,
        arch=arch,
        num_sms=properties.multi_processor_count,
        has_pdl=arch >= 90,
        has_fp8=arch >= 89 or not is_nvidia,
        has_ptx=is_nvidia,
    )
