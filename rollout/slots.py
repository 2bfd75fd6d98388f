"""The rows of a running batch on the device: their newest tokens, what they attend to, and the step that all take.

Axes: R slots, B of them in use (rounded up to a bucket), Q prompts, G seats per prompt, K steps of a chunk.

A step (policies/decode.py, then the draw) reads and writes tensors that stay where they are, so on a GPU it is recorded
once per bucket as a CUDA graph and replayed. Rows end on the device, at an end-of-sequence token or at their limit; the
host learns of it a chunk of steps later and until then such rows are idle. Nothing in a step waits for the host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from covey.kernels.decode_tables import DecodeTables
from covey.kernels.sample_inputs import draw
from covey.policies.decode import Step, decode_logits
from covey.policies.recording import uncollected
from covey.rollout.engine import Sampling
from covey.rollout.kv_pool import KVPool
from covey.rollout.memory import Room
from covey.rollout.sampling import Sampler

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy

TOKEN, STEP, ALIVE, LIMIT, DRAW = range(5)  # fields of a row's state
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # and the multiples of 128 from there on
CHUNK = 4  # steps from one look at the results to the next, at most


def pace(device: torch.device) -> tuple[int, bool]:
    """Steps of a chunk, and whether the next one is launched before the host looks at its results."""
    return (CHUNK, True) if device.type == "cuda" else (1, False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What K steps drew, on its way to the host."""

    steps: int
    ids: Tensor  # int64 [K, B]
    logp: Tensor  # [K, B] of the sampling distribution
    full_logp: Tensor | None  # [K, B] of the whole one if that is another
    event: "torch.cuda.Event | None"

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if self.event is not None:
            self.event.synchronize()
        return self.ids.numpy(), self.logp.numpy(), None if self.full_logp is None else self.full_logp.numpy()


class Slots:
    """R slots and their tables, as `room` says. `begin` comes before `arrange` and `run`."""

    def __init__(self, policy: "DecoderPolicy", pool: KVPool, room: Room, eos_ids: Iterable[int]):
        self.policy, self.pool, self.room, self.device = policy, pool, room, policy.device
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=self.device)
        self.graphs_wanted = self.device.type == "cuda"
        rows, groups = room.rows, room.groups
        logp = torch.float64 if policy.dtype == torch.float64 else torch.float32
        self.state = torch.zeros(5, rows, dtype=torch.int64, device=self.device)
        self.ids = torch.zeros(CHUNK, rows, dtype=torch.int64, device=self.device)
        self.logp = torch.zeros(2, CHUNK, rows, dtype=logp, device=self.device)
        self.tick = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.own_length = torch.zeros(rows, dtype=torch.int32, device=self.device)
        # own_start [R], group_of_row [R], prefix_start [Q], prefix_length [Q], rows_of_group [Q, G]
        self._sizes = rows, rows, groups, groups, groups * room.seats
        self.tables = torch.zeros(sum(self._sizes), dtype=torch.int32, device=self.device)
        self.steps: dict[int, Step] = {}
        self.settings: Sampling | None = None
        self.graphs: dict[int, Any] = {}
        self._graph_memory: Any = None

    def begin(self, sampling: Sampling) -> Sampler:
        """What draws from now on. Steps that were recorded hold their settings: they are kept for the same ones."""
        self.state[ALIVE] = 0
        settings = replace(sampling, seed=0, stop=(), max_new_tokens=1)  # that is what a step does not know
        if settings != self.settings:
            self.settings, self.graphs, self._graph_memory = settings, {}, None
            vocab = self.policy.spec.vocab_size
            self.sampler = Sampler(sampling, self.room.rows, vocab, self.logp.dtype, self.device)
            self.ends = not sampling.ignore_eos and len(self.eos) > 0
        return self.sampler

    def bucket(self, rows: int) -> int:
        """How many slots a step of so many rows computes."""
        if not self.graphs_wanted:
            return rows
        rounded = next((b for b in BUCKETS if b >= rows), -(-rows // 128) * 128)
        return min(rounded, self.room.rows)

    def arrange(
        self, source: np.ndarray, before: int, entering: np.ndarray, tables: Sequence[np.ndarray]
    ) -> None:
        """Row i from now on is row source[i] of the `before` rows so far, or of the entering ones behind them.

        entering: int64 [5, E] states. tables: own_start, group_of_row, prefix_start, prefix_length, rows_of_group.
        """
        states, rows = self._upload(np.concatenate([entering.ravel(), source])).split(
            (entering.size, len(source))
        )
        both = torch.cat((self.state[:, :before], states.view(5, -1)), 1)
        self.state[:, : len(source)] = both[:, rows]
        self.state[ALIVE, len(source) :] = 0
        self.tables.copy_(self._upload(np.concatenate([t.ravel() for t in tables]).astype(np.int32)))

    def run(self, rows: int, steps: int) -> Chunk:
        """That many steps of the first `rows` rows."""
        size = self.bucket(rows)
        if size not in self.steps:
            self.steps[size] = self._step_of(size)
        self.tick.zero_()
        for _ in range(steps):
            if not self.graphs_wanted:
                self._step(size)
            elif size in self.graphs:
                self.graphs[size].replay()
            else:  # the first one compiles what is not compiled yet
                self._step(size)
                self._record(size)
        whole = self.sampler.whole
        ids, logp = self.ids[:steps, :rows], self.logp[: 1 if whole else 2, :steps, :rows]
        if self.device.type != "cuda":
            logp = logp.clone()
            return Chunk(steps, ids.clone(), logp[0], None if whole else logp[1], None)
        ids, logp = (
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            for x in (ids, logp)
        )
        event = torch.cuda.Event()
        event.record()
        return Chunk(steps, ids, logp[0], None if whole else logp[1], event)

    def _step_of(self, size: int) -> Step:
        own_start, group_of_row, prefix_start, prefix_length, rows_of_group = self.tables.split(self._sizes)
        room, groups = self.room, min(self.room.groups, size)
        tables = DecodeTables(
            own_start[:size], self.own_length[:size], prefix_start[:groups], prefix_length[:groups],
            rows_of_group.view(room.groups, room.seats)[:groups], group_of_row[:size], room.max_own, room.max_prefix,
        )  # fmt: skip
        return Step.of(self.policy, self.state[TOKEN, :size], tables, *self.pool.layers())

    def _step(self, size: int) -> None:
        token, step, alive, limit, seed = self.state[:, :size].unbind()
        living = alive > 0
        self.own_length[:size] = torch.where(living, step + 1, 0)
        logits = decode_logits(self.policy, self.steps[size])
        ids, logp, full = self.sampler.pick(logits, draw(seed, step), living)
        self.ids[:, :size].index_copy_(0, self.tick, ids[None])
        self.logp[0, :, :size].index_copy_(0, self.tick, logp[None])
        if full is not None:
            self.logp[1, :, :size].index_copy_(0, self.tick, full[None])
        self.tick += 1
        token.copy_(torch.where(living, ids, token))
        step += alive
        goes_on = step < limit
        if self.ends:
            goes_on &= (ids[:, None] != self.eos).all(1)
        alive *= goes_on

    def _record(self, size: int) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, such as a reward model's.
        capture = torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local")
        with uncollected(), capture:
            self._step(size)
        self._graph_memory = self._graph_memory or graph.pool()
        self.graphs[size] = graph

    def _upload(self, values: np.ndarray) -> Tensor:
        """On the device, without a wait for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
