"""Opening artifacts as engines: what is refused, what is shown, what the stamp is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_engine import prompt_of, run

from quant.artifact.errors import ArtifactError, IntegrityError
from runtime.config import ConfigError, EngineConfig
from runtime.engine import load as loading
from runtime.engine import numerics
from runtime.engine.engine import Engine
from runtime.engine.load import ProbeError
from runtime.request import Request, SamplingParams

Make = Callable[..., Path]


def small(path: Path, **config: Any) -> Engine:
    return Engine.from_artifact(path, EngineConfig(num_gpu_blocks_override=64, **config))


def requests(**sampling: Any) -> list[Request]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
    return [Request(id=str(i), prompt=prompt_of(i, 5 + 9 * i), sampling=params) for i in range(6)]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_a_quantized_artifact_runs_alone_as_in_a_crowd(
    scheme: str, tiny_model: Make, artifact: Make
) -> None:
    path = artifact(tiny_model("llama"), scheme=scheme)
    engine = small(path, max_num_batched_tokens=32)
    together = run(engine, requests())
    for one in requests():
        alone = run(small(path), [one])[one.id]
        assert alone.token_ids == together[one.id].token_ids


def test_numerics_are_what_the_stamp_wants(tiny_model: Make, artifact: Make) -> None:
    engine = small(artifact(tiny_model("llama"), scheme="w4a16"), kv_cache_dtype="bfloat16")
    assert numerics(engine) == {
        "device_class": "cpu",
        "compute_dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "lm_head_scheme": "dense",
    }


def test_end_of_text_ids_come_from_the_artifacts_files(
    tiny_model: Make, dense_artifact: Make
) -> None:
    resolved = small(dense_artifact(tiny_model("llama"))).resolved
    assert resolved.eos_token_ids == (2,)
    assert "tokenizer_config.json" in resolved.reasons["eos_token_ids"]


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_model_that_computes_something_else_is_not_served(
    factor: float, tiny_model: Make, dense_artifact: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty kernel or rope table passes every checksum; the probe is what stops it."""
    path = dense_artifact(tiny_model("llama"))
    sound = loading.load_decoder

    def faulty(*args: Any, **kwargs: Any) -> Any:
        decoder = sound(*args, **kwargs)
        decoder.final_norm = decoder.final_norm * torch.tensor(factor)
        return decoder

    monkeypatch.setattr(loading, "load_decoder", faulty)
    with pytest.raises(ProbeError, match="does not compute what it was sealed with.*allowed") as e:
        small(path)
    assert isinstance(e.value, ArtifactError)
    assert small(path, probe=False).resolved.num_blocks == 64


def test_damage_and_impossible_settings_stop_the_start(
    tiny_model: Make, dense_artifact: Make, tmp_path: Path
) -> None:
    path = dense_artifact(tiny_model("llama"))
    with pytest.raises(ConfigError, match="longer than the model's context of 1024"):
        small(path, max_model_len=2048)
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError):
        small(copy)
    with pytest.raises(ArtifactError):
        small(tmp_path / "absent")


def test_more_threads_or_memory_than_there_are(tiny_model: Make, dense_artifact: Make) -> None:
    path = dense_artifact(tiny_model("llama"))
    with pytest.raises(ConfigError, match="num_threads 100000: this machine has"):
        small(path, num_threads=100_000)
    with pytest.raises(ConfigError, match="KV pool of 99999999999 blocks takes .* GiB"):
        Engine.from_artifact(path, EngineConfig(num_gpu_blocks_override=99_999_999_999))


def test_max_model_len_bounds_requests(tiny_model: Make, dense_artifact: Make) -> None:
    engine = small(dense_artifact(tiny_model("llama")), max_model_len=48)
    one = Request(id="a", prompt=prompt_of(1, 40), sampling=SamplingParams(ignore_eos=True))
    assert len(run(engine, [one])["a"].token_ids) == 8
