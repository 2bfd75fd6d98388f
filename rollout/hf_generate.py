"""Sampling from an HFPolicy with transformers' own `generate`, in the trainer's process and on its weights.

transformers computes the logits, with the cache that the model's architecture has; tokens are drawn and ended here, as
by the other engines (rollout/sampling.py), so draws do not depend on what a prompt is batched with. Made to be right
for every model, not to be fast: a prompt is computed once for each of its completions, and a wave runs until its last
row is done.

Axes: P prompts of a wave, B = P n rows, L tokens of the longest prompt, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.kernels.sample_inputs import draw
from covey.rollout.engine import Completion, Finish, Group, Prompt, Sampling
from covey.rollout.sampling import Sampler, check_request, draw_states
from covey.rollout.stops import StopStrings

if TYPE_CHECKING:
    from covey.policies.hf import HFPolicy


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    prompt: Prompt
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None


class GenerateEngine:
    """A RolloutEngine on an HFPolicy.

    decode: ids to text, without special tokens. eos_ids: any of them ends a completion.
    max_rows: completions that run at a time; prompts are worked off in waves of as many (one prompt at least).
    """

    def __init__(
        self,
        policy: "HFPolicy",
        decode: Callable[[Sequence[int]], str],
        eos_ids: Iterable[int],
        *,
        max_rows: int = 256,
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: set it to at least 1")
        self.policy, self.decode, self.eos_ids = policy, decode, frozenset(eos_ids)
        self.max_rows = max_rows
        self.version = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """n completions for each of P prompts: P groups in the prompts' order (see RolloutEngine).

        ValueError for an empty prompt, or one whose completion could leave the model's positions.
        """
        check_request(prompts, n, sampling, self.policy.max_positions)
        groups: dict[int, Group] = {}
        with self.policy.generating() as model:
            for wave in self._waves(prompts, n):
                rows = [_Row(prompts[i], sample) for i in wave for sample in range(n)]
                self._run(model, rows, sampling)
                for k, i in enumerate(wave):
                    completions = [self._completion(row) for row in rows[k * n : (k + 1) * n]]
                    groups[i] = Group(prompts[i], tuple(completions))
                    if finished is not None:
                        finished(i, groups[i])
        return [groups[i] for i in range(len(prompts))]

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Later samples come from these weights. The policy's own are in place; others are copied into it."""
        own = self.policy.weights()
        if weights.keys() != own.keys() or any(own[k].data_ptr() != w.data_ptr() for k, w in weights.items()):
            self.policy.load_weights(weights)
        self.version = version

    def sleep(self) -> None:
        """Nothing to give back: caches live during `generate` only, and the weights are the policy's."""

    def wake(self) -> None:
        """Nothing to take."""

    def _waves(self, prompts: Sequence[Prompt], n: int) -> Iterator[list[int]]:
        """Prompts that run together, of similar length; of equal length where padding would enter a layer's state."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        wave: list[int] = []
        for i in order:
            full = (len(wave) + 1) * n > self.max_rows
            if wave and (full or (self.policy.recurrent and len(prompts[i].ids) > len(prompts[wave[0]].ids))):
                yield wave
                wave = []
            wave.append(i)
        if wave:
            yield wave

    def _run(self, model, rows: list[_Row], sampling: Sampling) -> None:
        """Fills the rows, their prompts padded on the left."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        longest = max(len(row.prompt.ids) for row in rows)
        ids_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for b, row in enumerate(rows):
            ids_BL[b, longest - len(row.prompt.ids) :] = torch.tensor(row.prompt.ids)
            mask_BL[b, longest - len(row.prompt.ids) :] = 1
        device = self.policy.device
        drawing = _Drawing(rows, sampling, self.decode, frozenset() if sampling.ignore_eos else self.eos_ids)
        # Greedy, because `drawing` leaves one token each; without an end, because `drawing` knows when.
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        model.generate(
            input_ids=ids_BL.to(device),
            attention_mask=mask_BL.to(device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([drawing.draw]),
            stopping_criteria=StoppingCriteriaList([drawing.done]),
        )

    def _completion(self, row: _Row) -> Completion:
        assert row.finish is not None
        full = tuple(row.full) if row.full else None
        trained = (True,) * len(row.ids)
        return Completion(
            tuple(row.ids), tuple(row.logprobs), trained, row.text, row.finish, self.version, full
        )


class _Drawing:
    """What `generate` asks after each forward pass: which token comes next, and which rows are done."""

    def __init__(
        self,
        rows: list[_Row],
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        eos_ids: frozenset[int],
    ):
        self.rows, self.sampling, self.decode, self.eos_ids = rows, sampling, decode, eos_ids
        self.stops = StopStrings(sampling.stop, decode) if sampling.stop else None
        self.sampler: Sampler | None = None
        self.step = 0

    def draw(self, ids_BL: Tensor, logits_BV: Tensor) -> Tensor:
        """transformers' LogitsProcessor: logits that are 0 for the drawn token and -inf for all others."""
        if self.sampler is None:
            rows, vocab = logits_BV.shape
            self.sampler = Sampler(self.sampling, rows, vocab, logits_BV.dtype, logits_BV.device)
            slots = torch.arange(len(self.rows), device=logits_BV.device)
            self.sampler.admit(slots, [row.prompt.ids for row in self.rows], [()] * len(self.rows))
            row_B, sample_B = [row.prompt.row for row in self.rows], [row.sample for row in self.rows]
            self.state_B = draw_states(self.sampling.seed, row_B, sample_B).to(logits_BV.device)
        uniform_B = draw(self.state_B, torch.full_like(self.state_B, self.step))
        alive_B = torch.tensor([row.finish is None for row in self.rows], device=logits_BV.device)
        id_B, logp_B, full_B = self.sampler.pick(logits_BV, uniform_B, alive_B)
        full = [None] * len(self.rows) if full_B is None else full_B.tolist()
        self.step += 1
        for row, token, logp, whole in zip(self.rows, id_B.tolist(), logp_B.tolist(), full, strict=True):
            if row.finish is None:
                self._take(row, token, logp, whole)
        return torch.full_like(logits_BV, -math.inf).scatter_(1, id_B[:, None], 0.0)

    def done(self, ids_BL: Tensor, logits: object) -> Tensor:
        """transformers' StoppingCriteria."""
        return torch.tensor([row.finish is not None for row in self.rows], device=ids_BL.device)

    def _take(self, row: _Row, token: int, logp: float, full: float | None) -> None:
        """Notes a row's newest token, and whether and how it ends the row."""
        if math.isnan(logp):
            raise FloatingPointError(
                f"the logits after the prompt of row {row.prompt.row} and {len(row.ids)} tokens are not finite: "
                "the weights have diverged; go back to an earlier checkpoint and lower the learning rate"
            )
        row.ids.append(token)
        row.logprobs.append(logp)
        if full is not None:
            row.full.append(full)
        if token in self.eos_ids:
            row.finish, row.text = "eos", self.decode(row.ids[:-1])
        elif self.stops and (found := self.stops.first_stop(row.ids, len(row.ids) - 1)):
            row.finish, row.text = "stop", found[1]
        elif len(row.ids) == self.sampling.max_new_tokens:
            row.finish, row.text = "length", self.decode(row.ids)
