"""Stop strings in a completion's text, whatever tokens they are made of."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # stands for bytes that are no character, such as a part of one


class StopStrings:
    """Finds the first of some stop strings, a chunk of new tokens at a time.

    stop: one or more strings, none of them empty. decode: ids to text, without special tokens; bytes that are no
    character become U+FFFD.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self.stop, self.decode = tuple(stop), decode
        # Tokens before the unchecked ones that are looked at again. With a byte in each they hold all of a stop string
        # but the byte that completes it; one more because some decoders take a space off the beginning.
        self.window = max(len(text.encode()) for text in self.stop)
        self._seen: dict[int, bool] = {}  # tokens, and whether they have text

    def first_stop(self, ids: Sequence[int], checked: int) -> tuple[int, str] | None:
        """(number of tokens after which the first stop string is complete, the text before it), or None.

        ids: the completion so far, without an end-of-sequence token. checked: how many of its tokens were looked at
        before, so that no stop string is complete within them. The result does not depend on the chunks. The token
        that completes the string may hold more text; of several strings complete in it the leftmost counts.
        """
        start, text = self._window(ids, checked)
        # Bytes that are no character yet can hide one that was there before they came.
        if self._place(text) < 0 and BROKEN not in text:
            return None
        for length in range(checked + 1, len(ids) + 1):
            if self._place(self.decode(ids[start:length])) >= 0:
                whole = self.decode(ids[:length])
                if (place := self._place(whole)) >= 0:
                    return length, whole[:place]
        return None

    def _window(self, ids: Sequence[int], checked: int) -> tuple[int, str]:
        """As many tokens before the unchecked ones as can hold a stop string's beginning: where they start, and the
        text from there on."""
        start = checked
        while True:
            wanted = self.window
            while start > 0 and wanted > 0:
                start -= 1
                wanted -= self._has_text(ids[start])
            text = self.decode(ids[start:])
            # It may begin within a character, and some decoders then break all the bytes that follow.
            if start == 0 or not text.startswith(BROKEN):
                return start, text

    def _has_text(self, token: int) -> bool:
        """Special tokens have none, and a window of them holds no stop string."""
        if token not in self._seen:
            self._seen[token] = self.decode([token]) != ""
        return self._seen[token]

    def _place(self, text: str) -> int:
        """Where the first stop string begins; -1: nowhere."""
        return min((place for stop in self.stop if (place := text.find(stop)) >= 0), default=-1)
