"""What was stored computes: hidden states pass through a layer as it will run, the probe's prompts
through the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from quant.artifact.probe import ProbeRecord, make_probe
from quant.capture import tapped
from quant.kv_layer import planned_kv, stored_tap
from quant.kv_scales import scale_names
from quant.layer_job import dense_state, quantize_input
from quant.modelling import HEAD, linear_of
from quant.run_start import RunState, on_device


def advance(state: RunState, index: int, tensors: Mapping[str, Tensor]) -> None:
    """Pass every stream through layer `index` as stored: codes, rounded inputs, rounded KV."""
    prefix, schemes = state.skeleton.layer_prefix(index), state.schemes(index)
    parameters = dense_state(on_device(tensors, state.skeleton.device), schemes)
    scales = [parameters.pop(name) for name in scale_names(prefix) if name in parameters]
    layer = state.skeleton.build_layer(index, parameters)
    for name, scheme in schemes.items():
        if scheme.activations is not None:
            quantize_input(linear_of(layer, name.removeprefix(prefix)), scheme.activations)
    tap = stored_tap(planned_kv(state.plan, index), scales)
    rounded = tapped(layer.get_submodule("self_attn"), tap) if tap else nullcontext()
    with rounded:
        for stream in state.streams:
            stream.advance(
                lambda hidden, mask: state.skeleton.run_layer(index, layer, hidden, mask),
                f"layer {index}",
            )


def advance_original(state: RunState, index: int) -> None:
    """Pass the original model's stream through layer `index` as the source has it."""
    if state.original is None or index + 1 == state.plan.num_layers:
        return
    tensors = state.source.tensors(list(state.skeleton.layer_names(index)))
    layer = state.skeleton.build_layer(index, on_device(tensors, state.skeleton.device))
    state.original.advance(
        lambda hidden, mask: state.skeleton.run_layer(index, layer, hidden, mask),
        f"the original layer {index}",
    )


def run_probe(state: RunState, stored: Mapping[str, Tensor]) -> ProbeRecord:
    """What the artifact says to the probe's prompts; `stored` is its shard 0."""
    schemes = state.schemes(None)
    parameters = dense_state(stored, schemes)
    last = torch.cat([hidden[:, -1:] for hidden in state.probe.hidden])
    with torch.no_grad(), state.skeleton.head(parameters) as head:
        act = schemes[HEAD].activations
        handle = quantize_input(linear_of(head, HEAD), act) if act else None
        logits = (
            head(inputs_embeds=last.to(state.skeleton.device, torch.float32)).logits[:, 0].cpu()
        )
        if handle is not None:
            handle.remove()
    prompts = [batch.token_ids[0].tolist() for batch in state.probe.batches]
    schemes_used = state.plan.schemes().values()
    return make_probe(prompts, logits, schemes_used, has_fp8_kv=state.plan.kv_cache != "none")
