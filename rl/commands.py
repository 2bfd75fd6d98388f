"""What all commands do with errors: a sentence, and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@contextmanager
def sentences(debug: bool) -> Iterator[None]:
    """Errors become sentences and exit codes: 2 for what the user wrote, 1 for what failed, 130 for Ctrl-C."""
    try:
        yield
    except typer.Exit:  # a RuntimeError too
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        if not (isinstance(error, ValueError) and _another_says_it()):
            _explain(error, debug)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _another_says_it() -> bool:
    """Until the processes of a run have met, those of a machine do the same, and the first of them says what is
    wrong."""
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return os.environ.get("LOCAL_RANK", "0") != "0" and not met


def fail(sentence: str) -> None:
    typer.echo(f"error: {sentence}", err=True)


def _explain(error: Exception, debug: bool) -> None:
    """Our own errors are sentences already; any other is named, and says how to see where it came from."""
    if type(error).__module__.startswith("covey."):
        for line in str(error).splitlines():
            fail(line)
    else:
        fail(f"{type(error).__name__}: {error}" + ("" if debug else "\n(--debug shows where)"))
