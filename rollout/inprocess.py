"""Sampling with the weights that are being trained, in the trainer's own process.

Axes: P prompts of a wave, B rows (completions still running), T tokens of packed prompts, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from covey.kernels.attention import attention
from covey.rollout.engine import Completion, Finish, Group, Prompt, Sampling
from covey.rollout.kv_cache import KVCache
from covey.rollout.sampling import check_sampling, pick, uniforms

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy

PREFILL_TOKENS = 16384  # prompt tokens of one forward pass; bounds the activations, not what is computed
STOP_WINDOW_SLACK = 4  # tokens decoded besides those that can hold a stop string: decoders trim at the edges


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    prompt: Prompt
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None


class InProcessEngine:
    """A RolloutEngine on a DecoderPolicy. A group's prompt is computed and cached once; rows leave when done.

    decode: ids to text, without special tokens. eos_ids: any of them ends a completion.
    max_rows: completions that run at a time; prompts are worked off in waves of as many (one at least).
    """

    def __init__(
        self,
        policy: "DecoderPolicy",
        decode: Callable[[Sequence[int]], str],
        eos_ids: Iterable[int],
        *,
        max_rows: int = 256,
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: set it to at least 1")
        self.policy = policy
        self.decode = decode
        self.eos_ids = frozenset(eos_ids)
        self.max_rows = max_rows
        self.version = 0

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order.

        ValueError for an empty prompt, or one whose completion could leave the model's positions.
        """
        self._check(prompts, n, sampling)
        groups: dict[int, Group] = {}
        # Prompts of similar length share a wave and its padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        per_wave = max(1, self.max_rows // n)
        with torch.no_grad():
            self.policy.refresh()
            for first in range(0, len(order), per_wave):
                wave = order[first : first + per_wave]
                groups.update(zip(wave, self._wave([prompts[i] for i in wave], n, sampling), strict=True))
        return [groups[i] for i in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Later samples come from these weights. The policy's own are in place; others are copied into it.

        No keys or values outlive a call of `generate`, so none can be stale.
        """
        own = self.policy.weights()
        if weights.keys() != own.keys() or not all(_same(own[name], w) for name, w in weights.items()):
            self.policy.load_weights(weights)
        self.version = version

    def sleep(self) -> None:
        """Nothing to give back: caches live during `generate` only, and the weights are the policy's."""

    def wake(self) -> None:
        """Nothing to take."""

    def _check(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> None:
        check_sampling(sampling)
        if n < 1:
            raise ValueError(f"n is {n}: ask for at least one completion per prompt")
        limit = self.policy.spec.max_positions
        for prompt in prompts:
            if not prompt.ids:
                raise ValueError(f"the prompt of row {prompt.row} is empty: there is nothing to go on from")
            if len(prompt.ids) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"the prompt of row {prompt.row} has {len(prompt.ids)} tokens; with max_new_tokens "
                    f"{sampling.max_new_tokens} that is more than the {limit} positions of the model: "
                    "leave the row out, shorten it or lower max_new_tokens"
                )

    def _wave(self, prompts: list[Prompt], n: int, sampling: Sampling) -> list[Group]:
        spec, policy = self.policy.spec, self.policy
        lengths = [len(prompt.ids) for prompt in prompts]
        cache = KVCache(
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            lengths,
            group=n,
            max_own=sampling.max_new_tokens - 1,  # the last token is sampled, but nothing follows it
            scale=spec.attention_scale,
            dtype=policy.dtype,
            device=policy.device,
        )
        everyone = [_Row(prompt, sample) for prompt in prompts for sample in range(n)]
        rows = everyone
        stops = StopStrings(sampling.stop, self.decode) if sampling.stop else None
        logits_BV = self._prefill(prompts, cache).repeat_interleave(n, 0)
        for step in range(sampling.max_new_tokens):
            id_B = self._sample(logits_BV, rows, sampling, step)
            for row in rows:
                self._settle(row, sampling, stops)
            alive_B = np.array([row.finish is None for row in rows])
            if not alive_B.any():
                break
            if not alive_B.all():
                order = cache.keep(alive_B)
                rows = [rows[i] for i in order]
                id_B = id_B[torch.from_numpy(order).to(id_B.device)]
            logits_BV = self._decode_step(id_B, cache)
        done = [self._completion(row) for row in everyone]
        return [Group(prompt, tuple(done[i * n : (i + 1) * n])) for i, prompt in enumerate(prompts)]

    def _prefill(self, prompts: list[Prompt], cache: KVCache) -> Tensor:
        """Fills the cache's prompts and returns the logits after each: [P, V]."""
        parts, first = [], 0
        while first < len(prompts):
            last, tokens = first + 1, len(prompts[first].ids)
            while last < len(prompts) and tokens + len(prompts[last].ids) <= PREFILL_TOKENS:
                tokens += len(prompts[last].ids)
                last += 1
            parts.append(self._prefill_part([prompt.ids for prompt in prompts[first:last]], first, cache))
            first = last
        return torch.cat(parts)

    def _prefill_part(self, ids_P: list[tuple[int, ...]], first: int, cache: KVCache) -> Tensor:
        """The same for the cache's prompts from `first` on, in one forward pass."""
        policy, spec = self.policy, self.policy.spec
        end_P = np.cumsum([len(ids) for ids in ids_P])
        segments_P4 = torch.zeros(len(ids_P), 4, dtype=torch.int32)
        segments_P4[1:, 0] = torch.from_numpy(end_P[:-1])
        segments_P4[:, 1] = torch.from_numpy(end_P)
        plan = policy.plan(segments_P4)
        position_T = np.concatenate([np.arange(len(ids)) for ids in ids_P])
        rope = policy.rope(torch.from_numpy(position_T).to(policy.device))
        hidden = policy.embed(torch.from_numpy(np.concatenate(ids_P).astype(np.int64)).to(policy.device))
        final_P = torch.from_numpy(end_P - 1).to(policy.device)
        for layer in range(spec.num_layers):
            q, k, v = policy.project_qkv(layer, hidden, rope)
            cache.store_prompts(layer, first, first + len(ids_P), k, v)
            out, _ = attention(q, k, v, plan, spec.attention_scale)
            if layer == spec.num_layers - 1:  # from here on only the last tokens are of use
                hidden, out = hidden[final_P], out[final_P]
            hidden = policy.finish_layer(layer, hidden, out)
        return policy.logits(hidden)

    def _decode_step(self, id_B: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, V] after one more token in each row."""
        policy = self.policy
        cache.advance()
        rope = policy.rope(cache.positions())
        hidden = policy.embed(id_B)
        for layer in range(policy.spec.num_layers):
            q, k, v = policy.project_qkv(layer, hidden, rope)
            hidden = policy.finish_layer(layer, hidden, cache.attend(layer, q, k, v))
        return policy.logits(hidden)

    def _sample(self, logits_BV: Tensor, rows: list[_Row], sampling: Sampling, step: int) -> Tensor:
        """Draws token `step` of every row, notes it there and returns the ids: int64 [B] on the device."""
        samples = np.array([row.sample for row in rows])
        uniform = uniforms(sampling.seed, np.array([row.prompt.row for row in rows]), samples, step)
        uniform_B = torch.from_numpy(uniform).to(logits_BV.device)
        id_B, logp_B = pick(logits_BV, sampling, uniform_B)
        for row, token, logp in zip(rows, id_B.tolist(), logp_B.tolist(), strict=True):
            if math.isnan(logp):
                raise FloatingPointError(
                    f"the logits after the prompt of row {row.prompt.row} and {step} tokens are not finite: "
                    "the weights have diverged; go back to an earlier checkpoint and lower the learning rate"
                )
            row.ids.append(token)
            row.logprobs.append(logp)
        return id_B

    def _settle(self, row: _Row, sampling: Sampling, stops: "StopStrings | None") -> None:
        """Says whether, and how, the newest token ends the row."""
        if row.ids[-1] in self.eos_ids:
            row.finish, row.text = "eos", self.decode(row.ids[:-1])
        elif stops and (text := stops.cut(row.ids)) is not None:
            row.finish, row.text = "stop", text
        elif len(row.ids) == sampling.max_new_tokens:
            row.finish, row.text = "length", self.decode(row.ids)

    def _completion(self, row: _Row) -> Completion:
        assert row.finish is not None
        trained = (True,) * len(row.ids)
        return Completion(tuple(row.ids), tuple(row.logprobs), trained, row.text, row.finish, self.version)


class StopStrings:
    """Looks for stop strings in a completion's text, whatever tokens they are made of."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self.stop, self.decode = tuple(stop), decode
        self.longest = max(len(text) for text in self.stop)
        # A token holds at least one byte of the text, so this many can hold the longest stop string.
        self.window = max(len(text.encode()) for text in self.stop) + STOP_WINDOW_SLACK

    def cut(self, ids: list[int]) -> str | None:
        """The text before the first stop string if the newest token completed one, else None.

        Only the last tokens are decoded, as the earlier ones were looked at before; after a match all of them
        are, so that the text is that of the whole completion.
        """
        window = self.window
        tail = self.decode(ids[-window:])
        while window < len(ids) and len(tail) < self.longest + STOP_WINDOW_SLACK:  # tokens without text
            window *= 2
            tail = self.decode(ids[-window:])
        if not any(text in tail for text in self.stop):
            return None
        whole = self.decode(ids)
        places = [place for text in self.stop if (place := whole.find(text)) >= 0]
        return whole[: min(places)] if places else None


def _same(a: Tensor, b: Tensor) -> bool:
    """True if the two are one piece of memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
