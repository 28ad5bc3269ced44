"""code: the answer holds one closed code fence of the right language, and the code in it parses.

Parsing only; nothing is ever run. `prefix` completes a function whose head stands in the prompt (as
HumanEval has it); what follows it may be indented or not.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, Value, only, printable
from eval.checks.json_text import parse_strict

_OPEN = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#-]*)[^\n`]*\n", re.MULTILINE)
_NAMES = {"python": {"python", "py", "python3"}, "json": {"json"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """fenced: a fence is wanted; without it the whole answer is the code.

    defines: a function the code must define, with these parameters if they are given.
    """

    language: str
    fenced: bool
    prefix: str
    defines: str | None
    parameters: tuple[str, ...] | None


def read(row: Mapping[str, Any]) -> Options:
    """`language`: python or json. `fenced`, `prefix`, `defines`, `parameters` as in Options."""
    only(row, "language", "fenced", "prefix", "defines", "parameters")
    language, defines, parameters = row.get("language"), row.get("defines"), row.get("parameters")
    if not isinstance(language, str) or language not in _NAMES:
        raise ValueError(f"expected 'language' to be one of {sorted(_NAMES)}, found {language!r}")
    if not isinstance(row.get("fenced", True), bool) or not isinstance(row.get("prefix", ""), str):
        raise ValueError("expected 'fenced' to be true or false and 'prefix' to be text")
    if defines is not None and (
        language != "python" or not isinstance(defines, str) or not defines.isidentifier()
    ):
        raise ValueError(f"'defines' names a Python function, found {defines!r}")
    is_named = isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)
    if parameters is not None and (defines is None or not is_named):
        raise ValueError("'parameters' is a list of names and needs 'defines'")
    return Options(
        language=language,
        fenced=row.get("fenced", True),
        prefix=row.get("prefix", ""),
        defines=defines,
        parameters=None if parameters is None else tuple(parameters),
    )


def score(reply: Reply, options: Options) -> Outcome:
    """code_parses, code_fenced where a fence is wanted, code_defines where a name is."""
    block, fence_problem = _block(reply.text, options) if options.fenced else (reply.text, "")
    source = _completed(options.prefix, block)
    problem = _syntax_problem(options.language, source) if block.strip() else "no code"
    values: dict[str, Value] = {"code_parses": float(not problem)}
    if options.fenced:
        values["code_fenced"] = float(not fence_problem)
    if options.defines is not None:
        missing = "" if problem else _definition_problem(source, options)
        values["code_defines"] = float(not problem and not missing)
        problem = problem or missing
    return Outcome(values=values, problem=printable(problem or fence_problem))


def _block(text: str, options: Options) -> tuple[str, str]:
    """The first fenced block (up to the end if it is never closed) and what is wrong with it."""
    opened = _OPEN.search(text)
    if opened is None:
        return text, "no code fence"
    fence, tag = opened.group(1), opened.group(2).lower()
    rest = text[opened.end() :]
    closed = re.search(
        rf"^[ \t]*{re.escape(fence[0])}{{{len(fence)},}}[ \t\r]*$", rest, re.MULTILINE
    )
    if closed is None:
        return rest, "the code fence is never closed"
    if tag not in _NAMES[options.language]:
        return rest[: closed.start()], f"the code fence says {tag!r}, not {options.language}"
    return rest[: closed.start()], ""


def _completed(prefix: str, block: str) -> str:
    """The code behind its prefix, indented as a body if it has to be."""
    body = block.strip("\n")
    if not prefix:
        return textwrap.dedent(body)
    if body.lstrip().startswith(prefix.strip().splitlines()[0]):  # it repeats the head
        return textwrap.dedent(body)
    is_body = prefix.rstrip().endswith((":", '"""', "'''")) and not body.startswith((" ", "\t"))
    return prefix.rstrip("\n") + "\n" + (textwrap.indent(body, "    ") if is_body else body)


def _syntax_problem(language: str, source: str) -> str:
    try:
        if language == "json":
            if problem := parse_strict(source).problem:
                return problem
        else:
            _tree(source)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"does not parse: {error or type(error).__name__}"
    return ""


def _tree(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of "\d" in a text, which parses
        return ast.parse(source)


def _definition_problem(source: str, options: Options) -> str:
    for node in ast.walk(_tree(source)):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == options.defines
        ):
            given = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
            if options.parameters is not None and given != options.parameters:
                return f"{options.defines} takes {list(given)}, not {list(options.parameters)}"
            return ""
    return f"no function {options.defines}"
