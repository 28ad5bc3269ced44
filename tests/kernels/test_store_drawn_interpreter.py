"""Keeping drawn tokens: kernel and reference alike."""

from __future__ import annotations

import torch

from runtime.kernels.store_drawn import store_drawn, store_drawn_reference


def test_drawn_tokens_are_kept_and_handed_out() -> None:
    from runtime.kernels.store_drawn.kernel import store_drawn_triton

    ids = torch.tensor([5, 6, 7, 0], dtype=torch.int32)
    finite = torch.tensor([True, False, True, True])
    slots = torch.tensor([4, 1, 0, -1], dtype=torch.int32)
    for store in (store_drawn, store_drawn_reference, store_drawn_triton):
        last, out = torch.full((5,), 9, dtype=torch.int32), torch.full((4,), 77).int()
        store(ids, finite, slots, last, out)
        assert last.tolist() == [7, 6, 9, 9, 5]
        assert out.tolist() == [5, -1, 7, 0]
