"""A faster start: most of the seconds before a run's first token go into imports."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Makes Python look for garbage after 10,000 new objects instead of 700.

    Imports make a million objects that stay, and looking through them takes a seventh of the time. Not off altogether:
    what is read meanwhile may hold a model's weights in a cycle.
    """
    before = gc.get_threshold()
    gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
