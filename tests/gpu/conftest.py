"""The real small model on the GPU: artifacts made here from the GGUF, texts, and engines over them.

Runs with what a GPU host has: torch, triton, transformers, pytest, and pydantic and gguf carried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import DEVICE

REPO = Path(__file__).resolve().parents[2]
WINDOW, NUM_WINDOWS = 512, 16
# Round to nearest: how the codes were found does not matter to who multiplies with them.
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {"scheme": "dense", "method": "none"},
    "w4a16": {"scheme": "w4a16", "group_size": 64, "method": "rtn"},
    "w4a16-asym": {"scheme": "w4a16", "group_size": 32, "symmetric": False, "method": "rtn"},
    "w8a16": {"scheme": "w8a16", "group_size": "channel", "method": "rtn"},
    "w8a8": {"scheme": "w8a8", "method": "rtn"},
    "fp8": {"scheme": "fp8", "method": "rtn"},
    "kv-fp8-head": {"scheme": "dense", "method": "none", "kv_cache": "fp8-head"},
    "kv-fp8-kept": {
        "scheme": "dense",
        "method": "none",
        "kv_cache": "fp8",
        "kv_skip_layers": [1, 16, 18, 19, 20, 23],
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


_TOLD = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`tell(text)`: a figure worth seeing whether the test passes or not, shown at the end."""
    return request.config.stash.setdefault(_TOLD, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for text in config.stash.get(_TOLD, []):
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def smol(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`smol("w4a16")` -> an artifact of the real small model, a name of RECIPES."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        from quant.api import quantize

        if name not in made:
            folder = tmp_path_factory.mktemp(f"smol-{name}")
            recipe = folder / "recipe.yaml"
            recipe.write_text(json.dumps(RECIPES[name]), encoding="utf-8")
            calib = REPO / "calib_data" / "contracts.jsonl" if "kv_cache" in RECIPES[name] else None
            made[name] = quantize(
                str(smollm2_gguf), recipe, calib, out=folder / "art", device=DEVICE
            )
        return made[name]

    return make


@pytest.fixture(scope="session")
def windows(smollm2_gguf: Path) -> list[tuple[int, ...]]:
    """16 windows of 512 tokens, spread evenly over contracts, services and code."""
    from quant.source import open_source

    tokenizer = open_source(str(smollm2_gguf)).tokenizer()
    lines = (REPO / "calib_data" / "gate" / "text.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["text"] for line in lines)
    ids = tokenizer(text, verbose=False)["input_ids"]
    found = [tuple(ids[start : start + WINDOW]) for start in range(0, len(ids) - WINDOW, WINDOW)]
    return found[:: len(found) // NUM_WINDOWS][:NUM_WINDOWS]


@pytest.fixture
def engine_of(smol: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """`engine_of("w4a16", kv_cache_dtype="fp8", ...)` -> an engine, on the GPU unless told."""
    from runtime.config import EngineConfig
    from runtime.engine.engine import Engine

    def make(name: str, **config: Any) -> Engine:
        settings = {
            "device": DEVICE,
            "kv_cache_memory_bytes": 2 * 2**30,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "enable_prefix_caching": False,
            "verify": "fast",
            **config,
        }
        return Engine.from_artifact(smol(name), EngineConfig(**settings))

    yield make
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
