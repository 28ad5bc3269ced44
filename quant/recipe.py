"""Recipes: what to make of a model, as a YAML file checked to the last key.

A recipe names a scheme and a method, the modules to leave alone (`skip`), the modules to treat
otherwise (`overrides`) and how to calibrate. It knows nothing of any model: `quant.plan` applies it
to one. Patterns match the *whole* module name: a glob (`*` matches any characters, dots too; case
counts) or, after `re:`, a regular expression. So `model.layers.1.*` is layer 1 and never 10 to 19,
and `down_proj` alone matches nothing: write `*.down_proj`.

The last override that matches a module wins, and `skip` wins over all of them. `lm_head:` alone
speaks for the output head: where it is given, overrides and the default `skip` do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError

from quant.errors import RecipeError
from quant.located_yaml import LocatedYaml, parse_yaml
from quant.module_names import HEAD, matches
from quant.recipe_errors import explain_validation, place, render_findings
from quant.recipe_faults import contradictions
from quant.recipe_keys import RecipeKeys
from quant.recipe_rules import ModuleRule, head_rule, override_applies, resolve_rule, statistics_of


class Recipe(RecipeKeys):
    """A checked recipe. `text` is the file verbatim; `cli_overrides` what the caller changed."""

    _located: LocatedYaml = PrivateAttr()
    _text: str = PrivateAttr()
    _cli_overrides: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read and check a recipe file; RecipeError lists every fault with file, line and key."""
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
            ) from error
        except OSError as error:
            raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> Recipe:
        """A recipe from its text; `name` stands for the file in messages."""
        located = parse_yaml(text, name)
        if not isinstance(located.data, dict):
            raise RecipeError(
                f"{name}:1: found {_kind(located.data)}, expected keys such as `scheme:`, `method:`"
            )
        return cls._checked(located.data, located, text, {})

    @classmethod
    def _checked(
        cls, data: Mapping[str, Any], located: LocatedYaml, text: str, changed: dict[str, Any]
    ) -> Recipe:
        try:
            recipe = cls.model_validate(dict(data))
        except ValidationError as error:
            findings = explain_validation(error, cls, data)
            raise RecipeError(render_findings(findings, located, changed)) from error
        findings = list(contradictions(recipe))
        if findings:
            raise RecipeError(render_findings(findings, located, changed))
        recipe._located, recipe._text, recipe._cli_overrides = located, text, changed
        return recipe

    @property
    def name(self) -> str:
        """The file name without its suffix: `w4a16`."""
        return Path(self._located.name).stem

    @property
    def text(self) -> str:
        return self._text

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    @property
    def cli_overrides(self) -> dict[str, Any]:
        """Dotted key -> value for what `with_overrides` changed, in the order of the keys."""
        return dict(self._cli_overrides)

    @property
    def needs_calibration(self) -> bool:
        """Whether a method or the KV cache scales must see activations."""
        is_smoothed = self.smoothing == "search"  # auto: only where a method sees inputs anyway
        return self.sees_inputs or self.calibrates_kv or is_smoothed or self.is_mixed

    @property
    def data(self) -> dict[str, Any]:
        """The keys as they stand in the file, with what the caller changed."""
        return self._merged({})

    @property
    def calibrates_kv(self) -> bool:
        """Whether the KV cache has stored scales. (int8 makes its own, token by token.)"""
        return self.kv_cache in ("fp8", "fp8-head")

    @property
    def sees_inputs(self) -> bool:
        """Whether any module may get a method that must see its inputs."""
        methods = {self.method, *(rule.method for rule in self.overrides)}
        return any(statistics_of(m, self.rtn.scale_search) != "none" for m in methods if m)

    def with_overrides(self, changes: Mapping[str, Any]) -> Recipe:
        """A new recipe with dotted keys (`calibration.samples`) replaced; None changes nothing."""
        given = {key: value for key, value in sorted(changes.items()) if value is not None}
        changed = {**self._cli_overrides, **given}
        return type(self)._checked(self._merged(given), self._located, self._text, changed)

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        data = {k: dict(v) if isinstance(v, dict) else v for k, v in self._located.data.items()}
        for key, value in {**self._cli_overrides, **given}.items():
            section, _, leaf = key.rpartition(".")
            target = data.setdefault(section, {}) if section else data
            if leaf == "scheme":
                target.pop("weights", None)
                target.pop("activations", None)
            target[leaf] = value
        return data

    def module_rule(self, module: str, num_layers: int | None = None) -> ModuleRule:
        """The rule for `module`. `num_layers` resolves negative `layers:` (-1 = the last)."""
        if module == HEAD and self.lm_head is not None:
            return head_rule(self.lm_head)
        for pattern in self.skip:
            if matches(pattern, module):
                return ModuleRule(scheme=None, method="none", reason=f"skip: {pattern}")
        for index in reversed(range(len(self.overrides))):
            if override_applies(self.overrides[index], module, num_layers):
                return resolve_rule(self, index)
        return resolve_rule(self, None)

    def where(self, *path: str | int) -> str:
        """`file:line` of a key, or the flag that replaced it, for messages about it."""
        return place(path, self._located, self._cli_overrides)


def _kind(value: Any) -> str:
    return "an empty file" if value is None else f"a {type(value).__name__}"
