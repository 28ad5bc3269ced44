"""The search for KV scales: its errors are those of the layer itself, and it never loses to 1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quant.capture import Stream, first_input, make_batches, tapped
from quant.kv_scales import choose_scales, fake_quantize_kv, scale_for
from quant.kv_search import KEY, VALUE, Trial
from quant.modelling import KVTap
from quant.source import open_source

FAMILIES = ["llama", "mistral", "qwen3", "gemma3_text", "phi3"]


class Layer:
    """A layer of a tiny model, and windows of several lengths at its door."""

    def __init__(self, model: Path, index: int) -> None:
        source = open_source(str(model))
        self.skeleton, self.index = source.skeleton, index
        self.kv_heads = source.config["num_key_value_heads"]
        names = self.skeleton.layer_names(index)
        self.module = self.skeleton.build_layer(index, {n: source.tensor(n) for n in names})
        windows = [list(range(5, 5 + n)) for n in (60, 41, 7)]
        batches = make_batches(windows, 256)
        table = {"model.embed_tokens.weight": source.tensor("model.embed_tokens.weight")}
        hidden = list(self.skeleton.embed(table, [batch.token_ids for batch in batches]))
        self.stream = Stream(batches=batches, hidden=hidden)

    def run(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.skeleton.run_layer(self.index, self.module, hidden, mask)

    @property
    def attention(self) -> nn.Module:
        return self.module.get_submodule("self_attn")

    @property
    def reader(self) -> nn.Module:
        return self.attention.get_submodule("o_proj")

    def error(self, tap: KVTap) -> float:
        """Summed square error of the attention output over all real tokens, by running it."""
        total = 0.0
        for batch, hidden in self.stream:
            run = partial(self.run, hidden, batch.mask)
            exact = first_input(self.reader, run)
            with tapped(self.attention, tap):
                off = first_input(self.reader, run) - exact
            total += float(off[batch.mask].square().sum())
        return total


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_those_of_the_attention_itself(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    """All windows are shorter than the number of queries asked, so that all are asked."""
    layer = Layer(tiny_model(family), 0)
    trial = Trial.of(layer.attention, layer.reader, layer.stream, layer.run)
    scale = torch.tensor([0.37])
    rounded = fake_quantize_kv(scale, scale)
    taps: dict[int, KVTap] = {
        KEY: lambda key, value: (rounded(key, value)[0], value),
        VALUE: lambda key, value: (key, rounded(key, value)[1]),
    }
    for side, tap in taps.items():
        found = trial.errors(side, scale.expand(1, layer.kv_heads)).sum()
        assert float(found) == pytest.approx(layer.error(tap), rel=1e-3)


@pytest.mark.parametrize("by_head", [False, True])
def test_chosen_scales_are_no_worse_than_one_and_keep_room(
    by_head: bool, tiny_model: Callable[..., Path]
) -> None:
    layer = Layer(tiny_model("llama"), 1)
    found = choose_scales(layer.module, [layer.stream], layer.run, torch.bfloat16, by_head=by_head)
    assert found.key.shape == ((layer.kv_heads, 1, 1) if by_head else (1,))
    assert found.key.dtype == found.value.dtype == torch.bfloat16
    assert 0 < found.error < found.error_of_one
    plain, chosen = (
        layer.error(fake_quantize_kv(*pair))
        for pair in ((torch.ones(1), torch.ones(1)), (found.key, found.value))
    )
    assert chosen < plain


def test_a_long_text_raises_the_scale_of_all(tiny_model: Callable[..., Path]) -> None:
    """What only the other stream shows counts for the room that is kept."""
    layer = Layer(tiny_model("llama"), 0)
    loud = Stream(batches=layer.stream.batches, hidden=[h.clone() for h in layer.stream.hidden])
    weight = layer.module.get_submodule("input_layernorm").weight
    assert isinstance(weight, Tensor)

    def run(hidden: Tensor, mask: Tensor) -> Tensor:
        weight.fill_(2.0**12 if any(hidden is h for h in loud.hidden) else 1.0)
        return layer.run(hidden, mask)

    quiet = choose_scales(layer.module, [layer.stream], run, torch.float32)
    both = choose_scales(layer.module, [loud, layer.stream], run, torch.float32)
    assert float(both.value) >= scale_for(2.0**12) > 2 > float(quiet.value)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dead", ["v_proj", "k_proj", "q_proj"])
def test_a_dead_attention_has_scales_and_no_error(
    by_head: bool, dead: str, tiny_model: Callable[..., Path]
) -> None:
    layer = Layer(tiny_model("llama"), 0)
    weight = layer.attention.get_submodule(dead).weight
    assert isinstance(weight, Tensor)
    kept = weight.clone()
    weight.zero_()
    found = choose_scales(layer.module, [layer.stream], layer.run, torch.float32, by_head=by_head)
    weight.copy_(kept)
    for scales in (found.key, found.value):
        assert bool((torch.isfinite(scales) & (scales > 0)).all())
    assert (found.error == 0) == (dead == "v_proj")
