"""Names of modules, and nothing but names: which pattern takes one, which layer it belongs to,
and how many are said in one line.

Patterns match the *whole* name: a glob (`*` matches any characters, dots too; case counts) or,
after `re:`, a regular expression.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

HEAD = "lm_head"
# Modules that decide which experts a token goes to. Small, and never quantized: an error there
# sends tokens elsewhere.
ROUTERS = ("gate", "router", "shared_expert_gate")
SHOWN = 8
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_index(module: str) -> int | None:
    """The decoder layer a module belongs to, None outside the layers."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def matches(pattern: str, module: str) -> bool:
    """Whether `pattern` (a glob, or `re:` and a regular expression) matches the whole name."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def is_router(module: str) -> bool:
    """Whether the module decides which experts a token goes to."""
    return module.rpartition(".")[2] in ROUTERS


def general_name(module: str) -> str:
    """The module's name with `*` for its layer's and expert's numbers: what all of them share."""
    in_layer = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.*.", module)
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", in_layer)


def layer_ranges(layers: Iterable[int]) -> str:
    """`0-3, 7`: numbers ascending with runs joined."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def join_layers(names: Iterable[str]) -> list[str]:
    """Names that differ in layer or expert alone as one: `model.layers.0-29.mlp.down_proj`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        layer = layer_index(name)
        layers.setdefault(general_name(name), []).extend([] if layer is None else [layer])
    return [
        name.replace("layers.*.", f"layers.{layer_ranges(found)}.", 1)
        for name, found in layers.items()
    ]


def layer_order(name: str) -> tuple[bool, int]:
    """Key that sorts names layer by layer, those outside the layers last."""
    layer = layer_index(name)
    return (layer is None, layer or 0)


def few(items: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(items[:SHOWN])
    rest = len(items) - SHOWN
    return shown if rest <= 0 else f"{shown} and {rest} more"
