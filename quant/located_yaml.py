"""YAML read together with the line of every key, for errors that point at the place.

Stricter than YAML: a key given twice is an error (YAML lets the last one win in silence), aliases
are refused (they are nearly always an unquoted pattern that starts with `*`), keys are words.
Knows nothing about recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from quant.errors import RecipeError

KeyPath = tuple[str | int, ...]
_QUOTE_HINT = 'a pattern that starts with * must stand in quotes, as in "*.mlp.down_proj"'


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedYaml:
    """Plain data and the 1-based line of each key and list item, by path."""

    name: str
    data: Any
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """`file:line` of the deepest part of `path` that is in the text (else of its start)."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return f"{self.name}:1"


def parse_yaml(text: str, name: str) -> LocatedYaml:
    """Parse one document; RecipeError names `name`, the line and what was found."""
    try:
        _refuse_aliases(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_explain(error, name)) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: not YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{name}: nested too deeply to be a recipe") from error
    lines: dict[KeyPath, int] = {}
    data = None if root is None else _build(root, (), name, lines)
    return LocatedYaml(name=name, data=data, lines=lines)


def _refuse_aliases(text: str, name: str) -> None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            line = f":{event.start_mark.line + 1}" if event.start_mark else ""
            raise RecipeError(f"{name}{line}: found the YAML alias *{event.anchor}; {_QUOTE_HINT}")


def _explain(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = "" if mark is None else f":{mark.line + 1}"
    hint = f"; {_QUOTE_HINT}" if "alias" in f"{error.context} {error.problem}" else ""
    context = f"{error.context}: " if error.context else ""
    return f"{name}{line}: not YAML: {context}{error.problem}{hint}"


def _build(node: yaml.Node, path: KeyPath, name: str, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, name, lines)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
        return [_build(item, (*path, i), name, lines) for i, item in enumerate(node.value)]
    return _scalar(node, name)


def _build_mapping(
    node: yaml.MappingNode, path: KeyPath, name: str, lines: dict[KeyPath, int]
) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(key_node, name) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise RecipeError(
                f"{name}:{line}: found a key that is not a word; expected `key: value`"
            )
        if key in mapping:
            first = lines[(*path, key)]
            raise RecipeError(
                f"{name}:{line}: {key}: given twice (first on line {first}); keep one of them"
            )
        lines[(*path, key)] = line
        mapping[key] = _build(value_node, (*path, key), name, lines)
    return mapping


def _scalar(node: yaml.Node, name: str) -> Any:
    """The value of a scalar node, by YAML's own rules (no tags that build objects)."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        line = node.start_mark.line + 1
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{name}:{line}: cannot read {node.value!r}: {problem}") from error
    finally:
        loader.dispose()
