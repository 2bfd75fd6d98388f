"""GRPO, SFT and DPO put together from a configuration: rewards, data, what rl/sampler.py opens, and an optimiser."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.rewards.reward import RewardSpec, check_columns, load_reward
from covey.rewards.runner import Scorer
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.curriculum import make_supply
from covey.rl.data import Cursor, Row
from covey.rl.display import RunInfo
from covey.rl.documents import make_documents
from covey.rl.dpo import DpoMachine, dpo_step, evaluate_pairs, explain_pairs
from covey.rl.engines import check_engine
from covey.rl.entropy import EntropyBonus
from covey.rl.environments import Stage
from covey.rl.explain import SFT_OBJECTIVE, explain
from covey.rl.grpo import GrpoMachine, grpo_step
from covey.rl.loop import Results
from covey.rl.optimizer import FlatAdamW
from covey.rl.pairs import Pair, Preference, load_pairs, make_pairs
from covey.rl.rows import held_out_rows, training_rows
from covey.rl.sampler import Sampler
from covey.rl.sampler_check import check_start
from covey.rl.sft import SftMachine, document_nll, hold_out, sft_step
from covey.rl.sources import DataError
from covey.rl.templates import Encoded, check_context


class GrpoTrainer(Sampler):
    """Trainer (rl/loop.py) of GRPO. rows, eval_rows: given in Python instead of by the configuration."""

    command = "grpo"

    def __init__(
        self, config: GrpoConfig, rewards: Sequence[RewardSpec], rows: Any = None, eval_rows: Any = None
    ):
        self.config: GrpoConfig
        self.stage = Stage(config.environment) if config.environment.given else None
        loaded = [load_reward(spec) for spec in [*rewards, *(self.stage.rewards if self.stage else ())]]
        if not loaded:
            raise DataError("rewards: none is given. Name one, for example rewards: [{use: math}]")
        check_engine(config)
        if self.stage is not None:
            rows = self.stage.own_rows(config.data.train, False) if rows is None else rows
            eval_rows = self.stage.own_rows(config.data.eval, True) if eval_rows is None else eval_rows
        data, found = training_rows(config, loaded, rows)
        held_out = held_out_rows(config, loaded, eval_rows)
        super().__init__(config)
        self.scorer = Scorer(loaded)
        rollout = config.rollout
        if self.stage is not None:
            self.warnings += self.stage.prepare(self.tokenizer, config.data, self.eos)
            data, held_out = self.stage.openings(data), self.stage.openings(held_out)
        self.data = self.prompts(data, rollout.max_new_tokens)
        self.eval_tokens = config.eval.max_new_tokens or rollout.max_new_tokens
        self.held_out = self.prompts(held_out, self.eval_tokens) if held_out else []
        if len(self.data) < rollout.prompts_per_step:
            raise DataError(
                f"rollout.prompts_per_step: a step takes {rollout.prompts_per_step} different prompts, and there are "
                f"only {len(self.data)}. Set it to at most that, or give more rows"
            )
        self.supply = make_supply(self.data, config)
        self.cursor = self.supply.cursor
        self.steps = self.check_steps(config.optim.steps, self.held_out)
        self.found = found

    def load_weights(self) -> None:
        self.load(self.config.rollout.max_rows, reference=self.config.objective.kl_place != "none")
        self.optimizer = FlatAdamW(self.policy.parameters(), self.config.optim)
        self.entropy = EntropyBonus(self.config.objective)
        if self.stage is not None:
            self.rollouts = self.stage.engine(self.engine)
        self.machine = GrpoMachine(
            self.policy, self.rollouts, self.scorer, self.optimizer, self.entropy, self.device
        )
        self.sampler_note = check_start(self.engine, self.policy, self.data, self.config)

    def state(self) -> dict[str, Any]:
        return super().state() | {"entropy": self.entropy.state_dict()}

    def restore(self, adapter: Path, state: Mapping[str, Any], step: int) -> None:
        super().restore(adapter, state, step)
        self.entropy.load_state_dict(state["entropy"])

    def step(self, index: int) -> Results:
        prompts = [self.data[i] for i in self.cursor.next()]
        return grpo_step(self.machine, prompts, self.config, index, self.supply)

    def evaluate(self) -> Results | None:
        if not self.held_out:
            return None
        return self.scored(self.held_out, self.scorer, self.eval_sampling(self.config.rollout.stop))

    def describe(self, **where: Any) -> RunInfo:
        rollout = self.config.rollout
        rewards = ", ".join(
            " ".join((f"{r.name} x {r.weight:g}", r.note)).strip() for r in self.scorer.rewards
        )
        uses_it = self.config.objective.kl_place != "none"
        reference = "it is the reference" if uses_it else "no reference is computed (objective.beta is 0)"
        facts = self.info(
            objective=explain(self.config.objective, max_new_tokens=rollout.max_new_tokens),
            steps=self.steps,
            rows=rollout.prompts_per_step,
            completions=rollout.group_size,
            details={
                **({} if self.adapter is None else {"start": f"the adapter {self.adapter}; {reference}"}),
                "data": f"{self.found}, {len(self.data)} prompts; {len(self.held_out)} held out",
                **({} if self.stage is None else {"environment": self.stage.describe()}),
                "rewards": rewards,
                "sampling": f"up to {rollout.max_new_tokens} tokens at temperature {rollout.temperature:g}",
                **self.sampler_note,
            },
        )
        return RunInfo(**facts, **where)


class SftTrainer(Sampler):
    """Trainer (rl/loop.py) of SFT."""

    command = "sft"

    def __init__(
        self, config: SftConfig, rewards: Sequence[RewardSpec], rows: Any = None, eval_rows: Any = None
    ):
        self.config: SftConfig
        loaded = [load_reward(spec) for spec in rewards]
        data, found = training_rows(config, loaded, rows)
        if config.eval.share is None:
            held_out = held_out_rows(config, loaded, eval_rows)
        elif eval_rows is None:
            data, held_out = hold_out(data, config.eval.share, config.data.seed)
        else:
            raise DataError(
                "eval.share takes the held-out rows from the training rows: leave it or eval_data out"
            )
        if config.eval.patience is not None and not held_out:
            raise DataError("eval.patience needs held-out rows: set data.eval or eval.share")
        super().__init__(config)
        self.scorer = Scorer(loaded)
        self.data = make_documents(data, self.tokenizer, config.data, self.eos)
        self._report("documents", self.data)
        check_context(self.data.longest, 0, self.route.max_positions)
        self.prepare_evaluation(held_out)
        optim = config.optim
        self.cursor = Cursor(
            len(self.data),
            optim.rows_per_step,
            config.data.seed,
            config.data.shuffle,
            wrap=optim.epochs is None,
        )
        self.steps = self.check_steps(optim.steps or self.cursor.steps(optim.epochs or 1.0), self.held_out)
        self.found = found

    def prepare_evaluation(self, rows: Sequence[Row]) -> None:
        """Takes the first eval.rows of the held-out rows."""
        config, self.held_out_rows = self.config, len(rows)
        held_out = rows[: config.eval.rows]
        if len(held_out) < self.held_out_rows:
            self.warnings.append(
                f"{self.held_out_rows} rows are held out, the first {len(held_out)} (eval.rows) are evaluated"
            )
        self.held_out = make_documents(held_out, self.tokenizer, config.data, self.eos) if held_out else []
        self.eval_tokens = config.eval.max_new_tokens or 256
        self.eval_prompts = (
            self.prompts(held_out, self.eval_tokens) if held_out and self.scorer.rewards else []
        )

    def load_weights(self) -> None:
        self.load(max_rows=256, reference=False)
        self.optimizer = FlatAdamW(self.policy.parameters(), self.config.optim)
        self.machine = SftMachine(self.policy, self.optimizer, self.device)

    def step(self, index: int) -> Results:
        documents = [self.data[i] for i in self.cursor.next()]
        return sft_step(self.machine, documents, self.config, index, self.steps), []

    def evaluate(self) -> Results | None:
        if not self.held_out:
            return None
        nll = document_nll(self.policy, self.held_out, self.config.optim.tokens_per_pass, self.device)
        if not self.eval_prompts:
            return {"eval/nll": nll}, []
        metrics, rows = self.scored(self.eval_prompts, self.scorer, self.eval_sampling())
        return {"eval/nll": nll} | metrics, rows

    def data_in_words(self) -> str:
        tokens = sum(sum(document.trained) for document in self.data)
        share = tokens / max(1, sum(len(document.ids) for document in self.data))
        return f"{self.found}, {len(self.data)} documents, {tokens} trained tokens ({share:.0%})"

    def describe(self, **where: Any) -> RunInfo:
        start = {} if self.adapter is None else {"start": f"the adapter {self.adapter}"}
        facts = self.info(
            objective=SFT_OBJECTIVE,
            steps=self.steps,
            rows=self.config.optim.rows_per_step,
            details={**start, "data": f"{self.data_in_words()}; {len(self.held_out)} held out"},
        )
        return RunInfo(**facts, **where)


class DpoTrainer(Sampler):
    """Trainer (rl/loop.py) of preference optimisation."""

    command = "dpo"

    def __init__(
        self, config: DpoConfig, rewards: Sequence[RewardSpec], rows: Any = None, eval_rows: Any = None
    ):
        self.config: DpoConfig
        loaded = [load_reward(spec) for spec in rewards]
        for reward in loaded:
            if reward.name in ("loss", "accuracy", "margin"):
                raise DataError(
                    f"rewards: eval/{reward.name} is a metric of the pairs. Give the reward another name"
                )
        data = load_pairs(config.data.train if rows is None else rows, config.data)
        source = config.data.eval if eval_rows is None else eval_rows
        held_out = (
            [] if source is None else load_pairs(source, config.data, held_out=True)[: config.eval.rows]
        )
        for reward in loaded:
            check_columns(reward, data[0].chosen.columns)
        super().__init__(config)
        self.scorer = Scorer(loaded)
        self.data = self._pairs("pairs", data)
        self.held_out = self._pairs("held-out pairs", held_out) if held_out else []
        self.eval_tokens = config.eval.max_new_tokens or 256
        questions = [preference.chosen for preference in held_out] if loaded else []
        self.eval_prompts = self.prompts(questions, self.eval_tokens) if questions else []
        optim, seed = config.optim, config.data.seed
        self.cursor = Cursor(
            len(self.data), optim.rows_per_step, seed, config.data.shuffle, wrap=optim.epochs is None
        )
        self.steps = self.check_steps(optim.steps or self.cursor.steps(optim.epochs or 1.0), self.held_out)
        self.found = data.found

    def _pairs(self, what: str, preferences: Sequence[Preference]) -> Encoded[Pair]:
        pairs = make_pairs(preferences, self.tokenizer, self.config.data, self.eos)
        self._report(what, pairs)
        check_context(pairs.longest, 0, self.route.max_positions)
        return pairs

    def load_weights(self) -> None:
        self.load(max_rows=256, reference=True)
        self.optimizer = FlatAdamW(self.policy.parameters(), self.config.optim)
        self.machine = DpoMachine(self.policy, self.optimizer, self.device)

    def step(self, index: int) -> Results:
        pairs = [self.data[i] for i in self.cursor.next()]
        return dpo_step(self.machine, pairs, self.config, index, self.steps), []

    def evaluate(self) -> Results | None:
        if not self.held_out:
            return None
        tokens, objective = self.config.optim.tokens_per_pass, self.config.objective
        metrics = evaluate_pairs(self.policy, self.held_out, objective, tokens, self.device)
        if not self.eval_prompts:
            return metrics, []
        scored, rows = self.scored(self.eval_prompts, self.scorer, self.eval_sampling())
        return metrics | scored, rows

    def describe(self, **where: Any) -> RunInfo:
        adapter = self.adapter
        if self.config.model.method == "full":
            reference = "the model as it was loaded"
        elif adapter and self.config.model.reference == "adapter":
            reference = f"the adapter {adapter} as it was loaded"
        else:
            reference = "the model without its adapter"
        facts = self.info(
            objective=explain_pairs(self.config.objective, reference),
            steps=self.steps,
            rows=self.config.optim.rows_per_step,
            details={"data": f"{self.found}, {len(self.data)} pairs; {len(self.held_out)} held out"},
        )
        return RunInfo(**facts, **where)
