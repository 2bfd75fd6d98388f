"""A Modelfile, with which Ollama takes a GGUF file.

Ollama writes chats with a Go template, and knows a Jinja one only if it is among those that it has met. So the pieces
that a Jinja template puts around messages are read off its renderings, and the result is trusted only if it renders
some conversations as the Jinja template does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, USER, ANSWER = "«system»", "«user»", "«answer»"
Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What stands around the messages of a chat."""

    start: str  # before everything where there is no system message: perhaps a system message of the template's own
    system: tuple[str, str]
    user: tuple[str, str]
    answer: tuple[str, str]
    cue: str  # where the model's turn begins

    def render(self, messages: Messages) -> str:
        around = {"system": self.system, "user": self.user, "assistant": self.answer}
        written = "".join(around[role][0] + content + around[role][1] for role, content in messages)
        return ("" if messages[0][0] == "system" else self.start) + written + self.cue

    def go(self) -> str:
        """The same as a Go template of Ollama's."""
        system = "{{ .System }}".join(self.system)
        user, answer = ("{{ .Content }}".join(pair) for pair in (self.user, self.answer))
        otherwise = f"{{{{ else }}}}{self.start}" if self.start else ""
        return (
            f"{{{{ if .System }}}}{system}{otherwise}{{{{ end }}}}"
            f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
            f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ end }}}}{{{{ end }}}}{self.cue}'
        )


def modelfile(
    file_name: str, tokenizer: Any, eos: Sequence[int], *, adds_bos: bool, system: str | None = None
) -> str:
    """The text of a Modelfile for the GGUF file beside it.

    adds_bos: llama.cpp puts BOS in front of a prompt itself, so that the template must not.
    system: the system message of chats that bring none.
    """
    lines = [f"FROM ./{file_name}"]
    pieces = read_pieces(tokenizer, tokenizer.bos_token if adds_bos else None)
    if pieces is not None:
        lines.append(f'TEMPLATE """{pieces.go()}"""')
    elif tokenizer.chat_template:
        lines.append(
            "# The chat template is in the GGUF file; it could not be written in Ollama's language here."
        )
    if system and '"""' not in system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([i]), ensure_ascii=False)}" for i in eos]
    return "\n".join(lines) + "\n"


def read_pieces(tokenizer: Any, bos: str | None) -> Pieces | None:
    """The pieces of the tokenizer's chat template; None if it has none, or is more than pieces around messages."""
    template = tokenizer.chat_template
    if not template:
        return None

    def render(messages: Messages, cue: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=cue)
        return text.removeprefix(bos or "")

    system, user, answer = ("system", SYSTEM), ("user", USER), ("assistant", ANSWER)
    chats: list[Messages] = [
        [user], [system, user], [user, answer, user], [system, user, answer, ("user", "x y\nz"), answer, user],
    ]  # fmt: skip
    try:
        alone = render([user], cue=False)
        before_system, told = render([system, user], cue=False).split(SYSTEM)
        _, first, second, end = render([user, answer, user], cue=False).replace(ANSWER, USER).split(USER)
        start, before_user = alone.split(USER)[0], told.split(USER)[0]
        begin = _common_end(start, before_user, second)
        # If all turns end alike, that end is so far the beginning of the user's.
        turn = end if begin.startswith(end) else ""
        pieces = Pieces(
            start=start.removesuffix(begin) + turn,
            system=(before_system, before_user.removesuffix(begin) + turn),
            user=(begin.removeprefix(turn), end),
            answer=(first.removeprefix(end), second.removesuffix(begin) + turn),
            cue=render([user]).removeprefix(alone),
        )
        if any(render(chat) != pieces.render(chat) for chat in chats):
            return None
    except Exception:  # templates refuse chats in their own ways, or leave out what is looked for
        return None
    literal = "".join((pieces.start, *pieces.system, *pieces.user, *pieces.answer, pieces.cue))
    return None if "{{" in literal or '"""' in literal else pieces


def _common_end(*texts: str) -> str:
    """The longest text that all of these end with."""
    shortest = min(texts, key=len)
    starts = (at for at in range(len(shortest) + 1) if all(text.endswith(shortest[at:]) for text in texts))
    return shortest[next(starts) :]
