"""Mutated files of every kind that may come from an unknown source: ``python -m tests.fuzz.fuzz [--seconds 600]``.

A file is refused with a sentence, or read as an independent reader reads it: numpy, `safetensors`, `json`, `yaml`. No
input may raise anything else, end the process, take more memory than `MEMORY` or more time than `SECONDS`.

Mutations change bits, numbers, types, names, nesting and length; one input has 1 to 4 of them. Input N of a target is
always the same: ``--target manifest --first 4711 --inputs 1`` runs one alone, and leaves it in ``--keep FOLDER``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import pickletools
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "golden" / "fuzz.txt"
MEMORY = 1 << 30  # beyond what the libraries take
SECONDS = 10  # of the processor, for an input
WAITING = 300  # seconds by the clock, for a reader that waits for something
MAX_BYTES = 4 << 20  # of an input

# --- mutations ---

NUMBERS = (0, -1, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
FLOATS = (1e300, -1e300, 0.5, 1e-300, float("nan"), float("inf"), -float("inf"))
TEXTS = (
    "",
    " ",
    "x",
    "..",
    "../x",
    "/etc/passwd",
    "\0",
    "\x1b[2J",
    "\ud800",
    "é" * 9,
    "x" * 100_000,
    "://" * 20_000,
    "token=" * 10_000,
    "null",
    "-1",
    "1e300",
)
OTHERS = (None, True, False, [], {}, [[]], {"a": {}}, [1, "a", None])


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a tree."""
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from nodes(child, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate_tree(tree: Any, dice: random.Random) -> Any:
    """Change one value, name or place of a tree."""
    tree = copy.deepcopy(tree)
    paths = list(nodes(tree))
    if len(paths) == 1:
        return dice.choice(OTHERS)
    *above, key = dice.choice(paths[1:]) if dice.random() < 0.5 else descend(tree, dice)
    holder = at(tree, tuple(above))
    value = holder[key]
    changes: list[Callable[[], Any]] = [
        *[lambda: dice.choice((*NUMBERS, *FLOATS))] * 3,
        lambda: dice.choice(OTHERS),
        lambda: dice.choice(TEXTS),
        lambda: value + dice.choice((-1, 1)) if isinstance(value, int | float) else [value],
        lambda: str(value),
        lambda: copy.deepcopy(at(tree, dice.choice(paths))),
        lambda: value * dice.choice((0, 2, 1000)) if isinstance(value, list) and len(repr(value)) < 1000 else [],
        lambda: nested(value, dice.choice((1, 40, 400)), dice),
    ]
    number = dice.randrange(len(changes) + 2)
    if number < len(changes):
        holder[key] = changes[number]()
    elif number == len(changes) and isinstance(holder, dict):
        holder[dice.choice((*TEXTS[:10], *holder, f"{key}x"))] = holder.pop(key)
    else:
        del holder[key]
    return tree


def descend(tree: Any, dice: random.Random) -> tuple[Any, ...]:
    """A path of which every part is as likely as its neighbours, however much lies below them."""
    path: list[Any] = []
    while isinstance(tree, dict | list) and tree and (not path or dice.random() < 0.9):
        path.append(dice.choice([*tree]) if isinstance(tree, dict) else dice.randrange(len(tree)))
        tree = tree[path[-1]]
    return tuple(path)


def nested(value: Any, depth: int, dice: random.Random) -> Any:
    for _ in range(depth):
        value = {"a": value} if dice.random() < 0.5 else [value]
    return value


def mutate_bytes(content: bytes, dice: random.Random) -> bytes:
    """Change bits, numbers or the length of a file."""
    data = bytearray(content)
    place = dice.randrange(len(data) + 1)
    length = dice.choice((1, 2, 4, 8, 64, 1000))
    match dice.randrange(9):
        case 0 | 1 if data:
            data[min(place, len(data) - 1)] ^= 1 << dice.randrange(8)
        case 2:
            del data[place:]
        case 3:
            del data[place : place + length]
        case 4:
            data[place:place] = data[place : place + length] * dice.choice((1, 3))
        case 5:
            data[place : place + length] = dice.randbytes(length)
        case 6:
            number = dice.choice(NUMBERS[:15]) % 2**64
            data[place : place + 8] = number.to_bytes(8, "little")
        case 7 if found := list(re.finditer(rb"\d+", content[:200_000])):
            spot = dice.choice(found)
            data[spot.start() : spot.end()] = repr(dice.choice((*NUMBERS, 1e300))).encode()
        case 8:
            data[place:place] = dice.choice((b"[", b"{", b'{"a":')) * dice.choice((1, 30, 5000))
    return bytes(data)


HOSTILE_STEPS = (
    b")" + b"\x85" * 60,
    b"(" * 40,
    b"}" * 2000,
    b"(K\x01K\x02\x91",
    b"N",
    b"0",
    b"2",
    b"b",
    b"R",
    b"\x81",
    b"s",
)
"""Pieces of pickles: nested tuples, collections that are begun, many objects, a set, and single opcodes."""
NAMED = (
    "os system",
    "builtins set",
    "torch Size",
    "argparse Namespace",
    "collections OrderedDict",
    "x " + "y" * 100_000,
)


def mutate_pickle(content: bytes, dice: random.Random) -> bytes:
    """Change one opcode of a pickle: its number, text or name, its place, or how often it is there."""
    steps = [(opcode.name, argument, place) for opcode, argument, place in pickletools.genops(content)]
    n = dice.randrange(len(steps))
    name, _, start = steps[n]
    same = [step for step in steps if step[0] == name]
    end = steps[n + 1][2] if n + 1 < len(steps) else len(content)
    piece = content[start:end]
    match dice.randrange(7):
        case 0:
            piece = b""
        case 1:
            piece *= dice.choice((2, 40, 3000))
        case 2:
            number = pickle.encode_long(dice.choice((*NUMBERS, *range(8))))
            piece = b"\x8b" + len(number).to_bytes(4, "little") + number
        case 3:
            text = dice.choice(TEXTS).encode(errors="surrogatepass")
            piece = b"X" + len(text).to_bytes(4, "little") + text
        case 4:
            piece = b"c" + dice.choice(NAMED).replace(" ", "\n").encode() + b"\n"
        case 5:
            piece += dice.choice(HOSTILE_STEPS)
        case 6:
            other = dice.choice(same if dice.random() < 0.5 else steps)
            following = [place for _, _, place in steps if place > other[2]]
            piece = content[other[2] : following[0] if following else len(content)]
    return content[:start] + piece + content[end:]


def mutate(content: bytes, kind: str, dice: random.Random) -> bytes:
    """Change a file 1 to 4 times, as the tree that it holds or as bytes."""
    count = dice.choice((1, 1, 2, 4))
    if kind == "pickle" and dice.random() < 0.8:
        with contextlib.suppress(ValueError, IndexError):  # of what an earlier mutation has made
            for _ in range(count):
                content = mutate_pickle(content, dice)
        return content[:MAX_BYTES]
    if kind == "json" and dice.random() < 0.8:
        with contextlib.suppress(RecursionError, ValueError):  # of what an earlier mutation has made
            tree = json.loads(content)
            for _ in range(count):
                tree = mutate_tree(tree, dice)
            return json.dumps(tree).encode()[:MAX_BYTES]
    if kind == "lines" and dice.random() < 0.8:
        lines = content.split(b"\n")
        for _ in range(count):
            n = dice.randrange(len(lines))
            lines[n] = mutate(lines[n], "json", dice) if lines[n] else lines[n]
        return b"\n".join(lines)
    for _ in range(count):
        content = mutate_bytes(content, dice)[:MAX_BYTES]
    return content


# --- targets ---


class DifferenceError(AssertionError):
    """An accepted file was read as something else than it holds."""


def expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise DifferenceError(f"{what}: {found!r:.200} instead of {expected!r:.200}")


Read = Callable[[bytes], object]
"""Reads a mutated file: returns None if it is refused in some way other than an error; raises `DifferenceError`."""


@dataclass
class Target:
    """A kind of file."""

    kind: str  # json, lines or bytes
    originals: Sequence[bytes]
    read: Read
    clean: tuple[type[Exception], ...] = ()  # further errors that are sentences for a user


TARGETS: dict[str, Callable[[Path], Target]] = {}


def target(make: Callable[[Path], Target]) -> Callable[[Path], Target]:
    TARGETS[make.__name__] = make
    return make


@target
def manifest(folder: Path) -> Target:
    """Against the reader of docs/formats.md, which needs numpy alone; also through torch.distributed.checkpoint."""
    import shutil

    import torch
    import torch.distributed.checkpoint as dcp

    from megatron.arguments.compatibility import compare_configs
    from megatron.checkpoint.dcp_reader import CheckpointStorageReader
    from megatron.checkpoint.format import MANIFEST, MARKER, Manifest, marker_content
    from megatron.checkpoint.load import CheckpointReader
    from megatron.checkpoint.tensor_file import DTYPES, tensor_bytes
    from megatron.checkpoint.verify import list_damage
    from megatron.config.checkpoint import CheckpointConfig
    from megatron.config.run import RunConfig
    from megatron.convert.saved_model import SavedModel
    from megatron.training.resume_source import find_resume_source
    from tools import inspect_checkpoint

    example = (ROOT / "docs" / "formats.md").read_text().partition("```python\n")[2].partition("\n\n\ntensors,")[0]
    independent: dict[str, Any] = {}
    exec(example, independent)
    source = ROOT / "tests" / "fixtures" / "checkpoints" / "v1"
    save = folder / "iter_0000003"
    shutil.copytree(source, save)

    def read(content: bytes) -> object:
        (save / MANIFEST).write_bytes(content)
        (save / MARKER).write_bytes(marker_content(content))
        quiet(inspect_checkpoint.main, ["show", str(save)], (0, 2))
        found = Manifest.open(save)
        list(list_damage(found))
        reader = CheckpointReader(found)
        tensors = {name: tensor_bytes(reader.read(name)).tobytes() for name in reader.names}
        expected, state, config = independent["load"](save)
        expect(tensors, {name: value.tobytes() for name, value in expected.items()}, "tensors")
        expect({n: tuple(v.shape) for n, v in expected.items()}, {n: reader.shape(n) for n in reader.names}, "shapes")
        filled = {
            name: torch.empty(reader.shape(name), dtype=DTYPES[record.dtype]) for name, record in found.tensors.items()
        }
        dcp.load(filled, storage_reader=CheckpointStorageReader(found), no_dist=True)
        expect(
            {name: tensor_bytes(value).tobytes() for name, value in filled.items()}, tensors, "tensors of the library"
        )
        expect(same_json(found.state, state) and same_json(found.config, config), True, "state and configuration")
        compare_configs(found.config, RunConfig(), "weights-only")
        model = SavedModel(found).model
        sizes = {name: value for name, value in config["model"].items() if type(value) is int}
        expect(
            {name: getattr(model, name) for name in sizes if name != "vocab_size"} | {"vocab_size": 0},
            sizes | {"vocab_size": 0},
            "sizes",
        )
        return find_resume_source(CheckpointConfig(load=str(save)))

    return Target("json", [(source / MANIFEST).read_bytes()], read)


@target
def safetensors(folder: Path) -> Target:
    """Against the header read as JSON, and the bytes that it names."""
    import torch
    from safetensors.torch import save

    from megatron.checkpoint.tensor_file import DTYPE_NAMES, TensorFile, tensor_bytes

    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b.weight": torch.arange(5).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    tensors |= {"scalar": torch.tensor(7), "bytes": torch.arange(9, dtype=torch.uint8)}
    file = folder / "model.safetensors"

    def read(content: bytes) -> object:
        file.write_bytes(content)
        found = TensorFile(file)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__", None)
        expect({*found.keys}, {*header}, "names")
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            expect(DTYPE_NAMES[found.dtype(name)], entry["dtype"], f"type of {name}")
            expect(list(found.shape(name)), entry["shape"], f"shape of {name}")
            stored = content[8 + size + start : 8 + size + end]
            expect(tensor_bytes(found.tensor(name)).tobytes(), stored, f"elements of {name}")
        return found

    original = save(tensors, {"format": "pt"})
    size = int.from_bytes(original[:8], "little")

    def with_header(content: bytes) -> object:
        """Half of the inputs: a header mutated as JSON, with the right length before it."""
        return read(len(content).to_bytes(8, "little") + content + original[8 + size :])

    def either(content: bytes) -> object:
        return with_header(content) if content[:1] in b"{[" else read(content)

    return Target("json", [original[8 : 8 + size].rstrip(b" ")], either)


@target
def safetensors_bytes(folder: Path) -> Target:
    """The same file, length of the header included, as bytes."""
    import torch
    from safetensors.torch import save

    inner = safetensors(folder)
    original = save({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(40)})
    return Target("bytes", [original], inner.read)


@target
def token_index(folder: Path) -> Target:
    """Against the layout of docs/formats.md, read with numpy."""
    import numpy as np

    from megatron.data.indexed_dataset import DTYPE_CODES, IndexedDataset
    from megatron.data.inspect import sample_documents, summarize
    from tests.unit.data.pairs import write_packed

    prefix = write_packed(folder / "x", [[[1, 2, 3], []], [[4]], [], [[5, 6], [7] * 9]])
    ids = Path(f"{prefix}.bin").read_bytes()

    def read(content: bytes) -> object:
        Path(f"{prefix}.idx").write_bytes(content)
        found = IndexedDataset(prefix)
        dtype, (sequences, boundaries) = DTYPE_CODES[content[17]], np.frombuffer(content, "<u8", 2, 18).tolist()
        lengths = np.frombuffer(content, "<i4", sequences, 34)
        pointers = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
        documents = np.frombuffer(content, "<i8", boundaries, 34 + 12 * sequences)
        expect(len(found), sequences, "sequences")
        expect(found.documents.tolist(), documents.tolist(), "documents")
        for i in range(sequences):
            stored = ids[pointers[i] : pointers[i] + lengths[i] * dtype.itemsize]
            expect(found[i].tobytes(), stored, f"sequence {i}")
        expect(summarize(found).tokens, int(lengths.sum()), "tokens")
        sample_documents(found, 3, None)
        return found

    return Target("bytes", [Path(f"{prefix}.idx").read_bytes()], read)


@target
def yaml_config(folder: Path) -> Target:
    """Against what PyYAML reads: every option has the value of the file."""
    import yaml

    from megatron.arguments.cli import parse
    from megatron.arguments.sources import to_yaml
    from megatron.config.settings import GROUPS, SETTINGS

    flags = "--mock-data --vocab-size 97 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    full = parse([*flags.split(), "--train-iters", "5"], {}).config
    short = "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 97}\nseq_length: 8\nlr: 1e-3\n"
    short += (
        "data:\n  mock_data: true\n  split: '9,1'\nrampup_batch_size: [1, 1, 8]\nglobal-batch-size: 4\ntrain_iters: 3\n"
    )
    file = folder / "x.yaml"

    def read(content: bytes) -> object:
        file.write_bytes(content)
        found = parse(["--config", str(file)], {}).config
        tree = yaml.safe_load(content.decode())
        values: dict[str, Any] = {}
        for key, value in tree.items():
            nested = str(key) in GROUPS and isinstance(value, dict)
            values |= {str(k).replace("-", "_"): v for k, v in (value if nested else {key: value}).items()}
        for name, value in values.items():
            setting = SETTINGS.get(name)
            if setting is None or value is None or setting.option.parse or name in DERIVED:
                continue
            now = setting.value_in(found)
            items = value if isinstance(value, list) else [value]
            for one, other in zip(now if setting.many else [now], items, strict=True):
                expect(str(one).lower() if setting.scalar in (str, bool) else one, typed(other, setting.scalar), name)
        return found

    return Target("bytes", [to_yaml(full).encode(), *[short.encode()] * 4], read)


DERIVED = {"num_virtual_stages_per_pipeline_rank", "pipeline_schedule", "expert_tensor_parallel_size"}


def typed(value: Any, scalar: type) -> Any:
    return str(value).lower() if scalar in (str, bool) else scalar(value)


TOKENIZED = ("", "a text", "it's 12 <s>é\n\n  <|endoftext|> \U0001f600", "ab" * 40)


@target
def tokenizer_json(folder: Path) -> Target:
    """Against the library: the same ids, in the data and in prompts."""
    import tokenizers

    from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
    from megatron.inference.text import open_codec
    from tests.unit.data.made_tokenizers import bpe

    added = {"id": 300, "content": "<x>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    plain = json.loads(bpe(300).to_str())
    rules = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "_"}, {"type": "NFC"}],
    }
    words = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2}, "unk_token": "[UNK]"}
    words |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    pieces = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.5]],
        "byte_fallback": False,
    }
    ended = {**added, "id": 3, "content": "</s>"}
    originals = [plain, {**plain, "normalizer": rules, "added_tokens": [*plain["added_tokens"], added]}]
    originals += [{**plain, "model": model, "added_tokens": [ended]} for model in (words, pieces)]
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<x>"}')

    def read(content: bytes) -> object:
        (folder / "tokenizer.json").write_bytes(content)
        codec = open_codec({"tokenizer.json": content})
        tokenizer = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(folder), parse_special_tokens=True))
        expect(len(tokenizer.fingerprint), 16, "fingerprint")
        library = tokenizers.Tokenizer.from_str(content.decode())
        library.no_truncation()
        library.no_padding()
        for text in TOKENIZED:
            try:
                expected = library.encode(text, add_special_tokens=False).ids
            except BaseException:
                continue
            expect(tokenizer.encode(text).tolist(), expected, f"ids of {text!r}")
            tokenizer.decode(expected)
            codec.decode(codec.encode(text))
        return tokenizer

    return Target("json", [json.dumps(each).encode() for each in originals], read)


@target
def tokenizer_settings(folder: Path) -> Target:
    """The files beside tokenizer.json and in a model's folder: special tokens, and what ends a text."""
    from megatron.convert.huggingface.convert import special_token_ids
    from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
    from megatron.inference.text import open_codec, stop_ids
    from tests.unit.data.made_tokenizers import bpe

    tokenizer = bpe(300).to_str().encode()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    settings = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "pad_token": "a", "model_max_length": 1e30}
    settings |= {"eos_token_id": [256, 257], "bos_token_id": 1}

    def read(content: bytes) -> object:
        (folder / "tokenizer_config.json").write_bytes(content)
        found = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(folder)))
        token = json.loads(content).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        expect(found.decode([found.eod]), token or "<|endoftext|>", "end of a document")
        files = {"tokenizer.json": tokenizer, "tokenizer_config.json": content, "generation_config.json": content}
        ids = stop_ids(files, open_codec(files))
        named = json.loads(content).get("eos_token_id")
        if named is not None:
            expect(ids, {int(i) for i in (named if isinstance(named, list) else [named])}, "ids that end a text")
        special_token_ids(files, 10**6)
        return found

    return Target("json", [json.dumps(settings).encode()], read)


@target
def token_record(folder: Path) -> Target:
    """Against the JSON: what is accepted describes the tokenizer whose files lie beside it."""
    from megatron.data.tokenizers.huggingface import ByteTokenizer, HuggingFaceTokenizer
    from megatron.data.tokenizers.tokenizer import TokenizerRecord, load_recorded_tokenizer, read_tokenizer_record
    from tests.unit.data.made_tokenizers import hugging_face
    from tests.unit.data.pairs import write_packed
    from tools import inspect_dataset

    prefix = write_packed(folder / "x", [[[1, 2, 3]], [[4]]])
    hugging_face(Path(f"{prefix}.tokenizer"))
    tokenizers = (HuggingFaceTokenizer(Path(f"{prefix}.tokenizer")), ByteTokenizer())
    record = Path(f"{prefix}.tokens.json")

    def read(content: bytes) -> object:
        record.write_bytes(content)
        quiet(inspect_dataset.main, [str(prefix), "--verify", "--samples", "1"], (0, 1))
        found = read_tokenizer_record(prefix)
        assert found is not None
        expect(
            {k: v for k, v in vars(found).items() if v is not None},
            {k: v for k, v in json.loads(content).items() if v is not None},
            "record",
        )
        tokenizer = load_recorded_tokenizer(prefix)
        assert tokenizer is not None
        expect((tokenizer.vocab_size, tokenizer.eod), (found.vocab_size, found.eod), "tokenizer")
        return found

    return Target("json", [TokenizerRecord.of(each).to_bytes() for each in tokenizers], read)


@target
def other_tokenizers(folder: Path) -> Target:
    """SentencePiece models and ranks: no independent reader, only clean refusals."""
    from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
    from tests.unit.data.made_tokenizers import sentencepiece_model, tiktoken_file

    ranks = tiktoken_file(folder / "r.tiktoken").read_bytes()
    model = sentencepiece_model(folder / "m.model").read_bytes()

    def read(content: bytes) -> object:
        kind = "TikTokenizer" if content[:3] in ranks[:3] else "SentencePieceTokenizer"
        file = folder / ("x.tiktoken" if kind == "TikTokenizer" else "x.model")
        file.write_bytes(content)
        pattern = "v2" if kind == "TikTokenizer" else None
        tokenizer = build_tokenizer(TokenizerOptions(kind, str(file), tiktoken_pattern=pattern))
        for text in TOKENIZED:
            with contextlib.suppress(ValueError):
                tokenizer.decode(tokenizer.encode(text).tolist())
        return tokenizer

    return Target("bytes", [ranks, model], read)


@target
def hugging_face_config(folder: Path) -> Target:
    """Against the JSON, and `safetensors` for the weights: a model is accepted with the sizes of its tensors alone."""
    import torch
    from safetensors.torch import load_file

    from megatron.config.model import ModelConfig
    from megatron.convert.huggingface.config import read_model_config
    from megatron.convert.huggingface.families import model_families
    from megatron.convert.huggingface.weights import HuggingFaceWeights
    from tests.kit.solo import tiny
    from tests.unit.convert.folders import LLAMA, llama, random_weights, write_folder

    experts = {**LLAMA, "num_experts": 3}
    models = {"llama": llama(), "gpt2": tiny(hidden_size=24, num_attention_heads=3), "mixtral": tiny(**experts)}
    written = {name: write_folder(folder / name, model, random_weights(model)) for name, model in models.items()}
    stored = {name: load_file(written[name] / "model.safetensors") for name in written}
    originals = {name: (written[name] / "config.json").read_bytes() for name in written}

    def read(content: bytes) -> object:
        name = min(originals, key=lambda each: abs(len(originals[each]) - len(content)))
        (written[name] / "config.json").write_bytes(content)
        found = read_model_config(written[name])
        config = json.loads(content)
        family = model_families()[config["model_type"]]
        for key in family.keys:
            value = config.get(getattr(key, "theirs", ""))
            if isinstance(value, int | float) and getattr(found, key.ours) is not None:
                expect(getattr(found, key.ours), float(value) if isinstance(key.default, float) else value, key.theirs)
        weights = HuggingFaceWeights(written[name], found)
        for ours, spec in weights.specs.items():
            for mapping in weights.mappings[ours]:
                theirs = stored[name][mapping.name]
                expect(tuple(theirs.shape), mapping.shape, mapping.name)
                read_back = weights.read(ours, spec.view, mapping.box).permute(mapping.order).reshape(mapping.shape)
                expect(torch.equal(read_back, theirs), True, f"elements of {mapping.name}")
        assert isinstance(found, ModelConfig)
        return found

    return Target("json", list(originals.values()), read)


@target
def adapters(folder: Path) -> Target:
    """Against the JSON and the products of the stored tensors: what the adapters of PEFT add to a model's weights."""
    import torch
    from safetensors.torch import save_file

    from megatron.convert.huggingface.peft import from_peft, peft_linears
    from tests.unit.convert.folders import llama

    model = llama()
    linears, generator = peft_linears("llama", model), torch.Generator().manual_seed(0)
    stored = {
        f"base_model.model.{name}.lora_{letter}.weight": torch.randn(shape, generator=generator)
        for name, linear in linears.items()
        for letter, shape in zip("AB", linear.shapes(2))
    }
    save_file(stored, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "up_proj"],
    }
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 8}, "use_rslora": True, "bias": "none"}

    def read(content: bytes) -> object:
        (folder / "adapter_config.json").write_bytes(content)
        found, tensors = from_peft(folder, "llama", model)
        options = json.loads(content)
        for name, linear in linears.items():
            alphas = [
                value
                for end, value in (options.get("alpha_pattern") or {}).items()
                if re.fullmatch(rf"(.+\.)?{end}", name)
            ]
            if len(alphas) > 1:
                continue
            a, b = (stored[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
            alpha = [*alphas, options["lora_alpha"]][0]
            expected = b @ a * (alpha / (len(a) ** 0.5 if options.get("use_rslora") else len(a)))
            part = tensors[f"{linear.ours}.lora_a"].view(-1, len(a), linear.inputs)[linear.parts[0]]
            ours = tensors[f"{linear.ours}.lora_b"][linear.rows] @ part * found.lora_scale
            expect(torch.allclose(ours, expected, rtol=1e-4), True, f"{name} of {alpha}")
        return found

    return Target("json", [json.dumps(each).encode() for each in (config, config | patterns)], read)


@target
def weight_map(folder: Path) -> Target:
    """Against `safetensors`: the tensors of both files."""
    import torch
    from safetensors.torch import load_file

    from megatron.convert.huggingface.weights import open_weights
    from tests.unit.convert.folders import llama, random_weights, write_folder

    model = llama()
    written = write_folder(folder / "m", model, random_weights(model), shards=2)
    index = written / "model.safetensors.index.json"
    expected = {key: value for file in written.glob("*.safetensors") for key, value in load_file(file).items()}

    def read(content: bytes) -> object:
        index.write_bytes(content)
        found = open_weights(written)
        tensors = {key: file.tensor(key) for key, file in found.items()}
        for key in tensors:
            expect(torch.equal(tensors[key], expected[key]), True, key)
        return found

    return Target("json", [index.read_bytes()], read)


METRICS = [
    {"event": "start", "iteration": 0, "consumed-tokens": 0, "time": 1.0},
    *(
        {"iteration": n, "lm loss": 3.0 - n, "consumed-tokens": 64 * n, "consumed-samples": 8 * n, "batch-size": 8}
        | {"learning-rate": 1e-3, "grad-norm": 1.5, "skipped-iterations": [n] if n == 2 else [], "time": 2.0 * n}
        | {"weight-decay": 0.1, "loss-scale": 1.0, "samples-digest": "0" * 16}
        for n in (1, 2, 3)
    ),
    {"iteration": 3, "lm loss validation": 2.5, "consumed-tokens": 192, "consumed-samples": 24, "batch-size": 8},
    {"iteration": 3, "health/layers.0/grad-norm": 0.5, "health/layers.1/grad-norm": 0.25, "consumed-tokens": 192},
    {"event": "error", "iteration": 3, "consumed-tokens": 192, "text": "x"},
]


@target
def metrics(folder: Path) -> Target:
    """Against `json` line by line, and through the programs that draw and compare runs."""
    from megatron.training.loggers.run_folder import read_history
    from tools import diff_runs

    original = b"".join(json.dumps(line).encode() + b"\n" for line in METRICS)
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_bytes(original)

    def read(content: bytes) -> object:
        (folder / "a" / "metrics.jsonl").write_bytes(content)
        quiet(diff_runs.main, [str(folder / "a"), str(folder / "b"), "--no-data"], (0, 1, 2))
        found = read_history(folder / "a" / "metrics.jsonl")
        lines = [parsed(line) for line in content.split(b"\n")]
        for point in [*found.train, *found.evaluations]:
            expect(any(same_json(point.line, line) for line in lines), True, "a line")
            expect((type(point.tokens), type(point.loss)), (int, float), "numbers of a line")
        return found

    return Target("lines", [original], read, (ValueError,))


@target
def drawings(folder: Path) -> Target:
    """The same lines, drawn: a few a second."""
    from tools import plot_run

    inner = metrics(folder)

    def read(content: bytes) -> object:
        (folder / "a" / "metrics.jsonl").write_bytes(content)
        return quiet(plot_run.main, [str(folder / "a")], (0, 1)) == 0 or None

    return Target("lines", inner.originals, read)


def parsed(line: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line.decode(errors="replace"))
    return None


def same_json(one: Any, other: Any) -> bool:
    """Equal, where NaN equals NaN."""
    return json.dumps(one) == json.dumps(other)


@target
def corpus(folder: Path) -> Target:
    """Against `json`, line by line."""
    from megatron.data.preprocess.corpus import BadDocumentReport, read_documents

    texts = ["a text", 'quotes " and \\ é', "", "x" * 300, "\u2028 \U0001f600"]
    original = b"".join(json.dumps({"text": text, "id": n}).encode() + b"\n" for n, text in enumerate(texts))
    file = folder / "x.jsonl"

    def read(content: bytes) -> object:
        file.write_bytes(content)
        report = BadDocumentReport(skip=True, message=lambda _: None)
        found = [document.texts[0] for document in read_documents([file], ["text"], report, max_line_bytes=10_000)]
        expected = []
        for line in content.split(b"\n"):
            value = text_of(line)
            expected += [] if value is None or len(line) > 10_000 else [value]
        expect(found, expected, "texts")
        return found or None

    return Target("lines", [original], read)


def text_of(line: bytes) -> str | None:
    """The text of a line; None for none, and for what UTF-8 or a terminated string cannot hold."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        text = record["text"]
        text.encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return text if "\0" not in text else None


@target
def compressed_corpus(folder: Path) -> Target:
    """Against the libraries, where they can decompress the whole file."""
    import gzip
    import zlib

    import zstandard

    from megatron.data.preprocess.corpus import BadDocumentReport, read_documents

    lines = [{"text": f"line {n} of a text"} for n in range(2000)]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    originals = [gzip.compress(text), zstandard.ZstdCompressor(write_checksum=True).compress(text)]

    def read(content: bytes) -> object:
        file = folder / ("x.jsonl.zst" if content[:2] == originals[1][:2] else "x.jsonl.gz")
        file.write_bytes(content)
        report = BadDocumentReport(skip=True, message=lambda _: None)
        found = [document.texts[0] for document in read_documents([file], ["text"], report)]
        with contextlib.suppress(OSError, EOFError, zlib.error, zstandard.ZstdError):
            if file.suffix == ".gz":
                whole = gzip.decompress(content)
            else:
                whole = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()
            expected = [text for line in whole.split(b"\n") if (text := text_of(line)) is not None]
            expect(found, expected, "texts")
        return found or None

    return Target("bytes", originals, read)


@target
def tables(folder: Path) -> Target:
    """Against pyarrow, where a file is whole and its texts are: Parquet, and both forms of Arrow."""
    import pyarrow as pa
    from pyarrow import parquet

    from megatron.data.preprocess.corpus import BadDocumentReport, read_documents

    texts = ["a text", "é" * 9, "", *(f"line {n % 7} of a text" for n in range(90))]
    table = pa.table({"text": texts, "id": range(len(texts))})
    words = pa.table({"text": pa.array(texts).dictionary_encode()})
    parquet.write_table(table, folder / "x.parquet", row_group_size=40, compression="gzip")
    originals = [(folder / "x.parquet").read_bytes()]
    for form, rows in ((pa.ipc.new_file, table), (pa.ipc.new_stream, table), (pa.ipc.new_stream, words)):
        with pa.BufferOutputStream() as sink:
            with form(sink, rows.schema) as writer:
                writer.write_table(rows, 40)
            originals.append(sink.getvalue().to_pybytes())

    def read(content: bytes) -> object:
        file = folder / ("x.parquet" if content[:2] == b"PA" else "x.arrow")
        file.write_bytes(content)
        damaged: list[str] = []
        report = BadDocumentReport(skip=True, message=damaged.append)
        found = [document.texts[0] for document in read_documents([file], ["text"], report)]
        if damaged:  # of which pyarrow may read anything
            return found or None
        with contextlib.suppress(pa.ArrowException, OSError):  # of what another column holds
            if file.suffix == ".parquet":
                whole = parquet.read_table(file)
            else:
                whole = (pa.ipc.open_file if content[:6] == b"ARROW1" else pa.ipc.open_stream)(content).read_all()
            expect(found, whole["text"].to_pylist(), "texts")
        return found or None

    return Target("bytes", originals, read)


@target
def claim(folder: Path) -> Target:
    """A lease with odd values: who holds it is described, and judged, without an error."""
    from megatron.checkpoint.lease import LEASE_FILE, acquire_lease, current_lease
    from megatron.config.launch import JobStart

    start = JobStart(job="77", cluster="c", restart=1, step=0, group="g", chain="70")
    with acquire_lease(folder / "save", start=start) as lease:
        original = lease.text
    file = folder / "save" / ".epoch-1" / LEASE_FILE

    def read(content: bytes) -> object:
        file.write_bytes(content)
        found = current_lease(folder / "save")
        assert found is not None
        assert str(found.holder)
        start.follows(found.holder.start)
        if found.holder.token:
            data = json.loads(content)
            expect((found.holder.pid, found.holder.host), (data["pid"], data["host"]), "holder")
        return found if found.holder.token else None

    return Target("json", [original], read)


@target
def index_cache(folder: Path) -> Target:
    """Tables with right checksums: what is used is what numpy reads, and every sample can be read or is refused."""
    import numpy as np
    import xxhash

    from megatron.data.build import TABLE_CHECKS, FileSegmentBuilder
    from megatron.data.index_cache import ABOUT, IndexCache
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.loader import DataSource
    from tests.unit.data.pairs import write_packed

    prefix = write_packed(folder / "x", [[[n] * (n + 3)] for n in range(9)])
    part = (IndexedDataset(prefix), range(9))

    def build() -> tuple[Any, list[str]]:
        cache = IndexCache(folder / "cache", TABLE_CHECKS)
        return FileSegmentBuilder([part], None, 4, 1, cache)(20), cache.notes

    build()
    (entry,) = (folder / "cache").glob("order-*/")
    names = ("documents", "samples", "shuffle")
    originals = [(entry / f"{name}.npy").read_bytes() for name in names]
    about = (entry / ABOUT).read_bytes()

    def read(content: bytes) -> object:
        name = names[min(range(3), key=lambda n: difference(originals[n], content))]
        for each, table in zip(names, originals):
            (entry / f"{each}.npy").write_bytes(content if each == name else table)
        tables = json.loads(about)
        tables["tables"][name] = len(content), xxhash.xxh3_64_hexdigest(content)
        (entry / ABOUT).write_text(json.dumps(tables))
        dataset, notes = build()
        source = DataSource({"train": dataset}, {"train": (20,)}, {"train": 20}, 4, 1, 100)
        for i in range(len(dataset)):
            with contextlib.suppress(CLEAN):
                source.micro_batch("train", range(i, i + 1), 1)
        if notes:
            return None
        used = dict(zip(names, dataset.order))[name]
        expect(np.array_equal(used, np.load(io.BytesIO(content), allow_pickle=False)), True, name)
        return dataset

    return Target("bytes", originals, read)


class Stub:
    """An object of any class, for a reader of pickles that is not ours."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StubUnpickler(pickle.Unpickler):
    """Python's own unpickler, with tensors of `torch` and nothing else."""

    def __init__(self, content: bytes, storages: Any = None) -> None:
        super().__init__(io.BytesIO(content))
        self.storages = storages

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name == "_rebuild_tensor_v2":
            return lambda storage, *args: torch.as_strided(storage, args[1], args[2], args[0])
        if name == "Size":
            return tuple
        dtypes = {"FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64}
        return dtypes.get(name, type(name, (dict if name == "OrderedDict" else Stub,), {}))

    def persistent_load(self, key: Any) -> Any:
        import torch

        dtype = key[1] if isinstance(key[1], torch.dtype) else torch.uint8
        content = bytearray(self.storages[str(key[2])])
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def megatron_lm_seed(folder: Path, name: str) -> Path:
    """A small checkpoint that Megatron-LM has written, without its optimizer's files."""
    import tarfile

    with tarfile.open(ROOT / "tests" / "golden" / "megatron_ckpt.tar.xz") as archive:
        members = [member for member in archive if member.name.startswith(name)]
        archive.extractall(folder, members, filter="data")
    return folder / name / "iter_0000005"


def expect_weights(path: Path, stored: Callable[[str], Any]) -> object:
    """Read a checkpoint of Megatron-LM, whose weights are those that ``stored`` returns for a name of theirs."""
    import torch

    from megatron.checkpoint.load import CheckpointReader
    from megatron.convert.megatron_lm.names import their_keys
    from megatron.convert.saved_model import SavedModel
    from megatron.convert.sources import open_checkpoint

    found, _ = open_checkpoint(path)
    reader, model = CheckpointReader(found), SavedModel(found).model
    for name in reader.names:
        if name.startswith("layers.") or not name.startswith("optim."):
            layer = name.split(".")[1] if name.startswith("layers.") else None
            expected = stored(their_keys(name.replace(f"layers.{layer}.", "layers.{i}."), model)[0].name)
            tensor = reader.read(name)
            if expected is not None:
                same = expected[int(layer)] if layer is not None else expected[: len(tensor)]
                expect(torch.equal(tensor.to(same.dtype), same.reshape(tensor.shape)), True, name)
    return found


@target
def megatron_ranks(folder: Path) -> Target:
    """Against Python's unpickler: the pickle of a checkpoint in Megatron-LM's format ``torch``."""
    import zipfile

    path = megatron_lm_seed(folder, "gpt2_legacy_tp1_te_names")
    file = path / "mp_rank_00" / "model_optim_rng.pt"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in entries if name.endswith("/data.pkl"))
    storages = {name.rpartition("/")[2]: content for name, content in entries.items() if "/data/" in name}

    def read(content: bytes) -> object:
        with zipfile.ZipFile(file, "w") as archive:
            for name, entry in entries.items():
                archive.writestr(name, content if name == pickled else entry)
        model: dict[str, Any] = {}

        def stored(theirs: str) -> Any:
            with contextlib.suppress(Exception):  # it reads less than ours, or takes more memory
                model.update(model or StubUnpickler(content, storages).load()["model"])
                parts = [model[key] for key in sorted(model) if re.sub(r"layers\.\d+\.", "layers.", key) == theirs]
                return parts if "layers." in theirs else parts[0]

        return expect_weights(path, stored)

    return Target("pickle", [entries[pickled]], read)


@target
def megatron_dist(folder: Path) -> Target:
    """Against Python's unpickler and `torch.load`: the table of a checkpoint in the format ``torch_dist``."""
    import torch

    path = megatron_lm_seed(folder, "gpt2_torch_dist_tp2")
    files = {file.name: file.read_bytes() for file in path.glob("*.distcp")}

    @lru_cache
    def part(name: str, start: int, end: int) -> Any:
        return torch.load(io.BytesIO(files[name][start:end]), weights_only=True)

    def read(content: bytes) -> object:
        (path / ".metadata").write_bytes(content)
        table: dict[str, Any] = {}

        def stored(theirs: str) -> Any:
            with contextlib.suppress(Exception):
                table.update(table or StubUnpickler(content).load().state)
                entry = table["state_dict_metadata"][theirs].state
                whole = torch.empty(entry["size"])
                for index, info in table["storage_data"].items():
                    if index.state["fqn"] == theirs:
                        start = info.state["offset"]
                        value = part(info.state["relative_path"], start, start + info.state["length"])
                        places = zip(index.state["offset"], value.shape, strict=True)
                        whole[tuple(slice(a, a + b) for a, b in places)] = value
                return whole.to(value.dtype)

        return expect_weights(path, stored)

    frame = re.compile(rb"^(\x80.)\x95.{8}", re.DOTALL)
    return Target("pickle", [frame.sub(rb"\1", (path / ".metadata").read_bytes())], read)


def difference(one: bytes, other: bytes) -> int:
    """Return the approximate number of different bytes; an input's original is the nearest one."""
    return sum(a != b for a, b in zip(one, other)) + abs(len(one) - len(other))


CLEAN: tuple[type[Exception], ...] = ()
"""Errors that are sentences for a user; filled in the child, which imports the project."""


def quiet(main: Callable[[list[str]], int], argv: list[str], allowed: tuple[int, ...]) -> int:
    """Run a program, which prints no traceback and ends with one of these statuses."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    expect(status in allowed and "Traceback" not in err.getvalue(), True, f"status {status}: {err.getvalue():.300}")
    shown = out.getvalue() + err.getvalue()
    expect(re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown), [], "control characters printed")
    return status


# --- running ---


@dataclass
class Tally:
    """Counts of the inputs of a target: read, accepted, wrong."""

    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    memory: int = 0  # the most bytes that reading an input took
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.inputs, self.accepted = self.inputs + other.inputs, self.accepted + other.accepted
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)
        self.wrong += other.wrong


def run_inputs(args: argparse.Namespace, report: io.TextIOBase) -> None:
    """Run inputs of targets in this process; write a line of JSON before each input, and a tally after each target."""
    global CLEAN
    from megatron.checkpoint.errors import CheckpointError
    from megatron.config.errors import UserError
    from megatron.data.errors import DataError
    from megatron.inference.text import InferenceError

    CLEAN = (CheckpointError, UserError, DataError, InferenceError)
    made = {name: TARGETS[name](Path(tempfile.mkdtemp(prefix="fuzz-"))) for name in args.target}
    for name, ready in made.items():
        expect(ready.read(ready.originals[0]) is not None, True, f"the original of {name} is accepted")
    resource.setrlimit(resource.RLIMIT_DATA, (memory_of("VmData") + MEMORY,) * 2)
    for name, ready in made.items():
        tally, number, end = Tally(), args.first, time.monotonic() + args.seconds
        while time.monotonic() < end and (args.inputs is None or tally.inputs < args.inputs):
            dice = random.Random(f"{name} {number}")
            content = mutate(dice.choice(ready.originals), ready.kind, dice)
            if args.keep is not None:
                (args.keep / f"{name}-{number}").write_bytes(content)
            report.write(json.dumps({"target": name, "number": number}) + "\n")
            report.flush()
            run_input(f"{name} {number}", ready, content, tally)
            number += 1
        report.write(json.dumps({"target": name, "tally": vars(tally)}) + "\n")
        report.flush()
        args.first = 0


def run_input(title: str, ready: Target, content: bytes, tally: Tally) -> None:
    """Read an input and add what became of it to the tally."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process, whatever it is doing
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, began = memory_of("VmRSS"), time.process_time()
    try:
        tally.accepted += ready.read(content) is not None
    except CLEAN as error:
        if not str(error).strip():
            tally.wrong.append(f"{title}: an error without a sentence")
    except BaseException as error:
        if not isinstance(error, ready.clean) or isinstance(error, UnicodeError):
            tally.wrong.append(f"{title}: {describe(error)}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    tally.slowest = max(tally.slowest, time.process_time() - began)
    tally.memory = max(tally.memory, memory_of("VmHWM") - before)
    tally.inputs += 1


def describe(error: BaseException) -> str:
    """Return the class, the text and the last place in the project of an error."""
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
    inside = [frame for frame in places if "tests/fuzz" not in frame.filename] or places
    return (
        f"{type(error).__name__}: {error!s:.200} at {Path(inside[-1].filename).relative_to(ROOT)}:{inside[-1].lineno}"
    )


def memory_of(kind: str) -> int:
    """Return a number of bytes in the status of this process."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def run_targets(names: Sequence[str], seconds: float, first: int = 0, more: Sequence[str] = ()) -> dict[str, Tally]:
    """Run inputs of targets in a process, and the rest in another one if an input ends it."""
    total, left = {name: Tally() for name in names}, list(names)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    while left:
        command = [sys.executable, "-m", "tests.fuzz.fuzz", "--child", "--first", str(first), *more]
        command += ["--seconds", str(seconds), "--target", *left]
        with tempfile.TemporaryDirectory() as folder:
            environment |= {"TMPDIR": folder, "MPLCONFIGDIR": folder, "RUST_BACKTRACE": "0", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            if "tally" in line:
                total[line["target"]].add(Tally(**line["tally"]))
                left.remove(line["target"])
        if left and (not lines or "tally" in lines[-1]):
            raise RuntimeError(f"{left[0]}: {done.stderr[-3000:]}")
        if left:
            name, number = lines[-1]["target"], lines[-1]["number"]
            how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
            total[name].add(Tally(number + 1 - first, wrong=[f"{name} {number}: ended the process by {how}"]))
            first = number + 1
    return total


def table(tallies: dict[str, Tally]) -> str:
    """Return a line for each target."""
    head = f"{'':22}{'inputs':>9}{'accepted':>10}{'wrong':>7}{'slowest':>10}{'memory':>10}"
    rows = [
        f"{name:22}{t.inputs:>9,}{t.accepted:>10,}{len(t.wrong):>7}{t.slowest:>8.2f} s{t.memory >> 20:>7} MB"
        for name, t in tallies.items()
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str]) -> int:
    """Run all targets or one; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--inputs", type=int, help="of each target, at most")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave every input there")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"record the result, as in {FILE.relative_to(ROOT)}"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        report = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the libraries print
        run_inputs(args, report)
        return 0
    began = time.monotonic()
    more = [
        *(["--inputs", str(args.inputs)] if args.inputs else []),
        *(["--keep", str(args.keep)] if args.keep else []),
    ]
    tallies = run_targets(args.target, args.seconds / len(args.target), args.first, more)
    wrong = Counter(re.sub(r" \d+:", ":", text, count=1) for tally in tallies.values() for text in tally.wrong)
    print(table(tallies))
    for text, count in wrong.most_common():
        print(f"{count} times {text}")
    for text in [text for tally in tallies.values() for text in tally.wrong[:10]]:
        print(text)
    if args.output is not None:
        from tests.golden.provenance import provenance

        inputs = sum(tally.inputs for tally in tallies.values())
        head = f"{inputs:,} inputs, {sum(wrong.values())} wrong, {time.monotonic() - began:,.0f} s: {provenance()}"
        args.output.write_text(f"{head}\n\n{table(tallies)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
