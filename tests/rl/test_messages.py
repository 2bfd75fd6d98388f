"""Conversations with tools, a system message in a column of its own, other names for roles; what Arrow adds to them."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.policies.locate import locate_model
from covey.policies.tokenizer import load_tokenizer
from covey.rl.config import DataSection, DpoDataSection, SftDataSection
from covey.rl.data import DataError, Row, load_rows
from covey.rl.documents import Documents, make_documents
from covey.rl.dump import marked
from covey.rl.pairs import load_pairs
from covey.rl.templates import make_prompts

END = 258  # <|im_end|> of the model "tiny", whose other tokens are bytes
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + HEADER
TOOLS = (  # as Qwen's: tools in front, calls behind the content, arguments as JSON
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}" + TURN + "{% for c in "
    "m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>"
    "\n{% endfor %}" + HEADER
)
TEXT_ARGUMENTS = TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
USER, BOT = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


def conversation(arguments: Any) -> list[dict[str, Any]]:
    return [USER, call(arguments), {"role": "tool", "content": "3"}, BOT]


def sft(**keys: Any) -> SftDataSection:
    return SftDataSection(train="unused", **keys)


def written(rows: Any, template: str = TOOLS, **keys: Any) -> tuple[Documents, list[str]]:
    """The documents, and the text of each with what is trained between ⟦ and ⟧."""
    tokenizer = load_tokenizer(locate_model("tiny"))
    tokenizer.chat_template = template
    found = make_documents(load_rows(rows, sft(**keys)), tokenizer, sft(**keys), END)
    return found, [marked(tokenizer, document, ("⟦", "⟧")) for document in found]


@pytest.mark.parametrize("template", [TOOLS, TEXT_ARGUMENTS])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_calls_are_trained_and_tools_described(template: str, arguments: Any) -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        found, (text,) = written([{"messages": conversation(arguments), "tools": tools}], template)
        assert not found.warnings
        assert text == (
            f"[{json.dumps(TOOL)}]<|im_start|>user\n1+2?<|im_end|>\n"
            '<|im_start|>assistant\n⟦<call>add {"a": 1}</call><|im_end|>⟧\n'
            "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n⟦3.<|im_end|>⟧"
        )


def test_a_template_that_leaves_calls_or_tools_out_is_found_out() -> None:
    rows = [{"messages": conversation({}), "tools": [TOOL]}]
    found, (text, _) = written(rows * 2, PLAIN)
    assert text.count("⟦") == 1 and text.endswith("⟦3.<|im_end|>⟧")
    assert found.warnings[0] == (
        "row 0: has tools, which the chat template does not describe to the model (so have 1 more rows)."
    )
    assert "only the last turn is trained" in found.warnings[1]
    with pytest.raises(DataError, match=r"row 0: the chat template leaves out a part .*tool_calls"):
        written([{"messages": [USER, call({})]}], PLAIN)


def test_tools_are_part_of_a_prompt_too() -> None:
    tokenizer = load_tokenizer(locate_model("tiny"))
    tokenizer.chat_template = TOOLS
    rows = [{"query": "1+2?", "tools": [TOOL], "answer": "3"}, {"query": "hi", "tools": [], "answer": "ho"}]
    prompts = make_prompts(load_rows(rows, sft()), tokenizer, sft())
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [p.text for p in prompts] == [f"[{json.dumps(TOOL)}]" + user.format("1+2?"), user.format("hi")]
    assert load_rows(rows, sft(chat=False))[0].tools == ()  # raw prompts have none
    assert load_rows(rows, DataSection(train="-"))[0].tools == ()  # of GRPO the environment says them
    assert load_rows([{"messages": [USER, BOT], "x": [TOOL]}], sft(tools="x"))[0].tools == (TOOL,)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [USER, BOT], "tools": ["hammer"]},
            r"row 0: \"tools\" is \['hammer'\]\. Tools are a list",
        ),
        ({"messages": [USER, BOT], "tools": "{"}, r"row 0: \"tools\" is '{'\. Tools are a list"),
        (
            {"messages": [USER, BOT | {"tool_calls": "add"}]},
            r'message 1 has "tool_calls" that are no list of objects',
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "u"},
                    {"from": "function_call", "value": "add(1)"},
                ]
            },
            r"message 1 is a function_call, but 'add\(1\)' is not JSON like",
        ),
        ({"messages": [USER, BOT], "system": 7}, r'row 0: "system" is 7, not a system message'),
    ],
)
def test_what_is_no_tool_call_or_system_message(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_rows([row], sft())


def test_calls_of_sharegpt() -> None:
    said = [
        ("human", "1+2?"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "3"),
    ]
    row = {"conversations": [{"from": name, "value": text} for name, text in [*said, ("gpt", "3.")]]}
    (found,) = load_rows([row], sft())
    assert list(found.messages or ()) == [
        USER,
        call({"a": 1}) | {"content": ""},
        {"role": "tool", "content": "3"},
        BOT,
    ]
    pair = {"prompt": "1+2?", "chosen": row["conversations"][1:2], "rejected": [BOT], "tools": [TOOL]}
    (preference,) = load_pairs([pair], DpoDataSection(train="-"))
    assert list(preference.chosen.messages or ()) == [USER, call({"a": 1}) | {"content": ""}]
    assert preference.rejected.tools == (TOOL,)


def test_nulls_that_arrow_has_put_into_objects_are_not_there_and_written_ones_are(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": conversation({"a": 1})}, {"messages": conversation({"b": 2})}]
    table = pyarrow.Table.from_pylist(rows)
    assert table.to_pylist()[0] != rows[0]  # {"a": 1, "b": None}, and content: None beside the calls
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    data_set = datasets.Dataset.from_list(rows)
    data_set.save_to_disk(str(tmp_path / "saved"))
    wanted = [row.messages for row in load_rows(rows, sft())]
    for source in (tmp_path / "t.parquet", tmp_path / "saved", data_set):
        assert [row.messages for row in load_rows(source, sft())] == wanted
    (row,) = load_rows([{"messages": conversation({"a": None})}], sft())
    assert row.messages and row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


# --------------------------------------------------------------------------------------- system messages


def turns(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages or ()]


def test_a_column_with_the_system_message() -> None:
    chat = [("system", "s"), ("user", "1+2?"), ("assistant", "3.")]
    assert turns(load_rows([{"system": "s", "messages": [USER, BOT]}], sft())[0]) == chat
    own = [{"role": "system", "content": "own"}, USER, BOT]
    assert turns(load_rows([{"system": "s", "messages": own}], sft())[0])[0] == ("system", "own")
    rows = [
        {"system_prompt": "s", "question": "1+2?", "response": "3."},
        {"system_prompt": "", "question": "1+2?", "response": "3."},
    ]
    loaded = load_rows(rows, sft())
    assert 'prompt from "question", system message from "system_prompt", text to learn' in loaded.found
    user = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n⟦3.<|im_end|>⟧"
    assert written(rows, PLAIN)[1] == [f"<|im_start|>system\ns<|im_end|>\n{user}", user]
    # What the configuration says wins.
    assert written(rows[:1], PLAIN, system="mine")[1] == [f"<|im_start|>system\nmine<|im_end|>\n{user}"]
    assert written(rows[:1], PLAIN, chat=False)[1] == ["1+2?⟦3.<|im_end|>⟧"]
    assert written(rows[:1], PLAIN, prompt="{system_prompt}: {question}")[1] == ["s: 1+2?⟦3.<|im_end|>⟧"]


def test_the_same_prompt_in_grpo_and_dpo() -> None:
    row = {"system": "s", "prompt": "1+2?", "answer": "3"}
    assert turns(load_rows([row], DataSection(train="-"))[0]) == [("system", "s"), ("user", "1+2?")]
    (pair,) = load_pairs(
        [{"system": "s", "prompt": "1+2?", "chosen": "3", "rejected": "4"}], DpoDataSection(train="-")
    )
    assert turns(pair.rejected) == [("system", "s"), ("user", "1+2?")] and pair.rejected.completion == "4"
    chosen, rejected = [USER, BOT], [USER, BOT | {"content": "4."}]
    (pair,) = load_pairs([{"system": "s", "chosen": chosen, "rejected": rejected}], DpoDataSection(train="-"))
    assert turns(pair.chosen) == [("system", "s"), ("user", "1+2?"), ("assistant", "3.")]
    assert pair.chosen.prompt_messages == 2
    alpaca = {"instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4"}
    (pair,) = load_pairs([alpaca], DpoDataSection(train="-"))
    assert (pair.chosen.prompt, pair.rejected.prompt) == ("add\n\n1 2", "add\n\n1 2")


# ------------------------------------------------------------------------------- what is called how


def test_conversations_in_a_column_of_csv(tmp_path: Path) -> None:
    text = json.dumps([USER, BOT]).replace('"', '""')
    (tmp_path / "t.csv").write_text(f'id,messages\n1,"{text}"\n2,hi\n')
    assert turns(load_rows(str(tmp_path / "t.csv"), sft(malformed="skip"))[0]) == [
        ("user", "1+2?"),
        ("assistant", "3."),
    ]
    with pytest.raises(DataError, match=r"t\.csv:3: \"messages\" is 'hi'\. It must be a list"):
        load_rows(str(tmp_path / "t.csv"), sft())


def test_roles_under_other_names() -> None:
    row = {"messages": [{"role": "pupil", "content": "u"}, {"from": "Teacher", "value": "a"}]}
    assert turns(load_rows([row], sft())[0]) == [("pupil", "u"), ("Teacher", "a")]
    roles = {"pupil": "user", "Teacher": "assistant"}
    assert turns(load_rows([row], sft(roles=roles))[0]) == [("user", "u"), ("assistant", "a")]
    found = [("prompter", "user"), ("Human", "user"), ("ai", "assistant"), ("tool_response", "tool")]
    row = {"messages": [{"role": name, "content": "x"} for name, _ in found]}
    assert [role for role, _ in turns(load_rows([row], sft())[0])] == [role for _, role in found]
    row = {"chosen": [{"role": "Teacher", "content": "a"}], "rejected": [{"role": "Teacher", "content": "b"}]}
    (pair,) = load_pairs([{"prompt": "p", **row}], DpoDataSection(train="-", roles=roles))
    assert turns(pair.chosen) == [("user", "p"), ("assistant", "a")]


def test_a_whole_text_beside_columns_that_look_like_a_prompt() -> None:
    row = {"instruction": "i", "input": "", "output": "o", "text": "all", "n": 3}
    assert load_rows([row], sft())[0].text is None
    (found,) = load_rows([row], sft(text="text"))
    assert (found.text, found.prompt, found.completion) == ("all", None, None)
    assert load_rows([row], sft(text="{instruction}: {n}"))[0].text == "i: 3"
    for keys, says in (
        ({"text": "txt"}, r'data\.text: no column "txt".*Did you mean "text"'),
        ({"text": "n"}, r'row 0: "n" is 3, not text\. Set data\.text: "\{n\}"'),
        ({"text": "text", "prompt": "input"}, r"data\.text and data\.prompt: both are set"),
    ):
        with pytest.raises(DataError, match=says):
            load_rows([row], sft(**keys))
