"""One of two ranks, started by torchrun from test_parallel.py: plays scenarios one after another
and notes what came of each, `NAME-RANK.json` in a folder. The first one meets as torchrun wants it,
the others as under `quantize --ranks`.

    python ranks_driver.py FOLDER MODEL MIXTURE CALIB
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quant.api import quantize
from quant.artifact.artifact import open_artifact
from quant.errors import NonFiniteError
from quant.parallel import Part, Ranks
from quant.parallel_group import joined
from quant.parallel_launch import RENDEZVOUS

RECIPES = {
    "gptq": "scheme: w4a16\nmethod: gptq\ngroup_size: 32\n",
    "awq": "scheme: w4a16\nmethod: awq\ngroup_size: 32\n",
    "kv": "scheme: w8a16\nmethod: rtn\nkv_cache: fp8-head\n",
    "mixture": "scheme: w4a16\nmethod: gptq\ngroup_size: 32\n",
}


def main(folder: Path, model: str, mixture: str, calib: str) -> None:
    rank = int(os.environ["RANK"])

    def play(name: str, scenario: Callable[[Ranks], object], timeout_s: float = 120.0) -> None:
        if name != "gptq":
            os.environ[RENDEZVOUS] = str(folder / f"meet-{name}")
        began = time.monotonic()
        try:
            with joined(timeout_s=timeout_s) as ranks:
                said = {"value": scenario(ranks)}
        except Exception as error:
            said = {"error": type(error).__name__, "text": str(error)}
        said["seconds"] = time.monotonic() - began
        (folder / f"{name}-{rank}.json").write_text(json.dumps(said))

    def made(recipe: str, out: str) -> Callable[[Ranks], object]:
        file = folder / f"{recipe}.yaml"
        source = mixture if recipe == "mixture" else model
        return lambda ranks: (
            open_artifact(quantize(source, file, calib=calib, out=folder / out, ranks=ranks)).digest
        )

    for recipe in RECIPES:
        play(recipe, made(recipe, recipe))
    play("killed", made("gptq", "killed"))
    play("sums", sums)
    play("told", fails_on_one)
    play("other", lambda ranks: ranks.agree("job", {"model": "m", "calibration": ranks.rank}))
    play("parted", lambda ranks: ranks.add() if ranks.rank else ranks.largest())
    play("stuck", lambda ranks: time.sleep(10) if ranks.rank else ranks.total(1), timeout_s=1.0)


def sums(ranks: Ranks) -> object:
    """Every kind of exchange, with dtypes that backends do not know."""
    wide, count = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(ranks.rank + 3)
    ranks.add(wide, count, torch.zeros(0))
    most = torch.tensor([float(ranks.rank), -1.0])
    ranks.largest(most)
    codes = torch.full((2, ranks.rank + 1), 0.5 + ranks.rank).to(torch.float8_e4m3fn)
    parts = ranks.gather(
        Part(tensors={"codes": codes, "none": torch.zeros(0, 3)}, value=ranks.rank)
    )
    shown = ranks.first_tensors(lambda: {"a": torch.arange(3, dtype=torch.int8)})
    return {
        "sum": wide.tolist(),
        "count": int(count),
        "total": ranks.total(5 + ranks.rank),
        "most": most.tolist(),
        "first": ranks.first(lambda: f"of {ranks.rank}"),
        "shown": shown["a"].tolist(),
        "parts": [
            (p.value, p.tensors["codes"].float().tolist(), list(p.tensors["none"].shape))
            for p in parts
        ],
    }


def fails_on_one(ranks: Ranks) -> object:
    if ranks.rank == 1:
        raise NonFiniteError("sample 7 is NaN")
    return ranks.total(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
