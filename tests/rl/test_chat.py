"""`covey chat`: a conversation, as a terminal sees it."""

import io
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.tokenizer import load_tokenizer
from covey.rl import cli
from covey.rl.serving.chat import HELP, Chat
from covey.rl.serving.model import Speaker
from covey.rollout.engine import Prompt, Sampling


class Terminal:
    """Says the lines, one at each question, then Ctrl-D; what was written is in `shown`, piece by piece."""

    def __init__(self, *lines: str):
        self.lines, self.shown = list(lines), []

    def ask(self, prompt: str) -> str:
        self.shown.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.shown.append(text)

    def talk(self, speaker: Speaker, **sampling: Any) -> str:
        """All that was written after the greeting."""
        Chat(
            speaker, Sampling(**{"max_new_tokens": 20, "temperature": 0.0} | sampling), self.ask, self.write
        ).run()
        greeting, *rest = self.shown
        assert greeting.endswith(f"{HELP}\n")
        return "".join(rest)


@pytest.fixture(scope="module")
def letters(table_lm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_lm(torch.zeros(64), tmp_path_factory.mktemp("letters") / "model")


@pytest.fixture
def model(letters: Path, table_lm: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """model("abc", "x:"): writes b after a, c after b, ":" after "x", 50 nats ahead of all else; "|" is the end."""

    def make(*texts: str) -> Path:
        table = torch.zeros(64, 64)
        for text in texts:
            ids = [0 if c == "|" else load_tokenizer(letters).encode(c)[0] for c in text]
            table[ids[:-1], ids[1:]] = 50
        return table_lm(table, tmp_path / "model")

    return make


def test_a_conversation_remembers_what_was_said(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template writes U:hi, a line break and A: to go on from, and ends an answer with id 0."""
    speaker = Speaker(str(model(":ok|")), ["model.device=cpu"])
    seen: list[Any] = []
    generate = speaker.generate

    def watched(prompts: Sequence[Prompt], *more: Any, **named: Any) -> Any:
        seen.append(speaker.tokenizer.decode(list(prompts[0].ids)))
        return generate(prompts, *more, **named)

    monkeypatch.setattr(speaker, "generate", watched)
    terminal = Terminal("hi", "  ", "and", "/new", "so", "/exit", "never said")
    assert terminal.talk(speaker) == "> ok\n> > ok\n> > ok\n> "
    assert seen == ["U:hi\nA:", "U:hi\nA:ok<|end|>U:and\nA:", "U:so\nA:"]
    assert terminal.shown[2:5] == ["o", "k", ""]  # it was shown as it came
    assert terminal.lines == ["never said"]


def test_an_answer_may_be_too_long_and_the_model_full(model: Callable[..., Path]) -> None:
    folder = model(":abababab", "ba")
    text = (folder / "config.json").read_text()
    assert '"max_position_embeddings": 4096' in text
    (folder / "config.json").write_text(
        text.replace('"max_position_embeddings": 4096', '"max_position_embeddings": 16')
    )
    speaker = Speaker(str(folder), ["model.device=cpu"])
    assert Terminal("h").talk(speaker, max_new_tokens=4) == "> abab (stopped after 4 tokens)\n> \n"
    # U:h, line break, A: are 6 ids and leave 10; with the answer, its end and "U:i\nA:" there is no room left.
    assert Terminal("h", "i").talk(speaker) == (
        "> ababababab (stopped after 10 tokens)\n> (the model's 16 positions are full: /new starts over)\n> \n"
    )


def test_a_model_without_a_template_goes_on_from_the_line(model: Callable[..., Path]) -> None:
    folder = model("abc|")
    (folder / "chat_template.jinja").unlink()
    speaker = Speaker(str(folder), ["model.device=cpu"])
    terminal = Terminal("a", "b")
    assert terminal.talk(speaker) == "> bc\n> c\n> \n"
    assert "no chat template" in terminal.shown[0]


def test_what_could_drive_the_terminal_is_not_shown(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = Speaker(str(model(":a|")), ["model.device=cpu"])
    monkeypatch.setattr(speaker, "decode", lambda ids: "\x1b[2J\r\tok" if ids else "")
    assert Terminal("hi").talk(speaker).startswith("> \ufffd[2J\ufffd\tok")


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = Speaker(str(model(":abababab", "ba", "|U")), ["model.device=cpu"])
    terminal = Terminal("hi", "more")
    before = signal.getsignal(signal.SIGINT)
    write = terminal.write

    def interrupted(text: str) -> None:
        write(text)
        if terminal.shown[-3:] == ["a", "b", "a"]:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "write", interrupted)
    assert terminal.talk(speaker, max_new_tokens=1000) == "> aba (stopped)\n> aba (stopped)\n> \n"
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["covey", "chat", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(str(model(":ok|")), "model.device=cpu", "--temperature", "0") == 0
    assert capsys.readouterr().out == f"model (float32, CPU)\n{HELP}\n> ok\n> \n"
    assert run("no-such-model") == 2
    assert capsys.readouterr().err.startswith("error: there is no folder or file 'no-such-model'")
    assert run("tiny", "--top-p", "2") == 2
    assert "top_p is 2.0" in capsys.readouterr().err
