"""covey's own policy: a Llama-like decoder on frozen 4-bit (or plain) weights with a LoRA adapter.

Axes: T tokens of a packed batch, M scored positions, B rows being decoded, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.attention import AttentionPlan, Kind, attention_plan, pick_kind, reach
from covey.kernels.head import head_logits, selected_logprobs_backward, selected_logprobs_forward
from covey.kernels.lora_linear import LoraGroup, adapter_places
from covey.kernels.rope import rope_tables
from covey.policies.adapter import Adapter
from covey.policies.host_store import HostStore
from covey.policies.layer import DecoderLayer, Heads, LayerFunction, Pass, Rope
from covey.policies.linear import LinearGroup
from covey.policies.norm import Norm
from covey.policies.policy import Batch, Scored
from covey.policies.recorded import recorded_passes
from covey.policies.spec import ModelSpec


class DecoderPolicy:
    """Policy (see policies/policy.py) and, for the in-process engine, the decoder's single steps.

    After `logprobs(batch)` and `backward()` on a function of its result, `parameters()[0].grad` holds the gradient
    of the whole adapter. It accumulates, also over several backward calls, until `zero_grad()` (the policy's or a
    torch optimiser's) clears it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embedding_VH: Tensor,
        layers: list[DecoderLayer],
        norm: Norm,
        head_VH: Tensor,
        adapter: Adapter,
        *,
        folder: Path,
        keep_activations: bool,
    ):
        self.spec, self.layers, self.adapter, self.folder = spec, layers, adapter, folder
        self.embedding, self.norm, self.head = embedding_VH, norm, head_VH
        self.device, self.dtype = embedding_VH.device, embedding_VH.dtype
        self.keep_activations = keep_activations
        self._lora: dict[str, LoraGroup] = adapter.groups
        self._placed: dict[str, LoraGroup] | None = None  # whose `_places` are known
        self._places: list[tuple[Tensor, Tensor]] = []
        for group in self._linear_groups():
            group.reserve()
        self._inv_freqs = [rope.inv_freq.to(self.device) for rope in spec.ropes]
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        softcap, windows = spec.attention_softcap, (0, *spec.windows)
        kinds: list[Kind] = [pick_kind(self.device, self.dtype, spec.head_dim, softcap, w) for w in windows]
        self.attention_kind: Kind = kinds[0]  # in batches that no window reaches into
        self.windowed_kind: Kind = kinds[-1]
        parks = self.device.type == "cuda" and not keep_activations
        self._stream = torch.cuda.Stream(self.device) if parks else None
        self.recorded = recorded_passes(cast(Any, self))

    # What the trainer uses

    def logprobs(self, batch: Batch, *, entropy: bool = False, entropy_gradient: bool = False) -> Scored:
        """Log-probs [M] in float32 (float64 for a float64 policy), differentiable; entropies [M] too if asked."""
        self.refresh()
        hidden = self.embed(batch.input_ids)
        trains = torch.is_grad_enabled() and self._lora is self.adapter.groups
        hidden.requires_grad_(trains)
        ropes, tokens, out = self.rope(batch.positions), len(hidden), None
        if self.recorded is not None and (size := self.recorded.size(tokens)):
            rest = torch.tensor([[tokens, size, 0, 0]], dtype=torch.int32)
            plan = self.plan(torch.cat((batch.segments, rest)))
            out = self.recorded.run(size, hidden, ropes, plan, trains)
        if out is None:
            store = HostStore(self._stream) if trains and self._stream is not None else None
            plan, scale = self.plan(batch.segments), self.adapter.scale
            now = Pass(ropes, plan, self._lora, scale, self.keep_activations, store)
            out = hidden
            for layer in self.layers:
                out = LayerFunction.apply(out, layer, now)
        logp, entropies = HeadFunction.apply(
            out, self, batch.source, batch.target, batch.temperature, entropy, entropy and entropy_gradient
        )
        return Scored(logp, entropies)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Adapter off, or the adapter as it was when it was loaded if training continues from one."""
        self._lora = self.adapter.reference_groups
        try:
            with torch.no_grad():
                yield
        finally:
            self._lora = self.adapter.groups
            self.refresh()

    def refresh(self) -> None:
        """Brings what is computed with up to date with the adapter's master copy."""
        self.adapter.refresh()
        if not self._lora:  # the adapter is off: its columns and rows are not read
            return
        if self._placed is not self._lora:
            self._placed, self._places = self._lora, self._adapter_places()
        if self._places:
            torch._foreach_copy_([where for where, _ in self._places], [what for _, what in self._places])

    def _adapter_places(self) -> list[tuple[Tensor, Tensor]]:
        """Where the matrices that are held want the present adapter."""
        return [
            place
            for layer in self.layers
            for group in layer.groups.values()
            if group.held is not None and group.key in self._lora
            for place in adapter_places(group.held, self._lora[group.key])
        ]

    def weights(self) -> Mapping[str, Tensor]:
        return self.adapter.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy adapter weights with PEFT's names in."""
        self.adapter.load(weights)

    def parameters(self) -> list[Tensor]:
        """The flat adapter, as one tensor."""
        return [self.adapter.flat]

    def zero_grad(self) -> None:
        self.adapter.zero_grad()

    def save_adapter(self, folder: Path | str, base: str | None = None) -> None:
        """Write the adapter in PEFT's format; `base` names its base model there (default: the model's folder)."""
        self.adapter.save(Path(folder), base or str(self.folder))

    # What the in-process engine uses, step by step (policies/decode.py has the step that it repeats)

    @property
    def active(self) -> dict[str, LoraGroup]:
        """The adapter that is computed with, by group; empty while it is off."""
        return self._lora

    @property
    def unheld_bytes(self) -> int:
        """What `hold` would take of the device's memory."""
        return sum(
            self.dtype.itemsize * group.elements for group in self._linear_groups() if group.held is None
        )

    def hold(self) -> None:
        """Reads every matrix back from 4 bits, adapter beside it, for all that is computed until `release`."""
        for group in self._linear_groups():
            group.hold()
        self._placed = None
        self.refresh()

    def release(self) -> None:
        """Gives back what `hold` took."""
        for group in self._linear_groups():
            group.release()
        self._placed, self._places = None, []  # these are views into what was held

    def _linear_groups(self) -> Iterator[LinearGroup]:
        for layer in self.layers:
            yield from layer.groups.values()

    def plan(self, segments_S4: Tensor) -> AttentionPlan:
        """How the layers attend in a batch of these segments."""
        windows = self.spec.windows
        windowed = bool(windows) and windows[0] < reach(segments_S4)
        kind = self.windowed_kind if windowed else self.attention_kind
        return attention_plan(segments_S4, self.device, kind=kind)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states [T, H]."""
        hidden = torch.nn.functional.embedding(ids_T, self.embedding)
        return hidden if self._embedding_scale == 1 else hidden.mul_(self._embedding_scale)

    def rope(self, positions_T: Tensor) -> tuple[Rope, ...]:
        """cos and sin for these positions: a table for every entry of spec.ropes, shared by the layers that use it."""
        pairs = zip(self._inv_freqs, self.spec.ropes, strict=True)
        return tuple(rope_tables(positions_T, freq, rope.scaling, self.dtype) for freq, rope in pairs)

    def project_qkv(self, layer: int, hidden_TH: Tensor, rope: tuple[Rope, ...]) -> Heads:
        """q [T, n, d], k and v [T, m, d] of one layer, normed and rotated as they meet in the attention."""
        at = self.layers[layer]
        qkv, _, _ = at.qkv(hidden_TH, self._lora, self.adapter.scale)
        return at.place(qkv, rope[at.at.rope])[0]

    def finish_layer(self, layer: int, hidden_TH: Tensor, attn_Tnd: Tensor) -> Tensor:
        """The rest of a layer once its attention is known: hidden states [T, H]."""
        return self.layers[layer].finish(hidden_TH, attn_Tnd, self._lora, self.adapter.scale)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Logits [B, V] in float32."""
        s = self.spec
        normed, _ = self.norm(hidden_BH)
        return head_logits(normed, self.head, softcap=s.logit_softcap or None, scale=s.logit_scale)

    def forward_logits(self, ids: list[int]) -> Tensor:
        """Logits [T, V] of one sequence: the plain forward pass, for tests and curious people."""
        with torch.no_grad():
            self.refresh()
            length = len(ids)
            positions = torch.arange(length, device=self.device)
            plan = self.plan(torch.tensor([[0, length, 0, 0]], dtype=torch.int32))
            now = Pass(self.rope(positions), plan, self._lora, self.adapter.scale, keep=False)
            hidden = self.embed(torch.tensor(ids, device=self.device))
            for layer in self.layers:
                hidden = layer.forward(hidden, now)[0]
                assert hidden is not None
            return self.logits(hidden)


class HeadFunction(torch.autograd.Function):
    """Final norm and head at the scored positions: hidden [T, H] to (logp [M], entropy [M] or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        policy: DecoderPolicy,
        source_M: Tensor,
        target_M: Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        h, s = hidden_TH[source_M], policy.spec
        normed, stats = policy.norm(h)
        gradient = ctx.needs_input_grad[0]
        logp, entropies, u, u_entropy = selected_logprobs_forward(
            normed,
            policy.head,
            target_M,
            temperature,
            entropy=entropy,
            gradient=gradient,
            entropy_gradient=gradient and entropy_gradient,
            softcap=s.logit_softcap or None,
            scale=s.logit_scale,
        )
        if gradient:
            ctx.save_for_backward(h, stats, u, u_entropy, source_M)
            ctx.policy, ctx.tokens = policy, hidden_TH.shape[0]
        if entropies is not None and u_entropy is None:
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp_M: Tensor, dentropy_M: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h, stats, u, u_entropy, source = ctx.saved_tensors
        du = selected_logprobs_backward(dlogp_M, u, dentropy_M, u_entropy)
        dh = ctx.policy.norm.backward(du, h, stats)
        # Siblings share the hidden state of their prompt's last token: sum in the wide dtype, round once.
        wide = torch.zeros(ctx.tokens, h.shape[1], dtype=stats.dtype, device=h.device)
        return wide.index_add_(0, source, dh.to(stats.dtype)).to(h.dtype), *([None] * 6)
