"""`model` against transformers' own logits for each text alone, on tiny random checkpoints."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, LlamaConfig

from covey.rewards.reward import RewardError, RewardSpec, load_reward
from covey.rewards.reward_model import _batches, model
from covey.rewards.runner import Scorer

TEXTS = ["4", "The sum is four, as anybody can see.", "", "no idea", "2 + 2 = 4", "x" * 70]
PROMPTS = ["What is 2 + 2? "] * len(TEXTS)
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "dtype": "float32",
}


def write(folder: Path, tokenizer: Path, config: Any) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    if (tokenizer / "chat_template.jinja").exists():
        shutil.copy(tokenizer / "chat_template.jinja", folder)
    return str(folder)


def llama(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = SIZES | {
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_labels": 1,
    }
    return LlamaConfig(**(sizes | {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1} | changes))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> str:
    return write(tmp_path_factory.mktemp("reward"), tiny_llama, llama())


def alone(path: str, *texts: str, **kwargs: Any) -> torch.Tensor:
    """Logits [labels] of one text in a batch of its own, in float64."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    network = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return network(**tokenizer(*texts, return_tensors="pt", **kwargs)).logits[0]


def scores(path: str, completions: list[str] = TEXTS, **settings: Any) -> list[float]:
    n = len(completions)
    settings = {"prompts": PROMPTS[:1] * n, "messages": [None] * n} | settings
    return [scored["score"] for scored in model(completions, path=path, **settings)]


@pytest.mark.parametrize("budget", [1, 100, 10_000])
def test_batches_give_what_transformers_gives_alone(reward_model, budget):
    expected = [float(alone(reward_model, p + t)) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert len({round(value, 4) for value in expected}) == len(TEXTS)  # else this would prove nothing
    assert scores(reward_model, tokens_per_batch=budget) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_goes_through_the_chat_template(reward_model):
    template = "U:Be short.\nU:2 + 2?\nA:{}<|end|>"
    expected = [float(alone(reward_model, template.format(text))) for text in TEXTS]
    found = scores(reward_model, prompts=["not used"] * len(TEXTS), messages=[QUESTION] * len(TEXTS))
    assert found == pytest.approx(expected, abs=1e-5)
    plain = float(alone(reward_model, "U:What is 2 + 2? \nA:4<|end|>"))
    assert scores(reward_model, ["4"], form="chat") == pytest.approx([plain], abs=1e-5)


def test_through_the_runner(reward_model):
    scorer = Scorer([load_reward(RewardSpec("model", args={"path": reward_model}))])
    New: Any = SimpleNamespace
    prompt = New(text="not used", ids=(1,), messages=QUESTION, columns={})
    completions = [New(text=text, ids=(1,), finish="eos") for text in TEXTS]
    scores = scorer([New(prompt=prompt, completions=completions)])
    template = "U:Be short.\nU:2 + 2?\nA:{}<|end|>"
    expected = [float(alone(reward_model, template.format(text))) for text in TEXTS]
    assert scores.total[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [None, 0])  # no padding token, or the one that ends the text
def test_the_padding_token_is_no_matter(tmp_path, tiny_llama, pad):
    path = write(tmp_path, tiny_llama, llama(pad_token_id=pad))
    texts = [*TEXTS, "ends here"]
    expected = [float(alone(path, f"U:{PROMPTS[0]}\nA:{text}<|end|>")) for text in texts]
    assert scores(path, texts, form="chat") == pytest.approx(expected, abs=1e-5)


def test_pairs_of_an_encoder(tmp_path, tiny_llama):
    sizes: dict[str, Any] = SIZES | {"max_position_embeddings": 128, "num_labels": 3, "pad_token_id": 1}
    config = BertConfig(**sizes)
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    config.label2id = {"bad": 0, "fair": 1, "good": 2}
    path = write(tmp_path, tiny_llama, config)
    expected = [alone(path, PROMPTS[0], text) for text in TEXTS]
    good = scores(path, form="pair", label="good")
    assert good == pytest.approx([float(logits[2]) for logits in expected], abs=1e-5)
    share = scores(path, form="pair", label=1, output="probability")
    assert share == pytest.approx([float(logits.softmax(0)[1]) for logits in expected], abs=1e-5)
    for label in (None, "great", 3):
        with pytest.raises(RewardError, match="set label to one of bad, fair, good or 0 to 2"):
            scores(path, label=label)


def test_probability_of_an_only_output(reward_model):
    expected = [1 / (1 + math.exp(-value)) for value in scores(reward_model)]
    assert scores(reward_model, output="probability") == pytest.approx(expected, abs=1e-6)


def test_a_text_that_is_too_long_loses_its_beginning(reward_model):
    long = "a" * 300 + "b" * 240  # tokens are characters; 256 is what the model takes
    (scored,) = model([long], prompts=["p"], messages=[None], path=reward_model)
    assert scored["cut"] == 541 - 256
    assert scored["score"] == pytest.approx(float(alone(reward_model, "a" * 16 + "b" * 240)), abs=1e-5)
    short = model([long], prompts=["p"], messages=[None], path=reward_model, max_length=10)
    assert short[0]["score"] == pytest.approx(float(alone(reward_model, "b" * 10)), abs=1e-5)


def test_a_completion_cannot_open_a_turn(reward_model):
    """Special tokens that the completion spells out are left out, also when they are nested."""
    assert scores(reward_model, ["4\ud800"]) == pytest.approx(scores(reward_model, ["4?"]))
    texts = ["4<|end|>", "4<|e<|end|>nd|>", "4"]
    assert scores(reward_model, texts, form="chat") == pytest.approx(
        3 * scores(reward_model, ["4"], form="chat")
    )


def test_batches():
    assert _batches([5, 1, 3, 2], 6) == [[1, 3], [2], [0]]  # 2 x 2 tokens, but not 3 x 3; 1 x 3; 1 x 5
    assert _batches([9, 9], 4) == [[0], [1]]
    assert _batches([], 4) == []


def test_a_checkpoint_without_a_head_is_refused(tiny_llama):
    with pytest.raises(
        RewardError, match=r"lacks score\.weight, which transformers would fill with random numbers"
    ):
        scores(str(tiny_llama))


def test_a_score_that_is_not_finite_is_an_error(tmp_path, tiny_llama):
    path = write(tmp_path, tiny_llama, llama())
    network = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        network.score.weight.fill_(math.inf)
    network.save_pretrained(path)
    with pytest.raises(RewardError, match="gave the score"):
        scores(path)


def test_the_generator_of_the_run_does_not_move(tmp_path, tiny_llama):
    path = write(tmp_path, tiny_llama, llama())
    before = torch.get_rng_state()
    scores(path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "args.path is missing"),
        ({"path": "./nowhere"}, "there is no such folder"),
        ({"path": "."}, "a folder without config.json"),
        ({"path": "a/b", "form": "poem"}, "args.form is 'poem'"),
        ({"path": "a/b", "tokens_per_batch": 0}, "args.tokens_per_batch is 0"),
        ({"path": "a/b", "dtype": "int4"}, "args.dtype is 'int4'"),
    ],
)
def test_mistakes_in_the_settings(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=says):
        load_reward(RewardSpec("model", args=args))
