"""The command line: `covey grpo`, `covey sft` and `covey dpo`. Heavy imports wait until the recipe is known to be good.

Exit codes: 0 done, 1 the run failed, 2 something the user wrote is wrong, 130 interrupted and resumable.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from covey.rl.commands import Debug, fail, sentences
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig, SftOptimSection
from covey.rl.config_file import dump_config, load_config, recipes
from covey.rl.doctor import HELP as DOCTOR_HELP
from covey.rl.doctor import doctor
from covey.rl.export.cli import HELP as EXPORT_HELP
from covey.rl.export.cli import export
from covey.rl.report.cli import HELP as REPORT_HELP
from covey.rl.report.cli import report
from covey.rl.rewards_cli import app as rewards
from covey.rl.rollout_server import HELP as SERVER_HELP
from covey.rl.rollout_server import rollout_server
from covey.rl.serving.cli import CHAT_HELP, SERVE_HELP, chat, serve
from covey.rl.startup import seldom_collected

HELP = """
Turns a language model into a reasoning model on the GPU you have.

A recipe is a YAML file, or the name of one that comes with covey; section.key=value changes single keys.

\b
Examples:
  covey grpo quickstart                    a first run, made for a CPU
  covey grpo my.yaml optim.lr=1e-5         learn from reward functions
  covey sft my.yaml data.train=rows.jsonl  learn from examples
  covey dpo my.yaml data.train=rows.jsonl  learn from preferences
  covey grpo my.yaml --dry-run             show the resolved recipe and the plan
"""

GRPO_HELP = """
Learn from reward functions: sample completions, score them, reinforce the better ones (GRPO).

\b
Examples:
  covey grpo quickstart
  covey grpo my.yaml optim.lr=1e-5 rewards.0.weight=2 --name low-lr
  covey grpo my.yaml --resume auto
  covey grpo my.yaml model.adapter=runs/sft  go on from a run of covey sft
  covey grpo my.yaml objective.loss=gspo --explain
"""

SFT_HELP = """
Learn from examples: supervised fine-tuning on completions or conversations (SFT).

\b
Examples:
  covey sft my.yaml
  covey sft my.yaml optim.epochs=2 'data.prompt=Q: {question}'
  covey sft my.yaml --dump-batch 3         read what will be trained
"""

DPO_HELP = """
Learn from preferences: of two completions of a prompt one was chosen, the other rejected (DPO).

\b
Examples:
  covey dpo quickstart-dpo
  covey dpo my.yaml objective.beta=0.05 model.adapter=runs/sft
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help costs as much CPU time as everything else here
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Recipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="A YAML file or a shipped recipe's name.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Change single keys.")]
Resume = Annotated[
    str | None, typer.Option(metavar="PATH|auto", help="Go on from a run's folder; auto: the latest one.")
]
Name = Annotated[str | None, typer.Option(help="Name of the run's folder, as run.name=NAME.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan, then stop.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print the objective with its denominators, then stop.")
]
DumpBatch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Print the first N documents with their trained tokens marked, then stop."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"covey {version('covey')}")
        raise typer.Exit


@app.callback()
def _covey(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(help=GRPO_HELP, short_help="Learn from reward functions (GRPO).")
def grpo(
    recipe: Recipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    name: Name = None,
    dry_run: DryRun = False,
    explain: Explain = False,
    debug: Debug = False,
) -> None:
    def start() -> str | None:
        config = load_config(recipe, _with_name(overrides, name), GrpoConfig)
        if explain:
            from covey.rl.explain import explain as in_words

            typer.echo(in_words(config.objective, max_new_tokens=config.rollout.max_new_tokens))
            return None
        if dry_run:
            _print_dry_run(config, _grpo_plan(config), resume)
            return None
        with seldom_collected():
            from covey.rl.api import run_grpo

        run = run_grpo(config, resume=resume)
        return str(run.folder) if run.interrupted else None

    _run("grpo", start, recipe, overrides, name, debug)


@app.command(help=SFT_HELP, short_help="Learn from examples (SFT).")
def sft(
    recipe: Recipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    name: Name = None,
    dry_run: DryRun = False,
    dump_batch: DumpBatch = None,
    debug: Debug = False,
) -> None:
    def start() -> str | None:
        config = load_config(recipe, _with_name(overrides, name), SftConfig)
        if dry_run:
            _print_dry_run(config, _sft_plan(config), resume)
        if dump_batch is not None:
            from covey.rl.dump import dump_batch as lines

            for line in lines(config, dump_batch, colour=sys.stdout.isatty()):
                typer.echo(line)
        if dry_run or dump_batch is not None:
            return None
        with seldom_collected():
            from covey.rl.api import run_sft

        run = run_sft(config, resume=resume)
        return str(run.folder) if run.interrupted else None

    _run("sft", start, recipe, overrides, name, debug)


@app.command(help=DPO_HELP, short_help="Learn from preferences (DPO).")
def dpo(
    recipe: Recipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    name: Name = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    def start() -> str | None:
        config = load_config(recipe, _with_name(overrides, name), DpoConfig)
        if dry_run:
            _print_dry_run(config, _dpo_plan(config), resume)
            return None
        with seldom_collected():
            from covey.rl.api import run_dpo

        run = run_dpo(config, resume=resume)
        return str(run.folder) if run.interrupted else None

    _run("dpo", start, recipe, overrides, name, debug)


app.add_typer(rewards, name="rewards")
app.command(help=DOCTOR_HELP, short_help="Say how a model is trained, and in how much memory.")(doctor)
app.command(help=EXPORT_HELP, short_help="Write a trained model for transformers, vLLM or llama.cpp.")(export)
app.command(help=REPORT_HELP, short_help="Write a run as one HTML file.")(report)
app.command(help=CHAT_HELP, short_help="Talk to a model in the terminal.")(chat)
app.command(help=SERVE_HELP, short_help="Serve a model over HTTP as OpenAI does.")(serve)
app.command("rollout-server", help=SERVER_HELP, short_help="Start a vLLM server to sample from.")(
    rollout_server
)


def main() -> None:
    """The console script `covey`."""
    for argument in sys.argv[1:]:
        if re.match(r"--\w+\.\w", argument):
            key = argument.removeprefix("--").split("=")[0]
            fail(f"{argument}: keys of the recipe are written without dashes: {key}=VALUE")
            sys.exit(2)
    app(prog_name="covey")


def _with_name(overrides: list[str] | None, name: str | None) -> list[str]:
    quoted = [] if name is None else [f"run.name={json.dumps(name)}"]  # quoted: "007" is a name, not a number
    return [*(overrides or []), *quoted]


def _run(
    command: str,
    start: Callable[[], str | None],
    recipe: str | None,
    overrides: list[str] | None,
    name: str | None,
    debug: bool,
) -> None:
    """Runs `start`, and ends the process with a sentence and an exit code if it does not succeed.

    `start` returns the folder of a run that was stopped early and saved, else None.
    """
    if recipe is None or "=" in recipe:
        fail(f"covey {command} needs a recipe first. {_how_to_start(command)}")
        raise typer.Exit(2)
    with sentences(debug):
        try:
            resumable = start()
        except KeyboardInterrupt:
            resumable = "auto"
    if resumable is not None:
        if os.environ.get("RANK", "0") == "0":  # of several processes the first one says it
            several = os.environ.get("LOCAL_WORLD_SIZE", "1")
            start_with = (
                ["covey"] if several == "1" else ["torchrun", "--nproc-per-node", several, "-m", "covey"]
            )
            words = [*start_with, command, recipe, *(overrides or []), *(["--name", name] if name else [])]
            typer.echo(f"interrupted. Go on with: {shlex.join([*words, '--resume', resumable])}", err=True)
        raise typer.Exit(130)


def _how_to_start(command: str) -> str:
    examples = {"grpo": "quickstart", "sft": "my.yaml", "dpo": "quickstart-dpo"}
    return (
        f"Try: covey {command} {examples[command]}, or write your own YAML file (covey {command} --help). "
        f"Recipes that come with covey: {', '.join(recipes())}."
    )


def _print_dry_run(config: GrpoConfig | SftConfig | DpoConfig, plan: list[str], resume: str | None) -> None:
    """The plan is a comment, so that the output is a recipe again."""
    lora, run = config.lora, config.run
    lines = [
        f"model    {config.model.path}: {config.model.method}"
        + ("" if config.model.method == "full" else f", LoRA rank {lora.rank} on {lora.targets}"),
        *plan,
        f"folder   {run.dir}/{run.name or '(named after command, model and time)'}",
    ]
    if resume is not None:
        lines.append(f"resume   {resume}")
    typer.echo("\n".join(f"# {line}" for line in lines))
    typer.echo(dump_config(config), nl=False)


def _grpo_plan(config: GrpoConfig) -> list[str]:
    rollout, objective, optim = config.rollout, config.objective, config.optim
    completions = rollout.prompts_per_step * rollout.group_size
    rewards = ", ".join(f"{reward.weight:g} x {reward.name or reward.use}" for reward in config.rewards)
    return [
        f"data     {config.data.train}",
        f"rewards  {rewards or 'none named in the recipe'}",
        f"step     {rollout.prompts_per_step} prompts x {rollout.group_size} = {completions} completions "
        f"of up to {rollout.max_new_tokens} tokens, updates: {objective.updates}",
        f"loss     {objective.loss} on {objective.advantage} advantages, {objective.denominator} mean, "
        f"KL weight {objective.beta:g} (--explain says it in full)",
        f"run      {optim.steps} steps, {optim.steps * completions:,} completions",
    ]


def _sft_plan(config: SftConfig) -> list[str]:
    optim, share = config.optim, config.eval.share
    held_out = f", {share:.2%} of it held out" if share else ""
    return [
        f"data     {config.data.train}, loss on {config.data.loss_on}{held_out}",
        f"step     {optim.rows_per_step} rows of up to {config.data.max_tokens} tokens",
        _length(optim),
    ]


def _dpo_plan(config: DpoConfig) -> list[str]:
    objective, optim = config.objective, config.optim
    extra = f", plus {objective.sft_weight:g} x SFT on the chosen" if objective.sft_weight else ""
    whole = config.model.method == "full"
    reference = config.model.adapter or f"the model {'as it was loaded' if whole else 'without its adapter'}"
    return [
        f"data     {config.data.train}, preference pairs",
        f"step     {optim.rows_per_step} pairs of up to {config.data.max_tokens} tokens a side",
        f"loss     {objective.loss}, beta {objective.beta:g}{extra}; the reference is {reference}",
        _length(optim),
    ]


def _length(optim: SftOptimSection) -> str:
    length = f"{optim.steps} steps" if optim.epochs is None else f"{optim.epochs:g} epochs"
    return f"run      {length}, learning rate {optim.lr:g} ({optim.schedule})"
