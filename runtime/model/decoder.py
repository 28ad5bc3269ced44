"""The generic decoder: one forward pass for every family, told apart by ModelSpec alone.

Knows StepInputs and pools, not requests, sequences or text. All state comes in as arguments.

Two ways through a layer: torch's own ops (any device, float32 too), and kernels that rotate, store
and attend without asking the host anything, which a graph can capture (`has_kernels`).

Shape legend: T tokens in the step, R rows of logits, E hidden, H query heads, K key/value heads,
D head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.attention import (
    AttentionPlan,
    PagedBatch,
    TritonPlan,
    attention,
    plan_attention,
)
from runtime.kernels.backend import uses_triton
from runtime.kernels.kv_store import slot_rows, store_kv
from runtime.kernels.norm import add_rms_norm, rms_norm
from runtime.kernels.quantize import QuantizedActivations
from runtime.kernels.rope import rotate_
from runtime.kernels.rope_kv import rope_kv
from runtime.kernels.workspace import KernelOptions, Workspace
from runtime.model.kv_cache import KVCache, KVScales
from runtime.model.linear import Linear
from runtime.model.rope import RopeSpec, cos_sin, cos_sin_table
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
    """What all layers of a step share: attention by window and
    element type of the cache; rotations by rope and where K/V go
    are worked out per step for torch's ops only (kernels look both up by position and slot).

    last_rows: the last layer's attention where only the last row of each span is wanted.
    """

    attention: dict[tuple[int | None, torch.dtype], AttentionPlan | TritonPlan]
    last_rows: AttentionPlan | TritonPlan | None
    rotations: dict[RopeSpec, tuple[Tensor, Tensor]]
    kv_rows: Tensor | None


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
        kv_scales: tuple[KVScales | None, ...],
        options: KernelOptions | None = None,
        num_positions: int | None = None,
    ) -> None:
        """`num_positions`: longest sequence that will be run (None: the model's own limit)."""
        self.spec, self.layers, self.head, self.kv_scales = spec, layers, head, kv_scales
        self.embedding_VE, self.final_norm = embedding_VE, final_norm
        self.dtype, self.device = embedding_VE.dtype, embedding_VE.device
        self.options = options or KernelOptions(workspace=Workspace(self.device))
        self._head = head or Linear.shared(embedding_VE, self.options)
        self._rope_tables = self._tables(num_positions or spec.max_positions)
        scale = spec.embedding_scale
        # The factor itself is rounded to the compute type first: trained that way (Gemma).
        self._embedding_scale = None if scale is None else float(torch.tensor(scale).to(self.dtype))

    def _tables(self, num_positions: int) -> dict[RopeSpec, Tensor]:
        if not self.has_kernels:
            return {}
        ropes = {layer.spec.rope for layer in self.layers} - {None}
        return {r: cos_sin_table(r, num_positions, self.device) for r in ropes if r is not None}

    @property
    def has_kernels(self) -> bool:
        """Kernels of our own serve this device and compute type: steps can be captured."""
        return uses_triton(self.device) and self.dtype != torch.float32

    @property
    def lm_head_scheme(self) -> str:
        """Short name of the head's scheme (`dense` where tied)."""
        return self.head.label if self.head is not None else "dense"

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: KVCache) -> Tensor:
        """Write the step's K/V; final hidden states [R, E] of the rows `step.logit_rows_R`."""
        residual_TE = self._embed(step.token_ids_T)
        eps = self.spec.norm_eps
        first = self.layers[0]
        normed = rms_norm(residual_TE, first.norms.attention, eps, first.qkv.activations)
        plan: StepPlan | None = None
        for i, layer in enumerate(self.layers):
            is_last = i + 1 == len(self.layers)
            qkv = layer.qkv(normed)
            if plan is None:  # the first product keeps a device busy meanwhile
                plan = self._plan(step, kv)
            rows = step.logit_rows_R if is_last else None
            attended_TE = self._attend(i, qkv, step, plan, kv, rows)
            del qkv
            if rows is not None:
                # Nothing of the other rows is read any more: their K/V is written.
                residual_TE = residual_TE[rows]
                if not len(rows):
                    return residual_TE
            norms, up = layer.norms, layer.gate_up.activations
            residual_TE, normed = self._added(
                layer.o, attended_TE, residual_TE, norms.after_attention, norms.mlp, up
            )
            del attended_TE  # its memory serves the MLP, where a step takes most
            gated = layer.gate_up.gated(normed, self.spec.act, layer.down.activations)
            norm, quantized = self.final_norm, None
            if not is_last:
                after = self.layers[i + 1]
                norm, quantized = after.norms.attention, after.qkv.activations
            residual_TE, normed = self._added(
                layer.down, gated, residual_TE, norms.after_mlp, norm, quantized
            )
            del gated
        assert isinstance(normed, Tensor)
        return normed

    @torch.inference_mode()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, E] hidden states -> [R, V] float32 logits, soft-capped where the family does so."""
        logits_RV = self._head.in_float32(hidden_RE)
        cap = self.spec.logit_softcap
        return logits_RV if cap is None else (logits_RV / cap).tanh_().mul_(cap)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        x_TE = self.embedding_VE[token_ids_T]
        return x_TE if self._embedding_scale is None else x_TE * self._embedding_scale

    def _plan(self, step: StepInputs, kv: KVCache) -> StepPlan:
        kinds = {self._kind(i, kv) for i in range(len(self.layers))}
        attend = {kind: plan_attention(self._batch(step, kv, kind[1]), kind[0]) for kind in kinds}
        if self._is_on_kernels(step):
            last_rows = None
            if step.wants_last_rows and not self.options.deterministic:
                # A row whose K/V and all before it are stored is answered as a decode is.
                window, pool_dtype = self._kind(-1, kv)
                batch = self._batch(step, kv, pool_dtype)
                decodes = replace(batch, num_decodes=len(step.seq_lens), num_tokens=None)
                last_rows = plan_attention(decodes, window)
            return StepPlan(attention=attend, last_rows=last_rows, rotations={}, kv_rows=None)
        ropes = {layer.spec.rope for layer in self.layers} - {None}
        return StepPlan(
            attention=attend,
            last_rows=None,
            rotations={r: cos_sin(r, step.positions_T, self.dtype) for r in ropes if r is not None},
            kv_rows=slot_rows(step.slots_T, self.spec.kv_heads, kv.block_size),
        )

    def _is_on_kernels(self, step: StepInputs) -> bool:
        return self.has_kernels and step.query_starts_S1 is not None

    def _kind(self, i: int, kv: KVCache) -> tuple[int | None, torch.dtype]:
        """What layers share a plan by."""
        return self.layers[i].spec.window, kv.pools[i].dtype

    def _batch(self, step: StepInputs, kv: KVCache, pool_dtype: torch.dtype) -> PagedBatch:
        return PagedBatch(
            block_tables_SB=step.block_tables_SB,
            query_lens=step.query_lens,
            seq_lens=step.seq_lens,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            block_size=kv.block_size,
            blank_block=kv.blank_block,
            dtype=self.dtype,
            query_starts_S1=step.query_starts_S1 if self.has_kernels else None,
            seq_lens_S=step.seq_lens_S if self.has_kernels else None,
            num_decodes=step.num_decodes,
            heads=self.spec.heads,
            num_tokens=len(step.token_ids_T),
            pool_dtype=pool_dtype,
            deterministic=self.options.deterministic,
            workspace=self.options.workspace,
        )

    def _attend(
        self,
        i: int,
        qkv: Tensor,
        step: StepInputs,
        plan: StepPlan,
        kv: KVCache,
        rows: Tensor | None,
    ) -> Tensor:
        """Store all K/V; [R, H * D] of the `rows` wanted, None for all of them."""
        spec = self.spec
        heads_THD = qkv.view(len(qkv), -1, spec.head_dim)
        if plan.kv_rows is None:
            self._rotate_and_store(i, heads_THD, step, kv)
        else:
            self._rotate_and_store_by_ops(i, heads_THD, plan, kv)
        if rows is not None and not len(rows):
            return heads_THD.new_empty(0, spec.heads * spec.head_dim)
        if rows is None or plan.last_rows is None:
            attended_TE = self._answer(i, heads_THD, plan.attention[self._kind(i, kv)], kv)
            return attended_TE if rows is None else attended_TE[rows]
        return self._answer(i, heads_THD[rows], plan.last_rows, kv)

    def _answer(
        self, i: int, heads_THD: Tensor, plan: AttentionPlan | TritonPlan, kv: KVCache
    ) -> Tensor:
        return attention(
            heads_THD[:, : self.spec.heads],
            kv.pools[i],
            plan,
            scale=self.spec.attention_scale,
            kv_scales=kv.scales[i],
            head_scales_2K=kv.head_scales[i],
            token_scales=kv.token_scales[i],
        )

    def _added(
        self,
        linear: Linear,
        x: Tensor | QuantizedActivations,
        residual_TE: Tensor,
        after: Tensor | None,
        norm: Tensor,
        activations: ActivationScheme | None,
    ) -> tuple[Tensor, Tensor | QuantizedActivations]:
        """The residual plus the linear's output (normed by `after` where there is such a norm), and
        the sum's norm. The residual's memory may be used."""
        eps = self.spec.norm_eps
        if after is None and isinstance(x, Tensor) and linear.can_add(x):
            linear.add_(residual_TE, x)
            return residual_TE, rms_norm(residual_TE, norm, eps, activations)
        out_TE = linear(x)
        if after is not None:
            out_TE = rms_norm(out_TE, after, eps)
        return add_rms_norm(out_TE, residual_TE, norm, eps, activations)

    def _rotate_and_store(self, i: int, heads_THD: Tensor, step: StepInputs, kv: KVCache) -> None:
        layer = self.layers[i]
        rope = layer.spec.rope
        rope_kv(
            heads_THD,
            kv.pools[i],
            step.slots_T,
            num_heads=self.spec.heads,
            eps=self.spec.norm_eps,
            table=None if rope is None else self._rope_tables[rope],
            positions_T=step.positions_T,
            q_norm=layer.norms.q,
            k_norm=layer.norms.k,
            head_scales_2K=kv.head_scales[i],
            token_scales=kv.token_scales[i],
        )

    def _rotate_and_store_by_ops(
        self, i: int, heads_THD: Tensor, plan: StepPlan, kv: KVCache
    ) -> None:
        spec, layer = self.spec, self.layers[i]
        norms = layer.norms
        qk_THD = heads_THD[:, : spec.heads + spec.kv_heads]
        if norms.q is not None and norms.k is not None:
            _normalize_heads_(qk_THD, spec, norms.q, norms.k)
        if layer.spec.rope is not None:
            rotate_(qk_THD, *plan.rotations[layer.spec.rope])
        assert plan.kv_rows is not None
        store_kv(
            kv.pools[i],
            plan.kv_rows,
            heads_THD[:, spec.heads :],
            kv.scales[i],
            kv.head_scales[i],
            kv.token_scales[i],
        )


def _normalize_heads_(qk_THD: Tensor, spec: ModelSpec, q_norm: Tensor, k_norm: Tensor) -> None:
    """RMSNorm of each query head and each key head, in place."""
    for heads, weight in ((slice(0, spec.heads), q_norm), (slice(spec.heads, None), k_norm)):
        qk_THD[:, heads] = rms_norm(qk_THD[:, heads], weight, spec.norm_eps)
