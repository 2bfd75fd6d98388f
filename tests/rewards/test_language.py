# ruff: noqa: RUF001
"""`language` on sentences whose language is beyond doubt."""

import time

import pytest

from covey.rewards.language import language
from covey.rewards.reward import RewardError

SENTENCES = {
    "en": "First we add the ten numbers, and then we divide the sum by two.",
    "de": "Zuerst addieren wir die zehn Zahlen, und dann teilen wir die Summe durch zwei.",
    "fr": "Nous additionnons d'abord les dix nombres, puis nous divisons la somme par deux.",
    "es": "Primero sumamos los diez números y luego dividimos la suma entre dos.",
    "ru": "Сначала мы складываем десять чисел, а затем делим сумму на два.",
    "zh": "我们先把这十个数加起来，然后把总和除以二。",
    "ja": "まず十個の数を足して、それから合計を二で割ります。",
    "ko": "먼저 열 개의 수를 더한 다음 그 합을 둘로 나눕니다.",
    "ar": "نجمع أولا الأعداد العشرة ثم نقسم المجموع على اثنين.",
}


@pytest.mark.parametrize("code", SENTENCES)
@pytest.mark.parametrize("among", [None, list(SENTENCES)])
def test_each_sentence_is_in_its_language(code, among):
    assert language(SENTENCES[code], language=code, among=among) == {"score": 1.0, "read": {code: 1.0}}
    other = "en" if code != "en" else "de"
    assert language(SENTENCES[code], language=other, among=among) == {"score": 0.0, "read": {code: 1.0}}


def test_the_score_is_a_share_of_letters():
    """The English sentence has 49 letters, the Chinese one 19."""
    english, chinese = SENTENCES["en"], SENTENCES["zh"]
    assert (sum(map(str.isalpha, english)), sum(map(str.isalpha, chinese))) == (49, 19)
    for text in (
        f"{english}\n{chinese}",
        f"{english} {chinese}",
        f"{chinese}{english}",
    ):  # also within a line
        scored = language(text, language="en")
        assert scored is not None and scored["score"] == pytest.approx(49 / 68)
        assert scored["read"] == {"en": 0.7206, "zh": 0.2794}


@pytest.mark.parametrize(
    "added",
    [
        "```python\nfor zahl in zahlen: summe_der_zahlen += zahl_und_noch_eine\n```",
        "`eine_sehr_lange_variable_mit_deutschem_namen`",
        "$\\mathrm{geschwindigkeit} = \\mathrm{weg} / \\mathrm{benoetigte zeit}$",
        "\\[ \\text{die Summe der zehn Zahlen ist durch zwei geteilt} \\]",
        "https://example.org/zuerst-addieren-wir-die-zehn-zahlen",
        "<zuerst addieren wir die zehn>",
        "Hm, x = 5.",
        "2 + 2 = 4",
    ],
)
def test_what_is_no_prose_does_not_count(added):
    for text in (f"{SENTENCES['en']} {added}", f"{added}\n{SENTENCES['en']}"):
        assert language(text, language="en", among=["en", "de"]) == {"score": 1.0, "read": {"en": 1.0}}
    assert language(added, language="en") is None


@pytest.mark.parametrize("text", ["", "42", "The answer is 42.", "是的"])
def test_no_opinion_on_too_little(text):
    assert language(text, language="en") is None


def test_no_opinion_where_the_row_names_none():
    assert language(SENTENCES["en"], language=None) is None


def test_a_code_that_there_is_not():
    with pytest.raises(RewardError, match="'python' is none of the codes"):
        language(SENTENCES["en"], language="python")


@pytest.mark.parametrize("piece", ["```", "`", "$", "\\[", "\\(", "<", "https://", "a ", "word\n"])
def test_hostile_text_costs_little(piece):
    start = time.process_time()
    language(piece * 50_000, language="en")
    assert time.process_time() - start < 5
