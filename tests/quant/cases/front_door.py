"""Small models with planted faults, and what their artifacts hold and say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

WEIGHTS = "model.safetensors"


def changed_model(
    model: Path,
    out: Path,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> Path:
    """A copy of a checkpoint, `change` applied to its tensors and `config` to its config.json."""
    shutil.copytree(model, out)
    tensors = load_file(out / WEIGHTS)
    change(tensors)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        config["dtype"] = str(dtype).removeprefix("torch.")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, out / WEIGHTS, metadata={"format": "pt"})
    set_config(out, **config)
    return out


def set_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def recipe_file(folder: Path, name: str = "recipe", **keys: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(keys))
    return path


def rows_file(folder: Path, rows: Iterable[Any], name: str = "calib") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_of(artifact: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((artifact / "report.json").read_text())
    return report


def stored_tensors(artifact: Path) -> dict[str, Tensor]:
    """Everything in the artifact's weight files."""
    reader = open_artifact(artifact, verify="full").reader
    return {name: reader.tensor(name).clone() for name in reader.names}


def weights_of(artifact: Path) -> dict[str, Tensor]:
    """What each linear stands for, [out, in], by name."""
    opened = open_artifact(artifact)
    found = {}
    for name in opened.schemes():
        weight = opened.weight(name)
        found[name] = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
    return found


def codes_of(artifact: Path, module: str) -> QuantizedWeight:
    weight = open_artifact(artifact).weight(module)
    assert isinstance(weight, QuantizedWeight)
    return weight


def check_sound(artifact: Path) -> None:
    """No stored value is NaN or infinite, and no scale is 0 or negative."""
    for name, tensor in stored_tensors(artifact).items():
        if tensor.is_floating_point():
            assert bool(torch.isfinite(tensor.float()).all()), name
        if name.endswith("_scale"):
            assert bool((tensor.float() > 0).all()), name


def served_nll(artifact: Path, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihoods of all tokens but the first, as the runtime computes them."""
    config = EngineConfig(max_model_len=max(64, len(ids) + 1), num_gpu_blocks_override=32)
    score = Engine.from_artifact(artifact, config).score([ScoreItem(token_ids=tuple(ids))])
    return torch.tensor(score[0].nll)


def reference_nll(model: Path, ids: Sequence[int]) -> Tensor:
    """The same by transformers in float32 on the original checkpoint."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([list(ids)])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(list(ids[1:])), reduction="none")
