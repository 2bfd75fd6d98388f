"""Documents of real lengths and covey's SFT step on them: packed:ROWSxTOKENS/MEAN, for example packed:4x4096/660.

A step trains on documents of ROWS x TOKENS tokens together. Their lengths are log-normal, with a mean of MEAN and a
standard deviation of SIGMA in the logarithm, and then cut at TOKENS, which is how long a packed row of the peers is.
The last one of a step is cut to what is left. So they are shorter than MEAN on average: in_words says by how much.
Every token of a document but the first is trained.
"""

import math
import re
from collections.abc import Callable

import numpy as np
from benchmarks.peers.inputs import FIRST_ID

from covey.policies.decoder import DecoderPolicy
from covey.rl.config import ModelSection, SftConfig, SftDataSection, SftOptimSection
from covey.rl.documents import Document
from covey.rl.optimizer import FlatAdamW
from covey.rl.sft import SftMachine, sft_step
from covey.rl.step_metrics import Measured

SIGMA = 1.0
WARM_UP = 3  # steps that are not timed


def parse_packed(spec: str) -> tuple[int, int, int]:
    """(rows, tokens of a row, mean length of a document) of packed:ROWSxTOKENS/MEAN."""
    match = re.fullmatch(r"packed:([1-9]\d*)x([1-9]\d*)/([1-9]\d*)", spec)
    if match is None:
        raise ValueError(f"{spec}: work is packed:ROWSxTOKENS/MEAN in numbers above 0")
    rows, tokens, mean = map(int, match.groups())
    if not 2 <= mean <= tokens:
        raise ValueError(f"{spec}: documents have a mean of 2 tokens or more, and at most those of a row")
    return rows, tokens, mean


def packed_documents(spec: str, steps: int, vocab: int) -> list[list[Document]]:
    """Those of each step. The lengths do not depend on the vocabulary, nor a step's on how many there are."""
    rows, tokens, mean = parse_packed(spec)
    lengths, ids = np.random.default_rng(0), np.random.default_rng(1)
    found, row = [], 0
    for _ in range(steps):
        documents, left = [], rows * tokens
        while left > 1:  # a document of one token has nothing to train
            drawn = round(lengths.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA))
            size = min(max(drawn, 2), tokens, left)
            text = tuple(ids.integers(FIRST_ID, vocab, size=size).tolist())
            documents.append(Document(row, text, (False, *[True] * (size - 1))))
            left, row = left - size, row + 1
        found.append(documents)
    return found


def in_words(spec: str, steps: int) -> str:
    """What the documents of these steps look like."""
    lengths = [len(d.ids) for documents in packed_documents(spec, steps, FIRST_ID + 1) for d in documents]
    return (
        f"{spec}: {len(lengths)} documents in {steps} steps, mean {np.mean(lengths):.0f} tokens, median "
        f"{np.median(lengths):.0f}, longest {max(lengths)}"
    )


def sft_steps(
    policy: DecoderPolicy, steps: list[list[Document]], tokens_per_pass: int, lr: float = 2e-4
) -> Callable[[int], Measured]:
    """Step i of a covey SFT run on these documents, packing included; what it returns is measured on the device."""
    config = SftConfig(
        model=ModelSection(path="tiny"),  # this and the data are here already
        data=SftDataSection(train="packed"),
        optim=SftOptimSection(steps=len(steps), tokens_per_pass=tokens_per_pass, lr=lr),
    )
    machine = SftMachine(policy, FlatAdamW(policy.parameters(), config.optim), policy.device)
    return lambda i: sft_step(machine, steps[i], config, i, len(steps))
