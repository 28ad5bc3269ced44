"""Prometheus metrics under vLLM's names, so that its dashboards and routers work unchanged.

Engine counters and gauges are read from the newest EngineStats at scrape time; what only the server
sees (latencies, endings, refusals) is observed as it happens. Each app has a registry of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.engine_client import EngineClient
from runtime.server.messages import StepMessage

TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
                80, 160, 640, 2560)  # fmt: skip
TOKEN_BUCKETS = (.001, .002, .003, .005, .0075, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75,
                 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
LATENCY_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
                   1920, 7680)  # fmt: skip
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000,
                 100_000)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
LABELS = ("model_name", "engine")

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Between tokens of one sequence.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean after the first token.", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From arrival to the end.", LATENCY_BUCKETS),
    "request_decode_time_seconds": ("From first to last token.", LATENCY_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens per request.", COUNT_BUCKETS),
    "request_generation_tokens": ("Generated tokens per request.", COUNT_BUCKETS),
    "request_params_n": ("The n asked for.", N_BUCKETS),
    "request_params_max_tokens": ("The max_tokens in force.", COUNT_BUCKETS),
    "iteration_tokens_total": ("Tokens computed per engine step.", ITERATION_BUCKETS),
}


class Metrics:
    """Everything /metrics shows about one served model."""

    def __init__(self, client: EngineClient, model_name: str, artifact: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._client = client
        self._tokens_seen = _num_computed(client)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            .labels(**self._labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }  # fmt: skip
        self._endings = Counter(
            "vllm:request_success", "Requests by how they ended.",
            (*LABELS, "finished_reason"), registry=self.registry,
        )  # fmt: skip
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused before they were queued.",
            (*LABELS, "reason"), registry=self.registry,
        )  # fmt: skip
        self._corrupted = Counter(
            "vllm:corrupted_requests", "Requests ended by non-finite logits.",
            LABELS, registry=self.registry,
        ).labels(**self._labels)  # fmt: skip
        self._cached = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.",
            LABELS, registry=self.registry,
        ).labels(**self._labels)  # fmt: skip
        info = Gauge(
            "weighbridge:artifact_info", "The artifact served and its verdict.",
            (*LABELS, *artifact), registry=self.registry,
        )  # fmt: skip
        info.labels(**self._labels, **artifact).set(1)
        self.registry.register(EngineCollector(client, self._labels))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_end(self, reason: str) -> None:
        self._endings.labels(**self._labels, finished_reason=reason).inc()

    def count_rejection(self, reason: str) -> None:
        self._rejections.labels(**self._labels, reason=reason).inc()

    def count_corrupted(self) -> None:
        self._corrupted.inc()

    def count_cached(self, num_tokens: int) -> None:
        self._cached.inc(num_tokens)

    def on_step(self, message: StepMessage) -> None:
        """Called for each message of the engine."""
        seen, self._tokens_seen = self._tokens_seen, _num_computed(self._client)
        if message.output is not None and self._tokens_seen > seen:
            self.observe("iteration_tokens_total", self._tokens_seen - seen)


class RequestTimer:
    """Times of one sequence, observed into Metrics as they become known."""

    def __init__(self, metrics: Metrics, num_prompt: int, max_tokens: int, n: int) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic()
        self._first: float | None = None
        self._num_tokens = 0
        metrics.observe("request_prompt_tokens", num_prompt)
        metrics.observe("request_params_max_tokens", max_tokens)
        metrics.observe("request_params_n", n)

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.observe("time_to_first_token_seconds", now - self._start)
        else:
            self._metrics.observe("inter_token_latency_seconds", (now - self._last) / count)
        self._num_tokens += count
        self._last = now

    def end(self, reason: str) -> None:
        """The sequence ended: stop, length, abort or error."""
        metrics = self._metrics
        metrics.count_end(reason)
        if reason not in ("stop", "length"):
            return
        metrics.observe("e2e_request_latency_seconds", time.monotonic() - self._start)
        metrics.observe("request_generation_tokens", self._num_tokens)
        if self._first is not None and self._num_tokens > 1:
            decode = self._last - self._first
            metrics.observe("request_decode_time_seconds", decode)
            per_token = decode / (self._num_tokens - 1)
            metrics.observe("request_time_per_output_token_seconds", per_token)


class EngineCollector(Collector):
    """The engine's own counters and gauges, as they stand."""

    def __init__(self, client: EngineClient, labels: dict[str, str]) -> None:
        self._client = client
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        usage = stats.num_used_blocks / max(1, stats.num_blocks)
        yield self._gauge("num_requests_running", "Sequences running.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting.", self._client.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use (0-1).", usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up.", stats.prefix_queries_total)
        yield self._counter("prefix_cache_hits", "Tokens found.", stats.prefix_hits_total)
        yield self._counter("num_preemptions", "Preemptions.", stats.preemptions_total)
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total)
        yield self._counter("generation_tokens", "Generated tokens.", stats.generation_tokens_total)
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _cache_config(self) -> Metric:
        resolved = self._client.resolved
        info = {
            "block_size": str(resolved.block_size),
            "num_gpu_blocks": str(resolved.num_blocks),
            "cache_dtype": resolved.kv_cache_dtype,
            "enable_prefix_caching": str(resolved.enable_prefix_caching),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up.", labels=[*self._names, *info]
        )
        family.add_metric([*self._values, *info.values()], 1)
        return family


def _num_computed(client: EngineClient) -> int:
    return client.stats.prompt_tokens_total + client.stats.generation_tokens_total
