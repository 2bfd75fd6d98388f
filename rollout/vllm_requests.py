"""What is asked of vLLM, and how its replies are read: the same in this process and over HTTP."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from covey.rollout.engine import Completion, Finish, Prompt, Sampling
from covey.rollout.sampling import draw_states
from covey.rollout.stops import StopStrings
from covey.rollout.vllm_versions import LEAST_TEMPERATURE, MOST_BIAS, VllmError

SEEDS = (1 << 62) - 1  # vLLM adds a sample's place in its group, which must not leave 63 bits
CHARACTER = 4  # bytes, at most, and so tokens
LOWEST = -9999.0  # what a server makes of a log-prob of minus infinity


def check_limits(sampling: Sampling) -> None:
    """ValueError for what vLLM would quietly take for something else."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {sampling.temperature}: vLLM takes {LEAST_TEMPERATURE} instead of anything between 0 and "
            f"that; set it to 0 or to {LEAST_TEMPERATURE} at least"
        )
    for token, bias in sampling.logit_bias.items():
        if abs(bias) > MOST_BIAS:
            raise ValueError(
                f"logit_bias has {token}: {bias}; vLLM cuts it to {MOST_BIAS:g}: set it within that"
            )


class Requests:
    """Requests for completions with these settings, and their replies.

    decode: ids to text, without special tokens. eos_ids: any of them ends a completion.
    ValueError for settings that vLLM would quietly take for others.
    """

    def __init__(
        self, n: int, sampling: Sampling, decode: Callable[[Sequence[int]], str], eos_ids: Iterable[int]
    ):
        check_limits(sampling)
        self.n, self.sampling, self.decode = n, sampling, decode
        self.eos = frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        self.stops = StopStrings(sampling.stop, decode) if sampling.stop else None
        # Log-probs are of the distribution that is drawn from: with truncation, bias or penalties not of the whole one.
        s = sampling
        penalties = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        truncated = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        self.whole = not (penalties or truncated or s.logit_bias)

    def settings(self, prompt: Prompt) -> dict[str, Any]:
        """Settings for n completions of a prompt, as vLLM's SamplingParams and its /v1/completions both name them.

        Sample g of the prompt is drawn with the seed given here plus g, whatever it is batched with.
        """
        s = self.sampling
        return {
            "n": self.n,
            "max_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": s.repetition_penalty,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "logit_bias": dict(s.logit_bias) or None,
            "seed": int(draw_states(s.seed, [prompt.row], [0])) & SEEDS,
            "stop": list(s.stop),
            "stop_token_ids": sorted(self.eos),
            "ignore_eos": True,  # what ends a completion is said in stop_token_ids, not by the model's folder
            "logprobs": 0,  # of the sampled token alone
            "skip_special_tokens": True,
        }

    def completion(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        logprobs: Sequence[float],
        reason: str,
        text: str,
        version: int,
    ) -> Completion:
        """A reply as a Completion. reason, text: vLLM's finish_reason, and its text where it looked for stop strings.

        FloatingPointError for log-probs that are not finite, VllmError for a completion that was given up.
        """
        if any(not math.isfinite(logprob) or logprob <= LOWEST for logprob in logprobs):
            raise FloatingPointError(
                f"the logits after the prompt of row {prompt.row} are not finite: the weights have diverged; go back "
                "to an earlier checkpoint and lower the learning rate"
            )
        if len(ids) != len(logprobs) or not ids:
            raise VllmError(
                f"vLLM gave {len(ids)} tokens and {len(logprobs)} log-probs for the prompt of row {prompt.row}"
            )
        count, finish = len(ids), _finish(reason, ids[-1] in self.eos, prompt.row)
        if finish != "stop":
            text = self.decode(ids[:-1] if finish == "eos" else ids)
        elif self.stops is not None:
            # vLLM waits for the end of a character: the token that completed the string may be a few before the last.
            found = self.stops.first_stop(ids, max(0, len(ids) - CHARACTER))
            count, text = found or (count, text)
        whole = None if self.whole else (math.nan,) * count
        return Completion(
            tuple(ids[:count]), tuple(logprobs[:count]), (True,) * count, text, finish, version, whole
        )


def _finish(reason: str, ended: bool, row: int) -> Finish:
    if ended and reason == "stop":
        return "eos"
    if reason in ("stop", "length"):
        return reason  # type: ignore[return-value]
    raise VllmError(f"vLLM gave up the completions of row {row} ({reason}): its log says why")
