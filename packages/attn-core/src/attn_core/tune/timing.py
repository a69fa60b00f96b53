"""Timers: seconds of one call, measured so that two candidates can be compared."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]
_SAMPLE_S = 2e-3
"""A sample of a quick call repeats it until about so much time has passed."""
_MOST_CALLS = 50
_FLUSH_BYTES = 256 << 20
_FLUSHES = 5
"""Passes over that buffer before a call: some 0.3 ms, more than any candidate's host needs to enqueue."""
_EVENT_CALLS = 5


class Timer(Protocol):
    """Measures calls."""

    def sample(self, call: Call) -> float:
        """Return the seconds of one call; the call has been made at least once before."""


class HostTimer:
    """Wall clock around the call, for devices whose work is done when it returns.

    Args:
        clock: Seconds, ever rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sample(self, call: Call) -> float:
        """Return the mean of as many calls as fill a sample."""
        first = self._seconds(call, 1)
        if first >= _SAMPLE_S:
            return first
        calls = min(_MOST_CALLS, math.ceil(_SAMPLE_S / max(first, 1e-6)))
        return self._seconds(call, calls) / calls

    def _seconds(self, call: Call, calls: int) -> float:
        start = self._clock()
        for _ in range(calls):
            call()
        return self._clock() - start


class EventTimer:
    """Events on the device's stream around the call; a cold cache before each.

    Overwriting the cache also keeps the stream busy while the host enqueues, so host time is not measured.

    Args:
        device: A CUDA or HIP device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def sample(self, call: Call) -> float:
        """Return the median of a few calls."""
        stream = torch.cuda.current_stream(self._device)
        pairs = []
        call()  # the host's own caches warm
        for _ in range(_EVENT_CALLS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(_FLUSHES):
                self._flush.zero_()
            begin.record(stream)
            call()
            end.record(stream)
            pairs.append((begin, end))
        stream.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) * 1e-3


def timer_for(device: torch.device) -> Timer:
    """Return the timer that suits a device."""
    return EventTimer(device) if device.type == "cuda" else HostTimer()
