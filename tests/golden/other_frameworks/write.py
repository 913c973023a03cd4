"""Write small checkpoints with other programs, on a few processes without a GPU, and the logits of their models.

In an environment with the program and transformers::

    torchrun --nproc-per-node 2 tests/golden/other_frameworks/write.py fsdp2 FOLDER
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/golden/other_frameworks/write.py deepspeed1 FOLDER
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 tests/golden/other_frameworks/write.py deepspeed3 FOLDER
    torchrun --nproc-per-node 2 tests/golden/other_frameworks/write.py torchtitan FOLDER
    torchrun --nproc-per-node 2 tests/golden/other_frameworks/write.py nanotron FOLDER

``FOLDER`` then holds the checkpoint, a config.json, and ``logits.pt``: tokens ``[1, 12]`` and their logits. ``pack`` in
place of a program makes ``FOLDER.tar.xz`` of it. This file runs in the other program's environment, and imports nothing
of this project.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN, WIDTH, LAYERS, HEADS, GROUPS, WORDS, POSITIONS = 16, 20, 2, 4, 2, 18, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": WORDS,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}


def tokens() -> Tensor:
    """Return the tokens, ``[1, 12]``."""
    return (torch.arange(12) * 7 % WORDS).view(1, 12)


def llama() -> nn.Module:
    """Return Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return spread_norms(LlamaForCausalLM(LlamaConfig(**CONFIG)))


@torch.no_grad()
def spread_norms(model: nn.Module) -> nn.Module:
    """Give the scales of norms values other than 1, in place."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    return model


def loss_of(logits: Tensor) -> Tensor:
    """Return the loss of the tokens after the first."""
    return nn.functional.cross_entropy(logits[0, :-1].float(), tokens()[0, 1:])


def write_config(folder: Path, **changed: Any) -> None:
    """Write the config.json of transformers."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))


def write_logits(folder: Path, logits: Tensor) -> None:
    """Write the tokens and their logits."""
    torch.save({"tokens": tokens(), "logits": logits.detach().float()}, folder / "logits.pt")


def fsdp2(folder: Path) -> None:
    """Train Llama of transformers under FSDP2 for two steps, and save it with its optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model: Any = llama()
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        loss_of(model(tokens()).logits).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optimizer": state}}, checkpoint_id=folder)
    logits = model(tokens()).logits
    if dist.get_rank() == 0:
        write_config(folder)
        write_logits(folder, logits)


def deepspeed(folder: Path, stage: int) -> None:
    """Train Llama of transformers under ZeRO for two steps: stages 1 and 2 in bf16, 3 in fp32."""
    ds = import_module("deepspeed")

    model, sgd = llama(), {"type": "SGD", "params": {"lr": 1e-2}}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    options = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": adam if stage == 1 else sgd,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if stage == 3:  # parameters with and without gradients
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed_tokens" not in name)
    if stage < 3:
        options["bf16"] = {"enabled": True}
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=options)[0]
    for _ in range(2):
        engine.backward(loss_of(engine(tokens()).logits))
        engine.step()
    engine.save_checkpoint(str(folder))
    logits = engine(tokens()).logits
    if dist.get_rank() == 0:
        write_config(folder)
        write_logits(folder, logits)


def torchtitan(folder: Path) -> None:
    """Shard torchtitan's Llama with FSDP2, and save it by the names of its checkpoints."""
    mock("torchtitan.distributed.minimal_async_ep", "torchtitan.distributed.minimal_async_ep.kernels")  # need triton
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.nn.attention.flex_attention import create_block_mask

    llama3 = import_module("torchtitan.models.llama3")
    wrapper = import_module("torchtitan.components.checkpointer.base").ModelWrapper

    rope = llama3.ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=POSITIONS, theta=10000, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        hidden_dim=WIDTH,
        rope=rope,
        fuse_qkv=True,
        attn_backend="flex",
    )
    linear = llama3.Linear.Config(in_features=HIDDEN, out_features=WORDS, param_init=llama3._output_linear_init(HIDDEN))
    words = llama3.Embedding.Config(num_embeddings=WORDS, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT)
    norm = llama3.RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT)
    model = llama3.Llama3Model.Config(
        dim=HIDDEN, vocab_size=WORDS, tok_embeddings=words, norm=norm, lm_head=linear, layers=layers
    ).build()
    torch.manual_seed(1)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that rotary embeddings matter
            parameter.normal_(std=0.5)
    spread_norms(model)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu")
    positions = torch.arange(12)[None]
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save(wrapper([model]).state_dict() | {"train_state": {"step": 2}}, checkpoint_id=folder / "step-2")
    with torch.no_grad():  # FlexAttention has no backward on CPUs
        logits = model(tokens(), positions=positions, attention_masks=mask)
    if dist.get_rank() == 0:
        eps = model.norm.eps or torch.finfo(torch.float32).eps
        write_config(folder, rms_norm_eps=eps)
        write_logits(folder, logits)


def nanotron(folder: Path) -> None:
    """Build parameters with nanotron's tensor parallelism, and save them with its code.

    Its model needs a GPU and flash-attn. So the parameters are made with the names, shapes and slices of its Llama, and
    the logits are computed here.
    """
    others = (
        "config",
        "config.config",
        "optim",
        "optim.gradient_accumulator",
        "models",
        "models.base",
        "serialize.main",
        "serialize.optimizer",
    )
    mock(*(f"nanotron.{name}" for name in others))  # which import each other, or need a GPU
    context = MagicMock(spec=import_module("nanotron.parallel").ParallelContext)
    parameters = import_module("nanotron.parallel.parameters")
    sharded = import_module("nanotron.parallel.sharded_parameters")
    save_weights = import_module("nanotron.serialize.weights").save_weights
    rank, size, head = dist.get_rank(), 2, HIDDEN // HEADS
    context.dp_pg = dist.new_group([rank], use_local_synchronization=True)
    context.tp_pg, context.pp_pg = dist.group.WORLD, context.dp_pg
    context.world_ranks_to_pg = {(0, 1): context.tp_pg}
    context.get_3d_ranks.side_effect = lambda world_rank: (0, 0, world_rank)
    torch.manual_seed(1)
    whole: dict[str, Tensor] = {}

    def add(name: str, shape: tuple[int, ...], dim: int | None = None, chunks: tuple[int, ...] | None = None) -> None:
        whole[name] = torch.randn(shape) * 0.5
        content = whole[name]
        if dim is None:
            set_parameter(root, name, parameters.NanotronParameter(content))
            return
        if chunks:
            content = torch.cat([part.chunk(size, dim)[rank] for part in content.split(chunks, dim)], dim)
        else:
            content = content.chunk(size, dim)[rank]
        split = sharded.SplitConfig(split_dim=dim, contiguous_chunks=chunks)
        parameter = nn.Parameter(content.contiguous())
        set_parameter(root, name, sharded.create_sharded_parameter_from_config(parameter, context.tp_pg, split))

    root = nn.Module()
    add("model.token_position_embeddings.pp_block.token_embedding.weight", (WORDS, HIDDEN), 0)
    for layer in range(LAYERS):
        at = f"model.decoder.{layer}.pp_block."
        groups = GROUPS * head
        add(f"{at}input_layernorm.weight", (HIDDEN,))
        add(f"{at}attn.qkv_proj.weight", (HIDDEN + 2 * groups, HIDDEN), 0, (HIDDEN, groups, groups))
        add(f"{at}attn.o_proj.weight", (HIDDEN, HIDDEN), 1)
        add(f"{at}post_attention_layernorm.weight", (HIDDEN,))
        add(f"{at}mlp.gate_up_proj.weight", (2 * WIDTH, HIDDEN), 0, (WIDTH, WIDTH))
        add(f"{at}mlp.down_proj.weight", (HIDDEN, WIDTH), 1)
    add("model.final_layer_norm.pp_block.weight", (HIDDEN,))
    add("model.lm_head.pp_block.weight", (WORDS, HIDDEN), 0)
    save_weights(root, context, folder / "2")
    if rank == 0:
        kept = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
        options = kept | {"is_llama_config": True, "hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None}
        (folder / "2" / "model_config.json").write_text(json.dumps(options))
        (folder / "latest.txt").write_text("2")
        write_logits(folder, paired_llama(whole))


def set_parameter(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Add a parameter by its dotted name."""
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_parameter(last, parameter)


def paired_llama(weights: dict[str, Tensor]) -> Tensor:
    """Return the logits of Llama by nanotron's parameters, with rotary pairs that are neighbours."""
    at, head = tokens()[0], HIDDEN // HEADS

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weights[name]

    angles = torch.outer(torch.arange(12.0), 1e4 ** (-torch.arange(0, head, 2) / head))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    x = weights["model.token_position_embeddings.pp_block.token_embedding.weight"][at]
    for layer in range(LAYERS):
        name = f"model.decoder.{layer}.pp_block."
        joined = norm(x, f"{name}input_layernorm.weight") @ weights[f"{name}attn.qkv_proj.weight"].T
        q, k, v = joined.unflatten(-1, (-1, head)).split((HEADS, GROUPS, GROUPS), 1)
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        scores = torch.einsum("shd,thd->hst", q, k) * head**-0.5
        masked = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
        mixed = torch.einsum("hst,thd->shd", masked, v).flatten(-2)
        x = x + mixed @ weights[f"{name}attn.o_proj.weight"].T
        y = norm(x, f"{name}post_attention_layernorm.weight") @ weights[f"{name}mlp.gate_up_proj.weight"].T
        gate, up = y.chunk(2, -1)
        x = x + (nn.functional.silu(gate) * up) @ weights[f"{name}mlp.down_proj.weight"].T
    x = norm(x, "model.final_layer_norm.pp_block.weight")
    return (x @ weights["model.lm_head.pp_block.weight"].T)[None]


def mock(*names: str) -> None:
    """Put empty modules in place of those that cannot be imported without a GPU."""
    for name in names:
        module = MagicMock()
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module


def pack(folder: Path) -> None:
    """Write the content of a folder to ``FOLDER.tar.xz``, but for programs that DeepSpeed adds."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
        return None if info.name.endswith(".py") else info

    with tarfile.open(f"{folder}.tar.xz", "w:xz", preset=9) as archive:
        archive.add(folder, folder.name, filter=plain)


def main(program: str, folder: Path) -> None:
    """Write the checkpoint of a program."""
    if program == "pack":
        pack(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    if program.startswith("deepspeed"):
        deepspeed(folder, int(program.removeprefix("deepspeed")))
    else:
        {"fsdp2": fsdp2, "torchtitan": torchtitan, "nanotron": nanotron}[program](folder)
    dist.barrier()
    os._exit(0)  # other programs leave threads behind


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
