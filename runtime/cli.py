"""The `runtime` command. Parses, hands over, prints; decides nothing.

Heavy libraries are imported inside the commands, so that `--help` answers at once. Exit codes:
0 done, 1 the engine died or too many requests of a load test failed, 2 bad input or usage,
130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from errno import EDQUOT, EIO, ENOSPC
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from runtime import cli_bench
from runtime.cli_options import (
    API_KEY_VARIABLE,
    ApiKey,
    ArtifactDir,
    BlockSize,
    ComputeType,
    Deterministic,
    Device,
    EnforceEager,
    EngineSeed,
    Host,
    KVBlocks,
    KVBytes,
    KVType,
    LongPrefill,
    MaxBatched,
    MaxModelLen,
    MaxNumQueued,
    MaxNumSeqs,
    MaxTokens,
    NoPrefixCaching,
    NoProbe,
    NumThreads,
    Port,
    PrefixCaching,
    Probe,
    RequireAccepted,
    SampleSeed,
    ServedModelName,
    ShutdownTimeout,
    Stop,
    Temperature,
    TopP,
    Utilization,
    Verify,
)  # fmt: skip
from runtime.config import ConfigError, DType, EngineConfig, KVCacheDType

if TYPE_CHECKING:
    from rich.status import Status

    from runtime.api import LLM
    from runtime.server.app import ServedModel

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
# Click's UsageError, whichever click this typer brings.
USAGE_ERROR: Any = typer.BadParameter.__base__

HELP = """
Run an artifact: serve it, talk to it, or load-test a server.

An artifact is a directory made by `quantize`; a plain checkpoint or GGUF
becomes one with `quantize convert`. Flags that vLLM has keep vLLM's names and
meaning.

[bold]Examples[/bold]

  [cyan]runtime serve my-model-w4a16[/cyan]
    OpenAI-compatible server on http://127.0.0.1:8000/v1

  [cyan]runtime serve my-model-w4a16 --require-accepted --port 9000 --api-key $KEY[/cyan]
    only if `evaluate` accepted it under these very numerics

  [cyan]runtime generate my-model-w4a16 --prompt "The parties agree"[/cyan]
    continue a text in this process, no server

  [cyan]runtime chat my-model-w4a16[/cyan]
    a conversation in the terminal; also reads piped lines

  [cyan]runtime bench http://127.0.0.1:8000 --requests 64 --concurrency 16[/cyan]
    time to first token, time per token, failures by kind
"""
EPILOG = """
Exit codes: 0 done, 1 the engine died or too many requests failed, 2 bad input or usage,
130 interrupted.
"""

app = typer.Typer(
    name="runtime",
    help=HELP,
    epilog=EPILOG,
    rich_markup_mode="rich",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = Console(highlight=False)
err_console = Console(stderr=True, highlight=False)


@app.callback()
def runtime_command(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", metavar="", help="Show the version.")
    ] = False,
) -> None:
    if show_version:
        out_console.print(f"runtime (weighbridge) {_version()}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        out_console.print(context.get_help())
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command("serve")
def serve_command(
    artifact: ArtifactDir,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKey = None,
    max_num_queued: MaxNumQueued = None,
    shutdown_timeout: ShutdownTimeout = 30.0,
    require_accepted: RequireAccepted = False,
    device: Device = "auto",
    dtype: ComputeType = "auto",
    kv_cache_dtype: KVType = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatched = None,
    long_prefill_token_threshold: LongPrefill = 0,
    block_size: BlockSize = 16,
    gpu_memory_utilization: Utilization = 0.90,
    kv_cache_memory_bytes: KVBytes = None,
    num_gpu_blocks_override: KVBlocks = None,
    no_prefix_caching: NoPrefixCaching = False,
    prefix_caching: PrefixCaching = False,
    deterministic: Deterministic = False,
    enforce_eager: EnforceEager = False,
    verify: Verify = "full",
    no_probe: NoProbe = False,
    probe: Probe = False,
    seed: EngineSeed = 0,
    num_threads: NumThreads = None,
) -> None:
    """Serve an artifact over an OpenAI-compatible HTTP API.

    Routes: /v1/chat/completions /v1/completions /v1/models /tokenize /detokenize
    /health /metrics.
    SIGTERM finishes what runs and exits 0; a second signal ends at once. Full
    queues answer 503 with Retry-After.
    """
    engine_config = EngineConfig(
        device=device, dtype=_dtype(dtype), kv_cache_dtype=_kv_dtype(kv_cache_dtype),
        max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold, block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        enable_prefix_caching=_unless("enable-prefix-caching", no_prefix_caching, prefix_caching),
        deterministic=deterministic, enforce_eager=enforce_eager,
        verify="full" if _one_of("--verify", verify, ("full", "fast")) == "full" else "fast",
        probe=_unless("probe", no_probe, probe), seed=seed, num_threads=num_threads,
    )  # fmt: skip
    _check(artifact)
    from runtime.server.banner import loading_line
    from runtime.server.serve import ServerConfig, serve

    server_config = ServerConfig(
        host=host, port=port, served_model_name=served_model_name, api_key=_given_key(api_key),
        max_num_queued=max_num_queued, shutdown_timeout_s=shutdown_timeout,
        require_accepted=require_accepted,
    )  # fmt: skip
    err_console.print(f"loading {artifact.name} ...", style="dim")
    with err_console.status("opening") as status:
        announce = _announcer(bool(api_key), status)
        code = serve(
            artifact, engine_config, server_config, announce,
            lambda loading: status.update(loading_line(loading)),
        )  # fmt: skip
    raise typer.Exit(code)


@app.command("generate")
def generate_command(
    artifact: ArtifactDir,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; - reads stdin.")
    ],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    sampling_seed: SampleSeed = None,
    stop: Stop = None,
    device: Device = "auto",
    dtype: ComputeType = "auto",
    max_model_len: MaxModelLen = None,
    verify: Verify = "fast",
    num_threads: NumThreads = None,
) -> None:
    """Continue a text. The continuation goes to stdout as it is made, nothing else does."""
    _check(artifact)
    text = _stdin().read() if prompt == "-" else prompt
    llm = _load(artifact, device, dtype, max_model_len, verify, num_threads)
    ids = llm.text.encode(text)
    for piece in llm.stream(
        ids, stop=stop or (), max_tokens=min(max_tokens, _room(llm, ids)),
        temperature=temperature, top_p=top_p, seed=sampling_seed,
    ):  # fmt: skip
        _say(piece)
    _say("\n")


@app.command("chat")
def chat_command(
    artifact: ArtifactDir,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", help="System message.", show_default="the template's"
        ),
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    sampling_seed: SampleSeed = None,
    device: Device = "auto",
    dtype: ComputeType = "auto",
    max_model_len: MaxModelLen = None,
    verify: Verify = "fast",
    num_threads: NumThreads = None,
) -> None:
    """Talk to an artifact. Answers stream; /help lists what else can be typed.

    With piped input each line is a turn and only the answers are printed.
    """
    _check(artifact)
    from runtime.chat import Conversation

    llm = _load(artifact, device, dtype, max_model_len, verify, num_threads)
    conversation = Conversation(
        llm, system,
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
         "seed": sampling_seed},
    )  # fmt: skip
    interactive = sys.stdin.isatty()
    if interactive:
        err_console.print(f"{artifact.name}: type a message; /help for help", style="dim")
    for line in _lines(interactive):
        if conversation.over(line):
            break
        for piece in conversation.answer(line):
            _say(piece)
        _say("\n")


app.command("bench")(cli_bench.bench_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    OpenMP threads that spin at barriers make a shared machine 10 to 17 times slower (30 x 4 small
    linears, 2 threads, M = 16, under load: 999 ms spinning, 106 ms passive), so they sleep unless
    told otherwise. OpenMP reads this once, when torch is imported; the engine process inherits it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(args=argv, prog_name="runtime", standalone_mode=False)
    except USAGE_ERROR as error:
        error.show()
        code = EXIT_BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        code = EXIT_FAILED
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EIO) or error.filename is not None:
            raise
        code = _output_is_lost(error)
    except Exception as error:
        if not _is_for_users(error):
            raise
        err_console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        code = EXIT_BAD_INPUT
    sys.exit(code)


def _output_is_lost(error: OSError) -> int:
    """A full disk behind stdout: told once, not again when Python ends."""
    err_console.print(f"error: the output was cut off: {error.strerror}", style="red")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_FAILED


def _is_for_users(error: Exception) -> bool:
    """Errors of the house's own trees say all there is to say; anything else is a bug of ours."""
    return type(error).__module__.split(".")[0] in {"quant", "runtime"}


def _announcer(has_key: bool, status: Status) -> Callable[[ServedModel, str], None]:
    from runtime.server.banner import curl_example, render_banner

    def announce(model: ServedModel, url: str) -> None:
        status.stop()
        out_console.print(render_banner(model, url))
        out_console.print(curl_example(model.info.name, url, has_key), "", sep="\n", soft_wrap=True)

    return announce


def _check(artifact: Path) -> None:
    """Refuse what cannot run before torch is imported, which takes seconds."""
    from runtime.engine.precheck import check_artifact

    check_artifact(artifact)


def _load(
    artifact: Path, device: str, dtype: str, max_model_len: int | None, verify: str,
    num_threads: int | None,
) -> LLM:  # fmt: skip
    from runtime.api import LLM

    return LLM(
        artifact, device=device, dtype=_dtype(dtype), max_model_len=max_model_len,
        verify=_one_of("--verify", verify, ("full", "fast")), num_threads=num_threads,
        max_num_seqs=1,
    )  # fmt: skip


def _room(llm: LLM, ids: Sequence[int]) -> int:
    """Tokens the context still holds; at least 1, so that the engine words the refusal."""
    return max(1, llm.engine.resolved.max_model_len - len(ids))


def _lines(interactive: bool) -> Iterator[str]:
    """Non-empty lines of stdin, with a prompt when somebody types them."""
    stdin = _stdin()
    while True:
        if interactive:
            err_console.print("> ", style="bold", end="")
        line = stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _stdin() -> TextIO:
    """stdin, to be asked for before anything is read; the tokenizer refuses what is not UTF-8."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def _say(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{flag} is one of {', '.join(known)}, not {value!r}")
    return value


def _unless(name: str, off: bool, on: bool) -> bool:
    """The value of a switch that is on unless --no-NAME was said."""
    if off and on:
        raise ConfigError(f"--{name} and --no-{name} contradict each other; say one")
    return not off


def _given_key(key: str | None) -> str | None:
    """The key; a variable that is there but empty (a secret that was not set) is not "no key"."""
    if key is None and API_KEY_VARIABLE in os.environ:
        raise ConfigError(
            f"{API_KEY_VARIABLE} is set, but empty; unset it to serve without a key, or give one"
        )
    return key


def _dtype(value: str) -> DType:
    known: tuple[DType, ...] = ("auto", "float32", "bfloat16", "float16")
    return known[known.index(_one_of("--dtype", value, known))]


def _kv_dtype(value: str) -> KVCacheDType:
    known: tuple[KVCacheDType, ...] = (
        "auto",
        "float32",
        "bfloat16",
        "float16",
        "fp8",
        "int8",
    )
    return known[known.index(_one_of("--kv-cache-dtype", value, known))]


def _version() -> str:
    try:
        return version("weighbridge")
    except PackageNotFoundError:
        return "0"


if __name__ == "__main__":
    main()
