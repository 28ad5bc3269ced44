"""llm-compressor beside ours: the same model, windows and judge in the same process.

Needs `llmcompressor` (0.14 was tried), which is no dependency of this project: `is_installed` says
whether it is there. Each scheme has the peer settings that a careful user would try; the best of
them by mean KL is the one to beat. The peer is given the reference's weights in float32 and leaves
a model whose forward computes with its codes and rounded inputs, which is judged as ours is.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One setting of the peer. `modifiers` makes its recipe, once it is known to be installed."""

    name: str
    modifiers: Callable[[], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """A peer's model and what it took; `model` computes as the peer would have it served."""

    name: str
    model: nn.Module
    seconds: float


def is_installed() -> bool:
    """Whether the peer can be run here."""
    return importlib.util.find_spec("llmcompressor") is not None


def described() -> str:
    """The peer and its version, for the rows."""
    return f"llm-compressor {version('llmcompressor')}"


def _weights(num_bits: int, *, symmetric: bool, group_size: int | None) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    return {
        "num_bits": num_bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": group_size, "observer": "mse",
    }  # fmt: skip


def _gptq(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Any:
    from llmcompressor.modifiers.gptq import GPTQModifier

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"], actorder="static")


def _w4(symmetric: bool) -> Callable[[], list[Any]]:
    return lambda: [_gptq(_weights(4, symmetric=symmetric, group_size=64))]


def _w8a8(strength: float) -> Callable[[], list[Any]]:
    def modifiers() -> list[Any]:
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        inputs = {
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
        }  # fmt: skip
        gptq = _gptq(_weights(8, symmetric=True, group_size=None), inputs)
        return [SmoothQuantModifier(smoothing_strength=strength), gptq]

    return modifiers


def _fp8() -> list[Any]:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return [QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["lm_head"])]


PEERS: dict[str, tuple[Peer, ...]] = {
    "w4-sym-g64": (Peer(name="gptq-static-mse", modifiers=_w4(True)),),
    "w4-asym-g64": (Peer(name="gptq-static-mse", modifiers=_w4(False)),),
    "w8a8": (Peer(name="smoothquant-0.8-gptq", modifiers=_w8a8(0.8)),),
    "fp8": (Peer(name="fp8-dynamic", modifiers=_fp8),),
}


def run_peer(
    peer: Peer, reference: Any, tokenizer: Any, windows: Sequence[Sequence[int]]
) -> PeerRun:
    """A copy of `reference` compressed by the peer with token windows of one length.

    The peer wants its model to lie on disk, and a tokenizer though it has nothing to tokenize.
    """
    from llmcompressor import oneshot

    device = next(reference.parameters()).device
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)}
            for row in torch.tensor([list(window) for window in windows])]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        started = time.perf_counter()
        oneshot(
            model=model,
            dataset=DataLoader(rows, batch_size=1),  # type: ignore[arg-type] # a list is one
            processor=tokenizer,
            recipe=peer.modifiers(),
            num_calibration_samples=len(rows),
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    return PeerRun(name=peer.name, model=model.to(device).eval(), seconds=seconds)
