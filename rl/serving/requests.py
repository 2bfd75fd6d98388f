"""What a client of `covey serve` asks for, checked: OpenAI's fields, and those of vLLM that the engine has too."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from covey.rl.serving.model import Speaker
from covey.rollout.engine import Prompt, Sampling

MAX_CHOICES = 128  # completions of a request
TEXT_TOKENS = 16  # of a completion after a prompt, if nothing is said; as OpenAI has it
# Fields that would change the answer and are not supported, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}


class RequestError(ValueError):
    """A request that is refused. field: what is wrong with it, if it is one field. status: of HTTP."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens of a prompt, and of a completion."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """n completions of each prompt. usage: whether a stream ends with the numbers of tokens."""

    chat: bool
    prompts: tuple[Prompt, ...]
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    logprobs: bool


def read_request(body: Any, speaker: Speaker, limits: Limits, *, chat: bool) -> Asked:
    """Raises RequestError. chat: a conversation is asked to be continued, not a text."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, harmless in UNSUPPORTED.items():
        if name in given and given[name] not in harmless:
            raise RequestError(f"{name}: not supported here; leave it out", name)
    try:
        fields = (_ChatFields if chat else _TextFields).model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{name}: {message}", str(first["loc"][0])) from None
    if fields.model not in (None, *speaker.names):
        raise RequestError(f'model: "{fields.model}" is not here; "{speaker.name}" is', "model", 404)
    if fields.stream and fields.wants_logprobs:
        raise RequestError("logprobs: not supported in a stream; leave out one of the two", "logprobs")
    prompts = _prompts(fields, speaker, limits)
    if len(prompts) * fields.n > MAX_CHOICES:
        raise RequestError(f"n: a request may ask for up to {MAX_CHOICES} completions", "n")
    unknown = [token for token in fields.logit_bias if not 0 <= token < speaker.vocab_size]
    if unknown:
        raise RequestError(f"logit_bias: the vocabulary has no token {unknown[0]}", "logit_bias")
    sampling = Sampling(
        _new_tokens(fields, max(len(prompt.ids) for prompt in prompts), speaker, limits),
        **{name: getattr(fields, name) for name in _SAMPLING},
        top_k=max(fields.top_k, 0),  # vLLM writes -1 for off
        seed=fields.seed or 0,
    )
    usage = bool(fields.stream_options.get("include_usage"))
    return Asked(chat, prompts, fields.n, sampling, fields.stream, usage, fields.wants_logprobs)


# Fields


def _stops(value: Any) -> Any:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
        raise ValueError("must be a text, or a list of texts that are not empty")
    return tuple(values)


def _biases(value: Any) -> Any:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise ValueError("must be an object with token ids as its keys") from None


def _content(value: Any) -> Any:
    """The text of a message: a string, or parts of type text."""
    if isinstance(value, list):
        for part in value:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise ValueError('only parts like {"type": "text", "text": "..."} are supported')
        return "".join(part["text"] for part in value)
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _texts(value: Any) -> Any:
    """A list of prompts, each a text or ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be a text, a list of token ids, or a list of these")
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise ValueError("must be a text, a list of token ids, or a list of these, none of them empty")
    return prompts


Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Fields(BaseModel):
    """What both kinds of request have; unknown fields are ignored. A null is as good as nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    n: Count = 1
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[dict[int, Number], BeforeValidator(_biases)] = Field(default_factory=dict)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)


# These have the names that they have in Sampling.
_SAMPLING = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "stop", "ignore_eos",
)  # fmt: skip


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]


class _ChatFields(_Fields):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


class _TextFields(_Fields):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_texts)]
    # How many alternatives to tell of; the sampled tokens' own log-probs come with 0 already.
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


# From fields to tokens


def _prompts(fields: _ChatFields | _TextFields, speaker: Speaker, limits: Limits) -> tuple[Prompt, ...]:
    """With a seed their draws are those of rows 0, 1, ...; without one nobody has drawn them before."""
    name = "messages" if isinstance(fields, _ChatFields) else "prompt"
    try:
        encoded = _encode(fields, speaker)
    except ValueError as error:
        raise RequestError(f"{name}: {error}", name) from None
    for ids in encoded:
        if len(ids) > limits.prompt_tokens:
            raise RequestError(
                f"{name}: {len(ids)} tokens, and the limit is {limits.prompt_tokens}; shorten it", name
            )
        if any(not 0 <= token < speaker.vocab_size for token in ids):
            raise RequestError(f"{name}: token ids go from 0 to {speaker.vocab_size - 1}", name)
    first = secrets.randbits(62) if fields.seed is None else 0
    return tuple(Prompt(first + i, ids, "") for i, ids in enumerate(encoded))


def _encode(fields: _ChatFields | _TextFields, speaker: Speaker) -> list[tuple[int, ...]]:
    if isinstance(fields, _TextFields):
        return [speaker.encode_text(p) if isinstance(p, str) else tuple(p) for p in fields.prompt]
    roles = ["system" if m.role == "developer" else m.role for m in fields.messages]
    if roles[-1] == "assistant":
        raise ValueError(
            "the last one is the assistant's, and it is the assistant who answers; end with the user's"
        )
    messages = [{"role": role, "content": m.content} for role, m in zip(roles, fields.messages, strict=True)]
    return [speaker.encode_chat(messages)]


def _new_tokens(fields: _ChatFields | _TextFields, longest: int, speaker: Speaker, limits: Limits) -> int:
    """The most tokens of a completion: as asked, if that is allowed and fits; else as many as are allowed and fit."""
    name = "max_tokens"
    asked = fields.max_tokens
    if isinstance(fields, _ChatFields) and fields.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", fields.max_completion_tokens
    room = speaker.max_positions - longest
    most = min(limits.new_tokens, room)
    if most < 1:
        raise RequestError(
            f"the prompt's {longest} tokens leave no room: the model has {speaker.max_positions} positions"
        )
    if asked is None:
        return most if isinstance(fields, _ChatFields) else min(most, TEXT_TOKENS)
    if asked > most:
        why = "the limit" if most == limits.new_tokens else f"what {longest} tokens of prompt leave"
        raise RequestError(f"{name}: {asked} is more than {why}, {most}", name)
    return asked
