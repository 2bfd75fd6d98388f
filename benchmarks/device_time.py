"""Where the GPU's time goes in one step of a repeated work: what the profiler saw of many steps, less what of one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float, str]  # start and end of a kernel in microseconds, and its name


def step_time(run: Callable[[int], object], steps: int) -> dict[str, Any]:
    """`per_step` of run(steps + 1) over run(1): the mean of `steps` steps, without what comes before the second."""
    recorded(lambda: run(1))  # the profiler's own start is slow
    return per_step(recorded(lambda: run(steps + 1)), recorded(lambda: run(1)), steps)


def recorded(run: Callable[[], object]) -> list[Span]:
    """Everything that the GPU did, by start."""
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        run()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in measured.events() or []
        if event.device_type.name == "CUDA"
    )


def per_step(whole: list[Span], first: list[Span], steps: int) -> dict[str, Any]:
    """The difference of two recordings, divided by `steps`.

    kernels: [name, count, us], longest first. busy_us: at least one kernel ran. idle_us: none did, between the first
    and the last.
    """
    count: dict[str, int] = {}
    time: dict[str, float] = {}
    for sign, spans in ((1, whole), (-1, first)):
        for start, end, name in spans:
            count[name] = count.get(name, 0) + sign
            time[name] = time.get(name, 0.0) + sign * (end - start)
    busy, idle = (
        (more - less) / steps for more, less in zip(busy_and_idle(whole), busy_and_idle(first), strict=True)
    )
    names = sorted((name for name in count if count[name]), key=lambda name: -time[name])
    kernels = [[name, count[name] / steps, time[name] / steps] for name in names]
    return {"kernels": kernels, "busy_us": busy, "idle_us": idle}


def busy_and_idle(spans: list[Span]) -> tuple[float, float]:
    """Microseconds with and without a kernel, from the first start to the last end."""
    busy = idle = 0.0
    until = spans[0][0] if spans else 0.0
    for start, end, _ in spans:
        idle += max(0.0, start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, idle


def lines(time: dict[str, Any], rows: int) -> list[str]:
    """The longest kernels as text; shares are of the whole step, idle time included."""
    step = time["busy_us"] + time["idle_us"]
    text = [
        f"a step takes {step:,.0f} us: {time['busy_us']:,.0f} with a kernel, {time['idle_us']:,.0f} idle between them"
    ]
    text.append(f"{'us':>9}{'share':>7}{'count':>8}  kernel")
    for name, count, us in time["kernels"][:rows]:
        text.append(f"{us:>9.1f}{us / step:>7.1%}{count:>8.1f}  {name[:100]}")
    rest = time["kernels"][rows:]
    if rest:
        us = sum(kernel[2] for kernel in rest)
        text.append(
            f"{us:>9.1f}{us / step:>7.1%}{sum(kernel[1] for kernel in rest):>8.1f}  {len(rest)} others"
        )
    return text
