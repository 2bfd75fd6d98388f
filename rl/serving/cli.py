"""`covey chat` and `covey serve` on the command line. Heavy imports wait until they run."""

import ipaddress
import socket
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from covey.rl.commands import Debug, sentences

CHAT_HELP = """
Talk to a model in the terminal.

MODEL is a run (its best checkpoint where evaluations are compared, else its last), a checkpoint, an adapter in PEFT's
format, or what model.path may be. A run's method, chat template and system message are used again.

\b
Examples:
  covey chat runs/long
  covey chat Qwen/Qwen3-0.6B model.method=qlora 'model.template_options={enable_thinking: false}'
  covey chat runs/long 'data.system=Answer in one word.' --temperature 0
"""

SERVE_HELP = """
Serve a model over HTTP as OpenAI does: /v1/models, /v1/completions, /v1/chat/completions, with streaming.

MODEL is as for covey chat. It is for trying a model, or for a judge; docs/serve.md says what suits production.
Other machines can reach it only with --host and an API key.

\b
Examples:
  covey serve runs/long
  covey serve Qwen/Qwen3-0.6B --port 8001 --max-new-tokens 4096
  COVEY_API_KEY=... covey serve runs/long --host 0.0.0.0
"""


class ServeError(ValueError):
    """A server that cannot be started as it was asked for."""


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run, checkpoint, adapter or model.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of a recipe: model, data.system, data.chat."),
]
Base = Annotated[str | None, typer.Option(metavar="MODEL", help="Another place of an adapter's base model.")]
NewTokens = Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(min=1, help="The most tokens of a prompt; default: what the model's positions allow."),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Draw from the most probable tokens that make up this share.")]
Seed = Annotated[int, typer.Option(help="Of the draws: the same seed and input give the same answer.")]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]
Key = Annotated[
    str | None, typer.Option(envvar="COVEY_API_KEY", show_envvar=True, help="What clients have to bear.")
]
MaxRows = Annotated[int, typer.Option(min=1, help="Completions that are sampled at a time.")]


def chat(
    model: Model,
    overrides: Overrides = None,
    base: Base = None,
    max_new_tokens: NewTokens = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    with sentences(debug):
        from covey.rl.serving.chat import Chat
        from covey.rl.serving.model import Speaker
        from covey.rl.terminal import print_anything
        from covey.rollout.engine import Sampling
        from covey.rollout.sampling import check_sampling

        if find_spec("readline"):
            import readline  # noqa: F401  gives `input` its line editing
        sampling = Sampling(max_new_tokens, temperature, top_p, seed=seed)
        check_sampling(sampling)
        print_anything()

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        Chat(Speaker(model, overrides or [], base=base, max_rows=1), sampling, input, write).run()


def serve(
    model: Model,
    overrides: Overrides = None,
    base: Base = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Key = None,
    max_new_tokens: NewTokens = 2048,
    max_prompt_tokens: PromptTokens = None,
    max_rows: MaxRows = 64,
    debug: Debug = False,
) -> None:
    with sentences(debug):
        _check_server(host, api_key)
        listener = _bind(host, port)

        import uvicorn

        from covey.rl.serving.model import Speaker
        from covey.rl.serving.requests import Limits
        from covey.rl.serving.server import make_app

        speaker = Speaker(model, overrides or [], base=base, max_rows=max_rows)
        limits = Limits(max_prompt_tokens or speaker.max_positions, max_new_tokens)
        app = make_app(speaker, limits, api_key=api_key, max_rows=max_rows)
        typer.echo(speaker.describe())
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{shown}:{listener.getsockname()[1]}/v1 (Ctrl-C stops it)")
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(settings).run(sockets=[listener])


def _check_server(host: str, api_key: str | None) -> None:
    """Before anything heavy: ServeError if the server may not or cannot be started."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ServeError(f"covey serve needs {' and '.join(missing)}: run pip install 'covey[serve]'")
    if api_key is not None and not (api_key.strip() and api_key.isascii()):
        raise ServeError("the API key is empty or has other characters than ASCII; choose another one")
    if api_key is None and not _is_loopback(host):
        raise ServeError(
            f"--host {host} lets other machines use the model: set the environment variable COVEY_API_KEY to a key "
            "that they must have, or leave --host out"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    """The port, taken before the model is loaded; nobody is answered yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ServeError(
            f"cannot listen on {host}, port {port} ({reason}); choose another --port or --host"
        ) from error
    return listener
