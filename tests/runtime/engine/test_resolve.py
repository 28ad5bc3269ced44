"""What was said becomes what will run: every value with a reason, impossible ones refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quant.artifact.errors import ManifestError
from runtime.config import Account, ConfigError, EngineConfig, ResolvedConfig
from runtime.engine.end_of_text import end_of_text_ids
from runtime.engine.memory import available_host_bytes
from runtime.engine.resolve import (
    ModelFacts,
    PoolFacts,
    cpu_pool,
    describe,
    resolve,
    resolve_numerics,
    step_limits,
)

GIB = 2**30
MODEL = ModelFacts(
    max_positions=2048,
    vocab=300,
    end_of_text={2: ("config.json",), 7: ("config.json", "generation_config.json")},
    block_bytes=2**20,
    digest="d" * 64,
)


def resolved(pool_bytes: int = GIB, *, fp8: bool = False, **said: Any) -> ResolvedConfig:
    config = EngineConfig(**said)
    numerics = resolve_numerics(
        config, artifact_dtype="bfloat16", artifact_kv="fp8" if fp8 else None, has_cuda=False
    )
    return resolve(config, numerics, MODEL, PoolFacts(pool_bytes=pool_bytes, reason="a test"))


def test_every_value_has_a_reason_and_a_row() -> None:
    value = resolved()
    names = {f.name for f in fields(ResolvedConfig)} - {"reasons"}
    assert set(value.reasons) == names
    rows = describe(value)
    assert {name for name, _, _ in rows} == names - {"account"}, "a CPU has no account"
    assert all(shown and reason for _, shown, reason in rows)


def test_the_table_says_what_a_fast_start_did_not_check() -> None:
    rows = {name: (value, why) for name, value, why in describe(resolved(verify="fast"))}
    assert rows["verify"][0] == "fast"
    assert "bytes altered on disk go unnoticed" in rows["verify"][1]
    rows = {name: (value, why) for name, value, why in describe(resolved())}
    assert rows["verify"] == ("full", "every byte of the artifact was hashed")


def test_numerics_follow_device_and_artifact() -> None:
    def pick(has_cuda: bool, artifact: str, fp8: bool = False, **said: Any) -> tuple[str, str, str]:
        found = resolve_numerics(
            EngineConfig(**said),
            artifact_dtype=artifact,
            artifact_kv="fp8" if fp8 else None,
            has_cuda=has_cuda,
        )
        return found.device, found.dtype, found.kv_cache_dtype

    assert pick(False, "bfloat16") == ("cpu", "float32", "float32")
    assert pick(False, "float32", fp8=True) == ("cpu", "float32", "fp8")
    assert pick(True, "bfloat16") == ("cuda", "bfloat16", "bfloat16")
    assert pick(True, "float32") == ("cuda", "bfloat16", "bfloat16")
    assert pick(True, "float16", device="cpu", dtype="bfloat16")[:2] == ("cpu", "bfloat16")
    assert pick(False, "float32", fp8=True, kv_cache_dtype="float32")[2] == "float32"


def test_the_pool_is_no_larger_than_it_can_be_used() -> None:
    assert resolved(max_num_seqs=2).num_blocks == 2 * 2048 // 16
    assert resolved().num_blocks == 1024, "a GiB of blocks of a MiB"
    assert resolved(kv_cache_memory_bytes=50 * 2**20, max_model_len=64).num_blocks == 50
    assert resolved(num_gpu_blocks_override=3).num_blocks == 3


def test_a_context_larger_than_the_pool_is_lowered_or_refused() -> None:
    small = resolved(10 * 2**20)
    assert (small.num_blocks, small.max_model_len) == (10, 160)
    assert "lowered" in small.reasons["max_model_len"]
    with pytest.raises(ConfigError, match="1000 does not fit the KV pool of 160"):
        resolved(10 * 2**20, max_model_len=1000)
    forced = resolved(num_gpu_blocks_override=10)
    assert forced.max_model_len == 2048, "a pool of forced size refuses single requests instead"


def test_a_gpu_has_room_for_more_and_longer_steps() -> None:
    cpu, gpu = (step_limits(EngineConfig(), device) for device in ("cpu", "cuda:1"))
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 2048)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 8192)
    said = step_limits(EngineConfig(max_num_seqs=7), "cuda")
    assert (said.max_num_seqs, said.reasons["max_num_seqs"]) == (7, "as asked")


def test_deterministic_needs_kernels_that_promise_it() -> None:
    def ask(has_triton: bool, device: str = "cuda") -> str:
        config = EngineConfig(deterministic=True, device=device)
        return resolve_numerics(
            config, artifact_dtype="bfloat16", artifact_kv=None, has_cuda=True,
            has_triton=has_triton,
        ).device  # fmt: skip

    assert ask(True) == "cuda"
    with pytest.raises(ConfigError, match="independent of the batch"):
        ask(False)
    with pytest.raises(ConfigError, match="no kernel on cpu"):
        ask(True, "cpu")


def test_a_gpus_memory_is_accounted_for() -> None:
    account = Account(
        total=100 * GIB, weights=6 * GIB, kv=0, workspace=2 * GIB, graphs=GIB, outside=GIB,
        left=90 * GIB,
    )  # fmt: skip
    facts = PoolFacts(pool_bytes=80 * GIB + 5, reason="a test", account=account)
    model = replace(MODEL, max_positions=10**6)
    numerics = resolve_numerics(
        EngineConfig(), artifact_dtype="bfloat16", artifact_kv=None, has_cuda=True
    )
    value = resolve(EngineConfig(), numerics, model, facts)
    assert value.num_blocks == 80 * 1024
    assert value.account == replace(account, kv=80 * GIB, left=10 * GIB)
    parts = [getattr(value.account, f.name) for f in fields(Account) if f.name != "total"]
    assert sum(parts) == account.total
    shown = {name: text for name, text, _ in describe(value)}
    assert (shown["memory: kv"], shown["memory: left"]) == ("80 GiB", "10 GiB")


def test_the_token_budget_bounds_the_sequences() -> None:
    value = resolved(max_num_batched_tokens=32)
    assert value.max_num_seqs == 32
    assert "lowered from 64" in value.reasons["max_num_seqs"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"block_size": 12}, "use one of 8, 16, 32"),
        ({"max_model_len": 4096}, "longer than the model's context of 2048"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"gpu_memory_utilization": 1.5}, r"share in \(0, 1\]"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 100}, "does not hold one block"),
        ({"deterministic": True}, "independent of the batch"),
        ({"device": "tpu"}, "'tpu' is unknown"),
        ({"device": "cuda"}, "torch finds none"),
        ({"dtype": "int4"}, "'int4' is unknown"),
        ({"kv_cache_dtype": "int4"}, "'int4' is unknown"),
    ],
)
def test_settings_that_cannot_be_honoured(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**said)


def test_the_cpu_pool_is_modest() -> None:
    assert cpu_pool(64 * GIB).pool_bytes == 4 * GIB
    assert cpu_pool(2 * GIB).pool_bytes == GIB // 2


def test_host_memory_respects_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    assert available_host_bytes(meminfo, tmp_path) == 2_000_000


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def test_end_of_text_is_the_union_of_all_sources(tmp_path: Path) -> None:
    """Case B11."""
    write(tmp_path, "generation_config.json", {"eos_token_id": [4, 9]})
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 6, "content": "<end>"}]})
    found = end_of_text_ids(tmp_path, {"eos_token_id": 4}, 300)
    assert found == {
        4: ("config.json", "generation_config.json"),
        6: ("tokenizer_config.json",),
        9: ("generation_config.json",),
    }


def test_end_of_text_forms(tmp_path: Path) -> None:
    assert end_of_text_ids(tmp_path, {}, 300) == {}
    assert list(end_of_text_ids(tmp_path, {"text_config": {"eos_token_id": [1, 106]}}, 300)) == [
        1,
        106,
    ]
    write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {"</s>": 2}}})
    assert list(end_of_text_ids(tmp_path, {"eos_token_id": 999}, 300)) == [2], "999 cannot be drawn"
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ManifestError, match="generation_config.json is not valid JSON"):
        end_of_text_ids(tmp_path, {}, 300)
