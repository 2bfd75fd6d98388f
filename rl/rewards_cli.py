"""`covey rewards`: list the built-in rewards, try one on given completions, check those of a recipe.

Exit codes: 0 nothing is wrong, 1 a reward failed or looks wrong, 2 something the user wrote is wrong.
"""

import inspect
import math
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.rl.commands import Debug, sentences
from covey.rl.config import DataSection, GrpoConfig
from covey.rl.config_file import load_config
from covey.rl.config_yaml import parse_scalar

if TYPE_CHECKING:
    from covey.rl.reward_trials import Report, Scored

HELP = """
Try rewards without a model.

\b
Examples:
  covey rewards list
  covey rewards try math --completion 'The answer is 72.' answer=72
  covey rewards try rewards.py:brevity limit=200 --completions completions.jsonl
  covey rewards try rewards.py:mine --data train.jsonl --completions runs/a/samples/step-000010.parquet
  covey rewards check my.yaml
"""

TRY_HELP = """
Score completions with one function and print a table with notes, times and the spread.

USE is what `use` is in a recipe. KEY=VALUE are its args. A file of completions (jsonl, json, csv, parquet, txt) has
them in a column "completion" (one, or a list of them); its other columns go to the function, with those of the row of
--data that stands at the same place or that its column "row" names. Without a tokenizer completion_ids are made up:
one for each word and sign.
"""

CHECK_HELP = """
Call each function of a recipe on good, bad, empty, truncated and non-ASCII completions for the first rows of its data,
and say what looks wrong: failing, constant, never above 0, slow, not the same twice.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

Use = Annotated[
    str, typer.Argument(metavar="USE", help="A built-in name, file.py:function or module:function.")
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="args of the function.")]
Completions = Annotated[str | None, typer.Option(metavar="FILE", help="Completions to score.")]
Completion = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A completion; may be repeated.")]
Data = Annotated[str | None, typer.Option(metavar="SOURCE", help="Rows with the columns, as data.train.")]
Prompt = Annotated[str | None, typer.Option(metavar="COLUMN", help="As data.prompt.")]
Answer = Annotated[str | None, typer.Option(metavar="COLUMN", help="As data.answer.")]
AnswerAfter = Annotated[str | None, typer.Option(metavar="MARK", help="As data.answer_after.")]
Rows = Annotated[int | None, typer.Option(min=1, help="At most so many rows.")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="As timeout in a recipe.")]
Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file or a shipped recipe's name.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Change single keys.")]
CheckRows = Annotated[int, typer.Option(min=1, help="How many rows of the data.")]


@app.command("list", short_help="Show the built-in rewards.")
def list_builtins() -> None:
    """Show the built-in rewards: what they score, what they need and what can be set."""
    from covey.rewards.reward import BUILTINS, find_function

    for name in BUILTINS:
        function = find_function(name)
        needs, settings = _parameters(function)
        what = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        facts = f"needs {', '.join(needs) or 'no column'}; settings {', '.join(settings) or 'none'}"
        for first, text in ((f"{name:<15} ", what), (" " * 16, facts)):
            typer.echo(textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * 16))


@app.command("try", help=TRY_HELP, short_help="Score completions with one function.")
def try_reward(
    use: Use,
    args: Arguments = None,
    completions: Completions = None,
    completion: Completion = None,
    data: Data = None,
    prompt: Prompt = None,
    answer: Answer = None,
    answer_after: AnswerAfter = None,
    rows: Rows = None,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    with sentences(debug):
        if (completions is None) == (not completion):
            raise ValueError("give either --completions FILE or --completion TEXT")
        from covey.rewards.reward import RewardSpec, load_reward
        from covey.rl.reward_trials import given, score, summary

        reward = load_reward(RewardSpec(use, args=_settings(args or []), timeout=timeout))
        columns: Any = {"prompt": prompt, "answer": answer, "answer_after": answer_after}
        section = None if data is None else DataSection(train=data, **columns)
        scored = score(reward, given(completions, completion or [], section, rows))
        if reward.note:
            typer.echo(f"{reward.name}: {reward.note}")
        _print_table(scored)
        for line in summary(scored) if scored else ["no completions"]:
            typer.echo(line)
        if any(one.problem for one in scored):
            raise typer.Exit(1)


@app.command("check", help=CHECK_HELP, short_help="Say what looks wrong with the rewards of a recipe.")
def check_recipe(
    recipe: Recipe, overrides: Overrides = None, rows: CheckRows = 4, debug: Debug = False
) -> None:
    with sentences(debug):
        from covey.rl.reward_trials import check

        wrong = 0
        for report in check(load_config(recipe, overrides or [], GrpoConfig), rows):
            _print_report(report)
            wrong += len(report.wrong)
        if wrong:
            raise typer.Exit(1)


def _settings(pairs: list[str]) -> dict[str, Any]:
    """{"limit": 200} of ["limit=200"]; values are YAML, as in a recipe."""
    import yaml

    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair} is no setting: write KEY=VALUE")
        settings[key] = yaml.safe_load(value) if value[:1] in tuple("[{'\"") else parse_scalar(value)
    return settings


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """Names of the columns that a function needs, and its settings as name=default."""
    from covey.rewards.reward import ENGINE_NAMES

    engine = {name for names in ENGINE_NAMES.values() for name in names}
    own = [p for p in inspect.signature(function).parameters.values() if p.name not in engine]
    needs = [p.name for p in own if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    settings = [p for p in own if p.name not in needs]
    return needs, [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in settings]


def _print_table(scored: "list[Scored]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from covey.rl.terminal import print_anything, shorten

    print_anything()
    table = Table(box=None, pad_edge=False)
    for title, justify in (
        ("", "right"),
        ("completion", "left"),
        ("score", "right"),
        ("ms", "right"),
        ("notes", "left"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for n, one in enumerate(scored):
        notes = one.problem or ", ".join(f"{key}: {value}" for key, value in one.notes.items())
        score = "failed" if one.problem else _number(one.score)
        cells = (str(n), shorten(one.tried.text, 48), score, f"{one.seconds * 1e3:.1f}", shorten(notes, 200))
        table.add_row(*map(Text, cells))
    Console().print(table)


def _print_report(report: "Report") -> None:
    reward = report.reward
    note = f"; {reward.note}" if reward.note else ""
    typer.echo(
        f"{reward.name}: {reward.where}, weight {reward.weight:g}, {report.seconds * 1e3:.2g} ms a call{note}"
    )
    typer.echo("   best score: " + ", ".join(f"{kind} {_number(best)}" for kind, best in report.best.items()))
    for line in report.wrong:
        typer.echo(f"   wrong: {line}")
    for line in report.odd:
        typer.echo(f"   look:  {line}")
    if not report.wrong and not report.odd:
        typer.echo("   nothing looks wrong")


def _number(score: float) -> str:
    return "none" if math.isnan(score) else f"{score:.3g}"
