"""The base model with an artifact's weights in it, of which any can be put back.

Computed by transformers in float32: what the stored codes stand for (`quant.artifact`), inputs
rounded where the scheme says so. So this is the loss of the *weights*; what kernels and a quantized
KV cache add is the engine's, and is measured beside it. Both sets of weights are in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eval.blame import Unit, halves
from eval.errors import TargetError
from eval.windows import Window
from quant.artifact.artifact import Artifact
from quant.artifact.dialect import FUSED_SHARDS, fused_group
from quant.artifact.layout import QuantizedWeight, dequantize, fake_quantize_activations, quantize
from quant.artifact.scheme import ActivationScheme, Scheme, WeightScheme

_LAYER = re.compile(r"(?P<layer>.*\.layers\.(?P<index>\d+))\.(?P<rest>.+)")
_ATTENTION_NORMS = frozenset(("input_layernorm",))
# A loss that is no number: larger than any.
HOPELESS = 1e6


class SwappedModel:
    """`base` with every weight of the artifact in its place.

    units: what can be put back, coarsest first. schemes: of the linears.

    TargetError: the artifact has a tensor for which the base has no place.
    """

    def __init__(self, base: nn.Module, artifact: Artifact) -> None:
        self._base = base
        self.schemes = artifact.schemes()
        self._owners = {name: _owner(base, name) for name in _names(artifact)}
        self._original = {name: _parameter(m, leaf) for name, (m, leaf) in self._owners.items()}
        self._stored = dict(_stored(artifact, self._original))
        self._rounded = {
            name: scheme.activations for name, scheme in self.schemes.items() if scheme.activations
        }
        for name, rounding in self._rounded.items():
            self._module(name).register_forward_pre_hook(self._rounding(name, rounding))
        self._back: frozenset[str] = frozenset()
        changed = [
            name for name, t in self._stored.items() if not torch.equal(t, self._original[name])
        ]
        self.units = units_of(sorted({name.rpartition(".")[0] for name in changed}))
        self.put_back(frozenset())

    def put_back(
        self, names: frozenset[str], instead: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Originals for the modules `names`, the artifact's weights for all others.

        instead: what to make of the original of a linear, for instance its 8-bit rounding.
        """
        self._back = names
        for name, (module, leaf) in self._owners.items():
            tensor = self._stored[name]
            if (owner := name.rpartition(".")[0]) in names:
                tensor = self._original[name]
                if instead is not None and owner in self.schemes and tensor.ndim == 2:
                    tensor = instead(tensor)
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))

    def restore_base(self) -> None:
        """The base as it was."""
        self.put_back(frozenset(name.rpartition(".")[0] for name in self._owners))

    @torch.inference_mode()
    def divergence(self, windows: Sequence[Window], references: Sequence[Tensor]) -> float:
        """Mean KL(base || this) in nats over the scored tokens; HOPELESS when it is no number."""
        total, count = 0.0, 0
        for window, reference_RV in zip(windows, references, strict=True):
            ids = torch.tensor([window.token_ids], device=reference_RV.device)
            first = window.num_context - 1
            logits_RV = self._base(input_ids=ids, use_cache=False).logits[0, first:-1]
            values_RV = logits_RV.float().log_softmax(-1)
            wanted_RV = reference_RV[first:]
            kl_R = (wanted_RV.exp() * (wanted_RV - values_RV)).sum(-1, dtype=torch.float64)
            total, count = total + float(kl_R.sum()), count + len(kl_R)
        mean = total / count
        return mean if math.isfinite(mean) else HOPELESS

    def _module(self, name: str) -> nn.Module:
        return self._owners[f"{name}.weight"][0]

    def _rounding(self, name: str, rounding: ActivationScheme) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if name in self._back:
                return None
            return (fake_quantize_activations(inputs[0], rounding), *inputs[1:])

        return hook


def _names(artifact: Artifact) -> Iterator[str]:
    """Every tensor of the model that the artifact stores, under its name in the base."""
    records = artifact.manifest.modules
    yield from (f"{module}.weight" for module in records)
    for name in artifact.reader.names:
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" or (leaf == "weight" and module not in records):
            yield name


def _owner(base: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        module = base.get_submodule(path)
    except AttributeError:
        module = None
    if module is None or not isinstance(getattr(module, leaf, None), Tensor):
        raise TargetError(f"the artifact has {name}, for which the base has no place")
    return module, leaf


def _parameter(module: nn.Module, leaf: str) -> Tensor:
    tensor: Tensor = getattr(module, leaf).detach()
    return tensor


def _stored(artifact: Artifact, like: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What the artifact's tensors stand for, in float32 where the base has them."""
    for name, original in like.items():
        module = name.rpartition(".")[0]
        if name == f"{module}.weight" and module in artifact.manifest.modules:
            found = artifact.weight(module)
            tensor = dequantize(found) if isinstance(found, QuantizedWeight) else found
        else:
            tensor = artifact.reader.tensor(name)
        if tensor.shape != original.shape:
            raise TargetError(
                f"{name} is {list(tensor.shape)} in the artifact, {list(original.shape)} in the "
                "base; pass the model it was made from with --base"
            )
        yield name, tensor.to(original.device, torch.float32)


def units_of(modules: Sequence[str]) -> list[Unit]:
    """Modules as a tree: halves of the layers, layers, attention and MLP, groups; others alone."""
    layers: dict[tuple[str, int], list[str]] = {}
    alone: list[Unit] = []
    for name in modules:
        if match := _LAYER.fullmatch(name):
            layers.setdefault((match["layer"], int(match["index"])), []).append(name)
        else:
            alone.append(Unit(name=name, names=frozenset((name,)), is_block=True))
    ordered = sorted(layers.items(), key=lambda item: item[0][1])
    whole = [_layer(name, members) for (name, _), members in ordered]
    return [*halves(whole, lambda a, b: f"{a.name} to {b.name}"), *alone]


def _layer(name: str, members: Sequence[str]) -> Unit:
    """A layer; its norms go with the linears that they feed, into which scales may be folded."""
    has_own_mlp_norm = any("pre_feedforward_layernorm" in member for member in members)
    blocks: dict[str, list[str]] = {}
    for member in members:
        first = member.removeprefix(f"{name}.").split(".")[0]
        is_attention = first in _ATTENTION_NORMS or "attn" in first
        if first == "post_attention_layernorm":
            is_attention = has_own_mlp_norm
        blocks.setdefault("self_attn" if is_attention else "mlp", []).append(member)
    parts = tuple(_block(f"{name}.{block}", some) for block, some in sorted(blocks.items()))
    if len(parts) == 1:
        return parts[0]
    return Unit(name=name, names=frozenset(members), parts=parts)


def _block(name: str, members: Sequence[str]) -> Unit:
    groups: dict[str, list[str]] = {}
    for member in members:
        if not member.endswith("norm"):
            groups.setdefault(fused_group(member), []).append(member)
    parts = tuple(
        Unit(name=group, names=frozenset(some), is_block=True) for group, some in groups.items()
    )
    return Unit(name=name, names=frozenset(members), parts=parts, is_block=True)


def round_to_8_bits(weight: Tensor) -> Tensor:
    """The weight [out, in] as `w8a16` stores it: symmetric, groups of 128 where they fit."""
    width = weight.shape[1]
    size = next((size for size in (128, 64, 32) if width % size == 0), None)
    weights = WeightScheme(
        num_bits=8,
        kind="int",
        symmetric=True,
        strategy="channel" if size is None else "group",
        group_size=size,
    )
    grouped = weight.reshape(len(weight), -1, size or width)
    scale = (grouped.abs().amax(-1) / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
    scheme = Scheme(layout="pack-quantized", weights=weights)
    return dequantize(quantize(weight, scale, None, scheme))


def pattern_of(unit: Unit) -> tuple[str, int | None]:
    """A recipe's `match` for the linears of a unit, and the layer they are in."""
    match = _LAYER.fullmatch(next(iter(sorted(unit.names))))
    if match is None:
        return unit.name, None
    rest = unit.name.removeprefix(match["layer"]).lstrip(".")
    if unit.names == {unit.name}:
        return f"*.{rest}", int(match["index"])
    path, _, leaf = rest.rpartition(".")
    if shards := FUSED_SHARDS.get(leaf):
        inner = "|".join(shard.removesuffix("_proj") for shard in shards)
        return f"re:.*\\.{re.escape(path)}\\.({inner})_proj", int(match["index"])
    return f"*.{rest}.*", int(match["index"])
