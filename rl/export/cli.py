"""`covey export` on the command line. Heavy imports wait until it runs."""

from typing import Annotated, Literal

import typer

from covey.rl.commands import Debug, sentences

HELP = """
Write a trained model for others to load: transformers, PEFT, vLLM, llama.cpp, Ollama.

SOURCE is a run (its best checkpoint where evaluations are compared, else its last), a checkpoint, an adapter in PEFT's
format, or a model, which then goes out as it is.

\b
Examples:
  covey export runs/long --to adapter               PEFT, with tokenizer and model card
  covey export runs/long --to merged                safetensors in 16 bits
  covey export runs/long --to merged --base original --dtype float32
  covey export runs/long --to gguf --quant q4_k_m   llama.cpp, and a Modelfile for Ollama
  covey export runs/long --to merged --push me/name
"""

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A run, checkpoint, adapter or model.")]
To = Annotated[Literal["adapter", "merged", "gguf"], typer.Option(help="The form to write.")]
Out = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="A new folder; default: export/TO in the run's folder.")
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL|original|dequantised",
        help="Another place of the base model, or which of its weights: before they were quantised, or as trained on "
        "(the default of a run of method qlora).",
    ),
]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Of merged weights; default: the base's, or bfloat16 where that has 32 bits."),
]
ShardGb = Annotated[float, typer.Option(metavar="GB", help="The most that a file of merged weights holds.")]
Quant = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Of a GGUF file: q8_0 (default), f32, f16, bf16, q5_1, q5_0, q4_1, q4_0; with llama.cpp q4_k_m and kin.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Load merged weights again and compare them with the run's policy.")
]
Push = Annotated[
    str | None, typer.Option(metavar="REPO", help="Upload to this repository of the hub, private if new.")
]
Public = Annotated[bool, typer.Option("--public", help="Let everyone read the repository.")]


def export(
    source: Source,
    to: To = "merged",
    out: Out = None,
    base: Base = None,
    dtype: Dtype = None,
    shard_gb: ShardGb = 4.0,
    quant: Quant = None,
    check: Check = False,
    push: Push = None,
    public: Public = False,
    debug: Debug = False,
) -> None:
    with sentences(debug):
        from covey.rl.export.export import export as write

        write(
            source,
            to,
            out=out,
            base=base,
            dtype=dtype,
            shard_gb=shard_gb,
            quant=quant,
            check=check,
            push=push,
            public=public,
            say=typer.echo,
        )
