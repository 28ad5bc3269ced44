"""The generic decoder: one forward pass for every family, told apart by ModelSpec alone.

Knows StepInputs and pools, not requests, sequences or text. All state comes in as arguments.

Shape legend: T tokens in the step, R rows of logits, E hidden, H query heads, K key/value heads,
D head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.attention import AttentionPlan, PagedBatch, attention, plan_attention
from runtime.kernels.gate import gate
from runtime.kernels.kv_store import slot_rows, store_kv
from runtime.kernels.norm import add_rms_norm, rms_norm
from runtime.kernels.rope import rotate_
from runtime.model.kv_cache import KVCache
from runtime.model.linear import Linear
from runtime.model.rope import RopeSpec, cos_sin
from runtime.model.spec import LayerSpec, ModelSpec
from runtime.model.step import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Norm weights of a layer, float32, the family's offset folded in; None where it has none."""

    attention: Tensor
    after_attention: Tensor | None
    mlp: Tensor
    after_mlp: Tensor | None
    q: Tensor | None
    k: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer: qkv is q|k|v along rows, gate_up is gate|up."""

    spec: LayerSpec
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norms: Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What all layers of a step share: rotations by rope, attention by window, where K/V go."""

    rotations: dict[RopeSpec, tuple[Tensor, Tensor]]
    attention: dict[int | None, AttentionPlan]
    kv_rows: Tensor


class Decoder:
    """A loaded model. Made by `runtime.model.loader`; every weight is in place from the start.

    Attributes:
        spec, dtype (compute type), device.
        kv_scales: per layer the artifact's (k, v) scales for an fp8 cache, or None.
        embedding_VE: the embedding; also the head where `head` is None (tied).
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        layers: tuple[DecoderLayer, ...],
        embedding_VE: Tensor,
        final_norm: Tensor,
        head: Linear | None,
        kv_scales: tuple[tuple[float, float] | None, ...],
    ) -> None:
        self.spec, self.layers, self.head, self.kv_scales = spec, layers, head, kv_scales
        self.embedding_VE, self.final_norm = embedding_VE, final_norm
        self.dtype, self.device = embedding_VE.dtype, embedding_VE.device

    @property
    def lm_head_scheme(self) -> str:
        """Short name of the head's scheme (`dense` where tied)."""
        return self.head.label if self.head is not None else "dense"

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: KVCache) -> Tensor:
        """Write the step's K/V; final hidden states [R, E] of the rows `step.logit_rows_R`."""
        plan = self._plan(step, kv)
        residual_TE = self._embed(step.token_ids_T)
        eps = self.spec.norm_eps
        x_TE = rms_norm(residual_TE, self.layers[0].norms.attention, eps)
        for i, layer in enumerate(self.layers):
            x_TE = self._attend(layer, x_TE, plan, kv.pools[i], kv.scales[i])
            residual_TE, x_TE = add_rms_norm(x_TE, residual_TE, layer.norms.mlp, eps)
            x_TE = self._mlp(layer, x_TE)
            if i + 1 < len(self.layers):
                norm = self.layers[i + 1].norms.attention
                residual_TE, x_TE = add_rms_norm(x_TE, residual_TE, norm, eps)
        rows = step.logit_rows_R
        return add_rms_norm(x_TE[rows], residual_TE[rows], self.final_norm, eps)[1]

    @torch.inference_mode()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, E] hidden states -> [R, V] float32 logits, soft-capped where the family does so."""
        if self.head is not None:
            logits_RV = self.head(hidden_RE).float()
        else:
            logits_RV = functional.linear(hidden_RE, self.embedding_VE).float()
        cap = self.spec.logit_softcap
        return logits_RV if cap is None else (logits_RV / cap).tanh_().mul_(cap)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self.embedding_VE[token_ids_T]
        scale = self.spec.embedding_scale
        # The factor itself is rounded to the compute type first: trained that way (Gemma).
        return x_TE if scale is None else x_TE * torch.tensor(scale, dtype=self.dtype)

    def _plan(self, step: StepInputs, kv: KVCache) -> StepPlan:
        batch = PagedBatch(
            block_tables_SB=step.block_tables_SB,
            query_lens=step.query_lens,
            seq_lens=step.seq_lens,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            block_size=kv.block_size,
            blank_block=kv.blank_block,
            dtype=self.dtype,
        )
        ropes = {layer.spec.rope for layer in self.layers} - {None}
        windows = {layer.spec.window for layer in self.layers}
        return StepPlan(
            rotations={r: cos_sin(r, step.positions_T, self.dtype) for r in ropes if r is not None},
            attention={window: plan_attention(batch, window) for window in windows},
            kv_rows=slot_rows(step.slots_T, self.spec.kv_heads, kv.block_size),
        )

    def _attend(
        self,
        layer: DecoderLayer,
        x_TE: Tensor,
        plan: StepPlan,
        pool: Tensor,
        kv_scales: tuple[float, float],
    ) -> Tensor:
        spec, norms = self.spec, layer.norms
        heads_THD = layer.qkv(x_TE).view(len(x_TE), -1, spec.head_dim)
        qk_THD = heads_THD[:, : spec.heads + spec.kv_heads]
        if norms.q is not None and norms.k is not None:
            _normalize_heads_(qk_THD, spec, norms.q, norms.k)
        if layer.spec.rope is not None:
            rotate_(qk_THD, *plan.rotations[layer.spec.rope])
        store_kv(pool, plan.kv_rows, heads_THD[:, spec.heads :], kv_scales)
        attended_TE = attention(
            heads_THD[:, : spec.heads],
            pool,
            plan.attention[layer.spec.window],
            scale=spec.attention_scale,
            kv_scales=kv_scales,
        )
        out_TE = layer.o(attended_TE)
        after = norms.after_attention
        return out_TE if after is None else rms_norm(out_TE, after, spec.norm_eps)

    def _mlp(self, layer: DecoderLayer, x_TE: Tensor) -> Tensor:
        out_TE = layer.down(gate(layer.gate_up(x_TE), self.spec.act))
        after = layer.norms.after_mlp
        return out_TE if after is None else rms_norm(out_TE, after, self.spec.norm_eps)


def _normalize_heads_(qk_THD: Tensor, spec: ModelSpec, q_norm: Tensor, k_norm: Tensor) -> None:
    """RMSNorm of each query head and each key head, in place."""
    for heads, weight in ((slice(0, spec.heads), q_norm), (slice(spec.heads, None), k_norm)):
        qk_THD[:, heads] = rms_norm(qk_THD[:, heads], weight, spec.norm_eps)
