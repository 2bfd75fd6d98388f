"""An exported adapter: PEFT loads it, with the base model that it names, and computes what the policy does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.rl.export.export import export
from covey.rl.export.source import ExportError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("base", ["llama", "tied_qwen2"])
def test_peft_computes_what_the_policy_does(
    base: str,
    method: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Any,
    logits: Callable[..., torch.Tensor],
    ids: list[int],
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer, BitsAndBytesConfig

    folder = request.getfixturevalue(base)
    policy, adapter = train(folder, tmp_path / "adapter", method=method)
    config = json.loads((adapter / "adapter_config.json").read_text())
    named_from_here = Path(*[".."] * len(tmp_path.parts[1:]), *folder.parts[1:])
    config["base_model_name_or_path"] = str(named_from_here)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    exported = export(adapter, "adapter")
    monkeypatch.chdir("/")  # the name of the base model has to mean the same from anywhere

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    settings: dict[str, Any] = {"quantization_config": nf4} if method == "qlora" else {}
    model = AutoPeftModelForCausalLM.from_pretrained(exported, dtype=torch.float32, **settings)
    torch.testing.assert_close(logits(model.eval()), policy.forward_logits(ids), rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    chat = [{"role": "user", "content": "the end"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_has_no_adapter(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="whole model, without an adapter"):
        export(llama, "adapter", out=tmp_path / "out")
