"""What a start changes of Python is put back."""

import gc

import pytest

from covey.rl.startup import seldom_collected


def test_garbage_is_looked_for_as_before_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), seldom_collected():
        assert gc.isenabled() and gc.get_threshold() == (10_000, *before[1:])
        raise ZeroDivisionError
    assert gc.get_threshold() == before
