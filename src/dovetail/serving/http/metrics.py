"""Metrics for Prometheus, by vLLM's names where the meaning is the same: `{prefix}:num_requests_running` and so on.

Counts and gauges come from the engine's statistics when they are asked for; times are measured here, at the interface.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.serving.client import Client, Stats
from dovetail.serving.request import Output

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of one server."""

    def __init__(self, client: Client, model: str, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineStats(client, model, prefix))
        labels: dict[str, Any] = {"labelnames": ["model_name"], "registry": self.registry}

        def seconds(name: str, about: str, buckets: Sequence[float] = SECONDS) -> Any:
            return Histogram(f"{prefix}:{name}_seconds", about, buckets=buckets, **labels).labels(model)

        self.first = seconds("time_to_first_token", "from the request to its first token")
        self.between = seconds("inter_token_latency", "between two outputs of a request", GAPS)
        self.whole = seconds("e2e_request_latency", "from the request to its last token")
        self.queue = seconds("request_queue_time", "from the engine's queue to a row")
        self.prefill = seconds("request_prefill_time", "from a row to the first token")
        self.decode = seconds("request_decode_time", "from the first token to the last")
        self._ends = Counter(
            f"{prefix}:request_success", "finished choices", ["model_name", "finished_reason"], registry=self.registry
        )
        self.model = model

    def clock(self) -> Clock:
        """Begin to measure a request."""
        return Clock(self)

    def ended(self, reason: str) -> None:
        """Count the end of a choice."""
        self._ends.labels(self.model, reason).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Clock:
    """Measures one request."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.begin = metrics, time.perf_counter()
        self.first: float | None = None
        self.last = self.begin

    def tick(self, tokens: int) -> None:
        """Count new tokens."""
        if not tokens:
            return
        moment = time.perf_counter()
        if self.first is None:
            self.first = moment
            self.metrics.first.observe(moment - self.begin)
        else:
            self.metrics.between.observe(moment - self.last)
        self.last = moment

    def begun(self, output: Output) -> None:
        """Count the times that the engine reports with the first tokens of a request."""
        if output.index == 0 and output.queue_seconds is not None and output.prefill_seconds is not None:
            self.metrics.queue.observe(output.queue_seconds)
            self.metrics.prefill.observe(output.prefill_seconds)

    def end(self, reasons: Sequence[str]) -> None:
        """Count the end of each choice."""
        for reason in reasons:
            self.metrics.ended(reason)
        self.metrics.whole.observe(time.perf_counter() - self.begin)
        if self.first is not None:
            self.metrics.decode.observe(self.last - self.first)


class EngineStats(Collector):
    """The engine's own counts."""

    def __init__(self, client: Client, model: str, prefix: str) -> None:
        self.client, self.model, self.prefix = client, model, prefix

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without asking the engine."""
        yield from self._families(Stats())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._families(self.client.stats())

    def _families(self, stats: Stats) -> Iterator[Metric]:
        used = stats.blocks - stats.free_blocks - stats.cached_blocks
        gauges = {
            "num_requests_running": ("sequences that hold a row", stats.running),
            "num_requests_waiting": ("requests in the queue", stats.waiting),
            "kv_cache_usage_perc": ("blocks that requests use; 1 is all", used / stats.blocks if stats.blocks else 0.0),
        }
        counters = {
            "prefix_cache_queries": ("tokens that were looked up", stats.prefix_queries),
            "prefix_cache_hits": ("of these, tokens that were found", stats.prefix_hits),
            "num_preemptions": ("requests that were interrupted", stats.preemptions),
            "prompt_tokens": ("tokens of prompts", stats.prompt_tokens),
            "generation_tokens": ("generated tokens", stats.generation_tokens),
            "step_seconds": ("seconds of the engine's steps", stats.step_seconds),
            "schedule_seconds": ("of these, seconds of the scheduler", stats.schedule_seconds),
        }
        for families, kind in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (about, value) in families.items():
                family = kind(f"{self.prefix}:{name}", about, labels=["model_name"])
                family.add_metric([self.model], value)
                yield family
