"""Conversations: ids and masks match transformers and trl, and unusable lines are named."""

from __future__ import annotations

import copy
import gzip
import io
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron.config.data import DataConfig
from megatron.data import chat_template
from megatron.data.chat import (
    ChatTokenizer,
    Conversations,
    _load,
    encode_pair,
    encode_record,
    end_ids,
    load_conversations,
)
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
def test_answers_and_their_ends_are_marked(template: str, turns: list[tuple[str, str]]) -> None:
    found = tokenizer(template).conversation(messages(*turns))
    expected: list[tuple[int, bytes]] = []
    for role, content in turns:
        for answer, text in ((0, f"<{role}>"), (int(role == "assistant"), content)):
            encoded = text.encode() + (b"" if text != content else b"$\n" if answer else b"\n")
            last = expected.pop() if expected and expected[-1][0] == answer else (answer, b"")
            expected.append((answer, last[1] + encoded))
    assert parts(found.ids.tolist(), found.answers.tolist()) == expected


@pytest.mark.parametrize(
    "unused",
    [
        "{# {% generation %} #}",
        "{#- {%- generation -%}{% endgeneration %}\n-#}",
        "{{ '{% generation %}' if false }}",
        "{% if false %}{% raw %}{% generation %}{% endraw %}{% endif %}",
    ],
)
def test_text_that_resembles_a_generation_block_marks_no_answer(unused: str) -> None:
    turns = messages(*CONVERSATIONS[1])
    found, plain = (tokenizer(template).conversation(turns) for template in (unused + PLAIN, PLAIN))
    assert found.ids.tolist() == plain.ids.tolist()
    assert found.answers.tolist() == plain.answers.tolist()


@pytest.mark.parametrize("left_out", [{0}, {1}, {1, 3}])
@pytest.mark.parametrize("template", [PLAIN, MARKED, PLAIN.replace("{{ m.role }}", "{{ m.role }}{{ m.weight }}")])
def test_an_answer_of_weight_0_is_read_but_not_trained(template: str, left_out: set[int]) -> None:
    turns = [message for n in range(4) for message in messages(("user", "q"), ("assistant", f"answer {n}"))]
    whole = tokenizer(template).conversation(turns)
    weights = [{"weight": float(n not in left_out)} if n else {"weight": int(n not in left_out)} for n in range(4)]
    for n, weight in enumerate(weights):
        turns[2 * n] = turns[2 * n] | {"weight": None}
        turns[2 * n + 1] = turns[2 * n + 1] | weight
    found = encode_record(tokenizer(template), {"messages": turns})
    assert found.ids.tolist() == whole.ids.tolist()
    expected = [b"answer %d$\n" % n for n in range(4) if n not in left_out]
    assert [text for answer, text in parts(found.ids.tolist(), found.answers.tolist()) if answer] == expected
    assert found.ends.sum() == len(expected)


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


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}
{%- for p in ([m.content] if m.content is string else (m.content or [])) %}{{ p.text or p }}{% endfor %}
{%- for c in m.tool_calls or [] %}
{%- set a = c.function.arguments %}[{{ c.function.name }} {{ a if a is string else a | tojson }}]{% endfor %}
{{- eos_token }}
{% endgeneration %}{% else %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}

{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""A template of tools, which also takes parts."""


def calling(call: dict[str, Any], **content: Any) -> list[dict[str, Any]]:
    """A question, a call of a tool, and the answer."""
    call_turn = {"role": "assistant", "tool_calls": [call], **content}
    return [*messages(("user", "1+?")), call_turn, *messages(("tool", "2"), ("assistant", "It is 2"))]


def in_parts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        m | {"content": [{"type": "text", "text": part} for part in (m["content"][:1], m["content"][1:])]}
        for m in turns
    ]


RECORDS = [
    *({"messages": messages(*turns)} for turns in (*CONVERSATIONS[:2], [("system", ""), *CONVERSATIONS[0]])),
]
CALLS = [
    {"messages": calling(CALL, content=None), "tools": json.dumps(TOOLS)},
    {"messages": calling(CALL, content=""), "tools": None},
    {"messages": calling(CALL, content="I add"), "tools": None},
    {"messages": calling(CALL), "tools": json.dumps(TOOLS)},
]
TEXT_CALLS = [{"messages": calling(AS_TEXT, content=content)} for content in (None, "")]
PARTS = [{"messages": in_parts(messages(*turns))} for turns in CONVERSATIONS[:2]]
CONVERSATIONAL = [
    {"prompt": turns[:-1], "completion": turns[-1:]} for turns in (messages(*each) for each in CONVERSATIONS[:2])
]
CALLS_COMPLETED = [
    {"prompt": turns[:1], "completion": turns[1:], "tools": TOOLS}
    for turns in (calling(CALL, content=None), calling(CALL, content="I add"))
]
SHARES = [{"conversations": [{"from": role, "value": text} for role, text in turns]} for turns in CONVERSATIONS[:2]]
COMPLETIONS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"prompt": "é", "completion": "nd<|endoftext|>"},
    {"prompt": "", "completion": "alone"},
]


FORMS = {
    "messages": RECORDS,
    "completions": COMPLETIONS,
    "calls": CALLS,
    "calls in JSON": TEXT_CALLS,
    "parts": PARTS,
    "conversational completions": CONVERSATIONAL,
    "completions with calls": CALLS_COMPLETED,
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_labels_match_trl(form: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    records = FORMS[form]
    chat = tokenizer(MARKED if form in ("messages", "completions") else CALLING)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))
    of_turns = "prompt" not in records[0]
    config = SFTConfig(str(tmp_path), assistant_only_loss=of_turns, use_cpu=True, bf16=False, report_to="none")
    theirs = SFTTrainer(model, config, train_dataset=Dataset.from_list(records), processing_class=chat._tokenizer)
    for record, row in zip(records, theirs.train_dataset, strict=True):
        found = encode_record(chat, record)
        assert found.ids.tolist() == row["input_ids"]
        assert np.where(found.answers, found.ids, -100).tolist() == row["labels"]


def train(trim: bool | None = None, normalizer: Any = None, **options: Any) -> dict[str, bytes]:
    """A byte-level tokenizer whose offsets are trimmed or not, with a few words and the markers of the templates."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    model.decoder = decoders.ByteLevel()
    if normalizer is not None:
        model.normalizer = normalizer
    if trim is not None:
        model.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["hello world how are you user assistant sunny weather  \n\n"] * 9, trainer)
    return saved(model)


def saved(model: Tokenizer) -> dict[str, bytes]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 1 << 40}
    return {"tokenizer.json": model.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def metaspace() -> dict[str, bytes]:
    """A tokenizer like Llama's: spaces are letters, other letters are bytes, and decoding strips the first space."""
    letters = ["<unk>", *MARKERS, *(f"<0x{i:02X}>" for i in range(256)), *"▁helowrdyuasnit"]
    model = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, [], byte_fallback=True, unk_token="<unk>")
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(strip)
    model.add_special_tokens(list(MARKERS))
    return saved(model)


MARKERS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>")
TOKENIZERS = {
    "plain": train,
    "trimmed": lambda: train(True),
    "untrimmed": lambda: train(False),
    "without words": lambda: train(True, use_regex=False),
    "NFKC": lambda: train(True, normalizers.NFKC()),
    "NFD": lambda: train(False, normalizers.NFD()),
    "lower case": lambda: train(True, normalizers.Lowercase()),
    "metaspace": metaspace,
    "slow": lambda: {"tokenizer_config.json": b'{"tokenizer_class": "ByT5Tokenizer", "eos_token": "<|im_end|>"}'},
}


@cache
def trained(name: str) -> dict[str, bytes]:
    return TOKENIZERS[name]()


Pieces = list[tuple[str, int]]


def in_chatml(role: str, content: str) -> Pieces:
    answer = role == "assistant"
    return [(f"<|im_start|>{role}\n", 0), (f"{content}<|im_end|>", answer), ("\n", 0)]


def with_spaces(role: str, content: str) -> Pieces:
    if role == "assistant":
        return [("<|assistant|>", 0), (f" {content} <|im_end|>", 1)]
    return [(f"<|{role}|> {content} ", 0)]


def at_its_end(role: str, content: str) -> Pieces:
    if role == "assistant":
        return [("<|assistant|>\n", 0), (f"{content} ", 1)]
    return [(f"<|{role}|> {content} ", 0)]


def whole(role: str, content: str) -> Pieces:
    return [(content, role == "assistant")] if role == "assistant" else [(f"<|{role}|>{content}", 0)]


def glm(role: str, content: str) -> Pieces:
    return [(f"<|{role}|>", 2), ("\n", 0), (content, role == "assistant")]


def unmarked(role: str, content: str) -> Pieces:
    answer = role == "assistant"
    return [(f"<|im_start|>{role}\n", 0), (f"{content}<|im_end|>\n", answer)]


TURN = "<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
OTHER = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}"
IF = "{% if m.role == 'assistant' %}"
HERE = IF + TURN + "{% else %}" + OTHER + "{% endif %}"
FOR, END = "{% for m in messages %}", "{% endfor %}"
OTHERS = "{% else %}{{ '<|' + m.role + '|> ' + m.content + ' ' }}{% endif %}" + END


def marking(text: str, before: str = "", after: str = "") -> str:
    """A template in which ``text`` is the answer."""
    return FOR + IF + before + "{% generation %}{{ " + text + " }}" + after + "{% endgeneration %}" + OTHERS


BY_HAND: dict[str, tuple[str, Callable[[str, str], Pieces]]] = {
    "marked": (FOR + HERE + END, in_chatml),
    "in a macro": ("{% macro turn(m) %}" + HERE + "{% endmacro %}" + FOR + "{{ turn(m) }}" + END, in_chatml),
    "in a filter": ("{% filter replace('#', '') %}" + FOR + HERE + END + "{% endfilter %}", in_chatml),
    "content": (FOR + HERE.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>") + END, in_chatml),
    "spaces": (marking("' ' + m.content", "<|assistant|>", " <|im_end|>"), with_spaces),
    "space at the end": (marking("m.content + ' '", "{{ '<|assistant|>\n' }}"), at_its_end),
    "nothing else": (marking("m.content").replace(" ' + m.content + ' '", "' + m.content"), whole),
    "unmarked": (FOR + OTHER + END + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", unmarked),
    "next role": (
        FOR
        + "{{ '<|' + m.role + '|>\n' + m.content }}"
        + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        glm,
    ),
}
"""Templates, and what they write in pieces: 1 for answers, 2 for what ends an answer before it."""
TALKS = [
    [("user", "hello"), ("assistant", "how are you"), ("user", "weather"), ("assistant", "sunny")],
    [("assistant", "hello world"), ("user", "x"), ("assistant", " spaced ")],
    [("user", "hi "), ("assistant", "👩‍🚀 ok"), ("user", "é ñ\n"), ("assistant", "日本"), ("assistant", "again")],
    [("system", "be  brief"), ("user", "?"), ("assistant", " a"), ("user", "b"), ("assistant", "c  "), ("user", "d")],
]


def squeezed(text: str, name: str) -> str:
    """A text as decoding gives it back."""
    match name:
        case "NFKC" | "NFD":
            return unicodedata.normalize(name, text)
        case "lower case":
            return text.lower()
        case "metaspace" | "slow":  # these drop spaces, after and before which tokens
            return "".join(text.split())
    return text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", BY_HAND)
def test_answers_are_found_whatever_the_tokenizer_and_the_template(template: str, name: str) -> None:
    """The decoded answers are the texts written by hand, and with the rest they are the conversation."""
    source, write = BY_HAND[template]
    follows = name != "slow"  # its files have no token for the next role
    chat = ChatTokenizer(trained(name) | {"chat_template.jinja": source.encode()})
    for talk in TALKS:
        expected: Pieces = []
        for text, kind in (piece for turn in talk for piece in write(*turn)):
            answer = int(kind == 1 or (kind == 2 and follows and bool(expected) and expected[-1][1] == 1))
            last = expected.pop()[0] if expected and expected[-1][1] == answer else ""
            expected.append((last + text, answer))
        found = chat.conversation(messages(*talk))
        edges = [0, *(np.flatnonzero(np.diff(found.answers)) + 1), len(found.ids)]
        decoded = [
            (chat._tokenizer.decode(found.ids[a:b], skip_special_tokens=False), int(found.answers[a]))
            for a, b in itertools.pairwise(edges)
        ]
        wanted = [(squeezed(text, name), answer) for text, answer in expected]
        ours = [(squeezed(text, name), answer) for text, answer in decoded]
        assert [piece for piece in ours if piece[0]] == [piece for piece in wanted if piece[0]]


def test_a_token_across_the_edge_of_an_answer_belongs_to_it() -> None:
    """As transformers marks it."""
    chat = ChatTokenizer(trained("untrimmed") | {"chat_template.jinja": BY_HAND["marked"][0].encode()})
    for content in ("\n\nagain", "\n"):
        turns = messages(("user", "x"), ("assistant", content))
        theirs = chat._tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        found = chat.conversation(turns)
        assert found.ids.tolist() == theirs["input_ids"]
        assert found.answers.tolist() == theirs["assistant_masks"]
        assert chat._tokenizer.decode(found.ids[found.answers > 0]) == f"\n{content}<|im_end|>"


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({word: i for i, word in enumerate(["[UNK]", "hello", "are", *MARKERS])}, unk_token="[UNK]"),
        models.Unigram([(word, -1.0) for word in ("[UNK]", "hello", "are", *MARKERS)], unk_id=0),
    ],
    ids=["word pieces", "unigram"],
)
def test_words_without_a_token_of_their_own_count_too(model: models.Model) -> None:
    """Also where only the model names the token for them."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(MARKERS))
    chat = ChatTokenizer(saved(tokenizer) | {"chat_template.jinja": BY_HAND["marked"][0].encode()})
    found = chat.conversation(messages(("user", "hello how"), ("assistant", "how are you")))
    answer = found.ids[found.answers == 1].tolist()
    assert answer == tokenizer.encode("how are you<|im_end|>", add_special_tokens=False).ids


def test_offsets_that_do_not_fit_the_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a tokenizer whose normalizer loses count."""
    chat = ChatTokenizer(trained("plain") | {"chat_template.jinja": BY_HAND["marked"][0].encode()})
    turns = messages(("user", "hello"), ("assistant", "how are you"))
    correct = chat._plain

    class Shifted:
        normalizer = None

        def encode(self, text: str, **options: bool) -> Any:
            found = correct.encode(text, **options)
            return SimpleNamespace(
                ids=found.ids, offsets=[(a + 3, b + 3) for a, b in found.offsets[:-3]] + found.offsets[-3:]
            )

    monkeypatch.setattr(chat, "_plain", Shifted())
    with pytest.raises(BadDocumentError, match="the tokens of an answer are"):
        chat.conversation(turns)


def test_columns_with_other_names_match_trl() -> None:
    from trl import maybe_convert_to_chatml

    chat = tokenizer(MARKED)
    for record in SHARES:
        theirs = encode_record(chat, maybe_convert_to_chatml(copy.deepcopy(record)))
        assert encode_record(chat, record).ids.tolist() == theirs.ids.tolist()


def test_a_template_that_takes_only_texts_gets_the_joined_parts_and_no_null() -> None:
    """It would refuse them, or write them as Python does."""
    for template in (PLAIN, PLAIN.replace("{{ m.content }}", "{{ '' + m.content }}")):
        chat = tokenizer(template)
        for record, turns in zip(PARTS, CONVERSATIONS):
            whole = chat.conversation(messages(*turns))
            assert encode_record(chat, record).ids.tolist() == whole.ids.tolist()
        with pytest.raises(BadDocumentError, match="has tool calls, which the chat template does not render"):
            encode_record(chat, CALLS[0])
    chat = tokenizer(PLAIN.replace("{{ m.content }}", "{{ '' + m.content }}{% if m.tool_calls %}[add]{% endif %}"))
    for record in CALLS[:2]:
        found = encode_record(chat, {"messages": record["messages"]})
        assert (1, b"[add]$\n") in parts(found.ids.tolist(), found.answers.tolist())


def test_the_tokens_that_end_answers_are_named(tmp_path: Path) -> None:
    """Of a template in which the next role ends them; the last answer of a conversation has no end, with a note."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    files = saved_folder(tmp_path / "tokenizer", trained("plain") | {"chat_template.jinja": template.encode()})
    generation = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (tmp_path / "t.jinja").write_text(template + generation)
    talks = [TALKS[0], TALKS[0], [*TALKS[0], ("system", "end")]]
    options = DataConfig(
        chat_data_path=(str(tmp_path / "chat.jsonl"),),
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(files),
        chat_template=str(tmp_path / "t.jinja"),
    )
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": messages(*talk)}) + "\n" for talk in talks))
    found = load(options)
    ids = json.loads(trained("plain")["tokenizer.json"])["added_tokens"]
    number = {token["content"]: token["id"] for token in ids}
    assert end_ids(options, found) == [number["<|user|>"], number["<|system|>"], number["<|im_end|>"]]
    (note,) = found.notes
    assert note.startswith(f"2 of 6 answers have no special token at their end, the first in {tmp_path}/chat.jsonl:1;")


def saved_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_long_conversation_takes_no_quadratic_time() -> None:
    """Marked, it is rendered once; otherwise every answer takes a rendering, and the messages are limited."""
    turns = messages(*[("user", "q"), ("assistant", "a")] * 1500)
    assert tokenizer(MARKED).conversation(turns).answers.sum() == 1500 * len("a$\n")
    with pytest.raises(BadDocumentError, match=r"has 1,500 answers in 3,000 messages.*{% generation %}"):
        tokenizer(PLAIN).conversation(turns)


HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.5 s",
    "{{ 9 ** (9 ** 9) }}": "takes more than 0.5 s",
    "{{ 'a' * 10 ** 10 }}": "takes more than 1,024 MiB",
    "{{ '%9999999999d' % 1 }}": "takes more than 1,024 MiB",
    "{{ 'a' * 10 ** 7 }}": "is a text of 10,000,000 characters; the limit is 4,194,304",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "does not fit the chat template: maximum recursion depth",
    "{{ messages.append(1) }}": "does not fit the chat template",
    "{{ ''.__class__.__mro__ }}": "does not fit the chat template",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_is_a_program_within_limits(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.5)
    chat = tokenizer(template)
    for _ in range(2):
        with pytest.raises(BadDocumentError, match=re.escape(HOSTILE[template])):
            encode_record(chat, RECORDS[0])


def test_a_template_that_is_ended_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.3)
    options = data(tmp_path, [GOOD] * 9, bad_samples="skip")
    Path(options.chat_template).write_text("{{ 9 ** (9 ** 9) }}")
    with pytest.raises(DataError, match=r"the chat template takes more than 0\.3 s, for 3 conversations"):
        load(options)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"chat_template": "{{ 1 }}"}, "is not the name of a template of the tokenizer"),
        ({"chat_template": 5}, "is not the name of a template"),
        ({"chat_template": []}, "'chat_template' in 'chat_template_kwargs' is an array"),
        ({"documents": [{}]}, "cannot set 'documents'"),
        *(
            ({name: "x"}, f"cannot set '{name}'")
            for name in ("messages", "self", "tools", "tokenize", "eos_token", "_x", "")
        ),
        ({"mood": {}}, "'mood' in 'chat_template_kwargs' is an object"),
        ([], "'chat_template_kwargs' is not an object"),
    ],
)
def test_a_line_sets_only_plain_options(options: Any, seen: str) -> None:
    with pytest.raises(BadDocumentError, match=re.escape(seen)):
        encode_record(tokenizer(), RECORDS[0] | {"chat_template_kwargs": options})


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


MALFORMED = [
    [{"role": ["user"], "content": "?"}],
    [{"role": None, "content": "?"}],
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": {}}],
    *([{"role": "assistant", "content": "x", "weight": weight}] for weight in (0, 0.5, 2, -1, "0", True, [])),
    [{"role": "user", "content": "x", "weight": 1}, {"role": "assistant", "content": "x"}],
    [{"role": "assistant", "content": "", "tool_calls": "x"}],
    [{"role": "assistant", "content": "", "tool_calls": [5]}],
    [{"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
    [{"role": "assistant", "content": [{"type": [], "text": "x"}]}],
    [{"role": "assistant", "content": [{"type": "text", "text": 5}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "\ud800", "arguments": {}}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"a": nested(20_000)}]}],
    [{"role": "assistant", "content": "x", "odd": nested(800)}, {"role": "assistant", "content": "\ud800"}],
]


@pytest.mark.parametrize("turns", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_refused_with_a_sentence(turns: Any) -> None:
    chat = tokenizer(CALLING)
    for record in ({"messages": turns}, {"prompt": messages(("user", "?")), "completion": turns}):
        with pytest.raises(BadDocumentError):
            encode_record(chat, record)
    with pytest.raises(BadDocumentError):
        encode_pair(chat, {"prompt": messages(("user", "?")), "chosen": turns, "rejected": turns})


def test_a_text_that_a_normalizer_would_blow_up_is_refused() -> None:
    with pytest.raises(BadDocumentError, match="characters in its decomposed form"):
        encode_record(tokenizer(), {"prompt": "\ufdfa" * 300_000, "completion": "x"})


def test_code_beside_a_tokenizer_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if standard input agrees to it, which transformers asks."""
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/mod.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    code = {"AutoTokenizer": [f"{tmp_path}/strange--mod.Tok", None], "AutoConfig": f"{tmp_path}/strange--mod.Conf"}
    files = ByteTokenizer().hugging_face_files()
    named = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "Unknown"}
    for more in (
        {"tokenizer_config.json": json.dumps(named | {"auto_map": code}).encode()},
        {
            "tokenizer_config.json": json.dumps(named).encode(),
            "config.json": json.dumps({"model_type": "unknown", "auto_map": code}).encode(),
        },
    ):
        with pytest.raises(DataError, match="names code of its own in 'auto_map', which is never run"):
            ChatTokenizer(files | more)
    assert not (tmp_path / "ran").exists()


def test_a_conversation_that_is_rendered_differently_as_it_grows_is_refused() -> None:
    """As by templates that keep the thoughts of the last answer only."""
    forgetful = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:2] }}")
    with pytest.raises(BadDocumentError, match="renders the messages up to 2 differently"):
        tokenizer(forgetful).conversation(messages(*CONVERSATIONS[1][1:]))
    marked = MARKED.replace("m.content }}{{ eos_token", "(m.content if loop.last else m.content[:2]) }}{{ eos_token")
    turns = [message for _ in range(2) for message in messages(("user", "question"), ("assistant", "answer"))]
    assert tokenizer(marked).conversation(turns).answers.any()
    turns[1]["weight"] = 0
    with pytest.raises(BadDocumentError, match=r"conversation; an answer of weight 0 cannot be left out of it$"):
        tokenizer(marked).conversation(turns)
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
