"""Prometheus metrics of one service: a registry of its own, nothing global."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from service.clients import ClientMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MOST_LAGS = 1000  # series

_LATENCIES_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, math.inf)


class Metrics:
    """All metrics; names carry their unit."""

    def __init__(self) -> None:
        disable_created_metrics()  # one more series for each, of no use
        self.registry = CollectorRegistry(auto_describe=True)
        r = self.registry
        self.requests = Counter(
            "padfree_http_requests_total", "Requests answered", ["route", "method", "status"], registry=r
        )
        self.request_seconds = Histogram(
            "padfree_http_request_seconds",
            "Time from a request to the end of its answer; streams are not counted",
            ["route"],
            buckets=_LATENCIES_S,
            registry=r,
        )
        self.served_bytes = Counter(
            "padfree_served_bytes_total",
            "Bytes sent in streams, shard files and events",
            ["kind"],
            registry=r,
        )
        self.streams_open = Gauge("padfree_streams_open", "Streams that are open now", registry=r)
        self.streams_ended = Counter(
            "padfree_streams_ended_total",
            "Streams that ended: complete, disconnected by the client, or cut by the service",
            ["how"],
            registry=r,
        )
        self.first_batch_seconds = Histogram(
            "padfree_first_batch_seconds",
            "Time from a stream's request to its first step",
            ["dataset_state"],
            buckets=_LATENCIES_S,
            registry=r,
        )
        self.wait_seconds = Counter(
            "padfree_stream_wait_seconds_total",
            "Time that streams waited, for packs that are not packed yet or for slow readers",
            ["for_what"],
            registry=r,
        )
        self.datasets = Gauge("padfree_datasets", "Datasets in the store", ["state"], registry=r)
        self.jobs = Gauge(
            "padfree_jobs", "Datasets that this process packs or will pack", ["state"], registry=r
        )
        self.jobs_ended = Counter(
            "padfree_jobs_ended_total", "Packing runs of this process that ended", ["how"], registry=r
        )
        self.packed = {
            name: Counter(f"padfree_packed_{name}_total", f"Committed by this process: {text}", registry=r)
            for name, text in (
                ("rows", "rows packed"),
                ("tokens", "tokens packed"),
                ("packs", "packs"),
                ("capacity_tokens", "tokens that fit into the packs; tokens over these is the fill"),
                ("shards", "shards"),
                ("bytes", "bytes of shards"),
                ("partitions", "partitions"),
            )
        }
        self.rows_left_out = Counter(
            "padfree_rows_left_out_total",
            "Committed by this process: rows not packed",
            ["reason"],
            registry=r,
        )
        self.tasks_running = Gauge(
            "padfree_tasks_running",
            "Tasks that this process has handed out: inputs to index, partitions to pack",
            ["kind"],
            registry=r,
        )
        self.tasks_ended = Counter(
            "padfree_tasks_ended_total",
            "Tasks that ended: done, failed; worker_died and store_failed are tried again, twice at most",
            ["how"],
            registry=r,
        )
        self.stream_lag = Gauge(
            "padfree_stream_lag_steps",
            "Steps that could be sent to the rank of an open stream, but are not yet",
            ["dataset", "rank"],
            registry=r,
        )
        self.clients = ClientMetrics(r)
        self.store_free_bytes = Gauge(
            "padfree_store_free_bytes", "Free space of the store's file system", registry=r
        )
        self.store_size_bytes = Gauge(
            "padfree_store_size_bytes", "Size of the store's file system", registry=r
        )
        self.workers = Gauge(
            "padfree_workers", "Tasks that can run at once: CPUs of the Ray nodes that are alive", registry=r
        )
        self.runner_ready = Gauge("padfree_runner_ready", "Whether packing can be done: 1 or 0", registry=r)

        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """To Prometheus a counter that first shows up at 1 has not risen: its first count would be lost."""
        for metric, values in (
            (self.served_bytes, ("stream", "shard", "events")),
            (self.streams_ended, ("complete", "disconnected", "cut", "refused")),
            (self.first_batch_seconds, ("ready", "packing")),
            (self.wait_seconds, ("reader", "packing")),
            (self.jobs_ended, ("ready", "failed", "busy", "cancelled", "cluster_lost", "error")),
            (self.tasks_running, ("input", "partition")),
            (self.tasks_ended, ("done", "worker_died", "store_failed", "failed")),
            (self.rows_left_out, ("empty", "overlong", "rejected", "untrained")),
        ):
            for value in values:
                metric.labels(value)

    def count_datasets(self, states: Iterable[str]) -> None:
        found = list(states)
        for state in ("queued", "packing", "ready", "failed", "cancelled"):
            self.datasets.labels(state).set(found.count(state))

    def show_lags(self, lags: Iterable[tuple[str, int, int]]) -> None:
        """What the open streams have left: (dataset, rank, steps) each; the others are forgotten.

        Where there are very many, the ranks that lag the most; of two streams of one rank, the later.
        """
        most: dict[tuple[str, int], int] = {}
        for dataset, rank, steps in lags:
            most[dataset, rank] = max(steps, most.get((dataset, rank), 0))
        self.stream_lag.clear()
        for (dataset, rank), steps in heapq.nlargest(_MOST_LAGS, most.items(), key=lambda one: one[1]):
            self.stream_lag.labels(dataset, str(rank)).set(steps)

    def text(self) -> bytes:
        return generate_latest(self.registry)
