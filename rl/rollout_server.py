"""`covey rollout-server MODEL`: vLLM as a server that training can use. Heavy imports wait."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from covey.rl.commands import Debug, sentences
from covey.rl.config import GrpoConfig
from covey.rl.config_file import load_config

HELP = """
Start a vLLM server for the sampling of covey grpo (rollout.engine: vllm-server).

MODEL is the recipe of the run (a .yaml file), or what model.path may be, with the keys that matter to the server:
lora.rank, model.method, model.dtype, data.max_prompt_tokens, rollout.max_new_tokens, rollout.max_rows. What follows --
goes to vLLM. Whoever reaches the port can replace the weights: let nobody but your own machines reach it.

\b
Examples:
  covey rollout-server my.yaml
  covey rollout-server Qwen/Qwen3-0.6B lora.rank=32 --port 8001
  covey rollout-server my.yaml -- --tensor-parallel-size 2
"""

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A recipe (.yaml), folder, hub id or .gguf file.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of a recipe.")]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines.")]
Port = Annotated[int, typer.Option(help="The port to listen on.")]
Show = Annotated[bool, typer.Option("--dry-run", help="Print the command, then stop.")]


def rollout_server(
    model: Model,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    dry_run: Show = False,
    debug: Debug = False,
) -> None:
    """The command; where all is well, vLLM takes the place of this process."""
    with sentences(debug):
        given = overrides or []
        first = next((i for i, text in enumerate(given) if text.startswith("-")), len(given))
        url = f"http://{host}:{port}"
        command, environment = serve(model, given[:first], url, host, port)
        command += given[first:]
    switches = " ".join(f"{name}={value}" for name, value in environment.items())
    typer.echo(f"{switches} {shlex.join(command)}")
    if dry_run:
        return
    typer.echo(f"Training finds it with: rollout.engine=vllm-server 'rollout.vllm.urls=[{url}]'")
    os.execve(command[0], command, {**os.environ, **environment})


def serve(
    model: str, overrides: list[str], url: str, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """The command that serves what a run with this recipe or model needs, and its environment."""
    recipe = model.endswith((".yaml", ".yml"))
    source = model if recipe else {"model": {"path": model}, "data": {"train": "none"}}
    as_server = ["rollout.engine=vllm-server", f"rollout.vllm.urls={json.dumps([url])}"]
    config = load_config(source, [*overrides, *as_server], GrpoConfig)

    import torch

    from covey.policies.load import pick_device, pick_dtype
    from covey.policies.locate import locate_model
    from covey.policies.open import choose_path
    from covey.rl.checkpoint import find_adapter, find_model
    from covey.rl.engines import serving
    from covey.rollout import vllm_versions

    section = config.model
    version = vllm_versions.installed()
    if version is None:
        raise vllm_versions.VllmError(f"vLLM is not installed: run {vllm_versions.INSTALL}")
    vllm_versions.check_version(version)
    folder = locate_model(find_model(section.path))
    adapter = None if section.adapter is None else find_adapter(Path(section.adapter).expanduser())
    options = config.lora.path_options
    route = choose_path(folder, method=section.method, adapter=adapter, context=section.context, **options)
    rank = None if section.method == "full" else config.lora.rank
    if adapter is not None:
        rank = json.loads((adapter / "adapter_config.json").read_text("utf-8"))["r"]
    device = torch.device(pick_device(section.device))
    dtype = str(pick_dtype(section.dtype, device, section.method)).removeprefix("torch.")
    needs, on_cpu = serving(config, folder, dtype, rank, route.max_positions), device.type == "cpu"
    arguments = vllm_versions.engine_arguments(needs, version, on_cpu=on_cpu)
    if config.rollout.vllm.memory is not None and not on_cpu:
        arguments["gpu_memory_utilization"] = config.rollout.vllm.memory
    return vllm_versions.serve_command(arguments, name=section.path, host=host, port=port), dict(
        vllm_versions.SERVER_ENVIRONMENT
    )
