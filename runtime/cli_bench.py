"""`runtime bench`: the options of a load test. The test itself is `runtime.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from runtime.cli_options import integer, number

EXIT_FAILED = 1
CLOSED_CLIENTS, MOST_CLIENTS = 16, 1024


def bench_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Server, e.g. http://127.0.0.1:8000.")],
    requests: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Requests to send.")
    ] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(
            parser=integer(1, MOST_CLIENTS),
            metavar="N",
            help="Clients at once, the cap of this side.",
            show_default=f"{CLOSED_CLIENTS}, with --rate {MOST_CLIENTS}",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            parser=number(0.001),
            metavar="X",
            help="Open loop: requests due per second, at random times.",
            show_default="closed loop",
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="Prompt; a running number is put before it.")
    ] = "Summarize the duties of the parties to a supply contract.",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts instead, one a line: text, or JSON (prompt, messages)."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Tokens per answer.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(parser=number(0.0), metavar="X", help="0 is greedy.")
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option(parser=number(0.1), metavar="X", help="Seconds per request.")
    ] = 300.0,
    failure_limit: Annotated[
        float,
        typer.Option(
            parser=number(0.0, 1.0),
            metavar="X",
            help="Share of failed requests that is still fine.",
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(parser=integer(0), metavar="N", help="Of the times of --rate.")
    ] = 0,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", envvar="RUNTIME_API_KEY")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures here.")
    ] = None,
) -> None:
    """Load-test a server: any that speaks OpenAI's streaming chat API.

    TTFT is the time to the first chunk with generated content (or whose usage
    counts a token); a role, a keep-alive or the last usage is none. TPOT is
    (total - TTFT) / (n - 1). Latency and throughput are over successful requests
    only; nothing is retried. Each request is one of: ok, http_503 and the like,
    error_frame, cut (no end marker), empty, timeout, connect, client_limit.

    Closed loop: each client sends when its last request ended. Open loop
    (--rate): requests are due whatever the server does; how late they were sent,
    and whether this side's cap held them back, is shown.
    """
    from runtime.bench import (
        Load,
        check_writable,
        read_prompts,
        repeats,
        run_load,
        summarize,
        write_report,
    )
    from runtime.bench_report import render_report

    console = Console(highlight=False)
    if json_out is not None:
        check_writable(json_out)
    load = Load(
        url=url, num_requests=requests, rate=rate, seed=seed, prompt=prompt,
        concurrency=concurrency or (CLOSED_CLIENTS if rate is None else MOST_CLIENTS),
        prompts=() if prompts is None else read_prompts(prompts),
        max_tokens=max_tokens, temperature=temperature, timeout_s=timeout, api_key=api_key,
    )  # fmt: skip
    for line in repeats(load):
        console.print(line, markup=False)
    summary = summarize(run_load(load), load)
    console.print(render_report(summary))
    if json_out is not None:
        write_report(json_out, summary.to_json())
    if summary.failed_share > failure_limit:
        raise typer.Exit(EXIT_FAILED)
