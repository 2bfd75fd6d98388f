"""Plain sentences for what confuses people in a run, fired by rules on the metrics of a step."""

import math
from collections.abc import Iterator, Mapping

_STATISTICS = ("mean", "std", "min", "max", "unscored")  # reward/... of the total
_AGAIN_AFTER = 50  # steps until a hint is given once more
# What cut most of the episodes off (environment/cut_off_by_...), and what to do about it.
_EPISODES = {
    "max_turns": "environment.max_turns was reached before the environment was done. Raise it, and "
    "rollout.max_new_tokens with it, let the environment end earlier",
    "max_tokens_per_turn": "a reply was longer than environment.max_tokens_per_turn (by default "
    "rollout.max_new_tokens / environment.max_turns). Raise it, ask for shorter replies",
    "max_new_tokens": "rollout.max_new_tokens had no room for another reply: it is the limit of all turns with what "
    "stands between them. Raise it, lower environment.max_tokens_per_turn",
}


def reward_function(key: str) -> str | None:
    """NAME of a metric reward/NAME, unless it is a statistic of the total reward."""
    area, _, name = key.partition("/")
    is_function = area == "reward" and name not in _STATISTICS and "/" not in name
    return name if is_function else None


class Hints:
    """Looks at the steps of a run, one after the other."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._steps_without_spread = 0
        self._constant: dict[str, tuple[float, int]] = {}  # reward function: its value so far, steps
        self._skipped = 0.0

    def after(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What there is to say after a step (from 1)."""
        new = []
        for rule, text in self._rules(step, metrics):
            if rule not in self._said or step - self._said[rule] >= _AGAIN_AFTER:
                self._said[rule] = step
                new.append(text)
        return new

    def _rules(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        yield from self._loss_near_zero(step, metrics)
        yield from self._no_signal(step, metrics)
        yield from self._cut_off(metrics)
        yield from self._never_varies(metrics)
        yield from self._skipped_steps(step, metrics)

    def _loss_near_zero(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        learns = metrics.get("groups/no_spread", 1.0) < 1.0
        if step == 1 and learns and abs(metrics.get("loss/total", math.nan)) < 0.1:
            yield (
                "loss",
                "A loss near 0 is normal in GRPO: the advantages of a group sum to 0. Its gradient teaches "
                "all the same; the number to watch is the reward.",
            )

    def _no_signal(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        without = metrics.get("groups/no_spread", 0.0)
        self._steps_without_spread = self._steps_without_spread + 1 if without > 0.6 else 0
        if without == 1.0 and metrics.get("reward/mean") == 0.0:
            yield (
                "zero",
                f"All rewards of step {step} are 0, so nothing was learned. Read the samples: do the "
                "completions contain what the reward functions look for? If the task is too hard, take an "
                "easier one, a longer rollout.max_new_tokens, or some SFT first.",
            )
        elif self._steps_without_spread >= 3:
            yield (
                "spread",
                "For 3 steps more than 60% of the groups had equal rewards, and those teach nothing (mean "
                f"reward {metrics.get('reward/mean', 0.0):.2f}). Too hard: take easier prompts, a longer "
                "rollout.max_new_tokens, or some SFT first. Too easy: take harder prompts. A larger "
                "rollout.group_size helps in both cases.",
            )

    def _cut_off(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        share = metrics.get("length/truncated", 0.0)
        if not share > 0.2:
            return
        by = {limit: metrics.get(f"environment/cut_off_by_{limit}", 0.0) for limit in _EPISODES}
        most = max(by, key=lambda limit: by[limit])
        if by[most] > 0:
            which = "" if by[most] == share else f", most of them ({by[most]:.0%})"
            what = f"episodes were cut off{which} because {_EPISODES[most]}"
        else:
            what = (
                "completions were cut off by rollout.max_new_tokens before they ended. Raise it, ask for shorter "
                "answers"
            )
        yield (
            "cut off",
            f"{share:.0%} of the {what}, or leave them out of the loss (objective.truncated: mask).",
        )

    def _never_varies(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for key, value in metrics.items():
            name = reward_function(key)
            if name is None:
                continue
            first, steps = self._constant.get(name, (value, 0))
            # A value that changed once never counts again: steps is negative from then on.
            steps = steps + 1 if value == first and steps >= 0 else -1
            self._constant[name] = (first, steps)
            if steps == 5 and "zero" not in self._said:
                yield (
                    f"constant {name}",
                    f'The reward "{name}" had the mean {value:g} in each of 5 steps: it seems never to vary '
                    "and then it teaches nothing. Does it look at the completion?",
                )

    def _skipped_steps(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        skipped = metrics.get("grad/skipped", 0.0)
        if skipped > self._skipped:
            yield (
                "skipped",
                f"The gradient of step {step} was not finite, so it was skipped ({skipped:.0f} so far). "
                "If this happens often, lower optim.lr or take model.dtype: float32.",
            )
        self._skipped = skipped
