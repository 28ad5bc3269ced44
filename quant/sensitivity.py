"""How much KL each fused group costs in each scheme, predicted by the model's own Fisher matrix.

KL(model || model with outputs moved by d) is d^T F d / 2 to second order, F = E[g g^T] with g the
gradient of the summed -log p(y) and y drawn from the model itself. So the score of a group is half
the mean of (sum over the tokens of a window of g . d)^2, d = (What - W) x over the group's modules,
per token. The sum comes before the square: errors of k and v move in step at all tokens, and
without the products between tokens their score comes out five times too small (a test shows it on
a tiny model). Each window and draw is one sample of a chi-square: a score of n of both has a
relative error of sqrt(2 / n). (Fisher scores are common in public mixed-precision tools; the
layer-wise backward pass and the sum over the window are ours.)

A forward pass and `draws` backward ones, layer by layer: besides the hidden states at every layer's
door, kept on the CPU, one layer is in memory at a time. It does not know budgets or recipes.

Shape legend: B sequences of a batch, T tokens, H hidden size, N valid tokens, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.artifact.layout import dequantize
from quant.artifact.scheme import Scheme
from quant.capture import Batch, make_batches
from quant.checkpoint import Source
from quant.errors import UnsupportedModelError
from quant.methods.rtn import rtn
from quant.modelling import Skeleton, linear_of

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The KL in nats per token that `group` of a layer adds in `scheme`, rounded to nearest."""

    group: str
    layer: int
    modules: tuple[str, ...]
    scheme: Scheme
    score: float


def fisher_sensitivity(
    source: Source,
    windows: Sequence[Sequence[int]],
    candidates: Mapping[str, Sequence[Scheme]],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    draws: int = 4,
    batch_tokens: int = 2048,
    tell: Tell | None = None,
) -> list[Sensitivity]:
    """Scores of every fused group of every layer in each of its candidates.

    candidates: module name -> schemes, equally many for the modules of a group (the same scheme
    but for group sizes that do not divide). dtype: of scales. `tell` hears how far it is. Raises
    UnsupportedModelError for a mixture of experts.
    """
    tell = tell or (lambda _: None)
    batches = make_batches(windows, batch_tokens)
    skeleton = source.skeleton if device == "cpu" else Skeleton(source.config, device)
    if skeleton.mixture is not None:
        raise UnsupportedModelError(
            f"{source.path}: sensitivity of a mixture of experts cannot be measured yet; write its "
            "`overrides:` by hand"
        )
    doors = _forward(source, skeleton, batches, tell)
    gradients = _head_gradients(source, skeleton, batches, doors.pop(), draws, seed)
    found: list[Sensitivity] = []
    for index in reversed(range(source.num_layers)):
        tell(f"backward through layer {index + 1} of {source.num_layers}")
        layer = _build(source, skeleton, index)
        found += _layer(skeleton, index, layer, batches, doors.pop(), gradients, candidates, dtype)
    return sorted(found, key=lambda s: s.layer)


def _forward(
    source: Source, skeleton: Skeleton, batches: Sequence[Batch], tell: Tell
) -> list[list[Tensor]]:
    """Hidden states [B, T, H] of every batch before layer 0, 1, ... and after the last."""
    name = "model.embed_tokens.weight"
    table = {name: source.tensor(name)}
    doors = [skeleton.embed(table, [batch.token_ids for batch in batches])]
    for index in range(source.num_layers):
        tell(f"forward through layer {index + 1} of {source.num_layers}")
        layer = _build(source, skeleton, index)
        states = zip(doors[-1], batches, strict=True)
        doors.append([skeleton.run_layer(index, layer, h, b.mask).cpu() for h, b in states])
    return doors


def _build(source: Source, skeleton: Skeleton, index: int) -> nn.Module:
    return skeleton.build_layer(index, source.tensors(skeleton.layer_names(index)))


def _head_gradients(
    source: Source,
    skeleton: Skeleton,
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    draws: int,
    seed: int,
) -> list[list[Tensor]]:
    """Gradients [B, T, H] of the summed -log p(y) by the last layer's output, y ~ p per position;
    a list of `draws` for each batch."""
    generator = torch.Generator(skeleton.device).manual_seed(seed)
    found = []
    with skeleton.head(source.tensors(skeleton.outer_names())) as head:
        for batch, states in zip(batches, hidden, strict=True):
            entry = states.to(skeleton.device).requires_grad_()
            mask = batch.mask.to(skeleton.device)
            logs = head(inputs_embeds=entry).logits[mask].float().log_softmax(-1)
            drawn = torch.multinomial(
                logs.detach().exp(), draws, replacement=True, generator=generator
            )
            losses = -logs.gather(1, drawn).sum(0)
            found.append([_gradients(loss, [entry])[0].cpu() for loss in losses])
    return found


def _layer(
    skeleton: Skeleton,
    index: int,
    layer: nn.Module,
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    gradients: list[list[Tensor]],
    candidates: Mapping[str, Sequence[Scheme]],
    dtype: torch.dtype,
) -> list[Sensitivity]:
    """Scores of one layer; `gradients` by its output become those by its input."""
    prefix = skeleton.layer_prefix(index)
    stages = [tuple(prefix + leaf for leaf in stage) for stage in skeleton.stages(index)]
    linears = {name: linear_of(layer, name.removeprefix(prefix)) for s in stages for name in s}
    errors = {name: _errors(linears[name], candidates[name], dtype) for name in linears}
    sums = [torch.zeros(len(candidates[stage[0]]), dtype=torch.float64) for stage in stages]
    for i, batch in enumerate(batches):
        entry = hidden[i].to(skeleton.device).requires_grad_()
        with _watched(linears) as seen:
            output = skeleton.run_layer(index, layer, entry, batch.mask, needs_grad=True)
        outputs = [entry, *(seen[name][1] for name in linears)]
        for draw, upstream in enumerate(gradients[i]):
            below, *by_output = _gradients(output, outputs, upstream.to(output.device))
            gradients[i][draw] = below.cpu()
            slopes = dict(zip(linears, by_output, strict=True))
            for total, stage in zip(sums, stages, strict=True):
                total += _squares(stage, seen, slopes, errors)
    num_tokens = sum(int(b.mask.sum()) * len(g) for b, g in zip(batches, gradients, strict=True))
    return [
        Sensitivity(
            group="|".join(name.rpartition(".")[2] for name in stage), layer=index, modules=stage,
            scheme=scheme, score=0.5 * float(value) / num_tokens,
        )
        for total, stage in zip(sums, stages, strict=True)
        for scheme, value in zip(candidates[stage[0]], total, strict=True)
    ]  # fmt: skip


def _errors(linear: nn.Linear, schemes: Sequence[Scheme], dtype: torch.dtype) -> list[Tensor]:
    """What - W [O, I] in each scheme."""
    weight = linear.weight.detach().float()
    return [
        torch.zeros_like(weight)
        if scheme.is_dense
        else dequantize(rtn(weight, scheme, dtype, scale_search=True)).float() - weight
        for scheme in schemes
    ]


@contextmanager
def _watched(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of every linear that is called, by name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (args[0].detach(), output)

        return keep

    handles = [linear.register_forward_hook(hook(name)) for name, linear in linears.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _gradients(
    value: Tensor, inputs: Sequence[Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, upstream, retain_graph=True)


def _squares(
    stage: Sequence[str],
    seen: Mapping[str, tuple[Tensor, Tensor]],
    slopes: Mapping[str, Tensor],
    errors: Mapping[str, Sequence[Tensor]],
) -> Tensor:
    """Sum over windows of (sum over tokens of g . E x)^2 for each candidate, float64.

    Padding needs no mask: no loss depends on it, so that g is 0 there.
    """
    moved = torch.stack([_moved(slopes[n], seen[n][0], errors[n]) for n in stage]).sum(0)
    return moved.double().square().sum(1).cpu()


def _moved(slope: Tensor, inputs: Tensor, errors: Sequence[Tensor]) -> Tensor:
    """<E, sum over tokens of g x^T> for each candidate and window, [candidates, B].

    slope [B, T, O], inputs [B, T, I]: one product serves all candidates.
    """
    products = slope.transpose(1, 2) @ inputs
    return torch.stack([(products * error).sum((1, 2)) for error in errors])
