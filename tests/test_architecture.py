"""The law of the house (docs/architecture.md): who may import whom. Walks every import with `ast`,
those inside functions too."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("quant", "runtime", "eval")
STDLIB = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What the modules under `room` may import: `ours` by prefix, `outside` by top-level name."""

    room: str
    ours: frozenset[str]
    outside: frozenset[str] | None = None
    never: frozenset[str] = frozenset()


def law(room: str, ours: str, outside: str | None = None, never: str = "") -> Law:
    return Law(
        room=room,
        ours=frozenset(ours.split()),
        outside=None if outside is None else frozenset(outside.split()),
        never=frozenset(never.split()),
    )


# The most specific room wins.
LAWS = [
    law("quant.artifact", "quant.artifact", "numpy torch safetensors pydantic"),
    law("quant", "quant", never="triton fastapi"),
    law("quant.methods.columns_kernel", "quant.artifact quant.methods.columns", "torch triton"),
    law("quant.gguf_reading", "", "numpy gguf"),
    law("runtime.request", "", ""),
    law("runtime.config", "", ""),
    law("runtime.engine.scheduler", "runtime.request runtime.config runtime.engine", ""),
    law("runtime.engine.block_manager", "runtime.request runtime.config", ""),
    law("runtime.kernels", "runtime.kernels quant.artifact.layout quant.artifact.scheme",
        "torch triton numpy"),
    law("runtime.model", "runtime.model runtime.kernels quant.artifact", "torch numpy safetensors"),
    law("runtime.text", "runtime.text runtime.request", never="torch fastapi triton"),
    law("runtime.engine", "runtime.engine runtime.model runtime.kernels runtime.request "
        "runtime.config quant.artifact", "torch numpy psutil"),
    law("runtime.server", "runtime.server runtime.engine runtime.request runtime.config "
        "runtime.text quant.artifact", never="transformers triton"),
    law("runtime", "runtime quant.artifact"),
    law("eval", "eval runtime.engine runtime.request runtime.config runtime.text quant.artifact "
        "quant.gguf_reading", never="fastapi triton"),
    law("eval.review.web", "eval.review eval.errors", never="torch transformers triton"),
]  # fmt: skip

# Imports of one outside library that only one place may make.
ONLY_IN = {
    "transformers": ("quant.source", "quant.gguf_source", "quant.modelling", "runtime.text",
                     "eval.targets.reference"),
    "gguf": ("quant.gguf_source", "quant.gguf_reading"),
    "fastapi": ("runtime.server", "eval.review.web"),
    "lm_eval": ("eval.lm_eval_adapter",),
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of everything a file imports, `from a import b` given as `a.b`."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def law_of(module: str) -> Law:
    rooms = [entry for entry in LAWS if under(module, entry.room)]
    return max(rooms, key=lambda entry: len(entry.room))


SOURCES = sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_keep_the_law(path: Path) -> None:
    module = module_name(path)
    rule = law_of(module)
    for name, line in imports_of(path):
        where = f"{path.relative_to(REPO)}:{line}: {module} imports {name}"
        top = name.split(".")[0]
        if top in PACKAGES:
            assert any(under(name, allowed) for allowed in rule.ours), where
        elif top not in STDLIB:
            assert rule.outside is None or top in rule.outside, where
            assert top not in rule.never, where


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_outside_libraries_stay_in_their_room(library: str) -> None:
    for path in SOURCES:
        module = module_name(path)
        if any(under(name, library) for name, _ in imports_of(path)):
            assert any(under(module, room) for room in ONLY_IN[library]), (
                f"{module} imports {library}; only {', '.join(ONLY_IN[library])} may"
            )


def module_edges() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports (the longest known name of each import)."""
    known = {module_name(path) for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for path in SOURCES:
        targets = edges.setdefault(module_name(path), set())
        for name, _ in imports_of(path):
            parts = name.split(".")
            names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            target = next((candidate for candidate in names if candidate in known), None)
            if target is not None and target != module_name(path):
                targets.add(target)
    return edges


def test_no_import_circles() -> None:
    edges = module_edges()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


def test_packages_load_nothing_on_import() -> None:
    for package in PACKAGES:
        body = ast.parse((REPO / package / "__init__.py").read_text()).body
        assert len(body) == 1, f"{package}/__init__.py holds a docstring and nothing else"


def test_every_module_says_what_it_is_for() -> None:
    silent = [module_name(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_no_rooms_without_a_purpose() -> None:
    names = {part for path in SOURCES for part in path.relative_to(REPO).with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


def test_docs_name_only_paths_that_exist() -> None:
    import re

    for page in [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]:
        for name in re.findall(r"`((?:quant|runtime|eval|calib_data|recipes|scripts|tests|docs|"
                               r"benchmarks)/[\w./-]*)`", page.read_text()):  # fmt: skip
            assert (REPO / name).exists(), f"{page.name} names {name}, which does not exist"
