"""Which implementation of an operation runs: the Triton kernel, or the torch reference that it is proved against.

COVEY_KERNELS=auto (default) takes Triton on NVIDIA and AMD GPUs and torch elsewhere; `triton` insists on it (on a
CPU too, if TRITON_INTERPRET=1 was set before the first import); `reference` takes torch everywhere.
"""

import logging
import os
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)

CHOICES = ("auto", "triton", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (7, 5)  # compute capability; Triton compiles for nothing older


def use_triton(x: Tensor, kernel: str, unless: str = "") -> bool:
    """True if `kernel` shall run as Triton code on x's device and dtype.

    unless: why the kernel cannot take these arguments, empty if it can. Falling back on a GPU warns once for every
    kernel and reason. Raises ValueError if COVEY_KERNELS says something else than CHOICES.
    """
    choice = os.environ.get("COVEY_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"COVEY_KERNELS={choice}: one of {', '.join(CHOICES)}")
    if choice == "reference" or (choice == "auto" and not x.is_cuda):
        return False
    reason = unless or _obstacle(x.device, x.dtype)
    if reason:
        _warn(kernel, reason)
    return not reason


def insists_on_triton() -> bool:
    """True if COVEY_KERNELS=triton: kernels run also where they are not the default, such as those not measured yet."""
    return os.environ.get("COVEY_KERNELS") == "triton"


def interpreted() -> bool:
    """True if Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why no Triton kernel can run on such tensors; empty if it can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if interpreted():
        return "Triton's interpreter has no bfloat16 arithmetic" if dtype == torch.bfloat16 else ""
    if device.type != "cuda":
        return (
            f"Triton has no {device.type} backend here; TRITON_INTERPRET=1 runs its kernels on a CPU, slowly"
        )
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda and capability < OLDEST:
        return f"compute capability {capability[0]}.{capability[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    if dtype not in DTYPES:
        return f"{str(dtype)[6:]} tensors"
    return ""


@cache
def _warn(kernel: str, reason: str) -> None:
    log.warning("%s: the torch reference runs instead of the Triton kernel (%s)", kernel, reason)
