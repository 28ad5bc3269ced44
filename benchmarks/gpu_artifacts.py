"""Artifacts that benchmarks run on: random weights of a shape, made once per folder.

Speed does not depend on what a model has learnt, so `benchmarks.synth` stands in for a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = "tiny"
# For dry runs on a CPU: every part of a llama in a size that a test can afford.
_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
# The names of result rows and the recipes that make them.
RECIPES = {"w4a16": "w4a16", "w8a16": "w8a16", "w8a8": "w8a8", "fp8": "fp8", "bf16": "none"}
GROUPS: dict[str, int | str | None] = {
    "w4a16": 128, "w8a16": "channel", "w8a8": "channel", "fp8": "channel", "bf16": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One artifact: shape, scheme, and what departs from the recipe.

    group: columns per scale of w4a16. lm_head: scheme of the output head. layers: a short model
    (None: all of them), whose figures count for nothing but a quick look.
    """

    shape: str
    scheme: str
    group: int | str | None = None
    lm_head: str = "bf16"
    layers: int | None = None

    @property
    def name(self) -> str:
        parts = [Path(self.shape).name.removesuffix(".json"), self.scheme]
        parts += [f"g{self.group}"] if self.group is not None else []
        parts += [f"head-{self.lm_head}"] if self.lm_head != "bf16" else []
        parts += [f"{self.layers}-layers"] if self.layers is not None else []
        return "-".join(parts)

    def extra(self) -> dict[str, Any]:
        """What a result row says about it."""
        group = self.group if self.group is not None else GROUPS[self.scheme]
        extra: dict[str, Any] = {"group": group, "lm_head": self.lm_head}
        return extra if self.layers is None else {**extra, "layers": self.layers}


def artifact_of(subject: Subject, folder: Path, device: str) -> Path:
    """The artifact below `folder`; made if it is not there yet."""
    from benchmarks.synth import synthesize

    path = folder / subject.name
    if (path / "artifact.json").is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    shape = subject.shape
    if shape == TINY:
        config = folder / "tiny.json"
        config.write_text(json.dumps(_TINY_CONFIG), encoding="utf-8")
        shape = str(config)
    changes: dict[str, Any] = {} if subject.group is None else {"group_size": subject.group}
    if subject.lm_head != "bf16":
        changes |= {"lm_head": subject.lm_head}
    synthesize(
        shape, RECIPES[subject.scheme], path, layers=subject.layers, device=device, changes=changes
    )
    return path


def read_through(path: Path) -> int:
    """Read every file once, so that the page cache holds it; the bytes read."""
    total = 0
    for file in sorted(path.iterdir()):
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(64 * 2**20):
                total += len(chunk)
    return total
