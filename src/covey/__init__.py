"""covey: GRPO and SFT with 4-bit LoRA on the GPU you have. `covey.grpo`, `covey.sft`, `covey.load_policy`."""
