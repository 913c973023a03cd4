"""Megatron-LM's checkpoints for tests: original ones, and others in its formats, written here.

`write_ranks` and `write_torch_dist` cut and name tensors as docs of the formats describe, one statement for each kind
of tensor; they share nothing with the reader.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.convert.megatron_lm.pickles import StoredTensor, read_pickle_file, read_torch_file
from megatron.layers.parameters import gpt

ARCHIVE = Path(__file__).parents[2] / "golden" / "megatron_ckpt.tar.xz"
"""Checkpoints that Megatron-LM core 0.20.0 has written, with their tensors and logits."""

VOCABULARY = 300


def unpack(folder: Path) -> Path:
    """Unpack the archive, once."""
    if not (folder / "gpt2").exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    return folder


def expected(folder: Path, kind: str) -> dict[str, Tensor]:
    """All parameters in fp32, by our names."""
    found = {}
    for theirs, tensor in load_file(folder / kind / "expected.safetensors").items():
        name = theirs.removeprefix("decoder.").replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        found[name] = tensor[:VOCABULARY] if vocabulary else tensor
    return found


def random_tensors(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random values of every parameter, in the stored shapes of ours."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in gpt(model).items()}


def run_arguments(model: ModelConfig, padded: int, **more: Any) -> argparse.Namespace:
    """The ``args`` of a run of a gated model, as Megatron-LM names them."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "untie_embeddings_and_output_weights")
    experts = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    latent = (
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
    )
    router = ("moe_router_score_function", "moe_router_enable_expert_bias", "mtp_num_layers", "mtp_use_repeated_layer")
    every = (*sizes, *experts, *latent, *router, "vocab_size", "normalization", "qk_layernorm")
    args = {name: getattr(model, name) for name in every}
    args["moe_layer_freq"] = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    args |= {
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups or 1,
        "ffn_hidden_size": model.ffn,
        "padded_vocab_size": padded,
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": True,
        "add_bias_linear": False,
        "bias_gelu_fusion": False,
        "position_embedding_type": "rope",
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "consumed_train_samples": 28,
        **more,
    }
    return argparse.Namespace(**args)


def padded_rows(tensor: Tensor, rows: int) -> Tensor:
    """A vocabulary with padding that nothing may read."""
    return torch.cat([tensor, torch.full((rows - len(tensor), tensor.shape[1]), torch.nan)])


def gate_and_up(tensor: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of a gated projection ``[gate; up]``: its part of both."""
    return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])


def attention_tensors(model: ModelConfig, own: Callable[..., Tensor], grouped: bool) -> dict[str, Any]:
    """The tensors of attention in a block; ``own`` returns those of the rank by our name, cut along a dimension."""
    attention, fused = "self_attention.", "self_attention.linear_qkv."
    found: dict[str, Any] = {attention + "linear_proj.weight": own(attention + "linear_proj", 1)}
    if not model.multi_latent_attention:
        found[f"{fused}layer_norm_weight" if grouped else "input_layernorm.weight"] = own("input_layernorm")
        found |= {fused + "weight": own(attention + "linear_qkv", 0), fused + "_extra_state": None}
        norms = ("q_layernorm", "k_layernorm") if model.qk_layernorm else ()
        return found | {f"{attention}{norm}.weight": own(attention + norm) for norm in norms}
    found["input_layernorm.weight"] = own("input_layernorm")
    for latent in ("q", "kv"):
        down, up = f"{attention}linear_{latent}_down_proj", f"{attention}linear_{latent}_up_proj"
        found |= {f"{down}.weight": own(down), f"{up}.weight": own(up, 0)}
        found[f"{up}.layer_norm_weight"] = own(f"{attention}{latent}_layernorm")
    return found


def expert_tensors(
    model: ModelConfig, own: Callable[..., Tensor], bias: Tensor | None, at: Mapping[str, int], grouped: bool
) -> dict[str, Tensor]:
    """The tensors of the router, of the experts of the rank, and of the shared expert."""
    assert model.num_experts is not None
    t, tp, local = at["tp"], at["TP"], model.num_experts // at["EP"]
    found = {"mlp.router.weight": own("mlp.router")} | ({} if bias is None else {"mlp.router.expert_bias": bias})
    for e in range(local):
        for fc in ("linear_fc1", "linear_fc2"):
            every = own(f"mlp.experts.{fc}").chunk(model.num_experts)[at["ep"] * local + e]
            part = gate_and_up(every, t, tp) if fc == "linear_fc1" else every.chunk(tp, 1)[t]
            found[f"mlp.experts.{f'{fc}.weight{e}' if grouped else f'local_experts.{e}.{fc}.weight'}"] = part
    shared = "mlp.shared_experts."
    found[shared + "linear_fc1.weight"] = gate_and_up(own(shared + "linear_fc1"), t, tp)
    found[shared + "linear_fc2.weight"] = own(shared + "linear_fc2", 1)
    return found


def rank_tensors(
    model: ModelConfig, ours: Mapping[str, Tensor], layers: range, at: Mapping[str, int], padded: int, grouped: bool
) -> dict[str, Any]:
    """The tensors of one model chunk of one rank.

    Args:
        model: of the run.
        ours: all tensors.
        layers: of the chunk.
        at: ``tp``, ``ep`` and their sizes ``TP``, ``EP``.
        padded: rows of the vocabulary.
        grouped: experts with grouped matrix products, and the names of Transformer Engine.
    """
    t, tp = at["tp"], at["TP"]
    found: dict[str, Any] = {}
    words, head = "embedding.word_embeddings.weight", "output_layer.weight"
    if layers.start == 0:
        found[words] = padded_rows(ours[words], padded).chunk(tp)[t]
    blocks = [(f"decoder.layers.{n}.", f"layers.{layer}.", model.has_experts(layer)) for n, layer in enumerate(layers)]
    if layers.stop == model.num_layers and model.mtp_num_layers:
        depth, block = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."
        blocks.append((block, block, model.has_experts(model.num_layers - 1)))
        found |= {f"{depth}{n}.weight": ours[f"{depth}{n}.weight"] for n in ("enorm", "hnorm", "final_layernorm")}
        found[f"{depth}eh_proj.weight"] = ours[f"{depth}eh_proj.weight"].chunk(tp)[t]
        found[words] = padded_rows(ours[words], padded).chunk(tp)[t]
    for theirs, here, experts in blocks:
        fc1 = theirs + "mlp.linear_fc1."

        def own(name: str, dim: int | None = None, here: str = here) -> Tensor:
            whole = ours[f"{here}{name}.weight"]
            return whole if dim is None else whole.chunk(tp, dim)[t]

        found |= {theirs + name: tensor for name, tensor in attention_tensors(model, own, grouped).items()}
        fused = grouped and not experts
        norm = f"{fc1}layer_norm_weight" if fused else theirs + "pre_mlp_layernorm.weight"
        found[norm] = own("pre_mlp_layernorm")
        if not experts:
            found[fc1 + "weight"] = gate_and_up(own("mlp.linear_fc1"), t, tp)
            found[theirs + "mlp.linear_fc2.weight"] = own("mlp.linear_fc2", 1)
            continue
        bias = ours.get(here + "mlp.router.expert_bias")
        found |= {theirs + name: tensor for name, tensor in expert_tensors(model, own, bias, at, grouped).items()}
    if layers.stop == model.num_layers:
        found["decoder.final_layernorm.weight"] = ours["final_layernorm.weight"]
        untied = model.untie_embeddings_and_output_weights
        if untied or layers.start:
            found[head] = padded_rows(ours[head if untied else words], padded).chunk(tp)[t]
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}


def moments_of(tensor: Tensor) -> dict[str, Tensor]:
    """Moments that follow from a parameter."""
    return {"exp_avg": tensor * 2**-7, "exp_avg_sq": tensor * tensor * 2**-10}


def rank_optimizer(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The state of Adam in fp32: dense parameters and experts have optimizers of their own, and 1-D ones no decay."""
    found = []
    for expert in (False, True):
        state: dict[int, Any] = {}
        groups = []
        for decays in (True, False):
            trained = {key: x for key, x in tensors.items() if "expert_bias" not in key}
            keys = [k for k, x in trained.items() if (x.dim() > 1) == decays and ("mlp.experts." in k) == expert]
            first = len(state)
            state |= {first + n: moments_of(tensors[key]) for n, key in enumerate(keys)}
            group = {"wd_mult": float(decays), "is_expert_parallel": expert, "step": 7}
            groups += [group | {"params": [*range(first, len(state))]}] if keys else []
        found += [{"state": state, "param_groups": groups}] if groups else []
    return found


def write_ranks(
    folder: Path,
    model: ModelConfig,
    ours: Mapping[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    ep: int = 1,
    grouped: bool = False,
    optimizer: bool = False,
) -> Path:
    """Write a checkpoint of step 7 in the format ``torch``; ``chunks`` has the chunks of each pipeline rank."""
    padded = -(-model.vocab // (16 * tp)) * 16 * tp
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = run_arguments(model, padded, expert_tensor_parallel_size=tp, **sizes)
    count = model.num_layers // (pp * chunks)
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
                at, every = {"tp": t, "TP": tp, "ep": e, "EP": ep}, {}
                for v in range(chunks):
                    first = (v * pp + p) * count
                    part = rank_tensors(model, ours, range(first, first + count), at, padded, grouped)
                    content["model" if chunks == 1 else f"model{v}"] = part
                    every |= {f"{v}.{key}": x for key, x in part.items() if isinstance(x, Tensor)}
                if optimizer:
                    saved = rank_optimizer(every)
                    content["optimizer"] = saved[0] if len(saved) == 1 else saved
                path = folder / "iter_0000007" / name
                path.mkdir(parents=True)
                torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def write_torch_dist(
    folder: Path,
    model: ModelConfig,
    ours: Mapping[str, Tensor],
    *,
    fully_reshardable: bool = True,
    stacked: bool = True,
    common_file: bool = False,
) -> Path:
    """Write a checkpoint of step 7 of a model with experts in the format ``torch_dist``, with the state of Adam.

    Args:
        folder: of the checkpoints.
        model: of the run.
        ours: all tensors.
        fully_reshardable: the state of the optimizer is by parameter, not in buffers.
        stacked: layers are stacked, as where all have the same parameters.
        common_file: store the state of all ranks in a file, as older versions do.
    """
    layers, experts, padded = range(model.num_layers), model.num_experts or 0, model.vocab + 20
    stack = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
        **{f"self_attention.{n}.weight": f"self_attention.{n}.weight" for n in ("linear_qkv", "linear_proj")},
        **{f"self_attention.{n}.weight": f"self_attention.{n}.weight" for n in ("q_layernorm", "k_layernorm")},
        "mlp.router.weight": "mlp.router.weight",
        **{f"mlp.shared_experts.{n}.weight": f"mlp.shared_experts.{n}.weight" for n in ("linear_fc1", "linear_fc2")},
    }
    found = {
        f"decoder.layers.{key}": torch.stack([ours[f"layers.{i}.{n}"] for i in layers]) for key, n in stack.items()
    }
    for fc in ("linear_fc1", "linear_fc2"):
        each = [torch.stack(ours[f"layers.{i}.mlp.experts.{fc}.weight"].chunk(experts)) for i in layers]
        found[f"decoder.layers.mlp.experts.experts.{fc}.weight"] = torch.stack(each)
    found["embedding.word_embeddings.weight"] = padded_rows(ours["embedding.word_embeddings.weight"], padded)
    found["output_layer.weight"] = padded_rows(ours["output_layer.weight"], padded)
    found["decoder.final_layernorm.weight"] = ours["final_layernorm.weight"]
    every: dict[str, Any]
    if not stacked:
        for key in [key for key in found if key.startswith("decoder.layers.")]:
            each = found.pop(key)
            found |= {key.replace("layers.", f"layers.{i}.", 1): each[i].clone() for i in layers}
    every = dict(found)
    if not fully_reshardable:
        buffer = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
        every |= {f"{buffer}.{kind}": torch.ones(64) for kind in ("param", "exp_avg", "exp_avg_sq")}
    for key, tensor in found.items() if fully_reshardable else ():
        for kind, value in {"param": tensor, **moments_of(tensor)}.items():
            every[f"optimizer.state.{kind}.{key}"] = value
    args = run_arguments(model, padded)
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    part = {"optimizer": {"param_groups": [{"step": 6}]}, "grad_scaler": scaler}
    common = {"args": args, "iteration": 7, "optimizer": {0: part, 1: part}}  # of dense parameters, and of experts
    path = folder / "iter_0000007"
    path.mkdir(parents=True)
    if common_file:
        torch.save(common, path / "common.pt")
    else:
        every["common_state/shard_0_1"] = [common]
    dcp.save(every, checkpoint_id=path, no_dist=True, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def change_arguments(source: Path, folder: Path, **changes: Any) -> Path:
    """Copy a folder of one rank that Megatron-LM has written, with other ``args``; Megatron-LM is not needed."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    content = read_torch_file(file)
    tensors = {}
    for name, tensor in content["model"].items():
        if isinstance(tensor, StoredTensor):
            numel, dtype = math.prod(tensor.shape), {"F32": torch.float32, "BF16": torch.bfloat16}[tensor.dtype]
            tensors[name] = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)[
                tensor.offset : tensor.offset + numel * dtype.itemsize
            ].clone()
            tensors[name] = tensors[name].view(dtype).view(tensor.shape)
    plain = {name: value for name, value in content["args"].items() if isinstance(value, int | float | str | None)}
    args = argparse.Namespace(**plain | {"params_dtype": torch.float32} | changes)
    torch.save({"args": args, "iteration": content["iteration"], "model": tensors}, file)
    return folder


def entries(path: Path) -> dict[str, Any]:
    """Sizes and types of the entries of a distributed checkpoint by key, or ``object``; without entries of ranks."""
    found = {}
    for key, entry in read_pickle_file(path / ".metadata").state["state_dict_metadata"].items():
        if not key.startswith(("rng_state", "rerun_state_machine_state")):
            state = entry.state or {}
            found[key] = (state["size"], state["properties"].state[0]) if "size" in state else "object"
    return found


def common_state(path: Path) -> dict[str, Any]:
    """The state that is stored once for all ranks."""
    metadata = read_pickle_file(path / ".metadata").state["storage_data"]
    (place,) = (p.state for i, p in metadata.items() if i.state["fqn"] == "common_state/shard_0_1")
    (found,) = read_torch_file(path / place["relative_path"], place["offset"], place["length"])
    return dict(found)
