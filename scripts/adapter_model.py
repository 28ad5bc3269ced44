"""A llama-family model whose linears carry LoRA factors, for training on one device.

The forward pass is written for training alone: right-padded batches under a causal mask, logits
only where a token of an answer follows. The factors are float32; each step W + s B A is formed once
and rounded to bfloat16, so that a step costs no more kernels than plain training. Saving follows
PEFT's layout. It does not know the data nor the schedule.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from quant.checkpoint import Source

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
MOST_BYTES = 8_000_000


def load_base(source: Source, device: torch.device) -> nn.Module:
    """The model in float32, every parameter frozen."""
    settings = {k: v for k, v in source.config.items() if k not in ("model_type", "dtype")}
    config = AutoConfig.for_model(source.config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unknown = model.load_state_dict(
        {name: source.tensor(name) for name in source.names}, strict=False
    )
    if set(missing) - {"lm_head.weight"} or unknown:
        raise ValueError(f"{source.path}: missing {missing}, unknown {unknown}")
    model.tie_weights()
    return model.eval().requires_grad_(False).to(device)


class LoraLlama(nn.Module):
    """`base` (LlamaForCausalLM, frozen, float32) plus factors A [L, r, in] and B [L, out, r].

    L are the layers: all linears of a kind are merged in one batched product.
    """

    def __init__(self, base: nn.Module, *, rank: int, alpha: int, seed: int) -> None:
        super().__init__()
        self.base = [base]  # in a list: its parameters are not this module's
        self.config, self.rank, self.alpha = base.config, rank, alpha
        generator = torch.Generator().manual_seed(seed)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        self.stacked = {part: torch.stack(self._weights(part)) for part in LINEARS}
        for part, weight in self.stacked.items():
            layers, rows, width = weight.shape
            bound = 1 / math.sqrt(width)
            start = (torch.rand(layers, rank, width, generator=generator) * 2 - 1) * bound
            self.down[_key(part)] = nn.Parameter(start.to(weight.device))
            zeros = torch.zeros(layers, rows, rank, device=weight.device)
            self.up[_key(part)] = nn.Parameter(zeros)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def _weights(self, part: str) -> list[Tensor]:
        """The base's own weights [out, in] of a kind of linear, by layer."""
        layers = self.base[0].model.layers
        return [layer.get_submodule(part).weight for layer in layers]

    def delta(self, part: str) -> Tensor:
        """s B A of a kind of linear, float32 [L, out, in]."""
        return (self.up[_key(part)] @ self.down[_key(part)]) * self.scale

    def merged(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
        """W + s B A of every kind of linear, by layer; differentiable in the factors."""
        return {
            part: (weight + self.delta(part)).to(dtype).unbind()
            for part, weight in self.stacked.items()
        }

    def losses(self, ids: Tensor, rows: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Negative log-likelihood [K] of `targets` at flat positions `rows` of ids [B, T].

        Rows are padded on the right: under a causal mask no token sees what comes after it.
        """
        model = self.base[0].model
        x = F.embedding(ids, model.embed_tokens.weight).to(dtype)
        turn = rotary(self.config, ids.shape[1], ids.device, dtype)
        linears = self.merged(dtype)
        for index, layer in enumerate(model.layers):
            weights = [linears[part][index] for part in LINEARS]
            x = self._layer(x, layer, weights, turn)
        x = x.reshape(-1, x.shape[-1])[rows]
        x = _norm(x, model.norm.weight, self.config.rms_norm_eps)
        logits = x @ self.base[0].lm_head.weight.to(dtype).T
        return F.cross_entropy(logits.float(), targets, reduction="none")

    def _layer(
        self, x: Tensor, layer: nn.Module, weights: list[Tensor], turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        q, k, v, o, gate, up, down = weights
        hidden = _norm(x, layer.input_layernorm.weight, eps)
        x = x + F.linear(self._attention(hidden, q, k, v, turn), o)
        hidden = _norm(x, layer.post_attention_layernorm.weight, eps)
        return x + F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    def _attention(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        batch, length, _ = x.shape
        asked, keys, values = (
            F.linear(x, w).view(batch, length, n, -1).transpose(1, 2)
            for w, n in ((q, heads), (k, groups), (v, groups))
        )
        asked, keys = _rotate(asked, turn), _rotate(keys, turn)
        keys, values = (t.repeat_interleave(heads // groups, dim=1) for t in (keys, values))
        mixed = F.scaled_dot_product_attention(asked, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, -1)

    def factors(self) -> dict[str, Tensor]:
        """The factors in bfloat16 under PEFT's names."""
        found = {}
        for part in LINEARS:
            for letter, stored in (("A", self.down), ("B", self.up)):
                both = stored[_key(part)].detach().to("cpu", torch.bfloat16)
                for layer, factor in enumerate(both):
                    key = f"base_model.model.model.layers.{layer}.{part}.lora_{letter}.weight"
                    found[key] = factor.contiguous()
        return found

    def round_factors(self) -> None:
        """Round the factors to what `save` stores, so that what is measured is what is shipped."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()

    def set_base(self, change: Callable[[Tensor], Tensor] = lambda weight: weight) -> None:
        """Put `change` of each W + s B A (float32 [out, in]) into the base's own linears."""
        with torch.no_grad():
            for part, merged in self.merged(torch.float32).items():
                for weight, value in zip(self._weights(part), merged, strict=True):
                    weight.copy_(change(value))


def _key(name: str) -> str:
    return name.replace(".", "/")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotary(
    config: Any, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] of the default rotary embedding."""
    size = config.head_dim
    powers = torch.arange(0, size, 2, device=device).float() / size
    theta = config.rope_parameters["rope_theta"]
    angles = torch.arange(length, device=device).float()[:, None] * theta**-powers
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-right, left), dim=-1) * turn[1]


def save_adapter(model: LoraLlama, folder: Path, base_name: str) -> str:
    """Write PEFT's two files into `folder`; returns the sha256 of the weights.

    ValueError when they are larger than MOST_BYTES.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name,
        "r": model.rank, "lora_alpha": model.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in LINEARS),
        "inference_mode": True, "init_lora_weights": True, "fan_in_fan_out": False,
        "use_dora": False, "use_rslora": False, "modules_to_save": None,
    }  # fmt: skip
    weights, partial = folder / "adapter_model.safetensors", folder / "weights.partial"
    save_file(model.factors(), partial, metadata={"format": "pt"})
    if partial.stat().st_size > MOST_BYTES:
        raise ValueError(f"{weights}: {partial.stat().st_size} bytes, at most {MOST_BYTES}")
    partial.replace(weights)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    return hashlib.sha256(weights.read_bytes()).hexdigest()
