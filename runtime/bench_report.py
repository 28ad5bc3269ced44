"""A load test's figures for a terminal, and what to try about each kind of failure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from runtime.bench import Summary

_HINTS = {
    "connect": "nothing answers at this URL; is the server up, and the port the right one?",
    "timeout": "no answer in time; raise --timeout or lower --concurrency",
    "client_limit": "this side ran out of open files or ports; ulimit -n, or lower --concurrency",
    "cut": "the connection ended before the answer did; see the server's log",
    "empty": "the answers hold no text; see what the server says to one request by hand",
    "error_frame": "the server began to answer and then reported an error; see its log",
    "http_401": "the server wants a key; pass --api-key",
    "http_403": "the server refuses this key; pass another --api-key",
    "http_404": "no /v1/chat/completions at this URL, or no such model there",
    "http_503": "the server's queue is full or it is shutting down; lower --concurrency",
}


def hint(kind: str) -> str:
    """What to try about a kind of failure."""
    if kind in _HINTS:
        return _HINTS[kind]
    if kind.startswith("http_4"):
        return "the server refuses these requests; send one by hand to see its words"
    return "the server failed; see its log"


def render_report(summary: Summary) -> Group:
    """The figures for a terminal."""
    failed = ", ".join(f"{kind} {number}" for kind, number in summary.failures.items()) or "none"
    counted = Text(f"{summary.sent} requests sent, {summary.ok} ok, failed: {failed}")
    if not summary.ok:
        return Group(
            counted,
            Text(f"nothing to measure: every request failed in {summary.duration_s:.2f} s"),
            *(Text(f"{kind}: {hint(kind)}") for kind in summary.failures),
        )
    return Group(counted, *map(Text, _conditions(summary)), _table(summary))


def _conditions(s: Summary) -> Iterator[str]:
    """What was really asked of the server, and what held this side back."""
    yield (
        f"at most {s.concurrency} at once from here, {s.most_in_flight} reached, "
        f"{s.mean_in_flight:.1f} on average; {s.duration_s:.2f} s, "
        f"{s.output_tok_s:.1f} output tokens/s"
    )
    lags = f"p50 {s.lag_ms['p50']:.1f}, p99 {s.lag_ms['p99']:.1f}, most {s.lag_ms['max']:.1f}"
    if s.rate is None:
        yield f"sent later than a client was free, ms: {lags}"
    else:
        yield f"{s.rate:g} requests/s asked, {s.sent_rate:.1f} sent; later than due, ms: {lags}"
        if s.most_in_flight >= s.concurrency:
            yield (
                f"the cap of this side ({s.concurrency} at once) was reached: later requests had "
                "to wait for a client, so this is no open loop; raise --concurrency"
            )
    if s.in_one_piece:
        yield (
            f"{s.in_one_piece} answers came in one piece: their tokens were held back, so they "
            "have no time per token and their TTFT is that of the whole answer"
        )


def _table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("ms", "p50", "p90", "p99", "mean"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, values in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms),
                         ("end to end", summary.e2e_ms)):  # fmt: skip
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    return table
