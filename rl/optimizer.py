"""AdamW over the flat buffers of what is trained, with clipping and a learning-rate schedule.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

(Loshchilov & Hutter, algorithm 2). The gradient g is first multiplied by max_grad_norm / |g| if its global norm |g| is
larger than max_grad_norm. On a GPU one kernel does all of it (kernels/adamw.py), elsewhere torch's fused AdamW; both
keep the same state. optim.optimizer adamw8bit and paged_adamw8bit are those of bitsandbytes, which keep m and v in 8
bits each (Dettmers et al. 2021), paged in memory that moves to the host when the GPU is full; on a GPU they let the
updated p decay, not the old one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.kernels.adamw import Buffer, adamw, uses_kernel
from covey.rl.config import OptimSection

# Elements whose squares are summed at a time: the float64 copy of a chunk takes 32 MiB, that of an adapter
# could take more than is free.
_NORM_CHUNK = 1 << 22


def learning_rate(section: OptimSection, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`.

    Linear warm-up lr (step + 1) / warmup_steps, so that the first step already learns; then with
    x = (step - warmup_steps) / (total - warmup_steps) from lr at x = 0 towards lr * min_lr_ratio at x = 1,
    which is the end of the last step: no step is wasted on a learning rate of 0.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    x = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    left = 1.0 - x if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * left)


def global_norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all elements together, summed in float64."""
    parts = [chunk.double().square().sum() for t in tensors for chunk in t.reshape(-1).split(_NORM_CHUNK)]
    return math.sqrt(torch.stack([part.to(parts[0].device) for part in parts]).sum().item())


def _make_adamw(params: Sequence[Tensor], section: OptimSection) -> Any:
    options = {
        "lr": section.lr,
        "betas": (section.beta1, section.beta2),
        "eps": section.eps,
        "weight_decay": section.weight_decay,
    }
    if section.optimizer == "adamw":
        fused = all(p.device.type in ("cpu", "cuda") for p in params)
        return torch.optim.AdamW(params, fused=fused, **options)
    import bitsandbytes

    key, operator = params[0].device.type.upper(), "bitsandbytes::optimizer_update_8bit_blockwise"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
        raise ValueError(
            f"optim.optimizer: bitsandbytes {bitsandbytes.__version__} has no {section.optimizer} on {key}: use adamw"
        )
    kind = {"adamw8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw8bit": bitsandbytes.optim.PagedAdamW8bit}
    return kind[section.optimizer](params, **options)


class FlatAdamW:
    """AdamW on flat master buffers whose gradients are accumulated in place.

    params: leaf tensors, float32 (or float64); each gets a `grad` of zeros that lives as long as it does.
    shadow: for each of params a copy in another dtype, of the same shape, that every update rewrites.
    """

    def __init__(
        self, params: Sequence[Tensor], section: OptimSection, shadow: Sequence[Tensor] | None = None
    ) -> None:
        assert params and all(p.is_leaf and p.dtype in (torch.float32, torch.float64) for p in params)
        assert shadow is None or [s.shape for s in shadow] == [p.shape for p in params]
        self.params = list(params)
        self.shadow: Sequence[Tensor | None] = [None] * len(self.params) if shadow is None else list(shadow)
        self.section = section
        self.skipped = 0  # steps that were left out because a gradient was not finite
        self.updates = 0  # calls of `step` in this process: tells whether weights may have changed
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.eight_bit = section.optimizer != "adamw"
        self._adamw: Any = _make_adamw(self.params, section)

    def zero_grad(self) -> None:
        """Zeros in the same buffers: the policy's backward adds to them through views."""
        for grad in self._grads():
            grad.zero_()

    def step(self, step_index: int, total_steps: int, *, zero_grad: bool = False) -> dict[str, float]:
        """Clip, update, and say what was done. `grad/norm` is that before clipping.

        A gradient that is not finite changes neither weights nor moments; `grad/skipped` counts these steps.
        zero_grad: as if zero_grad() were called afterwards; on a GPU, in the same pass over the memory.
        """
        rate = learning_rate(self.section, step_index, total_steps)
        self.updates += 1
        if not self.eight_bit and uses_kernel(self.params, self.shadow):
            norm = self._step_kernel(rate, zero_grad)
        else:
            norm = self._step_torch(rate)
            if zero_grad:
                self.zero_grad()
        self.skipped += not math.isfinite(norm)
        return {"grad/norm": norm, "grad/skipped": self.skipped, "optim/lr": rate}

    def _step_kernel(self, rate: float, zero_grad: bool) -> float:
        s, buffers = self.section, []
        for p, grad, shadow in zip(self.params, self._grads(), self.shadow, strict=True):
            state = self._adamw.state[p]
            if not state:  # as torch's AdamW begins
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            buffers.append(
                Buffer(p.detach(), grad, state["exp_avg"], state["exp_avg_sq"], state["step"], shadow)
            )
        norm = adamw(
            buffers,
            lr=rate,
            beta1=s.beta1,
            beta2=s.beta2,
            eps=s.eps,
            weight_decay=s.weight_decay,
            max_grad_norm=s.max_grad_norm,
            zero_grad=zero_grad,
        )
        return norm.item()  # the first time that this waits for the GPU

    def _step_torch(self, rate: float) -> float:
        grads = self._grads()
        norm = global_norm(grads)
        if not math.isfinite(norm):
            return norm
        if 0.0 < self.section.max_grad_norm < norm:
            for grad in grads:
                grad.mul_(self.section.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for p, shadow in zip(self.params, self.shadow, strict=True):
            if shadow is not None:
                shadow.copy_(p.detach())
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts for a checkpoint; the weights themselves are the policy's to save."""
        state: dict[str, Any] = {"skipped": self.skipped}
        for i, p in enumerate(self.params):
            for name, tensor in self._adamw.state[p].items():
                state[f"{i}/{name}"] = tensor
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the moments are those of other parameters."""
        saved = [dict[str, Any]() for _ in self.params]
        for name, value in state.items():
            if name != "skipped":
                index, key = name.split("/")
                saved.extend({} for _ in range(int(index) + 1 - len(saved)))
                saved[int(index)][key] = value
        first_moment = "state1" if self.eight_bit else "exp_avg"
        if any(moments and first_moment not in moments for moments in saved):
            raise ValueError(
                "the checkpoint's optimiser is another one: resume with the optim.optimizer of the run"
            )
        shapes = [tuple(moments[first_moment].shape) for moments in saved if moments]
        if shapes and shapes != [tuple(p.shape) for p in self.params]:
            raise ValueError(
                f"the checkpoint's optimiser is for weights of shape {shapes}, these are "
                f"{[tuple(p.shape) for p in self.params]}: resume with the lora settings of the run"
            )
        self.skipped = int(state["skipped"])
        if self.eight_bit:
            self._load_eight_bit(saved)
            return
        # AdamW keeps its step count beside the weights only when it is fused. Copies, so that the caller's
        # tensors stay as they are.
        fused = self._adamw.param_groups[0]["fused"]
        for p, moments in zip(self.params, saved, strict=True):
            self._adamw.state[p] = {
                key: t.to("cpu" if key == "step" and not fused else p.device, copy=True)
                for key, t in moments.items()
            }

    def _load_eight_bit(self, saved: Sequence[dict[str, Any]]) -> None:
        """Into buffers that bitsandbytes makes, which may be paged."""
        for i, (p, moments) in enumerate(zip(self.params, saved, strict=True)):
            if not moments:
                self._adamw.state.pop(p, None)
                continue
            self._adamw.init_state(self._adamw.param_groups[0], p, 0, i)
            state = self._adamw.state[p]
            for key, value in moments.items():
                if isinstance(value, Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value

    def _grads(self) -> list[Tensor]:
        grads = [p.grad for p in self.params if p.grad is not None]
        assert len(grads) == len(self.params), "a gradient buffer was set to None; use FlatAdamW.zero_grad"
        return grads
