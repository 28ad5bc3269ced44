"""What others make of our artifacts: transformers (through compressed-tensors) loads them, holds
the very weights we dequantize, and computes what our engine computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

# Asymmetric pack-quantized is missing: transformers 5.24 with compressed-tensors 0.20.1 builds its
# packed zero points with the wrong shape; compressed-tensors' own reader is tested in
# tests/quant/artifact.
RECIPES: dict[str, dict[str, Any]] = {
    "w4a16": {"scheme": "w4a16", "group_size": 32, "method": "gptq"},
    "w8a16": {"scheme": "w8a16", "group_size": "channel"},
    "w3a16": {"scheme": "w3a16", "group_size": 32, "method": "gptq"},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
    "w4a8-fp8": {"scheme": "w4a8-fp8", "group_size": 32},
    "w8a8": {"scheme": "w8a8"},
    "fp8": {"scheme": "fp8"},
    "mixed": {
        "scheme": "w4a16",
        "group_size": 32,
        "overrides": [{"match": "*.mlp.down_proj", "scheme": "w8a8"}],
    },
}
WITHOUT_KERNEL = ("w3a16", "w4a8", "w4a8-fp8")
PROMPT = tuple(range(5, 69))


def load_in_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def transformers_logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_transformers_loads_the_artifact_and_agrees(
    name: str, tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    path = artifact(tiny_model("llama"), **RECIPES[name])
    model = load_in_transformers(path)
    theirs = transformers_logprobs(model)
    opened = open_artifact(path)
    weights = {module: opened.weight(module) for module in opened.schemes()}
    quantized = {m: w for m, w in weights.items() if isinstance(w, QuantizedWeight)}
    assert len(quantized) == 14
    for module, weight in quantized.items():
        linear = model.get_submodule(module)
        assert torch.equal(dequantize(weight).float(), linear.weight.float()), module
    engine = Engine.from_artifact(path, EngineConfig(max_model_len=128, num_gpu_blocks_override=32))
    assert ("no kernel" in engine.resolved.reasons["dtype"]) == (name in WITHOUT_KERNEL)
    score = engine.score([ScoreItem(token_ids=PROMPT, reference=theirs)])[0]
    chosen = theirs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert torch.allclose(-torch.tensor(score.nll), chosen, rtol=1e-2, atol=1e-2)
    assert score.kl is not None
    assert max(score.kl) < 1e-3
