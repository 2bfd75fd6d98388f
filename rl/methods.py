"""What changes where all weights are trained instead of an adapter (docs/methods.md)."""

from covey.rl.config import DpoConfig, GrpoConfig, LoraSection, SftConfig

FULL_LR = 5e-5  # the highest learning rate that raises no eyebrows there


def full_warnings(config: GrpoConfig | SftConfig | DpoConfig) -> list[str]:
    """Sentences about settings that suit an adapter only, for model.method full."""
    warnings = []
    if config.optim.lr > FULL_LR:
        warnings.append(
            f"optim.lr is {config.optim.lr:g}, which is usual for an adapter; where all weights are trained, 1e-5 or "
            "less is"
        )
    if config.lora != LoraSection():
        warnings.append("model.method is full, which trains all weights: the section lora has no effect")
    return warnings
