"""vLLM's replies as completions: how they end, and that their text is the trainer's."""

from collections.abc import Sequence

import pytest

from covey.rollout.engine import Prompt, Sampling
from covey.rollout.vllm_requests import Requests

PIECES = {
    0: b"",
    5: b"42",
    6: b"\n#",
    7: b"##",
    8: b"### x",
    9: b"\n##",
    10: b"a\xc3",
    11: b"\xa9#",
    12: b"\xe2",
    13: b"\x82",
}
PROMPT = Prompt(3, (1, 2), "")


def pieced(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("ids", "reason", "kept", "finish", "text"),
    [
        ((5, 6, 7), "stop", 3, "stop", "42"),
        ((5, 6, 8), "stop", 3, "stop", "42"),  # the token holds more than the stop string
        ((5, 9, 0), "stop", 3, "eos", "42\n##"),
        ((5, 9, 5), "length", 3, "length", "42\n##42"),
        (
            (5, 6, 7, 12, 13),
            "stop",
            3,
            "stop",
            "42",
        ),  # the last token begins a character, and vLLM waits for its end
        ((10, 11), "stop", 2, "stop", "a"),  # the stop string begins within a character
        (
            (5, 5),
            "stop",
            2,
            "stop",
            "vLLM's text",
        ),  # it saw a stop string that the trainer's decoder does not write
    ],
)
def test_how_completions_end(ids: tuple[int, ...], reason: str, kept: int, finish: str, text: str) -> None:
    requests = Requests(1, Sampling(5, stop=("\n###", "é#")), pieced, [0])
    logprobs = [-0.5 - i for i in range(len(ids))]
    c = requests.completion(PROMPT, ids, logprobs, reason, "vLLM's text", 7)
    assert (c.ids, c.logprobs, c.finish, c.text, c.version) == (
        ids[:kept],
        tuple(logprobs[:kept]),
        finish,
        text,
        7,
    )
    assert c.trained == (True,) * kept


def test_an_end_that_is_to_be_ignored_is_a_token_like_others() -> None:
    requests = Requests(1, Sampling(2, ignore_eos=True), pieced, [0])
    assert requests.settings(PROMPT)["stop_token_ids"] == []
    c = requests.completion(PROMPT, (5, 0), (-1.0, -1.0), "length", "", 0)
    assert (c.finish, c.text) == ("length", "42")


def test_seeds_leave_room_for_the_samples_of_a_group() -> None:
    seeds = [
        Requests(1, Sampling(1, seed=seed), pieced, []).settings(Prompt(row, (1,), ""))["seed"]
        for seed in (0, 1, -1, 2**63 - 1)
        for row in range(500)
    ]
    assert len(set(seeds)) == 2000 and all(0 <= seed < 2**62 for seed in seeds)
