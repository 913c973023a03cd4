"""Checkpoints of Megatron-LM's HybridModel: layers by symbol, and fused projections of which TP cuts each part."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.arguments.cli import parse
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.convert.megatron_lm.model import HYBRID_SPECS, read_arguments
from megatron.training.resume_source import preview_start, stored_config
from tests.kit.runs import checkpoint
from tests.unit.convert.megatron_lm import (
    common_state,
    entries,
    gate_and_up,
    moments_of,
    padded_rows,
    random_tensors,
    rank_optimizer,
    run_arguments,
)
from tools.convert_checkpoint import main as convert

MODEL = ModelConfig(
    hybrid_layer_pattern="M-M*E-G/*E/*E",
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=37,
    max_position_embeddings=32,
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    position_embedding_type="none",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=4,
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=20,
    untie_embeddings_and_output_weights=True,
    mamba_head_dim=6,
    mamba_num_heads=4,
    mamba_num_groups=2,
    mamba_state_dim=5,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LAYERS = [(0, "M"), (0, "-"), (1, "M"), (2, "*"), (2, "E"), (3, "-"), (4, "G")]
"""The block here, and the symbol, of each layer there."""
IN_PROJ = {"M": {"z": 24, "x": 24, "B": 10, "C": 10, "dt": 4}}
IN_PROJ["G"] = {"query": 6, "key": 6, "value": 20, "z": 20, "beta": 4, "alpha": 4}
CONV = {"M": {"x": 24, "B": 10, "C": 10}, "G": {"query": 6, "key": 6, "value": 20}}
"""Rows of the parts of fused tensors."""


def layer_tensors(
    symbol: str, block: Mapping[str, Tensor], t: int = 0, tp: int = 1, newer: bool = False
) -> dict[str, Tensor]:
    """The tensors of a layer there on a TP rank, from those of its block here; ``newer`` names of the convolution."""

    def rows(name: str) -> Tensor:
        return block[name].chunk(tp)[t]

    def columns(name: str) -> Tensor:
        return block[name].chunk(tp, 1)[t]

    def parts(name: str, sizes: Mapping[str, int]) -> Tensor:
        return torch.cat([part.chunk(tp)[t] for part in block[name].split([*sizes.values()])])

    if symbol == "M":
        conv = "mixer.conv1d_" if newer else "mixer.conv1d."
        return {
            "mixer.dt_bias": rows("mamba.dt_bias"),
            "mixer.A_log": rows("mamba.A_log"),
            "mixer.D": rows("mamba.D"),
            "mixer.in_proj.layer_norm_weight": block["pre_mamba_layernorm.weight"],
            "mixer.in_proj.weight": parts("mamba.linear_in.weight", IN_PROJ["M"]),
            f"{conv}weight": parts("mamba.conv.weight", CONV["M"]).unsqueeze(1),
            f"{conv}bias": parts("mamba.conv.bias", CONV["M"]),
            "mixer.norm.weight": rows("mamba.norm.weight"),
            "mixer.out_proj.weight": columns("mamba.linear_out.weight"),
        }
    if symbol == "G":
        return {
            "self_attention.dt_bias": rows("gated_delta_net.dt_bias"),
            "self_attention.A_log": rows("gated_delta_net.A_log"),
            "self_attention.in_proj.layer_norm_weight": block["pre_gated_delta_net_layernorm.weight"],
            "self_attention.in_proj.weight": parts("gated_delta_net.linear_in.weight", IN_PROJ["G"]),
            "self_attention.conv1d.weight": parts("gated_delta_net.conv.weight", CONV["G"]).unsqueeze(1),
            "self_attention.out_norm.weight": block["gated_delta_net.norm.weight"],
            "self_attention.out_proj.weight": columns("gated_delta_net.linear_out.weight"),
        }
    if symbol == "*":
        return {
            "self_attention.linear_proj.weight": columns("self_attention.linear_proj.weight"),
            "self_attention.linear_qkv.layer_norm_weight": block["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": rows("self_attention.linear_qkv.weight"),
        }
    if symbol == "-":
        return {
            "mlp.linear_fc1.layer_norm_weight": block["pre_mlp_layernorm.weight"],
            "mlp.linear_fc1.weight": gate_and_up(block["mlp.linear_fc1.weight"], t, tp),
            "mlp.linear_fc2.weight": columns("mlp.linear_fc2.weight"),
        }
    shared, experts = "mlp.shared_experts.linear_fc", "mlp.experts.linear_fc"
    found = {
        "pre_mlp_layernorm.weight": block["pre_mlp_layernorm.weight"],
        "mlp.router.weight": block["mlp.router.weight"],
        f"{shared}1.weight": gate_and_up(block[f"{shared}1.weight"], t, tp),
        f"{shared}2.weight": columns(f"{shared}2.weight"),
    }
    for e, (fc1, fc2) in enumerate(zip(block[f"{experts}1.weight"].chunk(4), block[f"{experts}2.weight"].chunk(4))):
        found |= {f"{experts}1.weight{e}": gate_and_up(fc1, t, tp), f"{experts}2.weight{e}": fc2.chunk(tp, 1)[t]}
    return found


def of_block(ours: Mapping[str, Tensor], before: str) -> dict[str, Tensor]:
    """The tensors whose names have a beginning, by the rest."""
    return {name.removeprefix(before): tensor for name, tensor in ours.items() if name.startswith(before)}


def head_tensors(ours: Mapping[str, Tensor], depth: int, t: int = 0, tp: int = 1) -> dict[str, Tensor]:
    """The tensors of a further predicted token."""
    before = f"mtp.layers.{depth}."
    found = {f"{before}{n}.weight": ours[f"{before}{n}.weight"] for n in ("enorm", "hnorm", "final_layernorm")}
    found[f"{before}eh_proj.weight"] = ours[f"{before}eh_proj.weight"].chunk(tp)[t]
    block = of_block(ours, f"{before}mtp_model_layer.")
    for number, symbol in enumerate("*E"):
        layer = layer_tensors(symbol, block, t, tp)
        found |= {f"{before}mtp_model_layer.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return found


def hybrid_arguments(padded: int, **more: Any) -> argparse.Namespace:
    """The ``args`` of a run, as Megatron-LM fills them in."""
    args = run_arguments(MODEL, padded, **more)
    names = ("state_dim", "head_dim", "num_groups", "num_heads")
    vars(args).update({f"mamba_{name}": getattr(MODEL, f"mamba_{name}") for name in names})
    names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    vars(args).update({f"linear_{name}": getattr(MODEL, f"linear_{name}") for name in names})
    vars(args).update(num_layers=7, moe_layer_freq=1, spec=[*HYBRID_SPECS[0]], position_embedding_type="none")
    vars(args).update({"hybrid_layer_pattern": "M-M*E-G/*E/*E", "is_hybrid_model": False} | more)
    return args


def write_hybrid_ranks(
    folder: Path, ours: Mapping[str, Tensor], segments: Sequence[str], tp: int = 1, pp: int = 1, newer: bool = False
) -> Path:
    """Write a checkpoint in the format torch, with the state of Adam.

    Args:
        folder: of the checkpoints.
        ours: all tensors.
        segments: layers of each stage; stage ``v * pp + p`` is chunk ``v`` of pipeline rank ``p``.
        tp: size of TP.
        pp: size of PP.
        newer: the names of the convolution are those of newer releases.
    """
    padded = -(-MODEL.vocab // (16 * tp)) * 16 * tp
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = hybrid_arguments(padded, hybrid_layer_pattern="|".join(segments) + "/*E/*E", **sizes)
    chunks = len(segments) // pp
    words, head = "embedding.word_embeddings.weight", "output_layer.weight"
    for t in range(tp):
        for p in range(pp):
            content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
            every: dict[str, Tensor] = {}
            for v in range(chunks):
                stage = v * pp + p
                first = len("".join(segments[:stage]))
                found = {words: padded_rows(ours[words], padded).chunk(tp)[t]} if stage == 0 else {}
                for number, symbol in enumerate(segments[stage]):
                    block, there = LAYERS[first + number]
                    assert symbol == there
                    layer = layer_tensors(symbol, of_block(ours, f"layers.{block}."), t, tp, newer)
                    found |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in layer.items()}
                if stage == len(segments) - 1:
                    found["decoder.final_norm.weight"] = ours["final_layernorm.weight"]
                    found |= {words: padded_rows(ours[words], padded).chunk(tp)[t]}
                    found |= head_tensors(ours, 0, t, tp) | head_tensors(ours, 1, t, tp)
                    found[head] = padded_rows(ours[head], padded).chunk(tp)[t]
                found = {name: tensor.clone() for name, tensor in found.items()}
                content["model" if chunks == 1 else f"model{v}"] = found
                every |= {f"{v}.{name}": tensor for name, tensor in found.items()}
            content["optimizer"] = rank_optimizer(every)
            path = folder / "iter_0000007" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


class InHalves(dcp.DefaultSavePlanner):
    """Writes every tensor of an even number of rows in two boxes, as two ranks of TP do."""

    def create_local_plan(self) -> SavePlan:
        """Return what is written."""
        plan = super().create_local_plan()
        items = [half for item in plan.items for half in self.halves(item)]
        return SavePlan(items, planner_data=plan.planner_data)

    def halves(self, item: WriteItem) -> list[WriteItem]:
        """Two items for one."""
        size = item.tensor_data.size if item.tensor_data else torch.Size()
        if not size or size[0] % 2:
            return [item]
        found = []
        for at in (0, size[0] // 2):
            offset, sizes = torch.Size((at, *(0 for _ in size[1:]))), torch.Size((size[0] // 2, *size[1:]))
            properties = TensorProperties(self.state_dict[item.index.fqn].dtype)
            data = TensorWriteData(ChunkStorageMetadata(offset, sizes), properties, size)
            found.append(WriteItem(MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=data))
        return found

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what an item holds."""
        found = self.state_dict[index.fqn]
        if index.offset is None or not isinstance(found, Tensor) or len(found) % 2:
            return found
        return found[index.offset[0] :][: len(found) // 2].clone()


def hybrid_entries(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the format torch_dist: fused tensors in parts, experts together."""
    found = {}
    for number, (block, symbol) in enumerate(LAYERS):
        layer = layer_tensors(symbol, of_block(ours, f"layers.{block}."))
        found |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in in_parts(symbol, layer).items()}
    for depth in (0, 1):
        found |= in_parts("E", head_tensors(ours, depth))
    padded = MODEL.vocab + 20
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        found[name] = padded_rows(ours[name], padded)
    found["decoder.final_norm.weight"] = ours["final_layernorm.weight"]
    return {name: tensor.clone() for name, tensor in found.items()}


def in_parts(symbol: str, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer with the parts of fused ones, and the experts as one."""
    found: dict[str, Tensor] = {}
    for name, tensor in layer.items():
        fused = IN_PROJ if name.endswith("in_proj.weight") else CONV if "conv1d" in name else {}
        sizes = fused.get(symbol)
        if sizes:
            found |= {f"{name}.{part}": each for part, each in zip(sizes, tensor.split([*sizes.values()]), strict=True)}
        elif "mlp.experts." in name:
            whole = name.replace("mlp.experts.", "mlp.experts.experts.").rstrip("0123456789")
            same = [each for other, each in layer.items() if other.rstrip("0123456789") == name.rstrip("0123456789")]
            found[whole] = torch.stack(same)
        else:
            found[name] = tensor
    return found


def write_hybrid_torch_dist(
    folder: Path, found: Mapping[str, Tensor], halves: bool = False, adam: bool = True, **more: Any
) -> Path:
    """Write a checkpoint in the format torch_dist, with the state of Adam or without."""
    every: dict[str, Any] = {**found}
    for key, tensor in found.items() if adam else ():
        every |= {f"optimizer.state.{k}.{key}": x for k, x in {"param": tensor, **moments_of(tensor)}.items()}
    args = hybrid_arguments(MODEL.vocab + 20, **more)
    part = {"optimizer": {"param_groups": [{"step": 7}]}}
    every["common_state/shard_0_1"] = [{"args": args, "iteration": 7, "optimizer": part}]
    path = folder / "iter_0000007"
    path.mkdir(parents=True)
    planner = (InHalves if halves else dcp.DefaultSavePlanner)(flatten_state_dict=False)
    dcp.save(every, checkpoint_id=path, no_dist=True, planner=planner)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def check_tensors(folder: Path, ours: Mapping[str, Tensor]) -> None:
    """A folder holds these tensors and their moments, and no others."""
    tensors, state = checkpoint(folder / "iter_0000007")
    moments = {f"optim.{kind}.{name}": x for name, tensor in ours.items() for kind, x in moments_of(tensor).items()}
    wanted = {**ours, **moments}
    assert tensors.keys() == wanted.keys()
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, wanted[name].view(tensor.shape))]
    assert state["optimizer"] == {"steps": 7}


@pytest.mark.parametrize(
    ("segments", "layout"),
    [
        (["M-M*E-G"], {"newer": True}),
        (["M-M*E-G"], {"tp": 2}),
        (["M-M", "*", "E-", "G"], {"tp": 2, "pp": 2}),  # a cut inside of a block
        (["M-M*", "", "E-G", ""], {"pp": 4, "newer": True}),
    ],
)
def test_ranks_of_every_layout_are_put_together(tmp_path: Path, segments: list[str], layout: Any) -> None:
    ours = random_tensors(MODEL)
    check_tensors(write_hybrid_ranks(tmp_path, ours, segments, **layout), ours)


@pytest.mark.parametrize("halves", [False, True])
def test_parts_of_fused_tensors_are_put_together(tmp_path: Path, halves: bool) -> None:
    ours = random_tensors(MODEL)
    check_tensors(write_hybrid_torch_dist(tmp_path, hybrid_entries(ours), halves), ours)


def test_a_hybrid_checkpoint_survives_a_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.convert.megatron_lm.save.BLOCK_ELEMENTS", 100)  # parts of parts
    ours = random_tensors(MODEL)
    theirs = write_hybrid_torch_dist(tmp_path / "theirs", hybrid_entries(ours))
    assert convert(["--load-megatron", str(theirs), "--save", str(tmp_path / "own")]) == 0
    assert convert(["--load", str(tmp_path / "own"), "--save-megatron", str(tmp_path / "back")]) == 0
    check_tensors(tmp_path / "own", ours)
    check_tensors(tmp_path / "back", ours)
    source, back = (entries(folder / "iter_0000007") for folder in (theirs, tmp_path / "back"))
    source, back = ({key: each for key, each in found.items() if each != "object"} for found in (source, back))
    rows = {MODEL.vocab + 20: 128}  # of the vocabulary, with padding
    assert back == {key: (tuple(rows.get(n, n) for n in size), dtype) for key, (size, dtype) in source.items()}
    args, found = (common_state(folder / "iter_0000007")["args"] for folder in (theirs, tmp_path / "back"))
    names = ("hybrid_layer_pattern", "num_layers", "spec", "mtp_num_layers", "mamba_num_heads", "linear_key_head_dim")
    assert {name: found[name] for name in names} == {name: args[name] for name in names}


# ---- The layers in the arguments ----


def pattern_of(**changes: Any) -> tuple[str | None, int]:
    """The pattern and the number of further tokens that a run's arguments describe."""
    args = vars(hybrid_arguments(MODEL.vocab)) | changes
    model, _ = read_arguments(args, "args")
    return model.hybrid_layer_pattern, model.prediction_depths


def test_older_arguments_name_the_layers() -> None:
    assert pattern_of(hybrid_layer_pattern="M-|M*E-|G/*E") == ("M-M*E-G", 1)
    assert pattern_of(hybrid_layer_pattern="M-M*E-G/") == ("M-M*E-G", 0)
    older = {"hybrid_layer_pattern": None, "hybrid_override_pattern": "M-M*E-G", "mtp_num_layers": 2}
    assert pattern_of(**older, mtp_hybrid_override_pattern="*E") == ("M-M*E-G", 2)
    assert pattern_of(**older | {"mtp_num_layers": 3}) == ("M-M*E-G", 0)
    shares = {
        "hybrid_layer_pattern": None,
        "is_hybrid_model": True,
        "hybrid_attention_ratio": 0.25,
        "num_experts": None,
    }
    assert pattern_of(**shares, hybrid_mlp_ratio=0.25, num_layers=8) == ("MM*-M*M-", 0)
    assert pattern_of(spec=["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]) == ("M-M*E-G", 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "gdp_stack_spec"]}, "spec .*gdp_stack_spec"),
        ({"hybrid_layer_pattern": "MDM-"}, "DeepSeek sparse attention, which is not implemented"),
        ({"layernorm_epsilon": 1e-6}, r"norm_epsilon 1e-06 \(inside of Mamba-2 there 1e-05\): norms inside"),
        ({"normalization": "LayerNorm"}, "normalization LayerNorm .inside of gated DeltaNet here RMSNorm"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p .not inside of gated DeltaNet here"),
        ({"experimental_attention_variant": "gdn2"}, "experimental_attention_variant: 'gdn2' is not one of gdn"),
    ],
)
def test_layers_that_there_are_none_of_here_are_refused_by_name(change: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        pattern_of(**change)


@pytest.mark.parametrize("flags", ["--num-layers 2", "--hybrid-layer-pattern *-*-"])
def test_a_pattern_of_blocks_is_a_gpt(tmp_path: Path, flags: str) -> None:
    """HybridModel's checkpoint of one loads in a run of either form, and is exported as GPTModel."""
    blocks = replace(MODEL, hybrid_layer_pattern=None, num_layers=2, num_experts=None, mtp_num_layers=None)
    ours = random_tensors(blocks)
    found = {"decoder.final_norm.weight": ours["final_layernorm.weight"]}
    for number, symbol in enumerate("*-*-"):
        layer = layer_tensors(symbol, of_block(ours, f"layers.{number // 2}."))
        found |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        found[name] = padded_rows(ours[name], MODEL.vocab + 20)
    absent = {"num_experts": None, "mtp_num_layers": None}
    more = {
        "mock_data": True,
        "seq_length": 32,
        "global_batch_size": 4,
        "train_iters": 9,
        "hybrid_layer_pattern": "*-|*-",
    }
    theirs = write_hybrid_torch_dist(tmp_path / "theirs", found, **absent, **more)
    check_tensors(theirs, ours)
    run = f"--load megatron:{theirs} --mock-data --vocab-size 37 --seq-length 32 --train-iters 9 --global-batch-size 4"
    config = parse([*f"{run} {flags}".split()], {}, recall=stored_config).config
    assert config.model.hybrid_layer_pattern is None
    assert preview_start(config, 1).iteration == 7
    assert convert(["--load", str(theirs), "--save-megatron", str(tmp_path / "back")]) == 0
    assert "decoder.layers.self_attention.linear_qkv.weight" in entries(tmp_path / "back" / "iter_0000007")
    check_tensors(tmp_path / "back", ours)


# ---- Tensors that are not where the pattern has them ----


@pytest.mark.parametrize(
    ("theirs", "moved"),
    [
        ("decoder.layers.0.mixer.D", "decoder.layers.1.mixer.D"),  # an MLP
        ("decoder.layers.3.self_attention.linear_proj.weight", "decoder.layers.4.self_attention.linear_proj.weight"),
        ("decoder.layers.0.mixer.in_proj.weight.z", "decoder.layers.0.mixer.in_proj.weight"),
        ("mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight", "mtp.layers.0.mtp_model_layer.mlp.router.weight"),
        ("decoder.layers.5.mlp.linear_fc2.weight", "decoder.layers.7.mlp.linear_fc2.weight"),
    ],
)
def test_a_tensor_of_another_layer_is_unknown(tmp_path: Path, theirs: str, moved: str) -> None:
    found = hybrid_entries(random_tensors(MODEL))
    found[moved] = found.pop(theirs)
    folder = write_hybrid_torch_dist(tmp_path, found, adam=False)
    with pytest.raises(DamagedCheckpointError, match=f"model of its args does not have: {moved}$"):
        Manifest.open(folder / "iter_0000007")


def test_a_part_of_another_size_is_refused(tmp_path: Path) -> None:
    found = hybrid_entries(random_tensors(MODEL))
    name = "decoder.layers.6.self_attention.conv1d.weight.key"
    found[name] = found[name][:4].clone()
    folder = write_hybrid_torch_dist(tmp_path, found, adam=False)
    with pytest.raises(DamagedCheckpointError, match=r"conv1d.weight.key \[4, 1, 4\] instead of \[6, 4\]"):
        Manifest.open(folder / "iter_0000007")
