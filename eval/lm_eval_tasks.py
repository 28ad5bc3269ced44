"""Task files of lm-eval as they lie on disk: checked, and their data found, before lm-eval runs.

lm-eval resolves data paths against the working directory, lets the last of two equal keys win, puts
data without a split into `train`, and fails on a column of two types deep inside a library. Here
each of these is put right or refused with the file and the line. Imports nothing of lm-eval.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eval.errors import UsageError
from eval.rows import object_of

# Data sets read by `datasets` from files, no hub involved.
LOCAL_READERS = frozenset(("json", "csv", "text", "parquet", "arrow", "pandas", "xml"))
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_JSON_TYPES = {bool: "true/false", int: "number", float: "number", str: "text", dict: "object",
               list: "list"}  # fmt: skip


def keep_data_in(cache: Path) -> None:
    """Have `datasets` and lm-eval keep what they derive under `cache`, unless the environment
    already says where. Must run before `datasets` is imported anywhere.
    """
    folder = cache / "lm-eval"
    os.environ.setdefault("LM_HARNESS_CACHE_PATH", str(folder / "requests"))
    if "HF_HOME" not in os.environ:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "datasets"))
        os.environ.setdefault("HF_EVALUATE_CACHE", str(folder / "metrics"))


def check_yaml(path: Path) -> Any:
    """What the file says, functions by name only.

    UsageError: it is not YAML, or says one key twice (the last would win).
    """
    try:
        with path.open("rb") as file:
            return yaml.load(file, Loader=_Strict)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


class _Strict(yaml.SafeLoader):
    """Refuses duplicate keys; knows lm-eval's `!function`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands here twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Strict.add_constructor("!function", lambda loader, node: node.value)


def is_task_file(name: str) -> bool:
    """Whether what was given as a task is a file rather than a name."""
    return name.endswith((".yaml", ".yml"))


def group_of(name: str) -> tuple[str, list[str]] | None:
    """The name of the group that a task file defines, and of its members; None for other files."""
    config = check_yaml(Path(name)) if is_task_file(name) else None
    if not isinstance(config, dict) or not isinstance(config.get("group"), str):
        return None
    members = config.get("task")
    named = [m.get("task") if isinstance(m, dict) else m for m in members or []]
    return config["group"], [member for member in named if isinstance(member, str)]


def unknown_name(name: str, include_path: Path | None) -> str:
    """Why a task cannot be found: lm-eval passes over broken files in silence."""
    broken = list(_broken_files(include_path)) if include_path else []
    advice = "; ".join(broken) or "`python -m lm_eval ls tasks` lists what it has"
    return f"lm-eval knows no task, group or tag {name!r}: {advice}"


def _broken_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            check_yaml(path)
        except UsageError as error:
            yield str(error)


def in_one_line(error: BaseException) -> str:
    """An exception of lm-eval or `datasets` in one line, with what to do about the usual ones."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and len(causes) < 5:
        causes.append(cause)
    said = " / ".join(
        f"{type(c).__name__}: {(str(c).strip().splitlines() or [''])[0]}" for c in causes
    )
    if missing := next((c for c in causes if isinstance(c, ModuleNotFoundError)), None):
        return f"{said}; the task needs the package {missing.name}: install it (or lm-eval's extra)"
    if any(word in said for word in ("Offline", "ConnectionError", "ConnectError", "hub", "Hub")):
        return (
            f"{said}; its data lies on the hub, which cannot be reached: copy the task's YAML, set "
            "dataset_path: json and dataset_kwargs: {data_files: {test: FILE}}"
        )
    return said


def with_local_data(config: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """A task's config with its data files as absolute paths, each under the split it is for.

    folder: where the task file lies; None for a task that was given as a dict.

    UsageError: a file is missing, a split has no data, or a JSONL column has two types.
    """
    if config.get("dataset_path") not in LOCAL_READERS:
        return _with_local_dataset(config, folder)
    options = dict(config.get("dataset_kwargs") or {})
    named = _by_split(options.get("data_files"), config)
    if named is None:
        return config
    files = {split: _resolved(paths, folder, config) for split, paths in named.items()}
    _check_splits(files, config)
    if config["dataset_path"] == "json" and "field" not in options:
        for paths in files.values():
            for path in paths:
                _check_columns(Path(path), config)
    return config | {"dataset_kwargs": options | {"data_files": files}}


def _with_local_dataset(config: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """A data set that is a folder beside the task file, by its absolute path."""
    name = config.get("dataset_path")
    if folder is not None and isinstance(name, str) and (folder / name).is_dir():
        return config | {"dataset_path": str((folder / name).resolve())}
    return config


def _by_split(data_files: Any, config: dict[str, Any]) -> dict[str, list[str]] | None:
    """data_files as {split: paths}. Without splits everything is the one split the task reads."""
    if data_files is None:
        return None
    if isinstance(data_files, dict):
        return {split: _list(paths) for split, paths in data_files.items()}
    wanted = _wanted(config)
    if len(wanted) != 1:
        raise UsageError(
            f"task {config.get('task')}: data_files names no split, but the task reads "
            f"{', '.join(wanted) or 'none'}; write data_files: {{test: FILE, ...}}"
        )
    return {wanted[0]: _list(data_files)}


def _list(paths: Any) -> list[str]:
    return [str(path) for path in (paths if isinstance(paths, list) else [paths])]


def _wanted(config: dict[str, Any]) -> list[str]:
    """The splits a task reads, without the slices that may stand behind them."""
    named = (config.get(key) for key in _SPLITS)
    return list(dict.fromkeys(str(name).split("[")[0] for name in named if name))


def _check_splits(files: dict[str, list[str]], config: dict[str, Any]) -> None:
    for split in _wanted(config):
        if split not in files:
            raise UsageError(
                f"task {config.get('task')} reads the split {split!r}, but data_files has only "
                f"{', '.join(files)}; add {split}: FILE"
            )


def _resolved(paths: list[str], folder: Path | None, config: dict[str, Any]) -> list[str]:
    return [found for path in paths for found in _find(path, folder, config)]


def _find(path: str, folder: Path | None, config: dict[str, Any]) -> list[str]:
    """Beside the task file; else where lm-eval looks, in the working directory."""
    if "://" in path:
        return [path]
    places = [Path(path).expanduser()] if Path(path).expanduser().is_absolute() else [
        place / path for place in (folder, Path.cwd()) if place is not None
    ]  # fmt: skip
    for place in places:
        if place.is_file():
            return [str(place.resolve())]
        if matches := sorted(place.parent.glob(place.name)):
            return [str(match.resolve()) for match in matches]
    raise UsageError(
        f"task {config.get('task')}: no data file {path} at "
        f"{' or '.join(str(place) for place in places)}"
    )


def _check_columns(path: Path, config: dict[str, Any]) -> None:
    """Every column of a JSONL file must have one type, or `datasets` cannot hold it."""
    seen: dict[str, tuple[str, int]] = {}
    for number, row in _rows(path):
        for name, value in row.items():
            kind = _JSON_TYPES.get(type(value))
            if kind is None:
                continue
            first, line = seen.setdefault(name, (kind, number))
            if first != kind:
                raise UsageError(
                    f"task {config.get('task')}: {path}:{number}: column {name!r} is {kind} here "
                    f"and {first} in line {line}; a column has one type (write mixed values, a "
                    "gold answer say, as JSON text)"
                )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file; nothing for a file that is one JSON document."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if lines[0].strip() in ("[", "{") or lines[0].startswith("["):
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, object_of(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
