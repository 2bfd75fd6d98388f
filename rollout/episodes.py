"""Completions of several turns: an engine around an engine, with an environment that answers in between.

A completion is one episode: reply, what the environment said, reply, ... Its ids are those that were sampled, and
between them the environment's, which are not trained:

    ids       r r r │ e e e e │ r r │ e e │ r r r r
    trained   1 1 1 │ 0 0 0 0 │ 1 1 │ 0 0 │ 1 1 1 1

All episodes of a call go turn by turn: the engine continues those that still run, and environments answer as soon as
their reply is there, while others are sampled.
"""

import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from covey.rollout.dialogue import Dialogue
from covey.rollout.engine import Completion, Finish, Group, Message, Prompt, RolloutEngine, Sampling
from covey.rollout.environment import (
    Environment,
    EpisodeError,
    check_opening,
    check_reward,
    check_step,
    describe,
    schedule,
)
from covey.rollout.sampling import draw_states

SAMPLES = (
    1 << 20
)  # at most so many episodes of a prompt: a continuation's draws are addressed by row * SAMPLES + sample
# What rewards may ask for of every episode
COLUMNS = ("environment_reward", "turns", "transcript", "failed", "cut_off_by")
LIMITS = ("max_turns", "max_tokens_per_turn", "max_new_tokens")  # what cut_off_by may be, beside None
LATE = 10.0  # seconds after a time limit at which an event loop that is blocked is given up

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Episode:
    """One completion on its way. group: the episodes of its prompt; sample: its own place among them."""

    prompt: Prompt
    group: "list[Episode]"
    sample: int
    environment: Environment
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] | None = None
    trained: list[bool] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    text: str = ""  # of the last reply
    version: int = 0
    reply_finish: Finish = "eos"
    finish: Finish | None = None  # None: it goes on
    pending: "Future[Any] | None" = None  # what the environment makes of the last reply
    failed: bool = False
    cut_off_by: str | None = None  # one of LIMITS

    def reply(self, completion: Completion) -> None:
        """Takes a turn of the model."""
        if not self.turns:
            self.version = completion.version
            self.full_logprobs = None if completion.full_logprobs is None else []
        self._extend(completion.ids, completion.logprobs, completion.full_logprobs, True)
        self.transcript.append({"role": "assistant", "content": completion.text})
        self.turns, self.text, self.reply_finish = self.turns + 1, completion.text, completion.finish

    def hear(self, ids: Sequence[int]) -> None:
        """Takes what the environment said."""
        nothing = (0.0,) * len(ids)
        self._extend(ids, nothing, nothing, False)

    def cut_off(self, limit: str) -> None:
        """Ends it at one of LIMITS."""
        self.finish, self.cut_off_by = "length", limit

    def _extend(
        self, ids: Sequence[int], logprobs: Sequence[float], full: Sequence[float] | None, trained: bool
    ) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.trained += [trained] * len(ids)
        if self.full_logprobs is not None and full is not None:
            self.full_logprobs += full

    def continuation(self) -> Prompt:
        """What the engine goes on from."""
        row = self.prompt.row * SAMPLES + self.sample
        return Prompt(row, (*self.prompt.ids, *self.ids), "")

    def completion(self) -> Completion:
        assert self.finish is not None
        columns = {
            **getattr(self.environment, "notes", {}),
            "environment_reward": sum(self.rewards) if self.rewards else None,
            "turns": self.turns,
            "transcript": tuple(self.transcript),
            "failed": self.failed,
            "cut_off_by": self.cut_off_by,
        }
        return Completion(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            trained=tuple(self.trained),
            text=self.text,
            finish=self.finish,
            version=self.version,
            full_logprobs=None if self.full_logprobs is None else tuple(self.full_logprobs),
            columns=columns,
        )


class EpisodeEngine:
    """A RolloutEngine whose completions are episodes.

    environment: makes the environment of one episode. name: what messages call it.
    max_turns: replies of an episode, at most. max_tokens_per_turn: of one reply; default: max_new_tokens / max_turns.
    timeout: seconds of a `start`, `step` or `score`. on_error: stop ends the run if one fails or is too slow; none ends
    that episode, without a reward.
    score: the rewards of the episodes of a group, asked for when the last of them is over; those that failed are left
    out. They are added to what `step` gave.

    Sampling.max_new_tokens is the limit of a whole episode, what the environment says included. It ends when another
    reply of max_tokens_per_turn has no room in it, or at max_turns: then its finish is "length".
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Callable[[], Environment],
        dialogue: Dialogue,
        *,
        name: str = "environment",
        max_turns: int = 8,
        max_tokens_per_turn: int | None = None,
        timeout: float | None = None,
        on_error: Literal["stop", "none"] = "stop",
        score: Callable[[Sequence[Any]], Awaitable[Sequence[float | None]]] | None = None,
    ):
        self.engine, self.environment, self.dialogue, self.name = engine, environment, dialogue, name
        self.max_turns, self.max_tokens_per_turn = max_turns, max_tokens_per_turn
        self.timeout, self.on_error, self.score = timeout, on_error, score

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """n episodes for each of P prompts (see RolloutEngine).

        The draws of a turn are addressed by the seed, the turn, the prompt's row and the sample's index in its group.
        EpisodeError for what an environment did wrong.
        """
        table: list[list[Episode]] = []
        for prompt in prompts:
            group: list[Episode] = []
            group += (Episode(prompt, group, g, self.environment()) for g in range(n))
            table.append(group)
        groups: dict[int, Group] = {}
        scores: dict[int, Future[Any] | None] = {}

        def hand_over(last: bool = False) -> None:
            for p, episodes in enumerate(table):
                if p in groups or not all(episode.finish for episode in episodes):
                    continue
                if p not in scores:
                    scores[p] = self._begin_score(episodes)
                future = scores[p]
                if future is None or last or future.done():
                    self._take_score(episodes)
                    groups[p] = Group(prompts[p], tuple(episode.completion() for episode in episodes))
                    if finished is not None:
                        finished(p, groups[p])

        everyone = [episode for episodes in table for episode in episodes]
        try:
            self._open(everyone)
            hand_over()
            turn, limit = 0, self._reply_limit(sampling)
            while running := [episode for episode in everyone if not episode.finish]:
                self._sample(running, replace(sampling, max_new_tokens=limit), turn)
                turn += 1
                for episode in running:
                    self._answer(episode, sampling.max_new_tokens - limit)
                hand_over()
            hand_over(last=True)
        finally:
            close_all([episode.environment for episode in everyone], self.name, self.timeout)
        return [groups[p] for p in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.engine.update(weights, version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def _reply_limit(self, sampling: Sampling) -> int:
        share = max(1, sampling.max_new_tokens // self.max_turns)
        return min(self.max_tokens_per_turn or share, sampling.max_new_tokens)

    def _sample(self, running: Sequence[Episode], sampling: Sampling, turn: int) -> None:
        """One reply of each; environments begin to answer as they come.

        The first replies of a group share their prompt, and are drawn as completions of one turn are.
        """
        if turn == 0:
            batches = list({id(episode.group): episode.group for episode in running}.values())
            prompts = [batch[0].prompt for batch in batches]
        else:
            batches = [[episode] for episode in running]
            prompts = [episode.continuation() for episode in running]
            sampling = replace(sampling, seed=int(draw_states(sampling.seed, [turn], [0])))

        def heard(index: int, group: Group) -> None:
            for episode, completion in zip(batches[index], group.completions, strict=True):
                if not episode.finish:
                    episode.reply(completion)
                    step = episode.environment.step
                    episode.pending = schedule(step, completion.text, timeout=self.timeout)

        self.engine.generate(prompts, len(batches[0]), sampling, heard)

    def _answer(self, episode: Episode, room: int) -> None:
        """Ends the episode, or appends what its environment says; room: ids that it may have before another reply."""
        result = self._result(episode, "step")
        if episode.finish:
            return
        messages, done, reward = check_step(result, f"{self.name}.step()")
        if reward is not None:
            episode.rewards.append(reward)
        episode.transcript += messages
        if episode.reply_finish == "length":
            episode.cut_off("max_tokens_per_turn")
        elif done or episode.reply_finish == "abort":
            episode.finish = episode.reply_finish
        elif episode.turns >= self.max_turns:
            episode.cut_off("max_turns")
        if episode.finish:
            return
        ids = self.dialogue.between(episode.prompt.messages or (), messages, episode.reply_finish)
        if len(episode.ids) + len(ids) > room:
            episode.cut_off("max_new_tokens")
        else:
            episode.hear(ids)

    def _open(self, episodes: Sequence[Episode]) -> None:
        """Starts the environments, and looks whether they begin as the prompts do."""
        for episode in episodes:
            row = copy.deepcopy(dict(episode.prompt.columns))
            episode.pending = schedule(episode.environment.start, row, timeout=self.timeout)
        for episode in episodes:
            opening, given = self._result(episode, "start"), episode.prompt.messages
            if given is None:
                raise EpisodeError(
                    f"the prompt of row {episode.prompt.row} is plain text: an environment needs messages. Set "
                    "data.chat: true."
                )
            if opening is None:
                continue
            opening = check_opening(opening, self.name)
            # The prompt may have a system message of the configuration in front.
            if list(map(dict, given[-len(opening) :])) != opening:
                raise EpisodeError(
                    f"{self.name}.start() opened row {episode.prompt.row} differently than before. The opening must "
                    "follow from the row alone, since the episodes of a group are compared: draw what varies from the "
                    "row."
                )

    def _begin_score(self, group: Sequence[Episode]) -> "Future[Any] | None":
        """Asks for the rewards of a group, if there are any to ask for; other groups go on meanwhile."""
        played = [episode for episode in group if not episode.failed]
        future = None
        if self.score is not None and played:
            future = schedule(self.score, [episode.environment for episode in played], timeout=self.timeout)
        for episode in group:
            episode.pending = future
        return future

    def _take_score(self, group: Sequence[Episode]) -> None:
        played = [episode for episode in group if episode.pending is not None and not episode.failed]
        for k, episode in enumerate(played):
            rewards = self._result(episode, "score")
            reward = None if episode.failed else check_reward(rewards[k], f"{self.name}.score()")
            if reward is not None:
                episode.rewards.append(reward)

    def _result(self, episode: Episode, what: str) -> Any:
        """What the pending call returned. If it failed: EpisodeError, or the end of the episode, as on_error says."""
        assert episode.pending is not None
        try:
            return episode.pending.result(_patience(self.timeout))
        except Exception as error:
            slow = isinstance(error, TimeoutError) and self.timeout is not None
            problem = f"took longer than {self.timeout:g} seconds" if slow else f"raised {describe(error)}"
            cause = error
        if self.on_error == "stop":
            raise EpisodeError(
                f"{self.name}.{what}() {problem} for row {episode.prompt.row}, turn {episode.turns}. Mend it, or set "
                "environment.on_error: none, which ends such an episode without a reward."
            ) from cause
        episode.finish, episode.failed, episode.rewards = "abort", True, []
        return None


def close_all(environments: Sequence[Environment], name: str, timeout: float | None) -> None:
    """Calls their `close`. What goes wrong here is logged: it must not hide why an episode ended."""
    closes = [getattr(environment, "close", None) for environment in environments]
    for future in [schedule(close, timeout=timeout) for close in closes if close is not None]:
        try:
            future.result(_patience(timeout))
        except Exception as error:
            log.warning("%s.close() failed: %s", name, describe(error))


def _patience(timeout: float | None) -> float | None:
    return None if timeout is None else timeout + LATE
