"""Megatron-LM's checkpoints are read to the bit in every format and layout, without execution of their content."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.arguments.sources import to_dict
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.save import save_sharded
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.check import run_own_model
from megatron.convert.huggingface.convert import RoundedWeights
from megatron.convert.megatron_lm.pickles import read_torch_file
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.distributed.comm import Group
from megatron.layers.parameters import gpt
from tests.kit.runs import checkpoint
from tests.megatron_core.forms import FLAGS, FORMS
from tests.megatron_core.record import plain
from tests.unit.convert.folders import card_of, whole_tensor
from tests.unit.convert.megatron_lm import (
    common_state,
    entries,
    expected,
    moments_of,
    random_tensors,
    unpack,
    write_ranks,
    write_torch_dist,
)
from tools.convert_checkpoint import main as convert
from tools.generate import main as generate
from tools.inspect_checkpoint import main as inspect

LAYOUTS = ("torch_dist_tp2", "legacy_tp1", "legacy_tp2_pp2", "legacy_tp1_te_names")
WITH_OPTIMIZER = ("gpt2_torch_dist_tp2", "gpt2_legacy_tp1", "llama_torch_dist_tp2")
DENSE = ModelConfig(
    num_layers=8,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=37,
    position_embedding_type="rope",
    max_position_embeddings=32,
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
EXPERTS = ModelConfig(
    **vars(DENSE)
    | {
        "num_layers": 2,
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    }
)
DEEP = ModelConfig(
    **vars(EXPERTS)
    | {
        "num_layers": 4,
        "num_query_groups": None,
        "moe_layer_freq": "[0,0,1,1]",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "multi_latent_attention": True,
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 3,
        "mtp_num_layers": 2,
        "mtp_use_repeated_layer": True,
    }
)
"""As DeepSeek-V3, made small, with one layer for two further tokens."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that Megatron-LM has written."""
    return unpack(tmp_path_factory.mktemp("megatron"))


def newest(folder: Path) -> Path:
    """The only checkpoint in a folder."""
    (path,) = folder.glob("iter_*")
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_layout_holds_the_tensors_that_were_written(written: Path, kind: str, layout: str) -> None:
    tensors, state = checkpoint(newest(written / f"{kind}_{layout}"))
    masters = f"{kind}_{layout}" in WITH_OPTIMIZER
    wanted = expected(written, kind)
    if masters:
        moments = {name: moments_of(tensor) for name, tensor in wanted.items()}
        wanted |= {f"optim.{moment}.{n}": x for n, found in moments.items() for moment, x in found.items()}
    elif kind == "gpt2":
        wanted = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name].view(tensor.shape)), name
    assert (state["iteration"], state["consumed_samples"]) == (5, 20)
    assert state.get("optimizer") == ({"steps": 5} if masters else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_model_computes_the_logits_of_megatron_lm(written: Path, kind: str, layout: str) -> None:
    manifest, _ = open_checkpoint(written / f"{kind}_{layout}")
    saved = SavedModel(manifest)
    source = RoundedWeights(saved, {"gpt2": torch.bfloat16, "llama": torch.float32}[kind])
    wanted = load_file(written / kind / "logits.safetensors")
    tokens = wanted["tokens"]
    logits = run_own_model(saved.model, source, tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).logits
    rounding = torch.finfo(torch.float32).eps * wanted["logits"].abs().max()
    assert (logits - wanted["logits"]).abs().max() < 16 * rounding


def check_tensors(
    folder: Path, ours: dict[str, Tensor], moments: bool, steps: int = 7, at: tuple[int, int] = (7, 28)
) -> None:
    """A folder holds these tensors, and the moments that follow from those that are trained."""
    tensors, state = checkpoint(newest(folder))
    wanted, trained = dict(ours), {name: tensor for name, tensor in ours.items() if "expert_bias" not in name}
    for name, tensor in trained.items() if moments else ():
        wanted |= {f"optim.{kind}.{name}": value for kind, value in moments_of(tensor).items()}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].view(tensor.shape)) for name, tensor in tensors.items())
    assert (state["iteration"], state["consumed_samples"]) == at
    assert state.get("optimizer") == ({"steps": steps} if moments else None)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, {"tp": 2, "pp": 2, "chunks": 2, "optimizer": True}),
        (DENSE, {"pp": 4, "grouped": True}),
        (EXPERTS, {"tp": 2, "ep": 2, "optimizer": True}),
        (EXPERTS, {"ep": 4, "pp": 2, "grouped": True, "optimizer": True}),
        (DEEP, {"tp": 2, "ep": 2, "pp": 2, "grouped": True, "optimizer": True}),
    ],
)
def test_interleaved_stages_and_experts_are_put_together(tmp_path: Path, model: ModelConfig, layout: Any) -> None:
    ours = random_tensors(model)
    check_tensors(write_ranks(tmp_path, model, ours, **layout), ours, "optimizer" in layout)


@pytest.mark.parametrize("form", [{}, {"stacked": False}, {"common_file": True}])
def test_stacked_experts_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setattr("megatron.convert.megatron_lm.checkpoint.BLOCK_ELEMENTS", 50)
    ours = random_tensors(EXPERTS)
    folder = write_torch_dist(tmp_path, EXPERTS, ours, **form)
    check_tensors(folder, ours, True, steps=6)
    manifest = Manifest.open(newest(folder))
    assert manifest.state["loss_scaler"] == {"scale": 4096.0, "good_steps": 3, "lives": 2.0}
    chunks = [chunk for record in manifest.tensors.values() for chunk in record.chunks]
    assert max(chunk.box.numel for chunk in chunks) == 48  # memory does not grow with a tensor


# ---- What is not read ----


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


class Build(Call):
    """Calls a function, and changes what it returns."""

    def __init__(self, function: Any, args: Any, state: Any) -> None:
        super().__init__(function, *args)
        self.state = state

    def __reduce__(self) -> Any:
        return self.function, self.args, self.state


def gadgets(mark: Path) -> dict[str, Any]:
    """Objects that would write a file; by the name that refuses them."""
    command = f"touch {mark}"
    return {
        "posix.system": Call(os.system, command),
        "builtins.eval": Call(eval, f"open({str(mark)!r}, 'w')"),
        "builtins.exec": Call(argparse.Namespace, Call(exec, f"open({str(mark)!r}, 'w')")),
        "functools.partial": Call(functools.partial, os.system, command),
        "torch.serialization.load": Call(torch.load, str(mark)),
        "operator.methodcaller": Build(argparse.Namespace, (), {"f": __import__("operator").methodcaller("x")}),
        "collections.defaultdict": collections.defaultdict(list, {1: Call(os.system, command)}),
        "io.open": Call(open, str(mark), "w"),
    }


@pytest.mark.parametrize("name", list(gadgets(Path("mark"))))
@pytest.mark.parametrize("nested", [False, True])
def test_a_pickle_that_names_anything_else_is_refused_and_executes_nothing(
    tmp_path: Path, name: str, nested: bool
) -> None:
    mark, hostile = tmp_path / "mark", gadgets(tmp_path / "mark")[name]
    folder = write_ranks(tmp_path / "run", DENSE, random_tensors(DENSE), tp=2)
    file = newest(folder) / "mp_rank_01" / "model_optim_rng.pt"
    change_content(file, lambda c: c.update(rng_state=[{"a": [hostile]}] if nested else hostile))
    names = name.replace("builtins", "(builtins|__builtin__)")
    with pytest.raises(DamagedCheckpointError, match=f"model_optim_rng.pt names {names}, which is not read"):
        Manifest.open(newest(folder))
    assert not mark.exists()


def test_a_tensor_does_not_reach_beyond_its_storage(tmp_path: Path) -> None:
    storage = torch.ones(4).storage()
    beyond = Call(torch._utils._rebuild_tensor_v2, storage, 2, (3,), (1,), False, collections.OrderedDict())
    torch.save({"secret": torch.zeros(64), "x": beyond}, tmp_path / "x.pt")
    with pytest.raises(DamagedCheckpointError, match=r"x.pt has a tensor \[3\] that is larger than its storage"):
        read_torch_file(tmp_path / "x.pt")


TWICE = b"".join(b"q%ch%c\x86" % (n, n) for n in range(40))
"""A tuple of two of the tuple on the stack, 40 times: 2**40 values if each is counted where it occurs."""
PROBED = [1]  # every place in a table of 2**16 where Python looks for 1, and for 2**61, which has the same hash
while len(PROBED) < 40_000:
    PROBED.append((5 * PROBED[-1] + 1) % 2**16)
MET = b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in PROBED)
SAME_HASH = b"\x8a\x08" + (2**61).to_bytes(8, "little") + b"q\x00N"
HOSTILE = {
    "numbers that a search meets": MET + SAME_HASH + b"h\x00N" * 300_000 + b"u.",
    "numbers that searches meet": MET + b"u" + SAME_HASH + b"s" + b"h\x00Ns" * 300_000 + b".",
    "numbers in a set that a search meets": b"\x8f"
    + MET[1:].replace(b"N", b"")
    + SAME_HASH[:-1]
    + b"h\x00" * 10**6
    + b"\x90.",
    "numbers in attributes": b"cargparse\nNamespace\n)R" + MET + b"uq\x01" + b"bh\x01" * 10**5 + b".",
    "nested tuples as a key": b"})" + TWICE + b"Ns.",
    "nested tuples as keys of items": b"}()" + TWICE + b"Nu.",
    "nested tuples as a key of an old dict": b"()" + TWICE + b"Nd.",
    "nested tuples in a set": b"\x8f()" + TWICE + b"\x90.",
    "nested tuples in a frozen set": b"()" + TWICE + b"\x91.",
    "nested tuples in a set that is called": b"cbuiltins\nset\n](" + b")" + TWICE + b"e\x85R.",
    "nested frozen sets": b"((\x91" + b"".join(b"q%c(h%c(h%c\x91\x91" % (n, n, n) for n in range(20)) + b"\x91.",
    "nested tuples as a name": b")" + TWICE + b"\x8c\x01x\x93.",
    "nested tuples as a storage": b"(\x8c\x07storageN)" + TWICE + b"NNtQ.",
    "nested tuples as a size": b"ctorch\nSize\n)" + TWICE + b"\x85R.",
    "nested tuples alone": b")" + TWICE + b".",
    "nested lists alone": b"]" + b"".join(b"q%c](h%ch%ce" % (n, n, n) for n in range(60)) + b".",
    "a list in itself": b"]q\x00h\x00a.",
    "deep tuples": b")" + b"\x85" * 10**6 + b".",
    "deep tuples as a key": b"})" + b"\x85" * 10**6 + b"Ns.",
    "deep lists": b"(" * 10**6 + b"l" * 10**6 + b".",
    **{
        f"many {step!r}": step * (50_000_000 // len(step)) for step in (b"}", b"(", b"]", b"\x8f", b"N", b"Na", b"\x94")
    },
    "many dimensions": b"ctorch\nSize\n](" + b"M\x01\x02" * 800_000 + b"e\x85R.",
    "a long text as a size": b"ctorch\nSize\nX\x40\x42\x0f\x00" + b"x" * 10**6 + b"\x85R.",
    "sets of one list": b"](cbuiltins\nset\nq\x00]("
    + b"J\x01\x02\x03\x04" * 60_000
    + b"eq\x01\x85R"
    + b"h\x00h\x01\x85R" * 20_000
    + b"e.",
    "a long name": b"c" + b"a" * 10**6 + b"\nx\n.",
    "a place among many": b"K\x01r\xff\xff\xff\x7f" + b"h\x00.",
    "very many bytes": b"\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a long number as a key": b"}\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b"Ns.",
}
READ_HOSTILE = """
import resource, sys
from pathlib import Path
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.convert.megatron_lm.pickles import read_pickle_file
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_pickle_file(file)
        print(file.name, "was read")
    except DamagedCheckpointError as error:
        if len(str(error)) > 1000 or "MemoryError" in str(error):
            print(file.name, len(str(error)), str(error)[:200])
"""


def test_hostile_pickles_end_in_a_sentence_soon(tmp_path: Path) -> None:
    """None hangs, ends the process or fills the memory, whatever is nested, repeated or long in it."""
    for name, content in HOSTILE.items():
        (tmp_path / re.sub(r"\W+", " ", name)).write_bytes(b"\x80\x04" + content)
    command = [sys.executable, "-c", READ_HOSTILE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def hostile_table(path: Path, change: Any) -> Path:
    """Change the table of a checkpoint in the format torch_dist."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


STACKED = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: vary(m, size=(2**40, 96, 32)), "of 1099511627776 layers"),
        (lambda m: vary(m, size=(10**8, 96, 32)), "of 100000000 layers"),
        (lambda m: vary(m, size=(0, 96, 32)), "of 0 layers"),
        (lambda m: vary(m, chunks=chunks_of(m) * 10**5), "repeats its values|KeyError"),
        (lambda m: vary(m, chunks=[chunk(2**40, 0, 0)]), "is not inside"),
        (lambda m: vary(m, chunks=[chunk(2**40, 96, 32)]), "is not inside"),
        (lambda m: places(m, 10**9), "puts .* GiB into"),
        (
            lambda m: m.state_dict_metadata.update(
                {"decoder.layers.0.mlp.experts.linear_fc1." + "1" * 200_000 + "x": entry(m)}
            ),
            "does not have",
        ),
    ],
    ids=range(8),
)
def test_a_table_is_compared_with_the_model_before_anything_is_built(
    written: Path, tmp_path: Path, change: Any, sentence: str
) -> None:
    path = hostile_table(shutil.copytree(newest(written / "gpt2_torch_dist_tp2"), tmp_path / "x"), change)
    tracemalloc.start()
    with pytest.raises(DamagedCheckpointError, match=sentence) as error:
        Manifest.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak < 200 << 20, len(str(error.value)) < 11_000) == (True, True)


def entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata[STACKED]


def chunks_of(metadata: Any) -> list[Any]:
    return list(entry(metadata).chunks)


def chunk(*sizes: int) -> Any:
    return dcp.metadata.ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))


def vary(metadata: Any, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(entry(metadata), name, torch.Size(value) if name == "size" else value)


def places(metadata: Any, length: int) -> None:
    for place in metadata.storage_data.values():
        place.length = length


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant: 'dsa' is not one of gdn"),
        ({"moe_layer_freq": [0, 2], "num_experts": 4}, "moe_layer_freq: '[0, 2]' is neither a number of layers nor"),
        ({"mtp_num_layers": 2, "mtp_hsm": True}, "mtp_hsm True: the model here has no"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type 'yarn' of an earlier release"),
        ({"position_embedding_type": "relative"}, "position_embedding_type"),
        ({"normalization": "L1"}, "normalization"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"padded_vocab_size": 3}, "vocab_size 37 and padded_vocab_size 3 contradict"),
        ({"num_attention_heads": 3}, "num_attention_heads|num_query_groups|heads"),
    ],
)
def test_arguments_that_there_are_none_of_here_are_refused_by_name(tmp_path: Path, change: Any, sentence: str) -> None:
    folder = write_ranks(tmp_path, DENSE, random_tensors(DENSE))
    change_content(newest(folder) / "mp_rank_00" / "model_optim_rng.pt", lambda c: vars(c["args"]).update(change))
    with pytest.raises(UserError, match=sentence.replace("[", r"\[").replace("]", r"\]")) as error:
        Manifest.open(newest(folder))
    assert [problem.code for problem in error.value.problems] == ["E854"]


def change_content(file: Path, change: Any) -> None:
    """Change what a rank has saved."""
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
DAMAGE: dict[str, tuple[str, Any, str]] = {
    "a rank is missing": ("01_001", lambda file: shutil.rmtree(file.parent), "lacks mp_rank_01_001, of TP 2 and PP 2"),
    "a file is missing": ("01_001", Path.unlink, "mp_rank_01_001/model_optim_rng.pt cannot be read"),
    "a file is cut": ("01_001", lambda file: os.truncate(file, 9000), "model_optim_rng.pt is truncated"),
}
"""The rank, what happens to its file, and the sentence."""
CHANGES: dict[str, tuple[str, Any, str]] = {
    "a tensor is missing": (
        "01_000",
        lambda c: c["model0"].pop(QKV),
        rf"does not hold all of {QKV}: element \[1, 0, 0, 0\] is not covered",
    ),
    "a tensor is too many": (
        "01_000",
        lambda c: c["model0"].update(x=torch.ones(1)),
        "holds tensors that the model of its args does not have: x",
    ),
    "a tensor has another shape": (
        "01_000",
        lambda c: c["model0"].update({QKV: torch.ones(4, 16)}),
        rf"another shape than in its args: {QKV} \[4, 16\] instead of \[16, 16\] in .*mp_rank_01_000",
    ),
    "a tensor has gaps": (
        "01_000",
        lambda c: c["model0"].update({QKV: torch.ones(16, 16).T}),
        f"{QKV} is not stored in row-major order",
    ),
    "the order of rows is older": (
        "00_000",
        lambda c: c.update(checkpoint_version=2.0),
        "checkpoint_version 2.0, with another order of queries, keys and values",
    ),
    "the output layer is not the embedding": (
        "01_001",
        lambda c: c["model1"]["output_layer.weight"].add_(1),
        "ties the output layer to the embedding in args, but output_layer.weight differs",
    ),
    "args deny the layers": (
        "00_000",
        lambda c: vars(c["args"]).update(num_layers=4),
        "holds tensors that the model of its args does not have",
    ),
    "args deny the ranks": (
        "00_000",
        lambda c: vars(c["args"]).update(tensor_model_parallel_size=1),
        "holds more ranks than TP 1 and PP 2 of its args",
    ),
    "args have very many ranks": (
        "00_000",
        lambda c: vars(c["args"]).update(pipeline_model_parallel_size=10**12),
        "4 ranks, fewer than pipeline_model_parallel_size 1000000000000",
    ),
    "args have experts in parallel": (
        "00_000",
        lambda c: vars(c["args"]).update(expert_model_parallel_size=10**12),
        "mp_rank_00_000 does not fit the args: TP, pipeline, expert",
    ),
}
"""The rank, what changes in its content, and the sentence."""


@pytest.mark.parametrize("damage", [*DAMAGE, *CHANGES])
def test_damage_is_named_by_file_and_tensor(tmp_path: Path, damage: str) -> None:
    folder = newest(write_ranks(tmp_path, DENSE, random_tensors(DENSE), tp=2, pp=2, chunks=2))
    rank, change, sentence = (DAMAGE | CHANGES)[damage]
    file = folder / f"mp_rank_{rank}" / "model_optim_rng.pt"
    if damage in DAMAGE:
        change(file)
    else:
        change_content(file, change)
    with pytest.raises(DamagedCheckpointError, match=sentence):
        Manifest.open(folder)


@pytest.mark.parametrize("layout", ["torch_dist_tp2", "legacy_tp1"])
def test_no_damage_ends_in_anything_but_a_sentence(written: Path, tmp_path: Path, layout: str) -> None:
    source = newest(written / f"gpt2_{layout}")
    wanted, _ = checkpoint(source)
    numbers = random.Random(3)
    read = 0
    for case in range(24):
        path = shutil.copytree(source, tmp_path / str(case))
        file = numbers.choice([*path.rglob("*.pt"), *path.rglob(".metadata"), *path.rglob("*.distcp")])
        content = bytearray(file.read_bytes())
        if case % 3 == 0:
            del content[numbers.randrange(len(content)) :]
        else:
            head = len(content) if case % 3 == 1 else min(len(content), 60000)  # where most of the pickles are
            for _ in range(numbers.choice([1, 8])):
                content[numbers.randrange(head)] = numbers.randrange(256)
        file.write_bytes(content)
        try:
            tensors, _ = checkpoint(path)
        except (CheckpointError, UserError):
            pass
        else:
            read += 1
            assert tensors.keys() == wanted.keys()
        shutil.rmtree(path)
    assert read < 22


@pytest.mark.parametrize("layout", ["torch_dist_tp2", "legacy_tp1"])
def test_a_flipped_bit_in_a_tensor_is_noticed(written: Path, tmp_path: Path, layout: str) -> None:
    path = shutil.copytree(newest(written / f"gpt2_{layout}"), tmp_path / "copy")
    name = "optim.exp_avg.layers.1.mlp.linear_fc2.weight"
    chunk = Manifest.open(path).tensors[name].chunks[-1]
    content = bytearray((path / chunk.file).read_bytes())
    content[chunk.offset + 5] ^= 1
    (path / chunk.file).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"{chunk.file} has flipped bytes .tensor {name}"):
        checkpoint(path)
    assert inspect(["verify", str(path)]) == 1


# ---- The optimizer ----


def no_optimizer(folder: Path) -> str:
    """Why a checkpoint has no state of an optimizer; its weights can be read."""
    saved = SavedModel(Manifest.open(newest(folder)))
    assert "optimizer" not in saved.manifest.state
    return str(saved.manifest.state["no_optimizer"])


def test_an_optimizer_state_that_is_not_read_leaves_the_weights(tmp_path: Path) -> None:
    ours = random_tensors(DENSE)
    folder = write_ranks(tmp_path / "zero", DENSE, ours, tp=2)
    (newest(folder) / "mp_rank_01" / "distrib_optim.pt").touch()
    assert "its optimizer state is in distrib_optim.pt" in no_optimizer(folder)
    folder = write_ranks(tmp_path / "groups", DENSE, ours, tp=2, optimizer=True)
    file = newest(folder) / "mp_rank_01" / "model_optim_rng.pt"
    change_content(file, lambda content: content["optimizer"]["param_groups"][0]["params"].pop())
    assert "mp_rank_01/model_optim_rng.pt: group 0 of the optimizer has 32 parameters, not the 33" in no_optimizer(
        folder
    )
    folder = write_ranks(tmp_path / "one", DENSE, ours, tp=2, optimizer=True)
    change_content(newest(folder) / "mp_rank_01" / "model_optim_rng.pt", lambda content: content.pop("optimizer"))
    assert "does not hold all of decoder.final_layernorm.weight" not in (why := no_optimizer(folder))
    assert "does not hold all of" in why
    folder = write_torch_dist(tmp_path / "dist", EXPERTS, random_tensors(EXPERTS), fully_reshardable=False)
    assert "--dist-ckpt-optim-fully-reshardable" in no_optimizer(folder)
    check_tensors(folder, random_tensors(EXPERTS), False)


def test_main_params_and_the_loss_scale_of_fp16(tmp_path: Path) -> None:
    ours = random_tensors(DENSE)
    folder = write_ranks(tmp_path, DENSE, ours, tp=2, pp=2, optimizer=True)
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 17, "hysteresis_tracker": 1}

    def halve(content: Any) -> None:
        fp32 = [x for name, x in content["model"].items() if isinstance(x, Tensor)]
        groups = [[x for x in fp32 if x.dim() > 1], [x for x in fp32 if x.dim() == 1]]
        content["model"] = {n: x.half() if isinstance(x, Tensor) else x for n, x in content["model"].items()}
        inner = content["optimizer"]
        content["optimizer"] = {"optimizer": inner, "fp32_from_fp16_params": groups, "grad_scaler": scaler}

    for file in newest(folder).rglob("*.pt"):
        change_content(file, halve)
    check_tensors(folder, ours, True)
    state = Manifest.open(newest(folder)).state
    assert state["loss_scaler"] == {"scale": 4096.0, "good_steps": 17, "lives": 1.0}


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "scale", DENSE, random_tensors(DENSE), optimizer=True)
    scaler = {"scale": torch.tensor([torch.inf]), "growth_tracker": 17, "hysteresis_tracker": 1}
    file = newest(folder) / "mp_rank_00" / "model_optim_rng.pt"
    change_content(file, lambda c: c.update(optimizer={"optimizer": c["optimizer"], "grad_scaler": scaler}))
    with pytest.raises(DamagedCheckpointError, match="is not a checkpoint of Megatron-LM, or is damaged"):
        Manifest.open(newest(folder))


def test_tools_read_such_folders(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written / "gpt2_legacy_tp1"
    assert inspect(["ls", f"megatron:{folder}"]) == 0
    assert "step 5" in capsys.readouterr().out
    assert inspect(["verify", str(folder)]) == 0
    assert "without checksums" in capsys.readouterr().out
    assert inspect(["diff", str(folder), str(written / "gpt2_torch_dist_tp2")]) == 1  # in options alone
    assert "84 of 84 tensors identical to the bit" in capsys.readouterr().out
    assert generate(["--load", f"megatron:{folder}", "--prompt", "1 2 3", "--max-new-tokens", "4", "--greedy"]) == 0
    one = capsys.readouterr().out
    assert (
        generate(
            ["--load", str(written / "gpt2_torch_dist_tp2"), "--prompt", "1 2 3", "--max-new-tokens", "4", "--greedy"]
        )
        == 0
    )
    assert capsys.readouterr().out == one


# ---- Conversion ----


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_megatron_lm_checkpoint_survives_a_round_trip(written: Path, tmp_path: Path, kind: str) -> None:
    source, own, back = written / f"{kind}_torch_dist_tp2", tmp_path / "own", tmp_path / "back"
    assert convert(["--load-megatron", str(source), "--save", str(own)]) == 0
    assert convert(["--load", str(own), "--save-megatron", str(back)]) == 0
    (theirs, _), (ours, _), (again, state) = (checkpoint(newest(folder)) for folder in (source, own, back))
    assert theirs.keys() == ours.keys() == again.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
        assert torch.equal(tensor, again[name]), name
    assert (state["iteration"], state["consumed_samples"], state["optimizer"]) == (5, 20, {"steps": 5})
    written_entries, wanted = entries(newest(back)), entries(newest(source))
    padded = {key: (tuple(384 if n == 512 else n for n in size), of) for key, (size, of) in sizes(wanted).items()}
    assert sizes(written_entries) == padded
    assert written_entries.keys() == wanted.keys() | {"decoder.final_layernorm._extra_state/shard_0_1"}
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "5"
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    plain = {key: torch.empty(wanted[key][0])}
    dcp.load(plain, checkpoint_id=newest(back), no_dist=True)
    names = [f"optim.exp_avg.layers.{i}.mlp.linear_fc1.weight" for i in range(len(plain[key]))]
    assert torch.equal(plain[key], torch.stack([theirs[name] for name in names]))
    if kind == "gpt2":
        check_common_state(*(common_state(newest(folder)) for folder in (source, back)))


def sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Those that are tensors."""
    return {key: entry for key, entry in found.items() if isinstance(entry, tuple)}


def check_common_state(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """The state of a run, and the arguments that describe it, are Megatron-LM's."""
    for name in ("iteration", "checkpoint_version", "opt_param_scheduler", "content_metadata"):
        assert ours[name] == theirs[name], name
    for group, wanted in zip(*(c["optimizer"]["optimizer"]["param_groups"] for c in (ours, theirs)), strict=True):
        expected = {name: pytest.approx(wanted[name]) for name in group if name != "bias_correction"}
        assert group == expected | {"bias_correction": True}
    shape = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("max_position_embeddings", "layernorm_epsilon", "normalization", "swiglu", "add_bias_linear", "add_qkv_bias"),
        *("untie_embeddings_and_output_weights", "position_embedding_type", "vocab_size", "params_dtype", "seed"),
        *("bias_gelu_fusion", "openai_gelu", "group_query_attention", "consumed_train_samples", "lr"),
    )
    assert {n: ours["args"][n] for n in shape} == {n: theirs["args"][n] for n in shape}


def test_experts_are_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.convert.megatron_lm.save.BLOCK_ELEMENTS", 112)  # rows across heads
    ours = random_tensors(EXPERTS)
    folder = write_torch_dist(tmp_path / "theirs", EXPERTS, ours)
    assert convert(["--load", str(folder), "--save-megatron", str(tmp_path / "back")]) == 0
    check_tensors(tmp_path / "back", ours, True, steps=6)


# ---- What Megatron-LM looks for in an export ----

EXPORTS = json.loads((Path(__file__).parents[2] / "golden" / "megatron_exports.json").read_text())
"""The files that Megatron-LM itself wrote at step 1, by form; ``python -m tests.megatron_core.record``."""


def export(folder: Path, form: str, flags: str = "") -> Path:
    """Export a checkpoint of step 1 of a run here, with random weights."""
    config = parse(f"{FLAGS} --mock-data {FORMS[form]} {flags}".split(), {"RANK": "0", "WORLD_SIZE": "2"}).config
    tensors = {}
    for name, value in random_tensors(config.model).items():
        moments = {} if "expert_bias" in name else moments_of(value)
        for prefix, each in {"": value, **{f"optim.{kind}.": x for kind, x in moments.items()}}.items():
            tensors[prefix + name] = whole_tensor(gpt(config.model)[name], each)
    batches = {"iteration": 0, "consumed_samples": 0}
    state = {"iteration": 1, "consumed_samples": 4, "optimizer": {"steps": 1}, "batches_since": batches}
    own = folder / "own" / "iter_0000001"
    save_sharded(own, tensors, state, to_dict(config), Group())
    assert convert(["--load", str(own), "--save-megatron", str(folder / "export")]) == 0
    check_tensors(folder / "export", random_tensors(config.model), True, 1, at=(1, 4))
    return newest(folder / "export")


@pytest.mark.parametrize("form", list(FORMS))
def test_an_export_holds_the_keys_that_megatron_lm_reads(tmp_path: Path, form: str) -> None:
    """It holds the keys that Megatron-LM writes with its own and with Transformer Engine's layers, and no others."""
    path, wanted = export(tmp_path, form), EXPORTS[form]
    held, common = plain([entries(path), common_state(path)])
    assert held == wanted["entries"] | wanted["transformer_engine"]
    named = wanted["args"].keys() & common["args"].keys()
    if not common["args"]["group_query_attention"]:
        named -= {"num_query_groups"}  # without effect
    assert {name: common["args"][name] for name in named} == {name: wanted["args"][name] for name in named}
    for name in ("opt_param_scheduler", "content_metadata"):
        assert common[name] == wanted[name]
    groups = common["optimizer"]["optimizer"]["param_groups"]
    for group, theirs in zip(groups, wanted["optimizer"]["optimizer"]["param_groups"], strict=True):
        assert group == theirs | {"bias_correction": True}  # which fused optimizers read


def test_experts_of_a_run_with_expert_parallelism_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    common = common_state(export(tmp_path, "experts", "--expert-model-parallel-size 2"))
    wanted = EXPORTS["experts"]["optimizer"]["optimizer"]["param_groups"]
    assert [*common["optimizer"]] == [0, 1]
    for number, part in common["optimizer"].items():
        for group, theirs in zip(part["optimizer"]["param_groups"], wanted, strict=True):
            assert plain(group) == theirs | {"is_expert_parallel": number == 1, "bias_correction": True}
    assert common["opt_param_scheduler"] == EXPORTS["experts"]["opt_param_scheduler"]


def test_the_card_of_a_run_of_megatron_lm_invents_nothing(written: Path, tmp_path: Path) -> None:
    """Directly and through a checkpoint of ours, it has the options that the arguments have."""
    source, own, out = written / "llama_torch_dist_tp2", tmp_path / "own", tmp_path / "hf"
    assert convert(["--load-megatron", str(source), "--save-hf", str(out)]) == 0  # compared with transformers
    assert convert(["--load-megatron", str(source), "--save", str(own)]) == 0
    assert convert(["--load", str(own), "--save-hf", str(tmp_path / "again"), "--no-check"]) == 0
    assert (tmp_path / "again" / "README.md").read_text() == (out / "README.md").read_text()
    rows = card_of(out)
    model = ["architecture", "parameters", "vocabulary", "positions"]
    assert [*rows] == [*model, "trained for", "optimizer options", "trained with", "exported with"]
    assert rows["trained for"] == "5 steps, 20 samples, 640 tokens"
    assert rows["trained with"] == "Megatron-LM, 2 ranks"
    options = dict(option.split(" ", 1) for option in rows["optimizer options"].split(", "))
    assert (options["optimizer"], options["adam_beta2"]) == ("adam", "0.95")
    assert options.keys() <= common_state(newest(source))["args"].keys()
    few = write_ranks(tmp_path / "few", DENSE, random_tensors(DENSE), optimizer=True)  # with few arguments
    assert convert(["--load-megatron", str(few), "--save-hf", str(tmp_path / "of_few"), "--no-check"]) == 0
    rows = card_of(tmp_path / "of_few")
    assert [*rows] == [*model, "trained for", "trained with", "exported with"]
    assert (rows["trained for"], rows["trained with"]) == ("7 steps, 28 samples", "Megatron-LM, 1 rank")


def test_a_failed_conversion_leaves_nothing(written: Path, tmp_path: Path, monkeypatch: Any) -> None:
    reads = iter(range(1000))

    def fail(reader: CheckpointReader, name: str, box: Any = None) -> Tensor:
        if next(reads) > 20:
            raise DamagedCheckpointError(f"{name} has flipped bytes")
        return original(reader, name, box)

    original = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", fail)
    source = written / "llama_torch_dist_tp2"
    assert convert(["--load", str(source), "--save-megatron", str(tmp_path / "back")]) == 1
    assert not (tmp_path / "back").exists()


def test_a_vocabulary_of_unknown_size_keeps_its_padding(tmp_path: Path) -> None:
    ours = random_tensors(DENSE)
    folder = write_ranks(tmp_path, DENSE, ours, tp=2)
    for file in newest(folder).rglob("*.pt"):
        change_content(file, lambda content: vars(content["args"]).update(vocab_size=None))
    tensors, _ = checkpoint(newest(folder))
    words = tensors["embedding.word_embeddings.weight"]
    assert words.shape == (64, 16)
    assert torch.equal(words[:37], ours["embedding.word_embeddings.weight"])
    assert words[37:].isnan().all()
