"""The reward `model`: the score of a Hugging Face sequence-classification model, N completions at a time."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from covey.rewards.find import RewardError
from covey.rewards.settings import settings

if TYPE_CHECKING:
    import torch

Messages = Sequence[Mapping[str, Any]]


def _check(path: str, **_: Any) -> None:
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"args.path is {path!r}, a folder without config.json: give a checkpoint of transformers."
        )
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"args.path is {path!r}: there is no such folder.")


@settings(_check)
def model(
    completions: list[str],
    prompts: list[str],
    messages: Sequence[Messages | None],
    *,
    path: str,
    form: Literal["auto", "chat", "text", "pair"] = "auto",
    label: int | str | None = None,
    output: Literal["logit", "probability"] = "logit",
    max_length: Annotated[int, Ge(1)] | None = None,
    tokens_per_batch: Annotated[int, Ge(1)] = 16384,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> list[dict[str, Any]]:
    """What the model says of each prompt with its completion: a logit, or its probability.

    path: a folder or a hub id; AutoModelForSequenceClassification reads it when the first step is scored.
    form: chat: the messages and the completion in the model's chat template; text: prompt and completion in one;
        pair: the last user message and the completion as two texts. auto: chat if the model has a template and the
        data has messages, else text.
    label: which output, by number or name; unset, the model must have one. output: probability is the sigmoid of an
        only output, or the softmax at the label.
    max_length: tokens; unset, what the model can take. A longer text loses its beginning, and gets the note `cut`.
    tokens_per_batch: texts of like length are scored together, at most so many tokens with their padding.
    device, dtype: auto is this process's GPU and bfloat16, or the CPU and float32.
    Raises RewardError for a checkpoint without a trained head, or a score that is not finite.
    """
    scorer = _load(path, device, dtype)
    place = scorer.place_of(label)
    rows = list(zip(prompts, messages, completions, strict=True))
    texts = [scorer.encode(*row, form, max_length) for row in rows]
    lengths = [len(inputs["input_ids"]) for inputs, _ in texts]
    results: list[dict[str, Any]] = [{} for _ in rows]
    for batch in _batches(lengths, tokens_per_batch):
        for i, score in zip(batch, scorer.scores([texts[i][0] for i in batch], place, output), strict=True):
            results[i] = {"score": score} | ({"cut": texts[i][1]} if texts[i][1] else {})
    return results


def _batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The numbers of the texts, from short to long, in batches whose padded tokens stay within the budget, if there
    is more than one text in them."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class _Scorer:
    def __init__(self, path: str, device: "torch.device", dtype: "torch.dtype"):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.path, self.device = path, device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.tokenizer.truncation_side = "left"
        network, info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
        if info["missing_keys"]:
            raise RewardError(
                f"model: {path} lacks {', '.join(sorted(info['missing_keys']))}, which transformers would fill with "
                "random numbers. Give a checkpoint that was trained as a reward model."
            )
        self.network: Any = network.to(device).eval()
        self.config = network.config.get_text_config()
        self.pad = self.config.pad_token_id
        self.special = re.compile("|".join(map(re.escape, self.tokenizer.all_special_tokens)) or r"(?!)")

    def place_of(self, label: int | str | None) -> int:
        """The index of an output, as the setting `label` names it."""
        names = {str(name): int(place) for place, name in (self.network.config.id2label or {}).items()}
        count = self.network.config.num_labels
        if label is None and count == 1:
            return 0
        place = names.get(label) if isinstance(label, str) else label
        if place is None or not 0 <= place < count:
            what = "has several outputs" if label is None else f"has no output {label!r}"
            raise RewardError(
                f"model: {self.path} {what}: set label to one of {', '.join(names)} or 0 to {count - 1}"
            )
        return place

    def encode(
        self, prompt: str, messages: Messages | None, completion: str, form: str, max_length: int | None
    ) -> tuple[dict[str, list[int]], int]:
        """What the model takes for one text, and how many tokens were cut off."""
        tokenizer, count = self.tokenizer, 1
        completion = completion.encode(errors="replace").decode()  # no lone surrogates
        while count:  # a completion must not end its turn by writing a special token, and begin another's
            completion, count = self.special.subn("", completion)
        if form == "auto":
            form = "chat" if tokenizer.chat_template and messages else "text"
        messages = messages or [{"role": "user", "content": prompt}]
        special = form != "chat"  # a template has written the special tokens already
        if form == "chat":
            said = [*messages, {"role": "assistant", "content": completion}]
            texts = [tokenizer.apply_chat_template(said, tokenize=False)]
        elif form == "pair":
            texts = [[m["content"] for m in messages if m["role"] == "user"][-1], completion]
        else:
            texts = [prompt + completion]
        positions = getattr(self.config, "max_position_embeddings", None)
        limit = min(n for n in (max_length, tokenizer.model_max_length, positions) if n)
        inputs = tokenizer(*texts, add_special_tokens=special)
        length = len(inputs["input_ids"])
        if length > limit:
            inputs = tokenizer(*texts, add_special_tokens=special, truncation=True, max_length=limit)
        return {name: inputs[name] for name in inputs if name != "attention_mask"}, max(length - limit, 0)

    def scores(self, texts: Sequence[Mapping[str, list[int]]], place: int, output: str) -> list[float]:
        """Of one batch. The padding is on the right, where no token of a text sees it."""
        import torch

        lengths = [len(text["input_ids"]) for text in texts]
        pad = self.pad
        if pad is None:  # transformers takes the last token that is no padding, so no text may contain that
            used = {token for text in texts for token in text["input_ids"]}
            pad = self.config.pad_token_id = next(i for i in range(self.config.vocab_size) if i not in used)
        inputs_BT = {
            name: [
                [*text[name], *[pad if name == "input_ids" else 0] * (max(lengths) - length)]
                for text, length in zip(texts, lengths, strict=True)
            ]
            for name in texts[0]
        }
        inputs_BT["attention_mask"] = [[1] * length + [0] * (max(lengths) - length) for length in lengths]
        tensors = {name: torch.tensor(rows, device=self.device) for name, rows in inputs_BT.items()}
        with torch.inference_mode():
            logits_BL = self.network(**tensors).logits.double()
        if output == "probability":
            logits_BL = logits_BL.sigmoid() if logits_BL.shape[1] == 1 else logits_BL.softmax(1)
        scores_B = logits_BL[:, place]
        if not scores_B.isfinite().all():
            raise RewardError(
                f"model: {self.path} gave the score {scores_B[~scores_B.isfinite()][0]}; try dtype: float32"
            )
        return scores_B.tolist()


@functools.lru_cache(maxsize=4)
def _load(path: str, device: str, dtype: str) -> _Scorer:
    import torch

    if device == "auto":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    try:
        return _Scorer(path, place, getattr(torch, dtype))
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"model: cannot load {path}: {error}") from error
