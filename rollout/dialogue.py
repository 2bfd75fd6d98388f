"""The token ids between two replies: what a chat template writes there, without touching what was sampled.

A conversation that is rendered and tokenised anew does not give back the ids that were sampled: other tokens may spell
the same text, and templates trim, drop thoughts or rewrite calls. So a reply's ids stay as they are, and only what
follows it is rendered: the template is given the opening, a mark in place of the reply, and the new messages; what
stands behind the mark is tokenised and appended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from covey.rollout.engine import Finish, Message
from covey.rollout.environment import EpisodeError

MARK = "reply-of-the-model-7c1f"
MESSAGE = "hi"

Render = Callable[[Sequence[Message], bool], str]


class Dialogue:
    """What the template writes between a reply and the next.

    render(messages, generation): the conversation as text, with generation followed by the header of a reply to come.
    encode: ids of a text alone, without BOS. eos_ids: those that end a reply.
    """

    def __init__(self, render: Render, encode: Callable[[str], Sequence[int]], eos_ids: Iterable[int]):
        self.render, self.encode, self.eos_ids = render, encode, frozenset(eos_ids)

    def between(
        self, opening: Sequence[Message], messages: Sequence[Message], finish: Finish
    ) -> tuple[int, ...]:
        """Ids from the end of a reply, which ended by `finish`, to where the next one begins.

        The end of the turn belongs to them unless the model has written it itself. EpisodeError for a template that
        writes the opening differently once other messages follow.
        """
        before = self.render(opening, False)
        text = self.render([*opening, {"role": "assistant", "content": MARK}, *messages], True)
        if not text.startswith(before):
            at = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text))
            raise EpisodeError(
                f"The chat template writes the beginning of a conversation differently once messages follow "
                f"({before[at : at + 40]!r} becomes {text[at : at + 40]!r}), so turns cannot be appended to what was "
                "sampled. Give a template that does not, with model.chat_template."
            )
        rest = text[len(before) :]
        if rest.count(MARK) != 1:
            raise EpisodeError(
                f"The chat template writes a reply {rest.count(MARK)} times where messages follow it, so turns cannot "
                "be appended to what was sampled. Give a template that writes it once, with model.chat_template."
            )
        ids = tuple(self.encode(rest.partition(MARK)[2]))
        return ids[1:] if finish == "eos" and ids[:1] and ids[0] in self.eos_ids else ids

    def check(self, role: str) -> list[str]:
        """Warnings, after a trial with a message of this role. EpisodeError as for `between`."""
        opening: list[Mapping[str, str]] = [{"role": "user", "content": MESSAGE}]
        answer = {"role": role, "content": MESSAGE, "name": "f", "tool_call_id": "000000001"}
        self.between(opening, [answer], "eos")
        thought = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\n{MESSAGE}"}
        if MARK in self.render([*opening, thought, answer], True):
            return []
        return [
            f"the chat template leaves <think> blocks of earlier replies out once a {role} message follows; in "
            "training they stay, since what was sampled is what is trained"
        ]
