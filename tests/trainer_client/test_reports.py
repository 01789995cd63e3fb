"""Reports of a loop that waits: what is sent, what is kept for later, and that nothing is held up."""

import threading
import time

import pytest
from reading_ahead import until

from trainer_client import PackedStream, reports
from trainer_client.prefetch import Meter, Prefetcher
from trainer_client.reports import Reporter


class Service:
    """Takes reports, or does not."""

    hears_reports = True

    def __init__(self) -> None:
        self.takes, self.reports = True, []

    def report(self, figures):
        if self.takes:
            self.reports.append(figures)
        return self.takes


def test_a_report_that_failed_goes_with_the_next():
    meter, service = Meter(), Service()
    reporter = Reporter(meter, rank=3, every_s=1.0)
    reporter.report(service)
    assert service.reports == []  # nothing to tell yet
    meter.num_batches, meter.get_wait_s, meter.elapsed_s = 5, 0.5, 2.0
    service.takes = False
    reporter.report(service)
    service.takes, meter.num_batches = True, 7
    reporter.report(service)
    reporter.report(service)
    assert service.reports == [{"rank": 3, "steps": 7, "elapsed_s": 2.0, "stall_s": 0.5, "retries": 0}]


def test_a_wait_that_goes_on_is_told_once():
    meter, service = Meter(), Service()
    reporter = Reporter(meter, rank=0, every_s=1.0)
    meter.waiting_since = time.monotonic() - 10.0
    reporter.report(service)
    meter.waiting_since = None
    reporter.report(service)  # between the wait's end and its being counted
    meter.num_batches, meter.get_wait_s, meter.elapsed_s = 1, 1000.0, 1200.0
    reporter.report(service)
    first, second = service.reports
    assert 10.0 <= first["stall_s"] < 1000.0
    assert first["stall_s"] + second["stall_s"] == pytest.approx(1000.0)
    assert second["elapsed_s"] == pytest.approx(1200.0 - first["elapsed_s"])


def test_a_loop_that_waits_is_seen_waiting():
    meter, go_on = Meter(), threading.Event()

    def source():
        yield 1
        go_on.wait()
        yield 2

    items = Prefetcher(source, size=lambda _: 1, cancel=go_on.set, max_items=2, max_bytes=9, meter=meter)
    assert next(items) == 1
    assert meter.waiting_since is None
    taken = []
    thread = threading.Thread(target=lambda: taken.append(next(items)))
    thread.start()
    until(lambda: meter.waiting_since is not None)
    go_on.set()
    thread.join(60)
    assert (taken, meter.waiting_since) == ([2], None)
    items.close()


def test_there_is_no_thread_without_somebody_to_tell(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="report_s: seconds above 0"):
        PackedStream(tmp_path, dataset="0" * 32, report_s=0)
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    service, ended = Service(), threading.Event()
    service.hears_reports = False
    Reporter(Meter(), rank=0, every_s=1.0).start(service, ended)
    service.hears_reports = True
    Reporter(Meter(), rank=0, every_s=None).start(service, ended)
    assert started == []


def test_the_end_waits_for_the_last_report_but_not_for_a_dead_service(monkeypatch):
    class Dead(Service):
        def report(self, figures):
            go_on.wait()
            return False

    go_on, meter = threading.Event(), Meter()
    meter.num_batches = 1
    for service, last_s in ((Service(), 60.0), (Dead(), 0.1)):
        monkeypatch.setattr(reports, "_LAST_S", last_s)
        ended = threading.Event()
        wait = Reporter(meter, rank=0, every_s=600.0).start(service, ended)
        ended.set()
        wait()
        assert len(service.reports) == (not isinstance(service, Dead))
    go_on.set()
