"""Which sandboxes work on this machine, and which of them a run uses."""

import functools
from typing import Literal

from covey.rewards import sandbox_monty
from covey.rewards.find import RewardError
from covey.rewards.sandbox import Box, Limits, UnsafeLocal
from covey.rewards.sandbox_bubblewrap import Bubblewrap
from covey.rewards.sandbox_sandlock import Sandlock

Tier = Literal["auto", "sandlock", "bubblewrap", "monty", "unsafe-local"]
BOXES = {"sandlock": Sandlock, "bubblewrap": Bubblewrap}  # in the order of preference
UNSAFE = " unsafe-local is no boundary, and is used only if you set sandbox: unsafe-local."


@functools.cache
def open_box(name: str) -> Box:
    """The box of this name, after a trial. Raises RewardError with a sentence if it does not work here."""
    try:
        box: Box = (BOXES | {"unsafe-local": UnsafeLocal})[name]()
        ending = box.run({"main.py": "print(input())"}, "works", Limits(seconds=20.0))
    except (OSError, RuntimeError) as error:
        raise RewardError(f"The sandbox {name} cannot be used here: {error}") from error
    if ending.stdout != "works\n":
        last = (ending.stderr.strip().splitlines() or [ending.status])[-1]
        raise RewardError(f"The sandbox {name} cannot be used here: a trial program did not run ({last}).")
    return box


@functools.cache
def choose_tiers(tier: Tier) -> tuple[bool, Box | None]:
    """Whether monty is tried first, and the box that runs real Python. Raises RewardError if nothing works."""
    if tier not in ("auto", "monty"):
        return False, open_box(tier)
    reasons, monty, box = [], True, None
    try:
        sandbox_monty.check()
    except RuntimeError as error:
        monty = False
        reasons.append(f"The sandbox monty cannot be used here: {error}")
    for name in BOXES if tier == "auto" else ():
        try:
            box = open_box(name)
            break
        except RewardError as error:
            reasons.append(str(error))
    if not monty and box is None:
        raise RewardError(" ".join(reasons) + (UNSAFE if tier == "auto" else ""))
    return monty, box


def describe_tiers(tier: Tier) -> str:
    """Where programs of the model will run, for people. Raises RewardError if nothing works."""
    monty, box = choose_tiers(tier)
    if tier == "unsafe-local":
        return (
            "programs run in unsafe-local, which is no sandbox: they can read your files and use the network"
        )
    if box is None:
        return "programs run in monty, a subset of Python (no numpy, heapq, generators)"
    return (
        f"programs run in {box.name}, simple ones in monty first" if monty else f"programs run in {box.name}"
    )
