"""Where the time of a training step goes, kernel by kernel: python -m benchmarks.profile_step --work sft:4x2048"""

import argparse
import tempfile
from pathlib import Path

import torch
from benchmarks.shapes import SHAPES, model_folder
from benchmarks.step import work
from torch.profiler import ProfilerActivity, profile

from covey.policies.load import load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama3.1-8b")
    parser.add_argument("--work", default="sft:4x2048")
    parser.add_argument("--memory", default="fast", choices=["fast", "lean", "auto"])
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "covey-shapes")
    args = parser.parse_args()
    policy = load_policy(model_folder(args.shape, args.root), method="qlora", memory=args.memory)
    run, _ = work(policy, args.work, policy.spec.vocab_size)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as measured:
        run()
        torch.cuda.synchronize()
    events = [
        e for e in measured.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"
    ]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"{args.shape} {args.work} {args.memory}: {total / 1e3:.1f} ms on the device")
    for event in events[: args.rows]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6d} x  {event.key[:110]}")
    print_gaps(measured)


def print_gaps(measured: profile, count: int = 8) -> None:
    """When the device waited for the host: the longest times between the end of a kernel and the next one's start."""
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in measured.events() or []
        if e.device_type.name == "CUDA" and e.time_range.end > e.time_range.start
    )
    gaps, busy_until, last = [], spans[0][0], "start"
    for start, end, name in spans:
        if start > busy_until:
            gaps.append((start - busy_until, last, name))
        if end > busy_until:
            busy_until, last = end, name
    print(
        f"idle between kernels: {sum(gap for gap, *_ in gaps) / 1e3:.1f} ms of {(busy_until - spans[0][0]) / 1e3:.1f}"
    )
    for gap, before, after in sorted(gaps, reverse=True)[:count]:
        print(f"{gap / 1e3:9.2f} ms  {before[:50]} -> {after[:50]}")


if __name__ == "__main__":
    main()
