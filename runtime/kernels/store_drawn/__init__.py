"""Keep drawn tokens where the next step reads them, and where the host does.

Shape legend: N slots, R rows that drew.
"""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.backend import uses_triton
from runtime.kernels.store_drawn.reference import FAULTY, store_drawn_reference

__all__ = ["FAULTY", "store_drawn", "store_drawn_reference"]


def store_drawn(
    ids_R: Tensor, is_finite_R: Tensor, slots_R: Tensor, last_tokens_N: Tensor, out_R: Tensor
) -> None:
    """`last_tokens_N[slots_R] = ids_R`; `out_R` gets the ids too, FAULTY for rows not finite.

    `ids_R`, `slots_R`, `last_tokens_N`, `out_R` int32; `is_finite_R` bool. Slot -1 stores nothing
    but its id in `out_R`. A faulty row's id is some valid token.
    """
    if not uses_triton(ids_R.device):
        store_drawn_reference(ids_R, is_finite_R, slots_R, last_tokens_N, out_R)
        return
    from runtime.kernels.store_drawn.kernel import store_drawn_triton

    store_drawn_triton(ids_R, is_finite_R, slots_R, last_tokens_N, out_R)
