"""The environment of a run: found, checked, and put around the engine (docs/environments.md)."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from covey.rewards.find import RewardError, find, short_path
from covey.rewards.reward import RewardSpec
from covey.rl.config import DataSection, EnvironmentSection
from covey.rl.data import Row
from covey.rl.sources import Found
from covey.rl.templates import Encoder
from covey.rollout.dialogue import Dialogue
from covey.rollout.engine import RolloutEngine
from covey.rollout.environment import Environment, EpisodeError, check_opening, describe, schedule
from covey.rollout.episodes import EpisodeEngine, close_all
from covey.rollout.tools import PARSERS, Tool, ToolEnvironment, choose_parser, make_tool
from covey.rollout.verifiers_env import VerifiersEpisode, VerifiersSource

AT_A_TIME = 256  # environments that are asked for their openings
VERIFIERS = "verifiers:"  # before the name of an environment of that package
OWN_ROWS = "environment"  # as data.train or data.eval: the rows that an environment of verifiers brings along


def environment_reward(completion: str, environment_reward: float | None = None) -> float | None:
    """What the environment gave for the episode: a reward beside the others."""
    return environment_reward


class Stage:
    """What `environment:` of the configuration asks for. EpisodeError for what cannot be used."""

    def __init__(self, section: EnvironmentSection):
        self.section = section
        self.tools: list[Tool] = [make_tool(_find(use, "tool")) for use in section.tools]
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise EpisodeError(f'environment.tools: two are called "{name}". Rename one of them.')
        self.schemas = [dict(tool.schema) for tool in self.tools]
        self.name, self.factory = "tools", self._tool_environment
        self.source: VerifiersSource | None = None
        self.max_turns = section.max_turns
        if section.use is not None and section.use.startswith(VERIFIERS):
            self.source = _verifiers(section.use.removeprefix(VERIFIERS), section.args)
            self.name, self.factory, self.schemas = section.use, self._verifiers_episode, self.source.tools
            self.max_turns = min(section.max_turns, self.source.max_turns or section.max_turns)
        elif section.use is not None:
            self.name, self.factory = _factory(section.use, section.args)
        if section.parser != "auto" and not self.schemas:
            raise EpisodeError(f"environment.parser: {self.name} has no tools to call: remove it")
        self._parser = section.parser

    @property
    def rewards(self) -> list[RewardSpec]:
        """What the environment adds to the rewards; tools have no opinion."""
        section = self.section
        if section.use is None:
            return []
        return [RewardSpec(environment_reward, section.weight, section.name, run="inline")]

    def prepare(self, tokenizer: Any, data: DataSection, eos_ids: Sequence[int]) -> list[str]:
        """Lets the chat template describe the tools from here on. Returns warnings; EpisodeError for a template that
        does not do."""
        template, warnings = str(tokenizer.chat_template or ""), []
        if self._parser == "auto":
            self._parser = choose_parser(template)
        if self.schemas and "tools" in template:
            tokenizer.apply_chat_template = functools.partial(
                tokenizer.apply_chat_template, tools=self.schemas
            )
        elif self.schemas:
            warnings = [
                "the chat template does not describe tools to the model: say in data.system which there are, and how "
                f"they are called (environment.parser is {self._parser})"
            ]
        self.encoder = Encoder(tokenizer, data)
        nowhere = Row(0, "an episode", {})

        def render(messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
            return self.encoder.render(messages, nowhere, generation=generation)

        self.dialogue = Dialogue(render, self.encoder.ids, eos_ids)
        return warnings + self.dialogue.check("tool" if self.schemas else "user")

    def own_rows(self, source: Any, held_out: bool) -> Found | None:
        """The environment's own rows, if `source`, which is data.train or data.eval, asks for them."""
        if self.source is None or source != OWN_ROWS:
            return None
        rows = self.source.rows(held_out)
        return Found(self.name, [(f"{self.name} row {number}", row) for number, row in enumerate(rows)])

    def openings(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what their environments open with; as they are where it is the data's own prompt."""
        # Those of verifiers open with that too, and may be costly to start: the first row is a trial.
        asked = [] if self.tools else rows[:1] if self.source else rows
        opened: list[Row] = []
        for first in range(0, len(asked), AT_A_TIME):
            some = asked[first : first + AT_A_TIME]
            environments = [self.factory() for _ in some]
            started = [
                schedule(environment.start, copy.deepcopy(dict(row.columns)), timeout=self.section.timeout)
                for environment, row in zip(environments, some, strict=True)
            ]
            opened += [self._opened(row, future) for row, future in zip(some, started, strict=True)]
            close_all(environments, self.name, self.section.timeout)
        opened += rows[len(asked) :]
        if opened and self.encoder.messages(opened[0]) is None:
            raise EpisodeError(
                f"{opened[0].where}: the prompt is plain text, and an episode needs messages. Set data.chat: true."
            )
        return opened

    def _opened(self, row: Row, opening: "Future[Any]") -> Row:
        try:
            messages = opening.result()
        except Exception as error:  # whatever the user's class does
            raise EpisodeError(f"{row.where}: {self.name}.start() raised {describe(error)}") from error
        if messages is None:
            return row
        checked = tuple(check_opening(messages, self.name))
        return replace(row, prompt=None, messages=checked, prompt_messages=len(checked))

    def engine(self, engine: RolloutEngine) -> EpisodeEngine:
        """The engine that plays episodes on `engine`."""
        section = self.section
        return EpisodeEngine(
            engine,
            self.factory,
            self.dialogue,
            name=self.name,
            max_turns=self.max_turns,
            max_tokens_per_turn=section.max_tokens_per_turn,
            timeout=None if self.tools else section.timeout,  # tools have theirs
            on_error=section.on_error,
            score=None if self.source is None else self.source.score,
        )

    def describe(self) -> str:
        """What is played, in words."""
        tools = ", ".join(schema["function"]["name"] for schema in self.schemas)
        what = [self.name] if self.section.use else []
        what += [f"the tools {tools}"] if tools else []
        return f"{' with '.join(what)}; at most {self.max_turns} turns"

    def _tool_environment(self) -> Environment:
        return ToolEnvironment(self.tools, PARSERS[self._parser], self.section.timeout)

    def _verifiers_episode(self) -> VerifiersEpisode:
        assert self.source is not None
        return self.source.episode(PARSERS[self._parser])


def _find(use: str, kind: str) -> Callable[..., Any]:
    if ":" not in use:
        raise EpisodeError(
            f'environment: "{use}" is not found. Name the {kind} like file.py:NAME or module:NAME.'
        )
    try:
        return find(use, {}, kind)
    except RewardError as error:
        raise EpisodeError(str(error)) from error


def _verifiers(name: str, args: Mapping[str, Any]) -> VerifiersSource:
    """An installed environment, or that of a file with a function load_environment."""
    make = _find(f"{name}:load_environment", "environment") if name.endswith(".py") else None
    return VerifiersSource(name, args, make)


def _factory(use: str, args: Mapping[str, Any]) -> tuple[str, Callable[[], Environment]]:
    """The name and the factory of a class or function that makes environments."""
    made = _find(use, "environment")
    name = getattr(made, "__name__", use)
    code = getattr(inspect.unwrap(made), "__code__", None) or getattr(
        getattr(made, "step", None), "__code__", None
    )
    where = f"{short_path(code.co_filename)}:{code.co_firstlineno} {name}" if code else name
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        raise EpisodeError(f"environment.args: {where} cannot be called with them: {error}.") from error
    try:
        first = made(**args)
    except Exception as error:  # whatever the user's class does
        raise EpisodeError(f"{where} raised {describe(error)}") from error
    for method in ("start", "step"):
        if not callable(getattr(first, method, None)):
            raise EpisodeError(
                f"{where} makes {first!r}, which has no method `{method}`; see docs/environments.md."
            )
    return where, functools.partial(made, **args)
