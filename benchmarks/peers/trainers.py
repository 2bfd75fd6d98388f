"""Whole SFT steps on packed documents: packed:ROWSxTOKENS/MEAN of benchmarks/packed.py.

The peers' trainers pack and run an epoch themselves; covey's steps are those of its run (rl/sft.py). The learning rate
is too small to change a weight: the mean loss over all documents is the same however they are packed and shuffled.
"""

import math
import statistics
import time
from typing import Any

import torch
from benchmarks.packed import WARM_UP, packed_documents, parse_packed, sft_steps

from covey.rl.documents import Document

LR = 1e-30


def trained(name: str, peer: Any, spec: str, vocab: int, reps: int, tokens_per_pass: int) -> dict[str, Any]:
    """The numbers of one work. tokens_per_pass: of covey."""
    rows, length, _ = parse_packed(spec)
    steps = packed_documents(spec, WARM_UP + reps, vocab)
    if name == "covey":
        return run_covey(peer, steps, tokens_per_pass).record(reps)
    return run_trainer(peer, steps, passes(name, rows, length), length).record(reps)


class Watch:
    """Times and trained tokens of steps, and the memory of those after the warm-up."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        self.last = self.now()

    def lap(self) -> None:
        """At the end of a step."""
        now = self.now()
        self.seconds.append(now - self.last)
        self.last = now
        if self.gpu and len(self.seconds) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()

    def record(self, reps: int) -> dict[str, Any]:
        steps = list(zip(self.seconds, self.tokens, self.losses, strict=True))
        timed = steps[WARM_UP : WARM_UP + reps]  # a step behind them has what was left of the documents
        if len(timed) < reps:
            raise ValueError(f"{len(steps)} steps were run, and not {WARM_UP + reps}")
        return {
            "ms": statistics.median(seconds for seconds, _, _ in timed) * 1e3,
            "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens, _ in timed),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.gpu else None,
            "loss": math.fsum(tokens * loss for _, tokens, loss in steps) / sum(self.tokens),
            "grad_norm": None,
            "step_seconds": self.seconds,
            "step_tokens": self.tokens,
        }


def run_covey(peer: Any, steps: list[list[Document]], tokens_per_pass: int) -> Watch:
    step, watch = sft_steps(peer.policy, steps, tokens_per_pass, LR), Watch(peer.device)
    peer.fill_adapter()
    watch.begin()
    for i in range(len(steps)):
        metrics = step(i)
        watch.lap()
        watch.tokens.append(round(metrics["tokens/trained"]))
        watch.losses.append(metrics["sft/nll"])
    return watch


def run_trainer(peer: Any, steps: list[list[Document]], passes: dict[str, int], length: int) -> Watch:
    """An epoch of the SFTTrainer on the documents of all steps, which it packs into rows of `length` tokens."""
    import datasets
    import transformers

    # Unsloth has put its own in their place.
    from trl import SFTConfig, SFTTrainer  # type: ignore

    watch, gpu = Watch(peer.device), peer.device.type == "cuda"

    class Laps(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.lap()

    config = SFTConfig(
        output_dir=str(peer.folder.parent / "trainer"),
        packing=True,
        max_length=length,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        optim="adamw_8bit" if gpu else "adamw_torch",
        gradient_checkpointing=True,
        bf16=gpu,
        use_cpu=not gpu,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        **passes,
    )
    ids = [list(document.ids) for documents in steps for document in documents]
    trainer = SFTTrainer(
        model=peer.model,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids}),
        processing_class=peer.tokenizer(),
        callbacks=[Laps()],
    )
    if not trainer.args.packing:  # Unsloth goes on without what it cannot do
        raise ValueError("the trainer has turned its packing off")
    peer.fill_adapter()  # only now: the trainer has turned it to bfloat16
    counts: list[Any] = []
    batches = trainer.get_batch_samples

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = batches(*args, **kwargs)
        counts.append(sum((batch["labels"][:, 1:] != -100).sum() for batch in found[0]))
        return found

    trainer.get_batch_samples = counted
    trainer.train()
    watch.tokens = [int(count) for count in counts]
    watch.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    expected = sum(len(text) - 1 for text in ids)
    if sum(watch.tokens) != expected:
        raise ValueError(f"{sum(watch.tokens)} tokens were trained, and not {expected}")
    return watch


def passes(peer: str, rows: int, length: int) -> dict[str, int]:
    """How a trainer does a step of `rows` packed rows.

    TRL packs for flash attention, which is not installed. transformers' other two kinds of attention keep the documents
    apart as well: `trl` (SDPA) with a mask of all pairs, so it gets a row at a time, and `trl-flex` (flex attention) by
    blocks of the mask, compiled for one length. Unsloth finds the ends of the documents in the batch.
    """
    if peer == "trl":
        return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows}
    whole = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    return whole | ({"pad_to_multiple_of": rows * length} if peer == "trl-flex" else {})
