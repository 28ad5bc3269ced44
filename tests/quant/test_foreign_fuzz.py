"""Whatever is wrong with another tool's checkpoint, the reader says so, and reads no further.

Each example takes a sound checkpoint apart in one to three places and reads it to the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import kv_checkpoint, quantized_copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quant.artifact.errors import ArtifactError
from quant.errors import QuantError
from quant.foreign import QuantizedSource

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-300, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
DTYPES = (torch.int32, torch.int64, torch.float32, torch.float16, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def sound(
    tiny_model: Callable[..., Path],
    artifact: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder, base = tmp_path_factory.mktemp("sound"), tiny_model(num_hidden_layers=1)
    gptq, _ = quantized_copy(base, folder / "gptq", method="gptq", version="gptq")
    awq, _ = quantized_copy(base, folder / "awq", method="awq", sym=False)
    dialect = kv_checkpoint(artifact, tiny_model, folder / "ct", "fp8-head")
    return {"gptq": gptq, "awq": awq, "ct": dialect}


def read(model: Path) -> None:
    """Everything there is, as a conversion does."""
    source = QuantizedSource(model)
    for module, scheme in source.schemes.items():
        if not scheme.is_dense:
            source.weight(module)
    for layer in range(source.num_layers):
        source.kv_scales(layer)
    for name in source._dense:
        source.tensor(name)


def break_settings(draw: Callable[..., Any], model: Path) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text())
    at = config["quantization_config"]
    while True:
        key = draw(st.sampled_from(sorted(at)) | st.sampled_from(["dynamic", "w_bit", "version"]))
        if isinstance(at.get(key), dict) and at[key] and draw(st.booleans()):
            at = at[key]
            continue
        if draw(st.booleans()):
            at.pop(key, None)
        else:
            at[key] = draw(JSON)
        break
    path.write_text(json.dumps(config))


def break_tensors(draw: Callable[..., Any], model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)))
    match draw(st.sampled_from(["drop", "cut", "type", "twin", "shape", "values"])):
        case "drop":
            del tensors[name]
        case "cut":
            tensors[name] = tensors[name][: draw(st.integers(0, 3))].clone()
        case "type":
            tensors[name] = tensors[name].to(draw(st.sampled_from(DTYPES)))
        case "twin":
            leaf = draw(st.sampled_from(["qweight", "g_idx", "weight", "k_scale", "weight_packed"]))
            tensors[f"{name.rpartition('.')[0]}.{leaf}"] = tensors[name].clone()
        case "shape":
            tensors[name] = tensors[name].flatten()
        case "values":
            number = draw(st.sampled_from([0, -1, 127]))
            tensors[name] = torch.full_like(tensors[name], number)
    save_file(tensors, path, metadata={"format": "pt"})


def break_file(draw: Callable[..., Any], model: Path) -> None:
    path = model / draw(st.sampled_from(["model.safetensors", "config.json"]))
    data = bytearray(path.read_bytes())
    where = draw(st.integers(0, max(0, len(data) - 1)))
    if draw(st.booleans()):
        data = data[:where]
    elif data:
        data[where] ^= draw(st.integers(1, 255))
    path.write_bytes(data)


@settings(
    max_examples=60, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
@pytest.mark.parametrize("kind", ["gptq", "awq", "ct"])
def test_only_errors_of_ours(
    sound: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kind: str, data: Any
) -> None:
    model = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(sound[kind], model)
    for fault in data.draw(st.lists(st.sampled_from([break_settings, break_tensors]), max_size=2)):
        fault(data.draw, model)
    if data.draw(st.booleans()):
        break_file(data.draw, model)
    said = ""
    try:
        read(model)
    except (QuantError, ArtifactError) as error:
        said = str(error)
    finally:
        shutil.rmtree(model)
    assert not said or str(model) in said or "tensor" in said, "it says where"


def test_sound_ones_are_read(sound: dict[str, Path]) -> None:
    for model in sound.values():
        read(model)
