"""schema_valid: the answer satisfies a JSON Schema, in the draft that its `$schema` names.

Beside it enum adherence: of the values that a top-level enum allows, how many are spelled exactly,
and how many would be once case, plural and punctuation are forgiven (the near misses).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from eval.checks.base import Outcome, Reply, only, printable
from eval.checks.json_text import parse_strict
from eval.checks.patience import TooSlowError, at_most
from eval.errors import SuiteError

# A recursive schema takes several calls for each level of an answer.
NESTED = "nested too deeply for its schema"
TOO_LARGE = "too large to be checked against its schema"
# An answer takes a few milliseconds.
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A schema and, of its top-level properties, the texts that each enum allows."""

    schema: dict[str, Any]
    enums: dict[str, tuple[str, ...]]


def read(row: Mapping[str, Any]) -> Options:
    """`schema`: a JSON Schema that holds all it refers to."""
    only(row, "schema")
    schema = row.get("schema")
    if not isinstance(schema, dict) or not schema:
        raise ValueError(f"expected a non-empty 'schema' (dict), found {schema!r}")
    require_schema(schema)
    properties = schema.get("properties")
    listed = properties.items() if isinstance(properties, dict) else ()
    enums = {
        name: tuple(value for value in part["enum"] if isinstance(value, str))
        for name, part in listed
        if isinstance(part, dict) and isinstance(part.get("enum"), list)
    }
    return Options(schema=schema, enums={name: texts for name, texts in enums.items() if texts})


def require_schema(schema: dict[str, Any]) -> None:
    """ValueError for something that is no JSON Schema of its draft."""
    try:
        _check(json.dumps(schema))
    except SchemaError as error:
        raise ValueError(f"the JSON Schema is not valid: {error.message}") from error
    except RecursionError:
        raise ValueError("the JSON Schema is nested too deeply") from None
    except OverflowError as error:  # of a regular expression's {99999999999}
        raise ValueError(f"the JSON Schema is not valid: {error}") from error


@lru_cache(maxsize=256)
def _check(text: str) -> None:
    """Most rows of a suite share a schema, and to check one takes milliseconds."""
    schema = json.loads(text)
    validator_for(schema, default=Draft202012Validator).check_schema(schema)


def checker(schema: dict[str, Any]) -> Validator:
    """A validator of the schema's own draft, formats on. Nothing outside the schema is fetched."""
    validator = validator_for(schema, default=Draft202012Validator)
    return validator(schema, format_checker=validator.FORMAT_CHECKER, registry=Registry())


def score(reply: Reply, options: Options) -> Outcome:
    """schema_valid, and enum_adherence / enum_lenient where the schema has enums."""
    parsed = parse_strict(reply.text)
    problem = parsed.problem or first_problem(options.schema, parsed.value)
    values: dict[str, Any] = {"schema_valid": float(not problem)}
    if options.enums:
        answer = parsed.value if isinstance(parsed.value, dict) else {}
        found = {name: answer.get(name) for name in options.enums}
        exact = sum(found[name] in allowed for name, allowed in options.enums.items())
        near = sum(_is_near(found[name], allowed) for name, allowed in options.enums.items())
        values["enum_adherence"] = (float(exact), float(len(options.enums)))
        values["enum_lenient"] = (float(near), float(len(options.enums)))
    return Outcome(values=values, problem=problem)


def first_problem(schema: dict[str, Any], value: Any) -> str:
    """The first broken keyword and its path, or ""."""
    try:
        with at_most(PATIENCE_S):
            errors = sorted(checker(schema).iter_errors(value), key=lambda error: error.json_path)
    except TooSlowError:
        if not any(_patterns(schema)):
            return TOO_LARGE
        raise SuiteError(endless(schema, value)) from None
    except Unresolvable as error:
        raise SuiteError(
            f"a JSON Schema refers to {error.ref!r}, which it does not hold"
        ) from error
    except RecursionError:
        return NESTED
    return printable(f"{errors[0].json_path}: {errors[0].validator}") if errors else ""


def endless(schema: dict[str, Any], value: Any) -> str:
    """What to say when a check ran out of its time."""
    patterns = ", ".join(sorted(set(_patterns(schema)))[:3])
    return (
        f"checking the answer {printable(str(value))[:60]!r} against its JSON Schema took more "
        f"than {PATIENCE_S:g} s of computing: a regular expression in it ({patterns or 'none'}) "
        "tries endlessly many ways to match; write it without a repeat inside a repeat"
    )


def _patterns(schema: Any) -> Iterator[str]:
    """Every regular expression in a schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)
    if not isinstance(schema, dict):
        return
    for name, part in schema.items():
        if name == "pattern" and isinstance(part, str):
            yield part
        if name == "patternProperties" and isinstance(part, dict):
            yield from part
        yield from _patterns(part)


def _is_near(value: Any, allowed: tuple[str, ...]) -> bool:
    if not isinstance(value, str):
        return False
    bare = _forgiven(value)
    return value in allowed or any(_forgiven(text) == bare for text in allowed)


def _forgiven(text: str) -> str:
    bare = "".join(char for char in text.casefold() if char.isalnum())
    return bare.removesuffix("s") if len(bare) > 3 else bare
