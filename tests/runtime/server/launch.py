"""Serve a scripted engine in a process of its own, as `runtime serve` does the real one.

Imports inside `main`: the engine process imports this module again and should start quickly.
Arguments: tokenizer directory, ServerConfig as JSON, Script as JSON. Prints the URL when it is up.
"""

from __future__ import annotations

import sys


def main() -> int:
    import json
    from functools import partial
    from pathlib import Path

    import typer

    from runtime.server.serve import ServerConfig, bind, run_server
    from runtime.text import TextProcessor
    from tests.runtime.server.in_process import describe
    from tests.runtime.server.scripted import Script, make_engine

    directory, config, script = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if script.get("say") is not None:
        script["say"] = tuple(script["say"])
    server = ServerConfig(**config)
    factory = partial(make_engine, Script(**script))
    with bind(server.host, server.port) as listener:
        text = TextProcessor.load(Path(directory))
        return run_server(listener, text, factory, describe, server, lambda _, url: typer.echo(url))


if __name__ == "__main__":
    sys.exit(main())
