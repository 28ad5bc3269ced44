"""What a mixed-precision plan may cost, and the schemes it may choose from, as a recipe says them.

`4.5bpw` counts bits per weight of the quantized linears with their scales and zero points, exactly
as stored; `5.2GiB` counts every weight of the artifact. Schemes are written as tables show them:
`w4a16-g32-asym`. Words and numbers only: no models, no files.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

from quant.artifact.scheme import GROUP_SIZES, PRESETS

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
# 3 bits come last: neither this runtime nor vLLM has a kernel for them, so that they are only
# taken where 4 bits do not fit.
LAST_RESORT = ("w3a16-g32-asym",)
_BY_BASE = {
    "w4a8": ("w4a8-g128", "w4a8-g64", "w4a8-g32", "w8a8"),
    "w4a8-fp8": ("w4a8-fp8-g128", "w4a8-fp8-g64", "w4a8-fp8-g32", "fp8"),
    "w8a8": ("w8a8", "dense"),
    "fp8": ("fp8", "dense"),
    "fp8-block": ("fp8-block", "dense"),
}
_WEIGHTS_ONLY = (
    "w4a16-g128", "w4a16-g64", "w4a16-g64-asym", "w4a16-g32", "w4a16-g32-asym", "w8a16-g128",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """At most `value` bits per quantized weight, or bytes for all weights of the artifact."""

    unit: Literal["bpw", "bytes"]
    value: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`4.5bpw`, `5.2GiB`; ValueError for anything else."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(bpw|MB|GB|MiB|GiB)\s*", text)
        if found is None or float(found[1]) == 0:
            raise ValueError(
                f"found {text!r}, expected bits per weight such as 4.5bpw, or a size such as "
                "5.2GiB (MB, GB, MiB, GiB)"
            )
        number, unit = float(found[1]), found[2]
        if unit == "bpw":
            return cls(unit="bpw", value=number, text=f"{number:g} bits per weight")
        return cls(unit="bytes", value=number * UNITS[unit], text=f"{number:g} {unit}")


def known_labels() -> dict[str, dict[str, Any]]:
    """Every scheme a plan may choose, as the recipe keys that name it, by its label."""
    found: dict[str, dict[str, Any]] = {"dense": {"scheme": "dense"}}
    for name, scheme in PRESETS.items():
        if scheme.is_dense:
            continue
        if scheme.layout != "pack-quantized":
            found[name] = {"scheme": name}
            continue
        for size in (*GROUP_SIZES, "channel"):
            unit = size if size == "channel" else f"g{size}"
            keys = {"scheme": name, "group_size": size}
            found[f"{name}-{unit}"] = {**keys, "symmetric": True}
            if scheme.activations is None:
                found[f"{name}-{unit}-asym"] = {**keys, "symmetric": False}
    return found


def check_label(label: str) -> str | None:
    """What is wrong with a scheme of `candidates:`; None when nothing is."""
    known = known_labels()
    if label in known:
        return None
    close = difflib.get_close_matches(label, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "such as w4a16-g64-asym, w8a16-g128"
    return f"found {label!r}, which names no scheme; {hint}"


def default_candidates(base: str | None) -> tuple[str, ...]:
    """Labels a plan chooses from when the recipe's scheme is the preset `base`."""
    return _BY_BASE.get(base or "", _WEIGHTS_ONLY)
