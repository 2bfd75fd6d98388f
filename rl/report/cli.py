"""`covey report` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from covey.rl.commands import Debug, sentences

HELP = """
Write a run as one HTML file: curves, completions, held-out results, and where the time went.

A run that ends has one already. RUN is a run's folder, or its name in runs/; it may still be going on. Of several runs
the curves are drawn into the same charts, and the page says in which settings they differ.

\b
Examples:
  covey report runs/long                           writes runs/long/report.html
  covey report runs/low-lr runs/high-lr -o lr.html
"""

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or their names in runs/.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Default: report.html in the (first) run."),
]
Samples = Annotated[int, typer.Option(min=0, help="Completions shown of each step that is shown.")]


def report(runs: Runs, output: Output = None, samples: Samples = 4, debug: Debug = False) -> None:
    with sentences(debug):
        from covey.rl.report.page import ReportError, write_report

        paths = [_folder(run) for run in runs]
        target = output or paths[0] / "report.html"
        try:
            write_report(paths, target, samples)
        except OSError as error:
            raise ReportError(f"cannot write {target}: {(error.strerror or str(error)).lower()}") from error
        typer.echo(str(target))


def _folder(run: str) -> Path:
    given, named = Path(run), Path("runs") / run
    return named if not given.exists() and named.is_dir() else given
