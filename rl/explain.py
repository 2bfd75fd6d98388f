"""The objective of a run in symbols and words, with its denominator: printed when a run starts and by --explain."""

from covey.rl.objective_config import LOSS_KEYS, AdvantageKind, Aggregation, Loss, ObjectiveSection

ADVANTAGES: dict[AdvantageKind, str] = {
    "group": "(R - mean of the group) / (std of the group + eps), std {std} (GRPO, arXiv 2402.03300)",
    "batch": "(R - mean of the group) / (std of all rewards of the step + eps), std {std} (arXiv 2508.08221)",
    "none": "R - mean of the group, not divided by the std (Dr. GRPO, arXiv 2503.20783)",
    "rloo": "R - mean of the other rewards of the group (RLOO, arXiv 2402.14740)",
    "reinforce++": "R - its mean over all trained tokens of the step, divided by their std "
    "(REINFORCE++, arXiv 2501.03262)",
    "reinforce++-baseline": "R - mean of the group, divided by the std over all trained tokens of the step "
    "(REINFORCE++-baseline, arXiv 2501.03262)",
    "maxrl": "(R - mean of the group) / mean of the group, 0 if that mean is not positive (MaxRL, arXiv 2602.02710)",
    "gdpo": "sum over reward functions of weight * (R_k - mean of the group) / (std of the group + eps), "
    "divided by the std of all such sums, std {std} (GDPO, arXiv 2601.05242)",
    "opo": "R - mean of the group with completions weighted by their lengths (OPO, arXiv 2505.23585)",
    "passk": "best of the group - second best, for the best completion; 0 for the others (arXiv 2503.19595)",
}

LOSSES: dict[Loss, str] = {
    "grpo": "min(r A, clip(r, {low}, {high}) A)",
    "gspo": "min(s A, clip(s, {low}, {high}) A)",
    "luspo": "T min(s A, clip(s, {low}, {high}) A)",
    "gmpo": "A exp(mean over the completion of d)",
    "cispo": "A sg(min(r, {ratio_cap})) logp",
    "sapo": "A (4 / tau) sigmoid(tau (r - 1))",
    "vespo": "A sg(exp(lam + k log W - lam W)) logp",
    "dppo_tv": "[inside] A sg(min(r, {ratio_cap})) logp",
    "dppo_kl": "[inside] A sg(min(r, {ratio_cap})) logp",
}

WHERE: dict[Loss, tuple[str, str]] = {
    "gspo": ("s", "exp(mean over the completion's tokens of log r)"),
    "luspo": ("s, T", "exp(mean over the completion's tokens of log r), and how many they are"),
    "gmpo": ("d", "log r, at most {clip_high} where A > 0, at least -{clip_low} where A < 0"),
    "sapo": ("tau", "{tau_positive} where A >= 0, else {tau_negative}"),
    "vespo": (
        "W",
        "probability of the completion, new / sampler; (k, lam) = {gamma_positive} where A >= 0, else {gamma_negative}",
    ),
    "dppo_tv": (
        "inside",
        "not: A moves the probability away, and it is more than {max_divergence} off the old one",
    ),
    "dppo_kl": (
        "inside",
        "not: A moves the probability away, and its binary KL from the old one is above {max_divergence}",
    ),
}

DENOMINATORS: dict[Aggregation, str] = {
    "token": "N_t: all trained tokens, every token counts the same (DAPO)",
    "sequence": "N_s * T: completions times own trained tokens, every completion counts the same (GRPO)",
    "constant": "N_s * {max_new_tokens}: completions times max_new_tokens (Dr. GRPO)",
    "prompt": "N_p * T_p: prompts times trained tokens of the prompt's completions, every prompt counts the same",
}

LEVELS = {
    "token": "of the token",
    "sequence": "of the completion (product over its tokens)",
    "geometric": "of the completion (geometric mean over its tokens)",
}

SFT_OBJECTIVE = """\
minimise  L = sum over target tokens of  [-logp] / D
  D    N_t: all target tokens, every token counts the same (cross-entropy); counted once per optimiser step"""


def explain(section: ObjectiveSection, *, max_new_tokens: int) -> str:
    """What a run minimises. Every bound, default and denominator of the section is in it as a number."""
    o = section
    numbers = {key: o.option(key) for key in LOSS_KEYS if o.has(key)}
    if "clip_low" in numbers:
        numbers |= {"low": f"{1 - numbers['clip_low']:g}", "high": f"{1 + numbers['clip_high']:g}"}
    term = "-" + ("c " if o.correction != "none" else "") + LOSSES[o.loss].format(**numbers)
    lines = [
        f"D      {DENOMINATORS[o.denominator].format(max_new_tokens=max_new_tokens)}; counted once per optimiser step"
    ]
    eps = ", eps 1e-06" if o.advantage in ("group", "batch", "gdpo") else ""
    lines.append(f"A      {ADVANTAGES[o.advantage].format(std=o.std or 'unbiased')}{eps}")
    once = " (1 at the only update, so nothing is clipped)" if o.updates == 1 else ""
    lines.append(f"r      exp(logp - logp before the first update){once}")
    if o.loss in WHERE:
        name, words = WHERE[o.loss]
        lines.append(f"{name:<6} {words.format(**numbers)}")
    if o.loss == "grpo" and o.option("ratio_cap") is not None:
        lines.append(f"       where A < 0 the term is at most {o.option('ratio_cap'):g} |A| (two-sided clip)")
    if "sg(" in term:
        lines.append("sg     stops the gradient")
    lines.append(f"c      {_correction(o)}")
    kl_term, kl_line = _kl(o)
    lines.append(f"KL     {kl_line}")
    entropy_term = ""
    if o.has_entropy_term:
        entropy_term = " - b H"
        lines.append(f"b, H   {_entropy(o)}")
    if o.top_entropy < 1:
        lines.append(f"       A is 0 for all but the {o.top_entropy:.0%} of tokens with the highest entropy")
    lines.append(_left_out(o))
    if o.updates > 1:
        lines.append(
            f"{o.epochs} x {o.updates_per_rollout} optimiser steps per batch of rollouts, each with its own D"
        )
    head = f"minimise  L = sum over trained tokens of  [{term}{kl_term}{entropy_term}] / D"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _correction(o: ObjectiveSection) -> str:
    if o.correction == "none":
        inside = "; the sampler is corrected for inside W" if o.loss == "vespo" else ""
        return f"none: the sampler's log-probs are taken for the trainer's{inside}"
    low, high = o.correction_bounds
    what = f"trainer / sampler probability {LEVELS[o.correction_level or 'token']}"
    bound = f"at most {high:g}" if o.correction == "truncate" else f"0 outside [{low:g}, {high:g}]"
    return f"{what}, {bound}; no gradient"


def _kl(o: ObjectiveSection) -> tuple[str, str]:
    if o.kl_place == "none":
        return "", "none (beta 0): the reference is never computed"
    formulas = {"k1": "k", "k2": "k^2 / 2", "k3": "exp(-k) - 1 + k"}
    value = f"{o.kl_estimator} = {formulas[o.kl_estimator]}, where k = logp - logp of the reference"
    if o.kl_place == "reward":
        per = "from the token on (return)" if o.advantage == "reinforce++" else "over its tokens"
        return (
            "",
            f"in the reward: R loses {o.beta:g} times the sum {per} of {value}, before the first update",
        )
    ratio = "r " if o.kl_live_ratio else ""
    return f" + {o.beta:g} {ratio}{o.kl_estimator}", value


def _entropy(o: ObjectiveSection) -> str:
    if o.entropy_target is None:
        return f"{o.entropy_bonus:g}, and the entropy of the policy at the token"
    return (
        f"b starts at {o.entropy_bonus:g} and moves by {o.entropy_step_size:g} per update towards a mean entropy H of "
        f"{o.entropy_target:g} nats; 0 while H is above it"
    )


def _left_out(o: ObjectiveSection) -> str:
    rows = ["completions that no reward function scored"]
    if o.truncated == "mask":
        rows.append("completions that max_new_tokens cut off")
    if not o.count_zero_advantage:
        rows.append("completions with advantage 0")
    return f"left out of L and of its denominator: {', '.join(rows)}"
