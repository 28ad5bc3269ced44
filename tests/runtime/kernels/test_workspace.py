"""Scratch memory of kernels: it grows, and what was handed out before stays."""

from __future__ import annotations

from runtime.kernels.workspace import Workspace


def test_growing_leaves_what_was_handed_out() -> None:
    workspace = Workspace("cpu")
    counters, partials = workspace.counters(4), workspace.partials(4)
    partials.fill_(7.0)
    assert workspace.counters(4).data_ptr() == counters.data_ptr()
    assert workspace.partials(2).data_ptr() == partials.data_ptr()
    larger = workspace.partials(64)
    larger.zero_()
    workspace.counters(64).fill_(1)
    assert partials.tolist() == [7.0] * 4
    assert counters.tolist() == [0] * 4
    assert workspace.num_bytes == 4 * (64 + 64)
