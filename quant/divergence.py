"""KL between a model and an artifact made of it, layer by layer: one layer of each in memory.

What the artifact stores is computed with in float (dequantized weights, rounded inputs, rounded
keys and values), so that the figure is of the representation and no kernel's. It does not know what
the figure is for.

Shape legend: B sequences of a batch, T tokens, H hidden size, N valid tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.artifact.artifact import Artifact
from quant.artifact.scheme import DENSE
from quant.capture import Stream, make_batches, tapped
from quant.checkpoint import Source
from quant.kv_layer import stored_tap
from quant.kv_scales import scale_names
from quant.layer_job import dense_state, quantize_input
from quant.modelling import EMBEDDING_WEIGHT, HEAD, Skeleton, linear_of
from quant.sensitivity import Tell

# Tokens that logits are made of at once: two of [tokens, V] are in memory.
_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Mean KL(model || artifact) in nats per token, and its standard error over windows (None of a
    single one)."""

    mean: float
    error: float | None


class Judge:
    """Judges artifacts of one model on the same windows; the model itself is run once."""

    def __init__(
        self,
        source: Source,
        windows: Sequence[Sequence[int]],
        device: str,
        *,
        batch_tokens: int,
    ) -> None:
        self._source, self._device = source, device
        self._skeleton = source.skeleton if device == "cpu" else Skeleton(source.config, device)
        self._batches = make_batches(windows, batch_tokens)
        self._states: list[Tensor] | None = None

    def judge(self, artifact: Artifact, tell: Tell) -> Divergence:
        """Mean KL of the artifact; NonFiniteError when its activations are not finite. `tell`
        hears of every layer, the first time of the model's too."""
        if self._states is None:
            self._states = self._reference(tell)
        stream = self._embedded(artifact.reader.tensor(EMBEDDING_WEIGHT))
        for index in range(self._source.num_layers):
            tell(f"judging, layer {index + 1} of {self._source.num_layers}")
            self._advance(stream, artifact, index)
        found = list(self._by_window(artifact, stream.hidden))
        sums, counts = zip(*found, strict=True)
        averages = [total / tokens for total, tokens in found]
        return Divergence(mean=math.fsum(sums) / sum(counts), error=_standard_error(averages))

    def _embedded(self, table: Tensor) -> Stream:
        stream = Stream(batches=self._batches)
        ids = [batch.token_ids for batch in self._batches]
        stream.fill(self._skeleton.embed({EMBEDDING_WEIGHT: table}, ids))
        return stream

    def _reference(self, tell: Tell) -> list[Tensor]:
        """The model's hidden states [B, T, H] after its last layer."""
        skeleton = self._skeleton
        stream = self._embedded(self._source.tensor(EMBEDDING_WEIGHT))
        for index in range(self._source.num_layers):
            tell(f"judging, layer {index + 1} of {self._source.num_layers} of the original")
            layer = skeleton.build_layer(index, self._source.tensors(skeleton.layer_names(index)))
            stream.advance(
                lambda hidden, mask: skeleton.run_layer(index, layer, hidden, mask),  # noqa: B023
                f"layer {index}",
            )
        return stream.hidden

    def _advance(self, stream: Stream, artifact: Artifact, index: int) -> None:
        skeleton, prefix = self._skeleton, self._skeleton.layer_prefix(index)
        schemes = {n: s for n, s in artifact.schemes().items() if n.startswith(prefix)}
        names = [name for name in artifact.reader.names if name.startswith(prefix)]
        stored = {name: artifact.reader.tensor(name).to(skeleton.device) for name in names}
        state = dense_state(stored, schemes)
        scales = [state.pop(name) for name in scale_names(prefix) if name in state]
        layer = skeleton.build_layer(index, state)
        for name, scheme in schemes.items():
            if scheme.activations is not None:
                quantize_input(linear_of(layer, name.removeprefix(prefix)), scheme.activations)
        is_kept = index in artifact.kv_kept_layers
        rounding = stored_tap(None if is_kept else artifact.manifest.kv_scheme(), scales)
        attention = layer.get_submodule("self_attn")
        with nullcontext() if rounding is None else tapped(attention, rounding):
            stream.advance(
                lambda hidden, mask: skeleton.run_layer(index, layer, hidden, mask),
                f"layer {index} of the artifact",
            )

    def _by_window(
        self, artifact: Artifact, hidden: Sequence[Tensor]
    ) -> Iterator[tuple[float, int]]:
        """Sum of KL and number of tokens of each window."""
        assert self._states is not None
        with self._head_of_model() as model, self._head_of(artifact) as candidate:
            for batch, first, second in zip(self._batches, self._states, hidden, strict=True):
                for row, mask in enumerate(batch.mask):
                    tokens = int(mask.sum())
                    yield (
                        self._kl_sum(model, candidate, first[row, :tokens], second[row, :tokens]),
                        tokens,
                    )

    def _head_of_model(self) -> AbstractContextManager[nn.Module]:
        skeleton = self._skeleton
        return skeleton.head(self._source.tensors(skeleton.outer_names()))

    @contextmanager
    def _head_of(self, artifact: Artifact) -> Iterator[nn.Module]:
        """The artifact's norm and head, in a skeleton of their own: both heads are in use."""
        scheme = artifact.schemes().get(HEAD, DENSE)
        names = (n for n in artifact.reader.names if not n.startswith("model.layers."))
        stored = {name: artifact.reader.tensor(name) for name in names}
        skeleton = Skeleton(self._source.config, self._device)
        with skeleton.head(dense_state(stored, {HEAD: scheme})) as head:
            if scheme.activations is not None:
                quantize_input(linear_of(head, HEAD), scheme.activations)
            yield head

    def _kl_sum(self, model: nn.Module, candidate: nn.Module, p_N: Tensor, q_N: Tensor) -> float:
        """Sum of KL over tokens whose hidden states are p_N and q_N, [N, H]."""
        total = 0.0
        for p, q in zip(torch.split(p_N, _ROWS), torch.split(q_N, _ROWS), strict=True):
            ours, theirs = self._log_probs(model, p), self._log_probs(candidate, q)
            total += float((ours.exp() * (ours - theirs)).sum(dtype=torch.float64))
        return total

    @torch.no_grad()
    def _log_probs(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """[N, V] float32 of hidden states [N, H]."""
        entry = hidden.to(self._skeleton.device, torch.float32)[None]
        logits: Tensor = head(inputs_embeds=entry).logits[0]
        return logits.float().log_softmax(-1)


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
