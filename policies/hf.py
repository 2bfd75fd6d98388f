"""HFPolicy: any causal language model of transformers, for what covey's own decoder does not cover.

Slower than the decoder (autograd keeps what the formulas would not), with the same seams. policies/hf_load.py loads it.

Axes: T tokens of a packed batch, M scored positions, R rows of a padded batch, L their length, H hidden size,
V vocabulary.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.kernels.attention import Kind, attention_plan, pick_kind
from covey.policies import hf_attention
from covey.policies.hf_head import Head, logprobs_of_logits
from covey.policies.hf_parameters import FlatParameters
from covey.policies.hf_save import load_whole, save_whole
from covey.policies.locate import ModelError
from covey.policies.policy import Batch, Scored

log = logging.getLogger(__name__)
# How far two ways to compute the same may be apart, relative to its size, by bytes of the dtype (some models compute
# parts in 32 bit whatever it is). Rounding in 16 bit gives hidden states about 0.01 in deep models; a token that sees
# what it should not, or another position, gives far more.
LAYOUT_TOLERANCE = {2: 0.05, 4: 1e-3, 8: 1e-4}
HEAD_TOLERANCE = {2: 0.01, 4: 1e-5, 8: 1e-5}
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # of a configuration's layer_types
UNLIMITED = 1 << 30  # positions of a model that knows no limit


class HFPolicy:
    """Policy (see policies/policy.py) on a transformers model.

    model: the causal language model, its adapter (if any) inside.
    peft: PEFT's wrapper around it, None for full finetuning.
    parameters: what is trained, by its name in the checkpoint.
    aliases: further names in the checkpoint, of weights that are tied to one of those: {alias: name}.
    frozen_copy: keep a copy of what is trained for the reference policy: of 16-bit weights on a GPU in host memory.
        Without it the reference is the model without its adapter, and full finetuning has none.
    tokens_per_pass: of the padded batches that models get which cannot be packed.

    A batch is packed where that gives what separate rows give, which is tried once, on a few tokens; see `packed`.
    """

    def __init__(
        self,
        model: Any,
        peft: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        aliases: Mapping[str, str],
        folder: Path,
        frozen_copy: bool,
        tokens_per_pass: int = 8192,
    ):
        self.lm, self.peft, self.aliases, self.folder = model, peft, aliases, folder
        self.config = model.config.get_text_config()
        self.tokens_per_pass, self.max_positions = tokens_per_pass, max_positions(self.config)
        # Whether there are layers that see earlier tokens through a state.
        others = set(getattr(self.config, "layer_types", None) or ()) - ATTENTION
        self.recurrent = bool(others) or getattr(model, "_is_stateful", False)
        self.dtype, self.device = model.dtype, model.device
        self._decoder = model.get_decoder()
        if self._decoder is model:  # transformers has not found it
            self._decoder = getattr(model, "model", model)
        self.rank: int | None = None if peft is None else peft.peft_config["default"].r
        self.flat = FlatParameters(parameters)
        self._reference = self.flat.snapshot() if frozen_copy else None
        self._own_attention = model.config._attn_implementation
        self._training = [m for m in model.modules() if m.training]  # as hf_load.py has set them
        with torch.no_grad():
            self.head = self._find_head()
            self.packed = self._packs()

    # What the trainer uses

    def logprobs(self, batch: Batch, *, entropy: bool = False, entropy_gradient: bool = False) -> Scored:
        """Log-probs [M] in float32 (float64 for a float64 policy), differentiable; entropies [M] too if asked."""
        self.flat.refresh()
        state_MX = self._packed_states(batch) if self.packed else self._row_states(batch)
        wanted = {"entropy": entropy, "entropy_gradient": entropy and entropy_gradient}
        if self.head is None:
            return Scored(*logprobs_of_logits(state_MX, batch.target, batch.temperature, **wanted))
        return Scored(*self.head.logprobs(state_MX, batch.target, batch.temperature, **wanted))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Adapter off, or the weights as they were when they were loaded if a copy of them is kept."""
        if self._reference is not None:
            with torch.no_grad(), self.flat.swapped(self._reference):
                yield
        elif self.peft is not None:
            with torch.no_grad(), self.peft.disable_adapter():
                yield
        else:
            raise ModelError("no copy of the weights is kept as the reference (open_policy: reference)")

    def weights(self) -> Mapping[str, Tensor]:
        return self.flat.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights with the names of `weights()` in."""
        self.flat.load(weights)

    def parameters(self) -> list[Tensor]:
        """What is trained, as few flat tensors."""
        return self.flat.masters

    def zero_grad(self) -> None:
        self.flat.zero_grad()

    def refresh(self) -> None:
        """Brings what is computed with up to date with the masters."""
        self.flat.refresh()

    # Saving and loading

    def save_adapter(self, folder: Path | str, base: str | None = None) -> None:
        """Write what is trained: an adapter in PEFT's format, or the whole model in transformers', with its tokenizer.

        base: what an adapter calls its base model (default: the model's folder). Adapters are in float32, models in the
        dtype that is computed with.
        """
        folder = Path(folder)
        self.flat.refresh()
        if self.peft is None:
            save_whole(self.lm, self.folder, folder)
            return
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: view.to("cpu", torch.float32).contiguous() for name, view in self.weights().items()}
        tensors |= {alias: tensors[name].clone() for alias, name in self.aliases.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = self.peft.peft_config["default"]
        config.base_model_name_or_path, config.inference_mode = base or str(self.folder), True
        config.save_pretrained(str(folder))
        config.inference_mode = False

    def load_saved(self, folder: Path | str) -> None:
        """Take the weights that `save_adapter` wrote."""
        from safetensors.torch import load_file

        if self.peft is None:
            self.load_weights(load_whole(Path(folder)))
        else:
            saved = load_file(Path(folder) / "adapter_model.safetensors")
            self.load_weights({name: weight for name, weight in saved.items() if name not in self.aliases})

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the saved weights to go on bit by bit: masters that are finer than those."""
        return {"masters": list(self.parameters())} if self.peft is None and self.flat.has_shadow else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for mine, saved in zip(self.parameters(), state.get("masters", []), strict="masters" in state):
            mine.detach().copy_(saved)

    # What the sampler uses

    @contextmanager
    def generating(self) -> Iterator[Any]:
        """The model for transformers' `generate`, without gradient: with its own attention, and without the settings
        that its folder has for sampling."""
        self.flat.refresh()
        for module in self._training:
            module.training = False
        self.lm.set_attn_implementation(self._own_attention)
        settings, self.lm.generation_config = self.lm.generation_config, type(self.lm.generation_config)()
        try:
            with torch.no_grad():
                yield self.lm
        finally:
            self.lm.generation_config = settings
            for module in self._training:
                module.training = True
            self._set_packed(self.packed)

    # One pass

    def _hidden(self, **inputs: Any) -> Tensor:
        """Last hidden states [R, L, H]."""
        return self._decoder(**inputs, use_cache=False).last_hidden_state

    def _logits(self, **inputs: Any) -> Tensor:
        """The model's own logits [R, L, V]."""
        return self.lm(**inputs, use_cache=False).logits

    def _states(self, **inputs: Any) -> Tensor:
        """What log-probs are made of: hidden states, or logits where the head is more than a matrix."""
        return self._logits(**inputs) if self.head is None else self._hidden(**inputs)

    def _packed_states(self, batch: Batch) -> Tensor:
        """What `_states` gives at the scored positions, from one row of all tokens: a prompt is computed once."""
        plan = attention_plan(batch.segments, self.device, kind=self._attention_kind())
        ids, positions = batch.input_ids[None], batch.positions[None].long()
        return self._states(input_ids=ids, position_ids=positions, covey_plan=plan)[0, batch.source]

    def _row_states(self, batch: Batch) -> Tensor:
        """The same from padded batches with a row for every segment that predicts something, its prefix before it.

        What fills a row up stands at its end, where nothing that counts sees it: there is no need for a mask.
        """
        segments, source_M = batch.segments.tolist(), batch.source.tolist()
        starts = [segment[0] for segment in segments]
        scored: dict[int, list[int]] = {}  # which of the M positions each segment predicts
        for m, token in enumerate(source_M):
            scored.setdefault(bisect_right(starts, token) - 1, []).append(m)
        rows = sorted(scored, key=lambda s: _length(segments[s]))
        order, states = [], []
        while rows:
            widest = _length(segments[rows[-1]])
            cut = max(0, len(rows) - max(1, self.tokens_per_pass // widest))
            part, rows = rows[cut:], rows[:cut]
            index_RL = torch.zeros(len(part), widest, dtype=torch.int64)
            at = []
            for r, s in enumerate(part):
                start, end, prefix_start, prefix_end = segments[s]
                index_RL[r, : _length(segments[s])] = torch.cat(
                    (torch.arange(prefix_start, prefix_end), torch.arange(start, end))
                )
                at += [(r, source_M[m] - start + prefix_end - prefix_start) for m in scored[s]]
                order += scored[s]
            out = self._states(input_ids=batch.input_ids[index_RL.to(self.device)])
            row_at = torch.tensor(at, device=out.device)
            states.append(out[row_at[:, 0], row_at[:, 1]])
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(states)[back.to(self.device)]

    # What is found out about the model once

    def _find_head(self) -> Head | None:
        """The head by its weight, scale and soft-cap, if these give the model's own logits for some tokens."""
        module = self.lm.get_output_embeddings()
        if hasattr(module, "modules_to_save"):  # PEFT's wrapper around a trained copy
            module = module.modules_to_save["default"]
        if self._decoder is self.lm or type(module) is not torch.nn.Linear or module.bias is not None:
            return None
        c = self.config
        scale = getattr(c, "logit_scale", None) or 1 / (getattr(c, "logits_scaling", None) or 1)
        softcap = getattr(c, "final_logit_softcapping", None) or getattr(c, "logits_soft_cap", None)
        head = Head(module.weight, float(scale), softcap)
        ids = _some_tokens(5, self.config.vocab_size).to(self.device)[None]
        own, mine = self._logits(input_ids=ids)[0], head.logits(self._hidden(input_ids=ids)[0])
        if not _close(mine, own.to(mine.dtype), HEAD_TOLERANCE[self.dtype.itemsize]):
            log.info("the head of %s is more than a matrix: its own logits are used", type(self.lm).__name__)
            return None
        return head

    def _packs(self) -> bool:
        """Whether a packed row gives the hidden states of separate rows. Leaves the attention as it is to be used."""
        why = self._unpackable()
        if why is None:
            batch = _probe(self.config.vocab_size, self.device)
            separate = self._row_states(batch)
            try:
                self._set_packed(True)
                if _close(self._packed_states(batch), separate, LAYOUT_TOLERANCE[self.dtype.itemsize]):
                    return True
                why = "a packed row gives other hidden states"
            except (hf_attention.UnsupportedAttention, ValueError, TypeError, RuntimeError) as error:
                why = f"packed attention is not possible ({error})"
        self._set_packed(False)
        log.info("%s is trained in padded rows, not packed: %s", type(self.lm).__name__, why)
        return False

    def _unpackable(self) -> str | None:
        """What a few tokens would not show."""
        if self.recurrent:
            return "it has layers with a state, which packed sequences would share"
        if getattr(self.config, "attention_chunk_size", None):
            return "its attention is chunked"
        if not self.lm.is_backend_compatible():
            return "its attention is its own"
        return None

    def _set_packed(self, packed: bool) -> None:
        if packed:
            hf_attention.register()
        self.lm.set_attn_implementation(hf_attention.NAME if packed else self._own_attention)

    def _attention_kind(self) -> Kind:
        c = self.config
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        latent = [getattr(c, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope")]
        dim = max(dim, sum(latent))
        window, softcap = getattr(c, "sliding_window", None), getattr(c, "attn_logit_softcapping", None)
        return pick_kind(self.device, self.dtype, dim, softcap or 0.0, window or 0)


def max_positions(config: Any) -> int:
    """Positions of the model of a text configuration."""
    sizes = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((size for size in sizes if size), UNLIMITED)


def _length(segment: list[int]) -> int:
    start, end, prefix_start, prefix_end = segment
    return end - start + prefix_end - prefix_start


def _close(mine_NX: Tensor, other_NX: Tensor, tolerance: float) -> bool:
    """Whether two ways to the same rows agree but for rounding, for most rows: a router that rounds may flip in one."""
    apart_N = (mine_NX - other_NX).float().norm(dim=-1) / other_NX.float().norm(dim=-1).clamp_min(1e-12)
    return bool(apart_N.median() <= tolerance)


def _some_tokens(count: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(0))


def _probe(vocab: int, device: torch.device) -> Batch:
    """A document, and a prompt with two completions, every position scored."""
    segments = [(0, 7, 0, 0), (7, 12, 0, 0), (12, 16, 7, 12), (16, 21, 7, 12)]
    positions = torch.tensor([*range(7), *range(5), *range(5, 9), *range(5, 10)], dtype=torch.int32)
    count = len(positions)
    zeros = torch.zeros(count, device=device)
    return Batch(
        input_ids=_some_tokens(count, vocab).to(device),
        positions=positions.to(device),
        segments=torch.tensor(segments, dtype=torch.int32),
        source=torch.arange(count, device=device),
        target=zeros.long(),
        row=zeros.int(),
        advantage=zeros,
        weight=zeros,
    )
