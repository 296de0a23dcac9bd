"""Measures when each launch of a step ends: with events on a card, else with this machine's clock."""

from __future__ import annotations

import time

import torch

from rewright.runtime.open_step import OpenStep

_CYCLES_PER_SECOND = 2_000_000_000
"""No card's clock is faster, so that a pause of so many cycles is no shorter than a second."""


def launch_marks(step: OpenStep, repeats: int) -> list[list[float]]:
    """Run a step once without the clock, then `repeats` times with it.

    Returns:
        For each time the microseconds from the start of the first launch to its start (0) and to the end of
        every launch.
    """
    if step.arena.is_cuda:
        return _card_marks(step, repeats)
    count = len(step.plan.launches)
    step.run(0, count)
    return [_clock_marks(step, count) for _ in range(repeats)]


def _clock_marks(step: OpenStep, count: int) -> list[float]:
    marks = [time.perf_counter()]
    for at in range(count):
        step.run(at, at + 1)
        marks.append(time.perf_counter())
    return [(mark - marks[0]) * 1e6 for mark in marks]


def _card_marks(step: OpenStep, repeats: int) -> list[list[float]]:
    """The card waits before the first launch until the host has put nearly all of them into the stream:
    otherwise the time would be that of the host, which takes longer for a launch than most kernels."""
    count = len(step.plan.launches)
    found, pause = [], 0.0
    for _ in range(repeats + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for event in events:
            event.record()  # the first record of an event makes it, which takes time
        torch.cuda.synchronize(step.arena.device)
        if pause:
            torch.cuda._sleep(int(pause * _CYCLES_PER_SECOND))
        begin = time.perf_counter()
        events[0].record()
        for at in range(count):
            step.run(at, at + 1)
            events[at + 1].record()
        pause = pause or 1.5 * (time.perf_counter() - begin)
        torch.cuda.synchronize(step.arena.device)
        found.append([events[0].elapsed_time(event) * 1e3 for event in events])
    return found[1:]
