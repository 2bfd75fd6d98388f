"""Environments of the package verifiers: their own loop runs, and waits for covey where it would ask a server.

`Environment.rollout(row, client, ...)` has a client, whose `get_response(messages)` is the model. The client here hands
the messages over and waits, so a rollout is a coroutine that stands still between two replies:

    rollout   setup_state   get_response ─ ─ ─ ─ ─ ─ ─ ─┐   env_response   get_response ─ ─ ─ ─┐   ...
    episode                 start() is done      step(reply)               step() is done

So stop conditions, tools, errors and whatever else an environment overrides are the package's own, and what stands
between two replies is what the messages of the second request have more than those of the first and its reply. When
the episodes of a group are over, the environment's rubric scores them together.
"""

import asyncio
import functools
import importlib
import importlib.util
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from covey.rollout.engine import Message
from covey.rollout.environment import EpisodeError, Step, describe
from covey.rollout.tools import ToolCall

SUPPORTED = "0.3"
INSTALL = "pip install 'covey[verifiers]'"

Parse = Callable[[str], list[ToolCall]]


class VerifiersSource:
    """An environment of verifiers, loaded once: its rows, the episodes that it plays, and their rewards.

    name: as in verifiers.load_environment. make: loads it instead. args: for that function. EpisodeError if the
    package or the environment is missing, or cannot be used.
    tools: what its tools are for a chat template. max_turns: its own limit, None: it has none.
    """

    def __init__(self, name: str, args: Mapping[str, Any], make: Callable[..., Any] | None = None):
        self.name, self.package = name, _package()
        if make is None:
            _check_installed(name)
            make = functools.partial(self.package.load_environment, name)
        with _signals_kept():
            try:
                self.env = make(**args)
            except Exception as error:  # whatever the environment does
                raise EpisodeError(
                    f"environment: loading {name} with the arguments {dict(args)} raised "
                    f"{describe(error.__cause__ or error)}"
                ) from error
        if not isinstance(self.env, self.package.Environment):
            raise EpisodeError(
                f"environment.use: {name} gave {self.env!r}, which is no verifiers.Environment."
            )
        members = getattr(self.env, "envs", [self.env])  # of a group of environments
        for env in members:
            if getattr(env, "timeout_seconds", None):
                env.timeout_seconds = None  # it would run while other episodes are sampled
        limits = [getattr(env, "max_turns", -1) for env in members]
        self.max_turns: int | None = max(limits) if min(limits) > 0 else None
        self.tools = [
            {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters")}}
            for tool in self.env.tool_defs or []
        ]

    def rows(self, held_out: bool) -> list[dict[str, Any]]:
        """Its training rows, or those for evaluations."""
        built = self.env.build_eval_dataset() if held_out else self.env.build_dataset()
        if built is None:
            key, what = ("eval", "evaluations") if held_out else ("train", "training")
            raise EpisodeError(
                f"data.{key}: {self.name} has no rows for {what}. Leave it out, or give other rows."
            )
        return built.to_list()

    def episode(self, parse: Parse) -> "VerifiersEpisode":
        """parse: the calls in a reply, for environments with tools."""
        return VerifiersEpisode(self, parse)

    async def score(self, episodes: Sequence["VerifiersEpisode"]) -> list[float | None]:
        """The rewards of the episodes of one group, by its rubric; what that measures becomes their notes."""
        states = [await episode.end() for episode in episodes]
        if self.env.score_rollouts:
            await self.env.rubric.score_group(states)
        for episode, state in zip(episodes, states, strict=True):
            await self.env.rubric.cleanup(state)
            episode.notes.update(state.get("metrics") or {})
        return [state["reward"] for state in states]


class VerifiersEpisode:
    """An Environment (rollout/environment.py): one rollout. Its reward comes from VerifiersSource.score."""

    def __init__(self, source: VerifiersSource, parse: Parse):
        self.source, self.parse = source, parse
        self.notes: dict[str, Any] = {}
        self.state: Any = None  # of verifiers, once the rollout is over
        self._requests: asyncio.Queue[tuple[Any, Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._answer: asyncio.Future[Any] | None = None  # what the rollout waits for
        self._said: list[Message] = []  # the conversation so far
        self._calls: dict[str, str] = {}  # ids of the tool calls -> names

    async def start(self, row: Mapping[str, Any]) -> None:
        """Runs the rollout up to its first request, which must be the prompt of the data."""
        prompt = row.get("prompt")
        if not isinstance(prompt, list):
            raise EpisodeError(
                'an environment of verifiers needs rows with messages as "prompt". Use its own: data.train: '
                "environment."
            )
        client = _client_type(self.source.package)(self._ask)
        self._rollout = asyncio.create_task(self.source.env.rollout(dict(row), client, "covey", {}))
        if await self._request() is None:
            raise EpisodeError("the environment ended before it asked for a reply")
        if _bare(self._said) != _bare([_message(m) for m in prompt]):
            raise EpisodeError(
                "the environment opens with other messages than the prompt of its row; those of a group must be the "
                "same, so it cannot be used"
            )

    async def step(self, reply: str) -> Step:
        assert self._answer is not None
        self._said.append({"role": "assistant", "content": reply})
        self._answer.set_result(self._response(reply))
        heard = await self._request()
        return (self._last_words(), True, None) if heard is None else (heard, False, None)

    async def end(self) -> Any:
        """The final state. A rollout that still waits is told that there is no room left, so it ends as truncated."""
        while self.state is None:
            assert self._answer is not None
            self._answer.set_exception(
                self.source.package.OverlongPromptError("the episode has no room left")
            )
            await self._request()
        return self.state

    async def close(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with suppress(asyncio.CancelledError):
                await self._rollout

    async def _ask(self, messages: Any, tools: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((messages, tools, answer))
        return await answer

    async def _request(self) -> list[Message] | None:
        """What the next request has more than the conversation so far, and appends it; None: the rollout is over."""
        assert self._rollout is not None
        coming = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({coming, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not coming.done():
                coming.cancel()
        if not coming.done():
            self.state = self._rollout.result()
            if (error := self.state.get("error")) is not None:
                raise EpisodeError(describe(error)) from error
            return None
        messages, tools, self._answer = coming.result()
        offered = [tool.name for tool in tools or []]
        known = [tool["function"]["name"] for tool in self.source.tools]
        if offered != known:
            raise EpisodeError(
                f"the tools of this episode ({', '.join(offered) or 'none'}) are others than those that all prompts "
                f"describe ({', '.join(known) or 'none'})"
            )
        asked: list[Message] = [_message(message, self._calls) for message in messages]
        if _bare(asked[: len(self._said)]) != _bare(self._said):
            raise EpisodeError(
                "the environment asks for a reply to a conversation that does not go on from the last one. What was "
                "sampled is what is trained, so earlier messages cannot be changed, shortened or left out"
            )
        more = asked[len(self._said) :]
        self._said += more
        return more

    def _response(self, reply: str) -> Any:
        """The reply as verifiers reads one."""
        package, calls = self.source.package, []
        for made in self.parse(reply) if self.source.tools else []:
            number = f"{len(self._calls) + 1:09d}"  # nine letters or digits, as Mistral's templates want
            self._calls[number] = made.name
            # A problem is no JSON, and the environment says so.
            written = made.problem or json.dumps(made.arguments)
            calls.append(package.ToolCall(id=number, name=made.name, arguments=written))
        message = package.ResponseMessage(
            content=reply,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
            tool_calls=calls or None,
        )
        return package.Response(id="covey", created=0, model="covey", message=message)

    def _last_words(self) -> list[Message]:
        """What the environment said after the last reply."""
        said: list[Message] = [
            _message(message, self._calls) for message in self.state.get("completion") or []
        ]
        last = max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=len(said))
        return said[last + 1 :]


def _message(message: Any, calls: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A message of verifiers as a plain dict; calls: names of the tools by the ids of their calls."""
    role, content = message["role"], message.get("content") or ""
    if role == "text":
        raise EpisodeError(
            'the environment is of the message_type "completion", and an episode needs messages'
        )
    if not isinstance(content, str):
        parts = [part.get("text") for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise EpisodeError(f"a {role} message has content other than text, which cannot be read here")
        content = "".join(parts)
    if role != "tool":
        return {"role": role, "content": content}
    number = message["tool_call_id"]
    return {"role": role, "name": (calls or {}).get(number, ""), "content": content, "tool_call_id": number}


def _bare(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _package() -> Any:
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise EpisodeError(
            f"environment.use: verifiers:NAME needs the package verifiers: {INSTALL}"
        ) from None
    if found.split(".")[:2] != SUPPORTED.split("."):
        raise EpisodeError(
            f"environment.use: verifiers {found} is installed, and covey plays the environments of {SUPPORTED} "
            f"(verifiers.load_environment, SingleTurnEnv, MultiTurnEnv, ToolEnv): {INSTALL}"
        )
    return importlib.import_module("verifiers")


def _check_installed(name: str) -> None:
    module = name.replace("-", "_").split("/")[-1]  # as verifiers does it
    if importlib.util.find_spec(module) is None:
        raise EpisodeError(
            f"environment.use: the environment {name} is not installed: there is no module {module}. Install its "
            "package (prime env install OWNER/NAME, or pip install FOLDER), or name a file: verifiers:FILE.py."
        )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """An environment of verifiers takes Ctrl-C for itself when it is made; here it belongs to the run."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler)


@functools.cache
def _client_type(package: Any) -> Any:
    class AskingClient(package.Client):
        """ask(messages, tools): waits for the model's reply."""

        def __init__(self, ask: Callable[[Any, Any], Any]):
            super().__init__(None)
            self.ask = ask

        async def get_response(
            self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            return await self.ask(prompt, tools)

    # The abstract methods are steps of the get_response that is replaced.
    AskingClient.__abstractmethods__ = frozenset()
    return AskingClient
