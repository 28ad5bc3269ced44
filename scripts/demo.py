"""The main job end to end on a real small model: quantize -> evaluate -> runtime serve -> chat.

The model is SmolLM2-135M-Instruct with the shipped business adapter. It answers nearly all of the
gate's tasks; the bare model answers few, and where nothing can be lost no loss can be seen.
Every step is one of the three console commands, printed as a user would type it. The verdict shown
is the true one: a rejected artifact is explained and the next recipe up is tried; if none is
accepted, the best one is served with the server's own warning. Artifacts whose bytes still verify
are reused by a second run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from quant.artifact.artifact import open_artifact
from quant.artifact.errors import ArtifactError
from quant.artifact.stamp import Stamp, read_stamp

RECIPES = ("w4a16", "w8a8")
# Small enough for two CPU cores: a real run calibrates on what the recipe says, and judges by the
# gate's own amounts, which are about twice these. 90 items can accept at a margin of 5 points an
# artifact that changes one answer in a hundred (`evaluate plan`).
CALIBRATION = ["--samples", "12", "--max-tokens", "512"]
JUDGING = ["--items", "90", "--noise-items", "8", "--windows", "36", "--window-tokens", "128"]
ADAPTER = "business"
EXIT_ACCEPTED, EXIT_REJECTED, EXIT_INCONCLUSIVE = 0, 1, 3
START_TIMEOUT_S = 120

# Neither text is in the data that the adapter was trained on.
EXTRACT = (
    "Extract from the contract as JSON: party_a, party_b, effective_date (YYYY-MM-DD), "
    "governing_law. Answer with JSON only."
)
CONTRACT = (
    "This Agreement is made on 4 May 2026 between Northwind Tools Ltd (the Supplier) and "
    "Blue Harbour Foods GmbH (the Buyer). It is governed by the laws of Ireland."
)
CLASSIFY = (
    "Classify the message as JSON: intent (refund, order_status, address_change, complaint, "
    "technical_help, invoice, cancellation or booking), order_id. Answer with JSON only."
)
LETTER = "Where is my parcel? Order NX-204816 should have come last week."


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One prepared artifact and what the gate said of it."""

    recipe: str
    path: Path
    exit_code: int
    stamp: Stamp | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or model directory")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for results")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    began = time.monotonic()
    greet(console, arguments.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    original = merge(console, arguments.model, arguments.out)
    candidates = prepare_until_accepted(console, arguments.model, original, arguments.out)
    chosen = choose(candidates)
    serve_and_chat(console, chosen)
    farewell(console, candidates, chosen, original, time.monotonic() - began)


def greet(console: Console, model: Path) -> None:
    console.print(
        Panel(
            f"Model      {model.name} with the adapter {ADAPTER!r}\n"
            "Job        calibrate on contracts, pack to 4 bit, weigh against the original, serve\n"
            "Machine    no GPU needed; takes its time on two cores",
            title="Weighbridge demo",
            expand=False,
        )
    )


def merge(console: Console, model: Path, out: Path) -> Path:
    """The model with its adapter and nothing quantized: what every artifact is held to."""
    merged = out / "smollm2-135m-business"
    console.rule("[bold]The original: model and adapter merged", align="left")
    if is_intact(merged):
        console.print(f"[green]reused[/] {merged}: every byte still matches its manifest\n")
        return merged
    command = ["quantize", "convert", str(model), "--adapter", ADAPTER]
    code = run(console, [*command, "--out", str(merged), "--overwrite"])
    if code != 0:
        sys.exit(f"error: quantize convert ended with exit code {code}")
    return merged


def prepare_until_accepted(
    console: Console, model: Path, original: Path, out: Path
) -> list[Candidate]:
    """Try the recipes from small to careful until the gate accepts one."""
    candidates: list[Candidate] = []
    for number, recipe in enumerate(RECIPES, start=1):
        console.rule(f"[bold]{recipe.upper()}: quantize", align="left")
        artifact = out / f"smollm2-135m-business-{recipe}"
        prepare(console, model, recipe, artifact)
        console.rule(f"[bold]{recipe.upper()}: evaluate", align="left")
        candidates.append(judge(console, recipe, artifact, original))
        if candidates[-1].exit_code == EXIT_ACCEPTED:
            break
        next_recipe = RECIPES[number] if number < len(RECIPES) else None
        explain(console, candidates[-1], original, next_recipe)
    return candidates


def prepare(console: Console, model: Path, recipe: str, artifact: Path) -> None:
    if is_intact(artifact):
        console.print(f"[green]reused[/] {artifact}: every byte still matches its manifest\n")
        return
    command = ["quantize", "--recipe", f"{recipe}.yaml", "--calib", "contracts.jsonl"]
    command += ["--calib", "service.jsonl", "--calib", "code.jsonl", "--adapter", ADAPTER]
    command += ["--model", str(model), "--out", str(artifact), "--overwrite", *CALIBRATION]
    code = run(console, command)
    if code != 0:
        sys.exit(f"error: quantize ended with exit code {code}")


def is_intact(artifact: Path) -> bool:
    try:
        open_artifact(artifact, verify="full")
    except (ArtifactError, OSError):
        return False
    return True


def judge(console: Console, recipe: str, artifact: Path, original: Path) -> Candidate:
    code = run(console, ["evaluate", str(artifact), "--base", str(original), *JUDGING])
    if code not in (EXIT_ACCEPTED, EXIT_REJECTED, EXIT_INCONCLUSIVE):
        sys.exit(f"error: evaluate ended with exit code {code}")
    return Candidate(recipe=recipe, path=artifact, exit_code=code, stamp=read_stamp(artifact))


def explain(
    console: Console, candidate: Candidate, original: Path, next_recipe: str | None
) -> None:
    """Why the gate did not accept, in its own words, and what comes next."""
    verdict = (
        "rejected" if candidate.exit_code == EXIT_REJECTED else "neither accepted nor rejected"
    )
    then = (
        f"Next: {next_recipe.upper()}, which keeps more of the original."
        if next_recipe
        else "No recipe is left: the best one is served, and the server will warn about it."
    )
    reason = candidate.stamp.summary if candidate.stamp else ""
    console.print(
        Panel(
            f"The gate {verdict} {candidate.recipe.upper()}. {reason}\n\n"
            "A 135M-parameter model loses far more at low precision than a 7B one; that the gate "
            f"notices is what it is for. Which layers carry the loss: evaluate blame "
            f"{candidate.path} --base {original}\n\n{then}",
            title="Why",
            expand=False,
        )
    )


def choose(candidates: list[Candidate]) -> Candidate:
    """The accepted one; else the last tried, which keeps the most of the original."""
    accepted = [c for c in candidates if c.exit_code == EXIT_ACCEPTED]
    return (accepted or candidates)[-1]


def serve_and_chat(console: Console, chosen: Candidate) -> None:
    console.rule(f"[bold]{chosen.recipe.upper()}: runtime serve", align="left")
    port = free_port()
    command = ["runtime", "serve", str(chosen.path), "--port", str(port)]
    show(console, command)
    server = subprocess.Popen([console_script(command[0]), *command[1:]])
    try:
        wait_until_healthy(server, port)
        chat(console, OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    if code != 0:
        sys.exit(f"error: the server ended with exit code {code}")
    console.print("\n[green]server shut down cleanly[/]\n")


def chat(console: Console, client: OpenAI) -> None:
    """One plain and one streamed answer through the official client."""
    model = client.models.list().data[0].id
    messages = [
        {"role": "system", "content": EXTRACT},
        {"role": "user", "content": CONTRACT},
    ]
    console.print(f"\n[bold]plain[/]     {EXTRACT}\n          {CONTRACT}")
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=96, temperature=0
    )
    said = (answer.choices[0].message.content or "").strip()
    console.print(said, style="cyan", markup=False)
    messages = [{"role": "system", "content": CLASSIFY}, {"role": "user", "content": LETTER}]
    console.print(f"\n[bold]streamed[/]  {CLASSIFY}\n          {LETTER}")
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, temperature=0, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            console.print(chunk.choices[0].delta.content, end="", style="cyan", markup=False)
    console.print()


def farewell(
    console: Console, candidates: list[Candidate], chosen: Candidate, original: Path, seconds: float
) -> None:
    table = Table(title="Where everything lies", title_justify="left", show_header=False)
    for candidate in candidates:
        verdict = candidate.stamp.verdict if candidate.stamp else "not judged"
        note = f"{candidate.recipe}, {verdict}" + (", served" if candidate is chosen else "")
        table.add_row(str(candidate.path), f"artifact ({note})")
        table.add_row(
            f"{candidate.path}-evaluation", "report.html, summary.md, report.json, junit.xml"
        )
    console.print(table)
    console.print(f"{seconds:.0f} s. Serve it yourself: [bold]runtime serve {chosen.path}[/]")
    console.print(f"May the gate be trusted? [bold]evaluate self-test --base {original}[/]")


def run(console: Console, command: list[str]) -> int:
    show(console, command)
    return subprocess.run([console_script(command[0]), *command[1:]], check=False).returncode


def show(console: Console, command: list[str]) -> None:
    console.print(f"[bold]$ {shlex.join(command)}[/]", highlight=False, soft_wrap=True)


def console_script(name: str) -> str:
    """The command of this very environment, whatever is first on PATH."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"error: the server ended while starting, exit code {server.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    sys.exit(f"error: the server was not ready after {START_TIMEOUT_S} s")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
