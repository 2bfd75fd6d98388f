"""A conversation in the terminal."""

import signal
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from covey.rl.serving.model import Speaker, TextStream
from covey.rollout.engine import Message, Prompt, Sampling

HELP = "/new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"
PROMPT = "> "


@dataclass
class Chat:
    """ask: reads a line after a prompt, or raises EOFError. write: shows text as it comes.

    A model without a chat template goes on from each line as it stands, and remembers nothing.
    """

    speaker: Speaker
    sampling: Sampling
    ask: Callable[[str], str]
    write: Callable[[str], object]

    def run(self) -> None:
        """Until the user ends it."""
        note = "" if self.speaker.chats else "; no chat template, so it goes on from what you write"
        self.write(f"{self.speaker.describe()}{note}\n{HELP}\n")
        history: list[Message] = []
        turn = 0
        while True:
            try:
                line = self.ask(PROMPT)
            except (EOFError, KeyboardInterrupt):
                self.write("\n")
                return
            if line.strip() == "/exit":
                return
            if line.strip() == "/new":
                history.clear()
            elif line.strip():
                said: Message = {"role": "user", "content": line}
                answer = self._answer([*history, said], line, turn)
                if answer is not None and self.speaker.chats:
                    history += [said, {"role": "assistant", "content": answer}]
                turn += 1

    def _answer(self, messages: Sequence[Message], line: str, turn: int) -> str | None:
        """The answer, which was written as it came; None if there was no room for one."""
        ids = self.speaker.encode_chat(messages) if self.speaker.chats else self.speaker.encode_text(line)
        room = self.speaker.max_positions - len(ids)
        if room < 1:
            self.write(f"(the model's {self.speaker.max_positions} positions are full: /new starts over)\n")
            return None
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))
        text = _Shown(self.write)
        stream = TextStream(self.speaker.decode, sampling.stop)
        try:
            with _interruptible(self.speaker.streams) as check:

                def tokens(_: int, sample: int, new: Sequence[int]) -> None:
                    text.add(stream.add(new))
                    check()

                [group] = self.speaker.generate([Prompt(turn, ids, "")], 1, sampling, tokens=tokens)
        except KeyboardInterrupt:
            self.write(" (stopped)\n")
            return text.whole
        completion = group.completions[0]
        text.add(stream.end(completion.text))
        self.write(
            f" (stopped after {len(completion.ids)} tokens)\n" if completion.finish == "length" else "\n"
        )
        return completion.text


@dataclass
class _Shown:
    """Text that was shown, without what could drive the terminal."""

    write: Callable[[str], object]
    whole: str = ""

    def add(self, piece: str) -> None:
        self.whole += piece
        self.write("".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in piece))


@contextmanager
def _interruptible(between_tokens: bool) -> Iterator[Callable[[], None]]:
    """What is yielded raises KeyboardInterrupt if Ctrl-C was pressed, so that it meets the engine between two steps."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed or not between_tokens:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
