"""The norms of a decoder with their frozen weights. Both kinds are called alike, so that a layer need not know which.

Axes: T tokens, H hidden size (of the norms of q and k: all heads together).
"""

from dataclasses import dataclass

from torch import Tensor

from covey.kernels.layernorm import add_layernorm, layernorm, layernorm_backward
from covey.kernels.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_backward


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square (kernels/rmsnorm.py)."""

    weight: Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x_TH: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y [T, H], in `out` if given, and the statistics that `backward` reads."""
        return rmsnorm(x_TH, self.weight, self.eps, out=out, plus_one=self.plus_one)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """h = x + residual, written over x, and the statistics of h; its norm goes into `out`."""
        options = {"out": out, "plus_one": self.plus_one, "inplace": True}
        h, _, stats = add_rmsnorm(x_TH, residual_TH, self.weight, self.eps, **options)
        return h, stats

    def backward(
        self,
        dy_TH: Tensor,
        x_TH: Tensor,
        stats: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """dx [T, H] + residual."""
        return rmsnorm_backward(dy_TH, x_TH, self.weight, stats, residual, self.plus_one, out)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Mean and variance (kernels/layernorm.py). Its methods are those of RMSNorm."""

    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x_TH: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return layernorm(x_TH, self.weight, self.bias, self.eps, out=out)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weight, self.bias
        h, _, stats = add_layernorm(x_TH, residual_TH, *weights, self.eps, out=out, inplace=True)
        return h, stats

    def backward(
        self,
        dy_TH: Tensor,
        x_TH: Tensor,
        stats: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return layernorm_backward(dy_TH, x_TH, self.weight, stats, residual, out)


Norm = RMSNorm | LayerNorm
