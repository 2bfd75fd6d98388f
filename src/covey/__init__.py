"""covey: GRPO, SFT and DPO with 4-bit LoRA on the GPU you have.

`covey.grpo`, `covey.sft`, `covey.dpo`, `covey.export`, `covey.load_policy`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rl.api import dpo, export, grpo, load_policy, sft

__all__ = ["dpo", "export", "grpo", "load_policy", "sft"]


def __getattr__(name: str) -> Any:
    """torch is imported when the first of these is asked for, not with the package."""
    if name in __all__:
        return getattr(import_module("covey.rl.api"), name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
