"""What `runtime serve` shows once it answers: resolved settings, verdict, how to call it."""

from __future__ import annotations

import json
import shlex

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from runtime.config import ResolvedConfig
from runtime.engine.resolve import describe
from runtime.server.app import ServedModel
from runtime.server.messages import Loading

_VERDICT_STYLE = {"accepted": "bold green", "rejected": "bold red"}
_HIDDEN = {"artifact_digest", "vocab_size"}


def render_banner(model: ServedModel, url: str) -> Group:
    """A table of ResolvedConfig with reasons, the stamp's verdict and the URL."""
    return Group(
        Text(""),
        _settings(model.client.resolved),
        Text(""),
        _verdict(model),
        Text(""),
        Text.assemble("serving ", (model.info.name, "bold"), " at ", (f"{url}/v1", "bold cyan")),
        Text(""),
    )


def _settings(resolved: ResolvedConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", style="bold", overflow="fold")
    table.add_column("why", style="dim", overflow="fold")
    for name, value, reason in describe(resolved):
        if name not in _HIDDEN:
            table.add_row(name, value, reason)
    return table


def _verdict(model: ServedModel) -> Text:
    info = model.info
    style = _VERDICT_STYLE.get(info.verdict, "bold yellow")
    gates = "" if info.gates is None else f" by {info.gates}"
    line = Text.assemble("verdict ", (info.verdict, style), f"{gates}  artifact {info.digest[:12]}")
    if info.remark is not None:
        line.append(f"\n{info.remark}", style="dim")
    if info.warning is not None:
        line.append(f"\nwarning: {info.warning}", style="yellow")
    return line


def loading_line(loading: Loading) -> str:
    """What a terminal shows of a start that is under way."""
    done = f"{loading.layers} of {loading.num_layers} layers loaded"
    return f"{done}; checking" if loading.layers == loading.num_layers else done


def curl_example(name: str, url: str, api_key: bool) -> Text:
    """A request to paste into a shell. It must not be wrapped: a break within quotes is a letter
    of the argument, so lines end between arguments, or where JSON allows a line break."""
    first = json.dumps({"model": name, "temperature": 0, "max_tokens": 64})
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    body = f'{first[:-1]},\n       "messages": {messages}}}'
    arguments = [
        f"curl {url}/v1/chat/completions",
        *(["-H 'Authorization: Bearer KEY'"] if api_key else []),
        "-H 'Content-Type: application/json'",
        f"-d {shlex.quote(body)}",
    ]
    return Text(" \\\n  ".join(arguments), style="dim", no_wrap=True, overflow="ignore")
