"""Stop strings against the plain reading: the fewest tokens whose text holds one, and the text before it."""

import random
from collections.abc import Callable, Sequence

import pytest

from covey.rollout.stops import StopStrings

Decode = Callable[[Sequence[int]], str]

# B14. 0 is a special token: it has no text.
PIECES = {
    0: b"",
    10: b"42", 11: b"\n#", 12: b"##", 13: b" x",
    20: b"42", 21: b"\n#", 22: b"### x",
    30: b"42", 31: b"\n##",
    50: b"a\xc3", 51: b"\xa9#", 52: b"b\xc3", 53: b"\xa9#\xe2",
}  # fmt: skip


def pieced(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def tokens_of(*pieces: bytes) -> Decode:
    """A decoder for the ids 0, 1, ... whose tokens are these bytes, as byte-level tokenizers have it."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def falling_back(*pieces: bytes) -> Decode:
    """The same after the fashion of byte fallback: a run of single bytes that is not all valid is broken as a whole."""

    def decode(ids: Sequence[int]) -> str:
        text, run = "", b""
        for piece in [*(pieces[i] for i in ids), None]:
            if piece is not None and len(piece) == 1:
                run += piece
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += (piece or b"").decode(errors="replace")
        return text

    return decode


def in_chunks(stops: StopStrings, ids: Sequence[int], sizes: Sequence[int]) -> tuple[int, str] | None:
    """Chunks of these sizes, over and over."""
    checked, turn = 0, 0
    while checked < len(ids):
        now = min(len(ids), checked + sizes[turn % len(sizes)])
        if found := stops.first_stop(ids[:now], checked):
            return found
        checked, turn = now, turn + 1
    return None


def plainly(stop: Sequence[str], decode: Decode, ids: Sequence[int]) -> tuple[int, str] | None:
    for length in range(1, len(ids) + 1):
        text = decode(ids[:length])
        places = [text.find(s) for s in stop if s in text]
        if places:
            return length, text[: min(places)]
    return None


SIZES = [(1,), (2,), (3,), (100,), (2, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_b14(sizes: Sequence[int]):
    stops = StopStrings(("\n###",), pieced)
    assert in_chunks(stops, [10, 11, 12, 13, 13], sizes) == (3, "42")
    assert in_chunks(stops, [20, 21, 22, 13], sizes) == (3, "42")  # more text in the completing token
    assert in_chunks(stops, [30, 31], sizes) is None  # a near miss
    assert in_chunks(stops, [30, 31, 13, 10, 11, 12], sizes) == (6, "42\n## x42")


@pytest.mark.parametrize("sizes", SIZES)
def test_a_character_split_over_tokens(sizes: Sequence[int]):
    stops = StopStrings(("é#",), pieced)
    assert in_chunks(stops, [50, 51, 13], sizes) == (2, "a")
    assert in_chunks(stops, [52, 53, 13], sizes) == (2, "b")  # what follows is a part of the next character
    assert in_chunks(stops, [13, 50, 0, 51], sizes) == (4, " xa")
    halves = [0, *[1, 2] * 8]  # a string of 8 characters in 16 tokens
    assert in_chunks(StopStrings(("é" * 8,), tokens_of(b"a", b"\xc3", b"\xa9")), halves, sizes) == (17, "a")


@pytest.mark.parametrize("sizes", SIZES)
def test_the_string_that_is_complete_first_counts(sizes: Sequence[int]):
    # "2\n" is complete with the second token, "##" with the third.
    assert in_chunks(StopStrings(("##", "2\n"), pieced), [10, 11, 12, 13], sizes) == (2, "4")
    # One token completes "# x" and "## x": the leftmost cuts.
    assert in_chunks(StopStrings(("# x", "## x"), pieced), [20, 21, 22], sizes) == (3, "42\n##")


@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_without_text_do_not_push_the_beginning_out_of_sight(sizes: Sequence[int]):
    ids = [10, 11, *[0] * 50, 12, 13]
    assert in_chunks(StopStrings(("\n###",), pieced), ids, sizes) == (53, "42")


def test_what_was_checked_is_not_looked_for_again():
    """As with a stop string in the tokens that an earlier call was content with: only new text completes one."""
    assert StopStrings(("42",), pieced).first_stop([10, 13], 0) == (1, "")
    assert StopStrings(("\n###",), pieced).first_stop([10, 11, 12, 13], 1) == (3, "42")


@pytest.mark.parametrize("decoder", [tokens_of, falling_back])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_change_nothing(decoder: Callable[..., Decode], seed: int):
    """Random completions of pieces that begin, end, split and resemble the stop strings."""
    text = "ab€é\n## 😀"
    pieces = [
        *(bytes([byte]) for byte in sorted(set(text.encode()))),
        b"",
        b"ab",
        b"\n#",
        b"#\n",
        "é€".encode(),
    ]
    pieces += ["€".encode()[:2], "€".encode()[2:], b"a\xe2", "😀b".encode()[2:], b" "]
    decode, rng = decoder(*pieces), random.Random(seed)
    found = []
    for _ in range(300):
        # Mostly characters byte by byte, so that the strings occur though there are many pieces.
        ids: list[int] = []
        while len(ids) < 40:
            if rng.random() < 0.7:
                ids += [pieces.index(bytes([byte])) for byte in rng.choice(text).encode()]
            else:
                ids.append(rng.randrange(len(pieces)))
        stop = [s for s in ("€é", "😀", "\n##", "#é", "aba", "€ é#", "é") if rng.random() < 0.4] or ["b#\n€"]
        expected = plainly(stop, decode, ids)
        sizes = [rng.randint(1, 12) for _ in range(5)]
        assert in_chunks(StopStrings(stop, decode), ids, sizes) == expected, (stop, ids, sizes)
        found.append(expected)
    assert 50 < sum(place is not None and place[0] > 5 for place in found) < 290


def test_a_real_tokenizer_with_byte_fallback():
    """Bytes of one character each in a token, after the decoder of Llama 2's tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"▁a": 0, "b": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "▁": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids))

    ids = [0, 1, *(2 + byte for byte in "ééé😀€€".encode()), 0, 1]
    assert decode(ids) == "abééé😀€€ ab"
    for sizes in SIZES:
        assert in_chunks(StopStrings(("é😀",), decode), ids, sizes) == (12, "abéé")
        assert in_chunks(StopStrings(("€ a",), decode), ids, sizes) == (19, "abééé😀€")
        assert in_chunks(StopStrings((" a",), decode), ids, sizes) == (19, "abééé😀€€")
        # The space of a first token is not shown.
        assert in_chunks(StopStrings((" b",), decode), [1, 1, 1, 258, 1], sizes) == (5, "bbb")
        assert in_chunks(StopStrings((" ",), decode), [1, 1, 1, 258, 1], sizes) == (4, "bbb")


def test_little_is_decoded():
    """Once per chunk, and only what can hold a stop string; all of it once there is one."""
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    stops, ids = StopStrings(("end", "stop"), decode), [ord(c) for c in "x" * 500 + "stop"]
    for checked in range(0, 496, 16):
        assert stops.first_stop(ids[: checked + 16], checked) is None
    longest = len("stop") + 16
    assert max(decoded) <= longest and sum(length > 1 for length in decoded) == 31
    assert stops.first_stop(ids, 496) == (504, "x" * 500)
    assert decoded[-1] == 504 and max(decoded[:-1]) <= longest
