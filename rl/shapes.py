"""Which column of a data set is what: as the configuration says, else by its name."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from covey.rl.config import DataSection, DpoDataSection, SftDataSection
from covey.rl.files import DataError
from covey.rl.sources import did_you_mean

# Names that are recognised; the first of a list wins over the others, which must not compete.
PROMPT = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWER = ("answer", "solution", "target", "label", "ground_truth", "final_answer")
MESSAGES = ("messages", "conversations", "conversation")
COMPLETION = ("completion", "response", "output")
TEXT = ("text",)
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools",)


@dataclass(frozen=True, slots=True)
class Columns:
    """The column, or template, that each part of a row is taken from."""

    prompt: str | None
    messages: str | None
    completion: str | None
    answer: str | None
    text: str | None
    more: str | None = None  # appended to the prompt after a blank line, if it has text (Alpaca's input)
    system: str | None = None  # the system message of a conversation that has none
    tools: str | None = None

    def describe(self) -> str:
        """'prompt from "question", text to learn from "answer"'."""
        roles = {
            "messages": self.messages,
            "prompt": self.prompt,
            "input": self.more,
            "system message": self.system,
            "tools": self.tools,
            "text to learn": self.completion or self.text,
        }
        return ", ".join(f"{role} from {_short(name)}" for role, name in roles.items() if name)


def find_columns(names: Sequence[str], section: DataSection) -> Columns:
    """Which of the columns `names` is what: as the section says, else by name."""
    if section.prompt and section.messages:
        raise DataError("data.prompt and data.messages: both are set. Keep one of them.")
    for key in ("messages", "answer", "tools"):
        _check_column(getattr(section, key, None), key, names)
    for key in ("prompt", "completion", "text"):
        if not is_template(getattr(section, key, None), names):
            _check_column(getattr(section, key, None), key, names)

    learns, pairs = isinstance(section, SftDataSection), isinstance(section, DpoDataSection)
    if isinstance(section, SftDataSection) and section.text:
        return _only_text(section, section.text)
    completion = section.completion or (_pick("completion", COMPLETION, names) if learns else None)
    prompt, messages = section.prompt, section.messages
    more = None
    if not prompt and not messages:
        free = [n for n in names if n not in (section.completion, section.answer)]
        prompt, more = _alpaca(free, {"instruction", "input"} | ({"output"} if not pairs else set()))
        prompt = prompt or _pick("prompt", PROMPT, free)
        messages = _pick("messages", MESSAGES, names)
        if prompt and messages:
            raise DataError(
                f"Both {prompt} and {messages} could be the prompt (columns: {', '.join(names)}). "
                f"Set data.prompt: {prompt}, or data.messages: {messages}"
            )
    answer = section.answer or _pick("answer", ANSWER, [n for n in names if n not in (prompt, completion)])
    if section.answer_after and not answer:
        raise DataError(
            f"data.answer_after: no column looks like an answer ({', '.join(names)}). Set data.answer."
        )
    text = None
    if learns:
        text, completion = _text_or_completion(names, section, prompt, messages, completion or answer)
    if not prompt and not messages and not text:
        raise DataError(
            f"No column looks like a prompt ({', '.join(names)}). Set data.prompt to a column, "
            f'or to a template like "Q: {{{names[0] if names else "question"}}}\\nA:"'
        )
    if text:
        return Columns(None, None, None, answer, text)
    system, tools = _beside(names, section, prompt or "")
    return Columns(prompt, messages, completion, answer, None, more, system, tools)


def _only_text(section: SftDataSection, text: str) -> Columns:
    if other := next((key for key in ("prompt", "messages", "completion") if getattr(section, key)), None):
        raise DataError(f"data.text and data.{other}: both are set. Keep one of them.")
    return Columns(None, None, None, section.answer, text)


def _beside(names: Sequence[str], section: DataSection, prompt: str) -> tuple[str | None, str | None]:
    """(the column with the system message, the one with the tools); prompts that are raw text have neither."""
    if section.chat is False:
        return None, None
    system = None if section.system is not None else _pick("system", SYSTEM, names)
    tools = None
    if isinstance(section, SftDataSection | DpoDataSection):  # in GRPO the environment says which there are
        tools = section.tools or _pick("tools", TOOLS, names)
    return (None if f"{{{system}}}" in prompt else system), (None if f"{{{tools}}}" in prompt else tools)


def _text_or_completion(
    names: Sequence[str], section: DataSection, prompt: str | None, messages: str | None, target: str | None
) -> tuple[str | None, str | None]:
    """For SFT: (the column that is learnt as a whole, the column that is learnt after the prompt)."""
    if messages:
        if section.completion:
            raise DataError("data.completion: the messages already hold the text to learn. Remove this key.")
        return None, None
    if prompt and target:
        return None, target
    if not prompt and section.completion:
        return section.completion, None
    text = None if section.prompt else _pick("completion", TEXT, names)
    if prompt and not text:
        raise DataError(
            f"No column looks like the text to learn after {prompt} ({', '.join(names)}). "
            "Set data.completion."
        )
    return text, None


def _alpaca(names: Sequence[str], wanted: set[str]) -> tuple[str | None, str | None]:
    """The columns "instruction" and "input", if all the wanted ones are there."""
    known = {name.lower(): name for name in names}
    if "prompt" in known or not wanted <= known.keys():
        return None, None
    return known["instruction"], known["input"]


def _short(name: str) -> str:
    text = json.dumps(name, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + '..."'


def _check_column(name: str | None, key: str, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        hint = did_you_mean(name, names)
        raise DataError(f'data.{key}: no column "{name}". Columns: {", ".join(names)}.{hint}')


def _pick(key: str, known: Sequence[str], names: Sequence[str]) -> str | None:
    found = [name for name in names if name.lower() in known]
    first = [name for name in found if name.lower() == known[0]]
    if first or not found:
        return first[0] if first else None
    if len(found) > 1:
        both = "\\n".join(f"{{{name}}}" for name in found)
        either = f'one of them, or to a template like "{both}"' if key == "prompt" else "one of them"
        raise DataError(
            f"data.{key}: {' and '.join(found)} are all possible (columns: {', '.join(names)}). "
            f"Set data.{key} to {either}."
        )
    return found[0]


def is_template(text: str | None, names: Sequence[str]) -> bool:
    return text is not None and text not in names and re.search(r"\{[^{}]+\}", text) is not None
