"""Passes over few tokens as recorded CUDA graphs.

Launching the kernels of a small pass one by one takes longer than they run: a training step of a 1.5B model is 2,000
launches. But for attention, whose work depends on how the tokens are divided into segments, a pass over a given number
of tokens is always the same kernels on the same memory. So it is recorded once, as steps: a graph, the attention of the
first layer, a graph, the attention of the second layer, and so on.

Tokens are filled up to one of four numbers per power of two. What is filled in is a segment of its own whose gradient
is 0, so it changes no gradient. All recordings use the same memory, one after the other: until the backward of a pass
has run, other passes run without a recording.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan
from covey.kernels.lora_linear import LoraGroup
from covey.policies.layer import DecoderLayer, Kept, Pass, Rope
from covey.policies.recording import Graph, Recording, uncollected

if TYPE_CHECKING:
    from covey.policies.decoder import DecoderPolicy

log = logging.getLogger(__name__)

LEAST, MOST = 64, 16384  # tokens
# Weights of a layer times tokens up to which launching takes clearly longer than computing (measured on an H200 with
# its host: 2.8 ms of launches a layer and step, 700 TFLOP/s).
LAUNCH_BOUND = 3e11
MEMORY = 1 / 16  # of the device's, at most, for what recordings keep
KEPT_RECORDINGS = 24  # numbers of tokens; each takes some megabytes


@dataclass(slots=True)
class Place:
    """Where passes over S tokens begin and end, and their recordings."""

    hidden_SH: Tensor
    ropes: tuple[Rope, ...]
    out_SH: Tensor
    dout_SH: Tensor
    forward: Recording | None = None  # that leaves what the backward reads
    backward: Recording | None = None
    # Forwards without a backward, by the adapter that they have.
    alone: dict[int, Recording] = field(default_factory=dict)


class RecordedPasses:
    """The layers of a policy, recorded for small numbers of tokens."""

    def __init__(self, policy: "DecoderPolicy", limit: int):
        """limit: the most tokens, filled up."""
        self.policy, self.limit = policy, limit
        self.memory_bytes = 0  # that recordings have taken
        self.places: OrderedDict[int, Place] = OrderedDict()
        self._memory: Any = None
        self._first: Graph | None = None  # keeps the memory together
        self._stream: Any = None
        # The pass whose backward is still to come, while it lives.
        self._waiting: Callable[[], object | None] = lambda: None

    def size(self, tokens: int) -> int:
        """S, the tokens of a pass filled up; 0 if it is not to be recorded."""
        step = max(LEAST, 1 << max(0, tokens.bit_length() - 3))
        size = -(-tokens // step) * step
        return size if 0 < size <= self.limit and self._waiting() is None else 0

    def run(
        self, size: int, hidden_TH: Tensor, ropes: tuple[Rope, ...], plan: AttentionPlan, trains: bool
    ) -> Tensor | None:
        """What the layers make of hidden [T, H], with a plan for `size(T)` tokens: [T, H], valid until the next pass.

        None if there is no memory for a recording; then and from now on the pass has to run without one.
        """
        place, lora = self._place(size, hidden_TH, ropes), self.policy.active
        try:
            if trains and place.forward is None:
                self._record_training(place, plan)
            elif not trains and id(lora) not in place.alone:
                place.alone[id(lora)] = self._record_alone(place, plan, lora)
        except torch.OutOfMemoryError:
            self.limit, self._memory, self._first, self.memory_bytes = 0, None, None, 0
            self.places.clear()
            log.warning("small passes are not recorded any more: there is no memory for it")
            return None
        for there, here in zip(place.ropes, ropes, strict=True):
            for x, y in zip(there, here, strict=True):
                x[: len(y)].copy_(y)
        if trains:
            return RecordedFunction.apply(hidden_TH, self, place, plan)
        return self._forward(place, place.alone[id(lora)], hidden_TH, plan)

    def forward(self, place: Place, hidden_TH: Tensor, plan: AttentionPlan, waiting: object) -> Tensor:
        assert place.forward is not None
        self._waiting = weakref.ref(waiting)
        return self._forward(place, place.forward, hidden_TH, plan)

    def backward(self, place: Place, dout_TH: Tensor, plan: AttentionPlan) -> None:
        assert place.backward is not None
        place.dout_SH[: len(dout_TH)].copy_(dout_TH)
        place.dout_SH[len(dout_TH) :].zero_()
        place.backward.replay(plan)
        self._waiting = lambda: None

    def _forward(self, place: Place, recording: Recording, hidden_TH: Tensor, plan: AttentionPlan) -> Tensor:
        place.hidden_SH[: len(hidden_TH)].copy_(hidden_TH)
        recording.replay(plan)
        return place.out_SH[: len(hidden_TH)]

    def _place(self, size: int, hidden: Tensor, ropes: tuple[Rope, ...]) -> Place:
        if size not in self.places:
            # What is filled in must be numbers.
            empty = tuple(
                (x.new_zeros(size, *x.shape[1:]), y.new_zeros(size, *y.shape[1:])) for x, y in ropes
            )
            begin, end, gradient = (hidden.new_zeros(size, hidden.shape[1]) for _ in range(3))
            self.places[size] = Place(begin, empty, end, gradient)
            if len(self.places) > KEPT_RECORDINGS:
                self.places.popitem(last=False)
        self.places.move_to_end(size)
        return self.places[size]

    def _record_training(self, place: Place, plan: AttentionPlan) -> None:
        lora = self.policy.active
        with self._aside(place, plan, lora, backward=True) as new_graph:
            forward, backward = Recording(new_graph), Recording(new_graph)
            with forward.record():
                kept = self._layers(place, self._pass(place, plan, lora, forward, keep=True))
            now, d = self._pass(place, plan, lora, backward, keep=True), place.dout_SH
            with backward.record():
                while kept:
                    layer, x, activations = kept.pop()
                    dx = layer.backward(d, x, activations, now)
                    d = d if dx is None else dx  # None below the first layer
        place.forward, place.backward = forward, backward

    def _layers(self, place: Place, now: Pass) -> list[tuple[DecoderLayer, Tensor, Kept]]:
        """Every layer with its input and activations, if those are kept; what comes out goes to its place."""
        kept, x = [], place.hidden_SH
        for layer in self.policy.layers:
            out, activations = layer.forward(x, now)
            assert out is not None
            if now.keep:
                kept.append((layer, x, activations))
            x = out
        place.out_SH.copy_(x)
        return kept

    def _record_alone(self, place: Place, plan: AttentionPlan, lora: dict[str, LoraGroup]) -> Recording:
        with self._aside(place, plan, lora, backward=False) as new_graph:
            recording = Recording(new_graph)
            with recording.record():
                self._layers(place, self._pass(place, plan, lora, recording, keep=False))
        return recording

    def _pass(
        self,
        place: Place,
        plan: AttentionPlan,
        lora: dict[str, LoraGroup],
        recording: Recording | None,
        keep: bool,
    ) -> Pass:
        return Pass(place.ropes, plan, lora, self.policy.adapter.scale, keep, recording=recording)

    @contextmanager
    def _aside(
        self, place: Place, plan: AttentionPlan, lora: dict[str, LoraGroup], *, backward: bool
    ) -> Iterator[Callable[[], Graph]]:
        """On a stream for recordings, with all kernels compiled and loaded; gives how graphs are made."""
        if not place.hidden_SH.is_cuda:
            yield lambda: Graph(None)
            return
        first = self._memory is None
        if first:
            self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), uncollected():
            self._warm_up(place, plan, lora, backward)
            if first:
                self._reserve()
            yield lambda: Graph(self._memory)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _warm_up(self, place: Place, plan: AttentionPlan, lora: dict[str, LoraGroup], backward: bool) -> None:
        """Two layers on zeros: whatever is added to a gradient is 0."""
        now, x, kept = self._pass(place, plan, lora, None, keep=backward), place.hidden_SH.zero_(), []
        for layer in self.policy.layers[:2]:
            out, activations = layer.forward(x, now)
            kept.append((layer, x, activations))
            assert out is not None
            x = out
        d: Tensor | None = torch.zeros_like(x)
        for layer, x, activations in reversed(kept) if backward else ():
            assert d is not None
            d = layer.backward(d, x, activations, now)

    def _reserve(self) -> None:
        """Takes the memory for the most tokens in one piece, from which all recordings get theirs."""
        graph, spec = Graph(self._memory), self.policy.spec
        self.memory_bytes = self.limit * (spec.num_layers + 2) * spec.kept_bytes(self.policy.dtype.itemsize)
        graph.begin()
        room = torch.empty(self.memory_bytes, dtype=torch.uint8, device=self.policy.device)
        room[:1].zero_()  # a graph may not be empty
        graph.end()
        self._first = graph


def recorded_passes(policy: "DecoderPolicy") -> RecordedPasses | None:
    """Recordings for a policy that keeps activations and weights in its GPU's memory, else None."""
    groups = [group for layer in policy.layers for group in layer.groups.values()]
    if policy.device.type != "cuda" or not policy.keep_activations or any(g.held is None for g in groups):
        return None
    spec = policy.spec
    token = spec.num_layers * spec.kept_bytes(policy.dtype.itemsize)
    room = MEMORY * torch.cuda.get_device_properties(policy.device).total_memory
    weights = sum(n * k for n, k, _ in spec.linears.values())
    return RecordedPasses(policy, int(min(MOST, LAUNCH_BOUND / weights, room / token)))


class RecordedFunction(torch.autograd.Function):
    """All layers as one node of autograd's graph. Its backward fills the adapter's gradient as a side effect."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, passes: RecordedPasses, place: Place, plan: AttentionPlan
    ) -> Tensor:
        ctx.passes, ctx.place, ctx.plan, ctx.waiting = passes, place, plan, _Waiting()
        return passes.forward(place, hidden_TH, plan, ctx.waiting)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.waiting is None:
            raise RuntimeError("the backward of this pass has run already")
        ctx.passes.backward(ctx.place, dout_TH, ctx.plan)
        ctx.waiting = None
        return None, None, None, None


class _Waiting:
    """Lives until a pass's backward has run, or its result is dropped."""
