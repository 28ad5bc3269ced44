"""What `runtime serve` shows once it answers: resolved settings, verdict, how to call it."""

from __future__ import annotations

from dataclasses import fields

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from runtime.config import ResolvedConfig
from runtime.server.app import ServedModel

_VERDICT_STYLE = {"accepted": "bold green", "rejected": "bold red"}
_HIDDEN = {"reasons", "artifact_digest", "vocab_size"}


def render_banner(model: ServedModel, url: str, api_key: bool) -> Group:
    """A table of ResolvedConfig with reasons, the stamp's verdict, the URL and a curl example."""
    return Group(
        Text(""),
        _settings(model.client.resolved),
        Text(""),
        _verdict(model),
        Text(""),
        Text.assemble("serving ", (model.info.name, "bold"), " at ", (f"{url}/v1", "bold cyan")),
        Text(""),
        Text(_curl(model.info.name, url, api_key), style="dim"),
        Text(""),
    )


def _settings(resolved: ResolvedConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", style="bold", overflow="fold")
    table.add_column("why", style="dim", overflow="fold")
    for field in fields(resolved):
        if field.name not in _HIDDEN:
            value = getattr(resolved, field.name)
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            table.add_row(field.name, shown, resolved.reasons.get(field.name, ""))
    return table


def _verdict(model: ServedModel) -> Text:
    info = model.info
    style = _VERDICT_STYLE.get(info.verdict, "bold yellow")
    line = Text.assemble("verdict ", (info.verdict, style), f"  artifact {info.digest[:12]}")
    if info.warning is not None:
        line.append(f"\nwarning: {info.warning}", style="yellow")
    return line


def _curl(name: str, url: str, api_key: bool) -> str:
    auth = " -H 'Authorization: Bearer KEY'" if api_key else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    kind = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {kind}{auth} \\\n  -d '{body}'"
