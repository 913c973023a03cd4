"""Conversations: the ids and masks are those of transformers and trl, and lines that cannot be used are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.run import DataConfig
from megatron.data.chat import ChatTokenizer, Conversations, _load, encode_pair, encode_record, load_conversations
from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import BadDocumentError
from megatron.data.tokenizers.huggingface import ByteTokenizer

PLAIN = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""A template without marks: the answers are found by rendering prefixes."""
MARKED = """{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}
{{- m.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""The same with marks."""
EOD = ByteTokenizer.eod

CONVERSATIONS = [
    [("user", "Hi"), ("assistant", "Hello!")],
    [("system", "Be brief"), ("user", "a\nb"), ("assistant", "c 日本 😀"), ("user", "?"), ("assistant", "d\n\ne")],
    [("user", "q"), ("assistant", "one"), ("assistant", "two"), ("user", "unanswered")],
]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def tokenizer(template: str | None = PLAIN) -> ChatTokenizer:
    files = ByteTokenizer().hugging_face_files()
    return ChatTokenizer(files if template is None else files | {"chat_template.jinja": template.encode()})


def parts(ids: list[int], answers: list[int]) -> list[tuple[int, bytes]]:
    """The text in runs of equal mask, with ``$`` for the end of a document."""
    runs: list[tuple[int, bytes]] = []
    for i, answer in zip(ids, answers, strict=True):
        letter = b"$" if i == EOD else bytes([i])
        if runs and runs[-1][0] == answer:
            runs[-1] = answer, runs[-1][1] + letter
        else:
            runs.append((answer, letter))
    return runs


@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_answers_and_what_ends_them_are_marked(template: str, turns: list[tuple[str, str]]) -> None:
    found = tokenizer(template).conversation(messages(*turns))
    expected: list[tuple[int, bytes]] = []
    for role, content in turns:
        for answer, text in ((0, f"<{role}>"), (int(role == "assistant"), content)):
            encoded = text.encode() + (b"" if text != content else b"$\n" if answer else b"\n")
            last = expected.pop() if expected and expected[-1][0] == answer else (answer, b"")
            expected.append((answer, last[1] + encoded))
    assert parts(found.ids.tolist(), found.answers.tolist()) == expected


TEMPLATES = ("cohere2", "gemma3", "lfm2_v2", "phi3_5", "qwen3_vl", "qwen3_instruct_2507")


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_models_give_the_masks_of_their_training_variants(name: str) -> None:
    """trl adds marks to the templates of models: without them the same answers are found, as transformers marks."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    plain, marked = ((folder / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
    assert "generation %}" not in plain.replace("add_generation_prompt", "")
    chat = tokenizer(plain)
    for turns in CONVERSATIONS[:2]:
        theirs = chat._tokenizer.apply_chat_template(
            messages(*turns), chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        found = chat.conversation(messages(*turns))
        assert found.ids.tolist() == theirs["input_ids"]
        assert found.answers.tolist() == theirs["assistant_masks"]
        assert 0 < sum(theirs["assistant_masks"]) < len(found.ids)


RECORDS = [
    *({"messages": messages(*turns)} for turns in CONVERSATIONS[:2]),
]
COMPLETIONS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"prompt": "é", "completion": "nd<|endoftext|>"},
    {"prompt": "", "completion": "alone"},
]


@pytest.mark.parametrize("records", [RECORDS, COMPLETIONS], ids=["messages", "completions"])
def test_ids_and_labels_are_those_of_trl(records: list[dict[str, Any]], tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    chat = tokenizer(MARKED)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))
    config = SFTConfig(
        str(tmp_path), assistant_only_loss="messages" in records[0], use_cpu=True, bf16=False, report_to="none"
    )
    theirs = SFTTrainer(model, config, train_dataset=Dataset.from_list(records), processing_class=chat._tokenizer)
    for record, row in zip(records, theirs.train_dataset, strict=True):
        found = encode_record(chat, record)
        assert found.ids.tolist() == row["input_ids"]
        assert np.where(found.answers, found.ids, -100).tolist() == row["labels"]


def test_a_conversation_that_is_rendered_differently_as_it_grows_is_refused() -> None:
    """As by templates that keep the thoughts of the last answer only."""
    forgetful = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:2] }}")
    with pytest.raises(BadDocumentError, match="renders the messages up to 2 differently"):
        tokenizer(forgetful).conversation(messages(*CONVERSATIONS[1][1:]))
    with pytest.raises(BadDocumentError, match="does not fit the chat template: roles must alternate"):
        tokenizer("{{ raise_exception('roles must alternate') }}").conversation(messages(*CONVERSATIONS[0]))


def test_tools_and_further_names_reach_the_template_as_in_trl() -> None:
    """With marks and without them, and in preferences."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {"messages": messages(*CONVERSATIONS[0]), "tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    head = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}\n"
    for template in (PLAIN, MARKED):
        chat = tokenizer(head + template)
        theirs = chat._tokenizer.apply_chat_template(record["messages"], tools=tools, mood="calm", return_dict=True)
        for given in (tools, json.dumps(tools)):
            found = encode_record(chat, record | {"tools": given})
            assert found.ids.tolist() == theirs["input_ids"]
            assert parts(found.ids.tolist(), found.answers.tolist())[0] == (0, b"addcalm\n<user>Hi\n<assistant>")
        turns = {"chosen": record["messages"], "rejected": messages(*CONVERSATIONS[0][:1], ("assistant", "No"))}
        pair, _ = encode_pair(chat, record | turns)
        assert pair[0].ids.tolist() == theirs["input_ids"]


def test_one_of_several_templates_is_chosen_as_transformers_does() -> None:
    files = ByteTokenizer().hugging_face_files()
    config = json.loads(files["tokenizer_config.json"])

    def named(**templates: str) -> ChatTokenizer:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
        return ChatTokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()})

    record = {"messages": messages(*CONVERSATIONS[0])}
    chat = named(default=PLAIN, tool_use="tools\n" + MARKED)
    assert encode_record(chat, record).ids.tolist() == encode_record(tokenizer(PLAIN), record).ids.tolist()
    choices: list[dict[str, Any]] = [{"tools": [{}]}, {"chat_template_kwargs": {"chat_template": "tool_use"}}]
    for options in choices:
        found = encode_record(chat, record | options)
        assert parts(found.ids.tolist(), found.answers.tolist())[0] == (0, b"tools\n<user>Hi\n<assistant>")
    with pytest.raises(DataError, match="multiple chat templates with no default") as refused:
        encode_record(named(rag=PLAIN, tool_use=PLAIN), record)
    assert not isinstance(refused.value, BadDocumentError)


@pytest.mark.parametrize("head", ["", "{{ bos_token }}{{ messages[0].role }}\n"])
def test_a_conversation_may_begin_with_an_answer(head: str) -> None:
    """Also with a template that reads the first message, or ends every conversation."""
    turns = messages(("assistant", "Hello!"), ("user", "Hi"), ("assistant", "one"))
    marked = tokenizer(head + MARKED).conversation(turns)
    for end in ("", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"):
        found = tokenizer(head + PLAIN + end).conversation(turns)
        assert found.answers.tolist()[: len(marked.ids)] == marked.answers.tolist()
        assert found.ids.tolist()[: len(marked.ids)] == marked.ids.tolist()
    assert marked.answers.sum() == len("Hello!$\none$\n")


GOOD = json.dumps({"messages": messages(*CONVERSATIONS[0])})
BAD = {
    '{"messages": []}': " has no messages",
    '{"messages": [{"role": "user", "content": "?"}]}': " has no assistant turn",
    '{"messages": "text"}': ": 'messages' is not an array",
    '{"messages": ["text"]}': ": message 1 is not an object",
    '{"messages": [{"role": "user"}]}': ": message 1 has no key 'content'; its keys: role",
    '{"messages": [{"role": 5, "content": "?"}]}': ": message 1: 'role' is a number, not a string",
    '{"messages": [{"role": "user", "content": ["?"]}]}': ": message 1: 'content' is an array, not a string",
    '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": " "}]}': (
        ": message 2 has an empty content"
    ),
    '{"prompt": "?", "completion": 5}': ": 'completion' is a number, not a string",
    '{"prompt": "?", "completion": ""}': " has an empty completion",
    '{"messages": [{"role": "assistant", "content": "!"}], "tools": "[{"}': (
        ": 'tools' is not JSON: Expecting property name enclosed in double quotes: line 1 column 3 (char 2)"
    ),
    '{"messages": [{"role": "assistant", "content": "!"}], "tools": ["add"]}': ": 'tools' is not an array of objects",
    '{"messages": [{"role": "assistant", "content": "!"}], "chat_template_kwargs": "a"}': (
        ": 'chat_template_kwargs' is not an object"
    ),
    '{"text": "?"}': " has neither 'messages' nor 'prompt' and 'completion'; its keys: text",
    "[1]": " is an array, not an object",
    '{"messages": [': " is not JSON: Expecting value: line 1 column 15 (char 14)",
    '{"prompt": "\\ud800", "completion": "?"}': ": 'prompt' is not Unicode: character 0 is an unpaired surrogate",
}


def data(tmp_path: Path, lines: list[str] | bytes, name: str = "chat.jsonl", **options: Any) -> DataConfig:
    """The options of a run on these lines."""
    content = lines if isinstance(lines, bytes) else "".join(line + "\n" for line in lines).encode()
    (tmp_path / name).write_bytes(content)
    (tmp_path / "t.jinja").write_text(PLAIN)
    named = {"tokenizer_type": "ByteTokenizer", "chat_template": str(tmp_path / "t.jinja")}
    return DataConfig(chat_data_path=(str(tmp_path / name),), **(named | options))


def load(options: DataConfig, seq_length: int = 100) -> Conversations:
    """The conversations, read again as by another process."""
    _load.cache_clear()
    return load_conversations(options, "train", seq_length)


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    options = data(tmp_path, [GOOD, "", line, GOOD])
    with pytest.raises(DataError) as refused:
        load(options)
    assert refused.value.seen == f"1 of 3 conversations cannot be used: {tmp_path}/chat.jsonl:3{BAD[line]}"
    assert "--bad-samples skip" in refused.value.fixes
    skipping = data(tmp_path, [GOOD, "", line, GOOD], bad_samples="skip")
    found = load(skipping)
    assert len(found.lengths) == 2
    assert found.notes == (f"left out: {refused.value.seen}",)


@pytest.mark.parametrize("cached", [False, True])
def test_lines_that_cannot_be_used_are_counted(tmp_path: Path, cached: bool) -> None:
    """Also from a cache; a conversation that does not fit into a sample is one of them, and not cut."""
    long = json.dumps({"prompt": "x" * 60, "completion": "y" * 60})
    options = data(tmp_path, [*BAD, GOOD, long, GOOD], bad_samples="skip")
    if cached:
        options = data(tmp_path, [*BAD, GOOD, long, GOOD], bad_samples="skip", data_cache_path=str(tmp_path / "cache"))
    for _ in range(2):
        found = load(options)
        (note,) = found.notes
        assert note.startswith(f"left out: 18 of 20 conversations cannot be used: {tmp_path}/chat.jsonl:1 has no mess")
        assert note.endswith("; and 13 more")
        assert found.lengths.tolist() == [len("<user>Hi\n<assistant>Hello!$\n") - 1] * 2
    assert len(load(options, 120).lengths) == 3  # 120 letters and the end, all but one of which are predicted
    with pytest.raises(DataError, match=r"chat.jsonl:15 takes 120 positions, and a sample has 119"):
        load(data(tmp_path, [*[GOOD] * 14, long]), 119)
    assert list((tmp_path / "cache").glob("chat-*")) != [] or not cached


def test_files_without_anything_to_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no conversations"):
        load(data(tmp_path, ["", " "]))
    with pytest.raises(DataError, match="1 of 1 conversation cannot be used"):
        load(data(tmp_path, ["[]"], bad_samples="skip"))
    with pytest.raises(DataError, match=r"1 of 1 conversation cannot be used: .* takes 27 positions"):
        load(data(tmp_path, [GOOD], bad_samples="skip"), 26)
    with pytest.raises(DataError, match="the tokenizer has no chat template\n  fix: --chat-template"):
        load(data(tmp_path, [GOOD], chat_template=None))
    with pytest.raises(DataError, match="conversations need a tokenizer that transformers can read"):
        load(data(tmp_path, [GOOD], tokenizer_type=None))
    with pytest.raises(DataError, match=r"none.jsonl.*No such file"):
        load(DataConfig(chat_data_path=("none.jsonl",), tokenizer_type="ByteTokenizer"))


def test_compressed_and_damaged_files(tmp_path: Path) -> None:
    content = gzip.compress(f"{GOOD}\n{GOOD}\n".encode())
    assert len(load(data(tmp_path, content, "chat.jsonl.gz")).lengths) == 2
    with pytest.raises(DataError, match=r"chat.jsonl.gz:\d+ ends in the middle of a .gz stream"):
        load(data(tmp_path, content[:-9], "chat.jsonl.gz"))


def test_prompts_and_conversations_may_share_a_file(tmp_path: Path) -> None:
    found = load(data(tmp_path, [GOOD, json.dumps(COMPLETIONS[0])]))
    ids, answers = (table[found.starts[1] : found.stops[1]].tolist() for table in (found.ids, found.answers))
    assert parts(ids, answers) == [(0, b"2 + 2 ="), (1, b" 4$")]
