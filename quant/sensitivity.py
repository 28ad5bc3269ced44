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

from quant.artifact.dialect import fused_group
from quant.artifact.layout import dequantize, fake_quantize_activations, quantize
from quant.artifact.scheme import ActivationScheme, Scheme
from quant.capture import Batch, make_batches
from quant.checkpoint import Source
from quant.methods.scales import search_scales
from quant.modelling import EMBEDDING_WEIGHT, Skeleton, linear_of
from quant.spill import choose_home

Tell = Callable[[str], None]
# Multiples of the min-max scale that are tried below 8 bits.
SCALE_FACTORS = (1.06, 0.98, 0.9, 0.82)
# Values of products g x^T that are in memory at once.
_PRODUCTS = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The KL in nats per token that `group` of a layer adds in its candidate number `option`,
    rounded to nearest. scheme: that of its first module; modules: all that must share it."""

    group: str
    layer: int
    modules: tuple[str, ...]
    option: int
    scheme: Scheme
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """What C candidates do to a linear: the errors of its weight [C, O * I], and where inputs are
    rounded, by how: which candidates, and their weights [c, O * I]."""

    errors: Tensor
    by_rounding: tuple[tuple[ActivationScheme, list[int], Tensor], ...]


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
    """Scores of every fused group (experts of a layer: one) in each of its candidates.

    candidates: module name -> schemes, equally many for the modules of a group (the same scheme
    but for group sizes that do not divide); groups that are not in it are left out. dtype: of
    scales. `tell` hears how far it is.
    """
    tell = tell or (lambda _: None)
    skeleton = source.skeleton if device == "cpu" else Skeleton(source.config, device)
    # Experts see the tokens of a batch in one list: only one window each keeps windows apart.
    batches = make_batches(windows, 1 if skeleton.mixture else batch_tokens)
    kept = source.num_layers + 1 + draws
    width = kept * source.shape(EMBEDDING_WEIGHT)[1]
    num_tokens = sum(batch.mask.numel() for batch in batches)
    home = choose_home(num_tokens * width * skeleton.compute_dtype.itemsize, device)
    doors = _forward(source, skeleton, batches, home, tell)
    gradients = _head_gradients(source, skeleton, batches, doors.pop(), draws, seed)
    found: list[Sensitivity] = []
    for index in reversed(range(source.num_layers)):
        tell(f"backward through layer {index + 1} of {source.num_layers}")
        layer = _build(source, skeleton, index)
        found += _layer(skeleton, index, layer, batches, doors.pop(), gradients, candidates, dtype)
    return sorted(found, key=lambda s: s.layer)


def _forward(
    source: Source, skeleton: Skeleton, batches: Sequence[Batch], home: torch.device, tell: Tell
) -> list[list[Tensor]]:
    """Hidden states [B, T, H] of every batch before layer 0, 1, ... and after the last, at home."""
    name = EMBEDDING_WEIGHT
    table = {name: source.tensor(name)}
    embedded = skeleton.embed(table, [batch.token_ids for batch in batches])
    doors = [[states.to(home) for states in embedded]]
    for index in range(source.num_layers):
        tell(f"forward through layer {index + 1} of {source.num_layers}")
        layer = _build(source, skeleton, index)
        states = zip(doors[-1], batches, strict=True)
        doors.append([skeleton.run_layer(index, layer, h, b.mask).to(home) for h, b in states])
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
    a list of `draws` for each batch. Window by window: logits are the largest thing there is."""
    generator = torch.Generator(skeleton.device).manual_seed(seed)
    found = []
    with skeleton.head(source.tensors(skeleton.outer_names())) as head:
        for batch, states in zip(batches, hidden, strict=True):
            gradients = [torch.zeros_like(states) for _ in range(draws)]
            for row, mask in enumerate(batch.mask):
                tokens = int(mask.sum())
                entry = states[row : row + 1, :tokens].to(skeleton.device).requires_grad_()
                logs = head(inputs_embeds=entry).logits[0].float().log_softmax(-1)
                drawn = torch.multinomial(
                    logs.detach().exp(), draws, replacement=True, generator=generator
                )
                for draw, loss in enumerate(-logs.gather(1, drawn).sum(0)):
                    gradients[draw][row, :tokens] = _gradients(loss, [entry])[0][0]
            found.append(gradients)
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
    groups = _groups(skeleton, index, candidates)
    names = [name for group in groups for name in group]
    linears = {name: linear_of(layer, name.removeprefix(prefix)) for name in names}
    changes = {name: _changes(linears[name], candidates[name], dtype) for name in names}
    sums = [torch.zeros(len(candidates[group[0]]), dtype=torch.float64) for group in groups]
    for i, batch in enumerate(batches):
        entry = hidden[i].to(skeleton.device).requires_grad_()
        with _watched(linears) as seen:
            output = skeleton.run_layer(index, layer, entry, batch.mask, needs_grad=True)
        outputs = [entry, *(moved for _, moved in seen.values())]
        for draw, upstream in enumerate(gradients[i]):
            below, *by_output = _gradients(output, outputs, upstream.to(output.device))
            gradients[i][draw] = below.to(gradients[i][draw].device)
            slopes = dict(zip(seen, by_output, strict=True))
            for total, group in zip(sums, groups, strict=True):
                total += _squares([name for name in group if name in seen], seen, slopes, changes)
    num_tokens = sum(int(b.mask.sum()) * len(g) for b, g in zip(batches, gradients, strict=True))
    return [
        Sensitivity(
            group=_group_name(group), layer=index, modules=group, option=option,
            scheme=candidates[group[0]][option], score=0.5 * float(value) / num_tokens,
        )
        for total, group in zip(sums, groups, strict=True)
        for option, value in enumerate(total)
    ]  # fmt: skip


def _groups(
    skeleton: Skeleton, index: int, candidates: Mapping[str, Sequence[Scheme]]
) -> list[tuple[str, ...]]:
    """Modules of a layer that must share a scheme, as far as they have candidates."""
    found: dict[str, list[str]] = {}
    for stage in skeleton.stages(index):
        for leaf in stage:
            name = skeleton.layer_prefix(index) + leaf
            if name in candidates:
                found.setdefault(fused_group(name), []).append(name)
    return [tuple(names) for names in found.values()]


def _group_name(modules: Sequence[str]) -> str:
    """`q_proj|k_proj|v_proj`, `experts`."""
    if ".experts." in modules[0]:
        return "experts"
    return "|".join(name.rpartition(".")[2] for name in modules)


def _changes(linear: nn.Linear, schemes: Sequence[Scheme], dtype: torch.dtype) -> _Changes:
    """What each scheme does to a linear."""
    weight = linear.weight.detach().float()
    rounded = [_rounded(weight, scheme, dtype) for scheme in schemes]
    found: dict[ActivationScheme, list[int]] = {}
    for i, scheme in enumerate(schemes):
        if scheme.activations is not None:
            found.setdefault(scheme.activations, []).append(i)
    return _Changes(
        errors=torch.stack([part - weight for part in rounded]).flatten(1),
        by_rounding=tuple(
            (act, which, torch.stack([rounded[i] for i in which]).flatten(1))
            for act, which in found.items()
        ),
    )


def _rounded(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """The weight in a scheme, to nearest. Few scales are tried: scores are for comparing."""
    if scheme.weights is None:
        return weight
    few = SCALE_FACTORS if scheme.weights.num_bits < 8 else ()
    scale, zero = search_scales(weight, scheme.weights, dtype, factors=few)
    return dequantize(quantize(weight, scale, zero, scheme)).float()


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
    group: Sequence[str],
    seen: Mapping[str, tuple[Tensor, Tensor]],
    slopes: Mapping[str, Tensor],
    changes: Mapping[str, _Changes],
) -> Tensor:
    """Sum over windows of (sum over tokens of g . d)^2 for each candidate, float64 [candidates].

    Padding needs no mask: no loss depends on it, so that g is 0 there.
    """
    if not group:  # no token was routed here
        return torch.zeros((), dtype=torch.float64)
    moved = torch.stack([_moved(slopes[n], seen[n][0], changes[n]) for n in group]).sum(0)
    return moved.double().square().sum(1).cpu()


def _moved(slope: Tensor, inputs: Tensor, changes: _Changes) -> Tensor:
    """Sum over tokens of g . d for each candidate and window, [C, B].

    slope [B, T, O], inputs [B, T, I] (of an expert, without B). A few windows at a time: each has a
    product as large as the weight.
    """
    slope, inputs = (part if part.dim() == 3 else part[None] for part in (slope, inputs))
    at_once = max(1, _PRODUCTS // (slope.shape[2] * inputs.shape[2]))
    parts = zip(
        torch.split(slope.float(), at_once), torch.split(inputs.float(), at_once), strict=True
    )
    return torch.cat([_moved_at_once(g, x, changes) for g, x in parts], 1)


def _moved_at_once(slope: Tensor, inputs: Tensor, changes: _Changes) -> Tensor:
    """d = (What - W) x + What (Q(x) - x), Q the rounding of inputs: the sum over tokens of g . d is
    <What - W, g x^T> and so on, so that one product g x^T serves all candidates."""
    transposed = slope.transpose(1, 2)
    found = changes.errors @ (transposed @ inputs).flatten(1).T
    for act, which, rounded in changes.by_rounding:
        gap = fake_quantize_activations(inputs, act) - inputs
        found[which] += rounded @ (transposed @ gap).flatten(1).T
    return found
