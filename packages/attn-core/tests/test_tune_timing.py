"""The timer of ``attn tune`` on a GPU, over a stream that keeps its own time."""

import time

import pytest
import torch

from attn_core.tune import timing
from attn_core.tune.timing import EventTimer, HostTimer, timer_for


class Device:
    """A GPU: work advances its clock when it is reached, and the host may read no event before it waited."""

    def __init__(self):
        self.clock, self.log, self.waited = 0.0, [], False

    def work(self, what, milliseconds):
        self.log.append(what)
        self.waited = False
        self.clock += milliseconds

    def synchronize(self):
        self.log.append("wait")
        self.waited = True


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream):
        assert stream is self.device
        self.at = self.device.clock
        self.device.log.append("event")

    def elapsed_time(self, other):
        assert self.device.waited, "an event was read before the stream was waited for"
        return other.at - self.at


class Flush:
    def __init__(self, device):
        self.device = device

    def zero_(self):
        self.device.work("flush", 0.06)


@pytest.fixture
def gpu(monkeypatch):
    device, where = Device(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda asked: (where.append(asked), device)[1])
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(timing.torch, "empty", lambda size, dtype, device: size)
    timer = EventTimer(torch.device("cuda", 1))
    timer._flush = Flush(device)
    device.where = where
    return device, timer


def test_the_median_of_calls_in_seconds_between_their_own_events(gpu):
    device, timer = gpu
    costs = iter([900.0, 2.0, 3.0, 70.0, 1.0, 2.5])  # the first is the warm-up, one is an outlier
    assert timer.sample(lambda: device.work("call", next(costs))) == pytest.approx(2.5e-3)
    assert device.where == [torch.device("cuda", 1)]


def test_the_order_on_the_stream(gpu):
    """A call that is not measured, then each behind a flushed cache; the call alone lies between events."""
    device, timer = gpu
    timer.sample(lambda: device.work("call", 1.0))
    measured = ["flush"] * timing._FLUSHES + ["event", "call", "event"]
    assert device.log == ["call", *measured * timing._EVENT_CALLS, "wait"]


def test_what_a_call_raises_comes_out(gpu):
    _, timer = gpu
    with pytest.raises(ZeroDivisionError):
        timer.sample(lambda: 1 / 0)


def test_each_device_has_its_timer(monkeypatch):
    made = []
    monkeypatch.setattr(timing.torch, "empty", lambda size, dtype, device: made.append((size, device)))
    assert isinstance(timer_for(torch.device("cuda", 1)), EventTimer)
    assert made == [(timing._FLUSH_BYTES, torch.device("cuda", 1))]
    assert isinstance(timer_for(torch.device("cpu")), HostTimer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_work_counts_and_host_time_does_not():
    timer = EventTimer(torch.device("cuda", 0))
    factor = torch.ones(4096, 4096, dtype=torch.float16, device="cuda")
    into = torch.empty_like(factor)

    def work(times, busy_s=0.0):
        until = time.perf_counter() + busy_s
        while time.perf_counter() < until:
            pass
        for _ in range(times):
            torch.mm(factor, factor, out=into)

    work(8)  # clocks and the library's own choice of a kernel
    one, four = timer.sample(lambda: work(1)), timer.sample(lambda: work(4))
    assert 3.0 < four / one < 5.0
    assert timer.sample(lambda: work(1, 1e-4)) < 1.5 * one < 1.5e-2
