"""What Prometheus reads at /metrics: requests, seconds, batches, the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NO_ADAPTER, SEVERAL = "", "several"


class Metrics:
    """Counters of one process; `count_queued` tells how many rows wait or run."""

    def __init__(self, count_queued: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry, "namespace": "domext"}
        self._requests = Counter("requests", "Requests answered.", ["route", "status", "adapter"], **own)
        self._seconds = Histogram("request_seconds", "Seconds to the answer.", ["route"], buckets=_SECONDS, **own)
        self._rows = Histogram("batch_rows", "Rows of a pass.", buckets=_ROWS, **own)
        self._tokens = Counter("batch_tokens", "Tokens of passes, padding counted.", **own)
        self._adapters = Histogram("batch_adapters", "Adapters of a pass.", buckets=_ROWS, **own)
        Gauge("queue_rows", "Rows that wait or run.", **own).set_function(count_queued)

    def count_request(self, route: str, status: int, adapter: str, seconds: float) -> None:
        """Count an answer; the adapter is one that was served, `SEVERAL` or `NO_ADAPTER`."""
        self._requests.labels(route, str(status), adapter).inc()
        self._seconds.labels(route).observe(seconds)

    def count_pass(self, num_rows: int, num_tokens: int, num_adapters: int) -> None:
        """Count a pass through the encoder."""
        self._rows.observe(num_rows)
        self._tokens.inc(num_tokens)
        self._adapters.observe(num_adapters)

    def write(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)
