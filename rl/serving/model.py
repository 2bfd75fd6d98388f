"""A model to talk to: a run, checkpoint, adapter or model, opened for sampling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.policies.tokenizer import decode_completion
from covey.rl.config import SftConfig
from covey.rl.config_file import load_config
from covey.rl.data import Row
from covey.rl.export.source import Source, find_source
from covey.rl.sampler import Sampler
from covey.rl.templates import Encoder
from covey.rollout.engine import Group, Message, Prompt, Sampling
from covey.rollout.inprocess import InProcessEngine
from covey.rollout.stops import BROKEN

TokensCallback = Callable[[int, int, Sequence[int]], None]


class Speaker:
    """A model with its tokenizer and engine. Prompts are written as in the run that trained it.

    path: what `covey export` takes: a run, a checkpoint, an adapter in PEFT's format, or what model.path may be.
    overrides: keys of a recipe (model.*, data.system, data.chat). base: another place of an adapter's base model.
    max_rows: completions at a time. Raises ValueError for what the caller can mend, RunError for an unfinished run.
    """

    def __init__(
        self, path: str, overrides: Sequence[str] = (), *, base: str | None = None, max_rows: int = 64
    ):
        source = find_source(path, base)
        self.name = source.name
        self.names = (self.name, path)  # that a client may call it by
        self._sampler = Sampler(load_config(_settings(source), overrides, SftConfig))
        self._sampler.load(max_rows, reference=False)
        self.tokenizer, self.engine = self._sampler.tokenizer, self._sampler.engine
        self.device = self._sampler.policy.device
        self.max_positions = self._sampler.route.max_positions
        self.vocab_size = self._sampler.route.vocab_size
        self.eos = frozenset(self._sampler.eos)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template to write conversations with."""
        return bool(self.tokenizer.chat_template) and self._sampler.config.data.chat is not False

    @property
    def streams(self) -> bool:
        """Whether `generate` calls `tokens`."""
        return isinstance(self.engine, InProcessEngine)

    def describe(self) -> str:
        bits = "4-bit weights, " if self._sampler.config.model.method == "qlora" else ""
        dtype = str(self._sampler.policy.dtype).removeprefix("torch.")
        return f"{self.name} ({bits}{dtype}, {self._sampler.device_name})"

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation that the model goes on with; DataError if the template cannot write it."""
        return self._sampler.encode(messages).ids

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of raw text; DataError if there is nothing in it."""
        raw = self._sampler.config.data.model_copy(update={"chat": False, "system": None})
        return tuple(Encoder(self.tokenizer, raw).prompt(Row(0, "prompt", {}, prompt=text))[2])

    def decode(self, ids: Sequence[int]) -> str:
        return decode_completion(self.tokenizer, ids, self.eos)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        finished: Callable[[int, Group], None] | None = None,
        tokens: TokensCallback | None = None,
    ) -> list[Group]:
        """As InProcessEngine.generate; other engines do not call `tokens`."""
        if isinstance(self.engine, InProcessEngine):
            return self.engine.generate(prompts, n, sampling, finished, tokens)
        return self.engine.generate(prompts, n, sampling, finished)


class TextStream:
    """Text of a completion in pieces that, put together, are its text.

    What may still change is held back: bytes that are no character yet, and what may become a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]):
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._sent = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        self._ids += ids
        text = self._decode(self._ids).rstrip(BROKEN)
        start = len(self._sent)
        end = next((i for i in range(start, len(text)) if self._stops_at(text, i)), len(text))
        return self._send(text[:end])

    def end(self, text: str) -> str:
        """The rest of the whole text, which the engine says."""
        return self._send(text)

    def _stops_at(self, text: str, start: int) -> bool:
        """Whether a stop string begins there, as far as the text goes."""
        return any(text.startswith(stop, start) or stop.startswith(text[start:]) for stop in self._stop)

    def _send(self, text: str) -> str:
        # Some decoders show a whole run of bytes as broken while its last character is: then wait.
        if not text.startswith(self._sent):
            return ""
        piece = text[len(self._sent) :]
        self._sent = text
        return piece


def _settings(source: Source) -> Mapping[str, Any]:
    """A configuration for sampling: what the run says of its model and its prompts."""
    run_model, run_data = source.config.get("model", {}), source.config.get("data", {})
    kept = ("method", "dtype", "context", "chat_template", "template_options")
    model = {key: run_model[key] for key in kept if key in run_model}
    if source.method in (None, "full"):  # nothing was trained beside 4-bit weights, so they stay whole
        model["method"] = "lora"
    if source.adapter is not None:
        model["adapter"] = str(source.adapter)
    data = {key: run_data[key] for key in ("system", "chat") if key in run_data}
    return {
        "model": {"path": str(source.base), **model},
        "lora": {} if source.adapter else {"rank": 1},  # a new adapter changes nothing: the smallest will do
        "data": {"train": "none", **data},
        "optim": {"steps": 1},
    }
