"""Train with megatron-core from PyPI on CPUs: ``python loop.py``, with a line ``RANKS JOB.json`` for each job.

The wheel has the classes of Megatron-LM (``megatron.core``), but not its program. This is the smallest loop over them:
its data, model of local layers, data parallelism, pipeline schedules, optimizer, schedule of the learning rate, batch
ramp and checkpoints. It runs in an environment of its own, and imports nothing of this package but ``no_gpu``.

``JOB.json`` has ``flags`` (of Megatron-LM), ``steps`` (file for loss and gradient norm of each step, exact to the last
digit), and optionally ``save`` (folders by the number of steps taken before), ``load`` (folder of an iteration) and
``fault`` (Python to run before the model is built, with which a test plants a fault). The ranks of a job are processes
forked from this one, which answers each line with their exit status; what they print is in ``JOB.log``.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

no_gpu = importlib.import_module("no_gpu")  # beside this file
no_gpu.replace_cuda()

import torch.nn.functional as F  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.activations import quick_gelu, squared_relu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides  # noqa: E402
from megatron.core.optimizer.optimizer_config import OptimizerConfig  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

torch_layers = importlib.import_module("torch_layers")  # beside this file, too

no_gpu.replace_optimizer()
torch_layers.install()

DEFAULTS: dict[str, Any] = {
    "num_layers": 2,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "make_vocab_size_divisible_by": 128,
    "position_embedding_type": "learned_absolute",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_interleaved": False,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "num_query_groups": None,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "num_experts": None,
    "moe_layer_freq": 1,
    "mtp_num_layers": None,
    "qk_layernorm": False,
    "micro_batch_size": 1,
    "rampup_batch_size": None,
    "min_lr": 0.0,
    "lr_warmup_iters": 0,
    "lr_warmup_init": 0.0,
    "lr_decay_iters": None,
    "lr_decay_style": "linear",
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": "exponential",
    "weight_decay": 0.01,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
    "clip_grad": 1.0,
    "use_distributed_optimizer": False,
    "accumulate_allreduce_grads_in_fp32": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "split": "969,30,1",
    "seed": 1234,
    "fp16": False,
    "bf16": False,
    "moe_token_dispatcher_type": "allgather",
}
"""Defaults of its arguments that no configuration class has, or that the checkpoint's reader here asks for."""

RENAMED = {
    "disable_bias_linear": ("add_bias_linear", False),
    "no_bias_gelu_fusion": ("bias_gelu_fusion", False),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
}
"""Flags without a value -> attribute and value."""

NAMES = {"norm_epsilon": "layernorm_epsilon"}
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
TEXTS = {"split", "data_path", "lr_decay_style"}
"""Attributes that stay text."""


def parse(flags: Sequence[str]) -> Namespace:
    """Return flags of Megatron-LM as its ``args``: a flag without a value is True, several values are a list."""
    given: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = []
        else:
            given[name].append(word)
    args = dict(DEFAULTS)
    for name, values in given.items():
        attribute, value = RENAMED.get(name, (NAMES.get(name, name), True))
        read = values if attribute in TEXTS else [literal(each) for each in values]
        args[attribute] = value if not values else read[0] if len(read) == 1 else read
    return complete(Namespace(**args))


def literal(text: str) -> Any:
    """Return a value as a literal of Python, or as the text that it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def complete(args: Namespace) -> Namespace:
    """Fill in what follows from other arguments, as its program does."""
    args.data_path = [args.data_path] if isinstance(args.data_path, str) else args.data_path
    args.world_size = int(os.environ["WORLD_SIZE"])
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = args.world_size // model_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if not hasattr(args, "ffn_hidden_size"):
        gated = args.swiglu or args.quick_geglu
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64 if gated else 4 * args.hidden_size
    if not args.group_query_attention:
        args.num_query_groups = None
    if args.pipeline_model_parallel_size > 1 and hasattr(args, "num_layers_per_virtual_pipeline_stage"):
        per_rank = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = per_rank // args.num_layers_per_virtual_pipeline_stage
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    for end in ("start", "end"):
        if getattr(args, f"{end}_weight_decay") is None:
            setattr(args, f"{end}_weight_decay", args.weight_decay)
    args.iteration = args.consumed_train_samples = 0
    return args


def fields(kind: type, args: Namespace) -> dict[str, Any]:
    """Return the attributes that a configuration class has."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


def model_config(args: Namespace) -> TransformerConfig:
    """Return the configuration of the model."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = fields(kind, args) | {
        "num_moe_experts": args.num_experts,
        "layernorm_zero_centered_gamma": args.apply_layernorm_1p,
        "pipeline_dtype": args.params_dtype,
        "bias_activation_fusion": not args.swiglu and args.bias_gelu_fusion and args.add_bias_linear,
        "deallocate_pipeline_outputs": False,  # gloo may still be sending them
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    if args.swiglu:
        values |= {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": args.add_bias_linear}
    elif args.quick_geglu:
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True, "bias_activation_fusion": False}
    elif args.squared_relu:
        values |= {"activation_func": squared_relu, "bias_activation_fusion": False}
    if args.virtual_pipeline_model_parallel_size:  # as its program does; two stages would mix messages otherwise
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def build_chunk(args: Namespace, config: TransformerConfig, stage: int | None) -> GPTModel:
    """Return the model, or one chunk of it."""
    dense = {"use_transformer_engine": False, "normalization": args.normalization}
    spec = torch_layers.replaced(get_gpt_decoder_block_spec(config, **dense, vp_stage=stage), config)
    further = None
    if args.mtp_num_layers:
        further = get_gpt_mtp_block_spec(
            config, get_gpt_decoder_layer_specs(config, **dense)[-1], use_transformer_engine=False, vp_stage=stage
        )
        further = torch_layers.replaced(further, config)
    ends = {"ignore_virtual": False, "vp_stage": stage}
    chunk = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=further,
        vp_stage=stage,
    )
    chunk.model_type, chunk.vp_stage = ModelType.encoder_or_decoder, stage
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def build_model(args: Namespace) -> tuple[TransformerConfig, list[Any]]:
    """Return the configuration, and the chunks of this rank inside of their data parallelism."""
    config = model_config(args)
    count = args.virtual_pipeline_model_parallel_size
    chunks = [build_chunk(args, config, stage) for stage in ([None] if count is None else range(count))]
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    parallel = DistributedDataParallelConfig(
        **fields(DistributedDataParallelConfig, args) | {"grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32}
    )
    return config, [
        DistributedDataParallel(config, parallel, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


def build_optimizer(args: Namespace, chunks: Sequence[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """Return the optimizer and the schedule of its learning rate."""
    config = OptimizerConfig(**fields(OptimizerConfig, args) | {"lr": args.lr, "min_lr": args.min_lr})
    optimizer = get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))
    samples = partial(in_samples, args)
    return optimizer, OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=samples("lr_warmup") or 0,
        lr_decay_steps=samples("lr_decay") or samples("train"),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=samples("train"),
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=samples("lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def in_samples(args: Namespace, name: str) -> int | None:
    """Return a length of the schedule, which is given in samples or in steps of the full batch."""
    steps, samples = (getattr(args, f"{name}_{unit}", None) for unit in ("iters", "samples"))
    return samples or (None if steps is None else steps * args.global_batch_size)


def build_data(args: Namespace) -> Any:
    """Return its dataset of training samples."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        tokenizer=NullTokenizer(args.vocab_size - 1),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    sizes = [in_samples(args, "train"), None, None]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def microbatches(args: Namespace, dataset: Any, consumed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the micro-batches of this rank of a step, in the order of its sampler."""
    size, rank = args.micro_batch_size, parallel_state.get_data_parallel_rank()
    for first in range(
        consumed + rank * size, consumed + get_current_global_batch_size(), size * args.data_parallel_size
    ):
        samples = [dataset[number] for number in range(first, first + size)]
        yield {name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in samples[0]}


def forward(args: Namespace, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Compute the loss of each token of a micro-batch; return it, and the function that sums it."""
    batch = get_batch_on_this_cp_rank(next(batches))
    more = {"loss_mask": batch["loss_mask"]} if args.mtp_num_layers else {}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], **more)
    return losses, partial(summed, batch["loss_mask"])


def summed(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses, the number of tokens, and both for the record."""
    mask = mask.reshape(-1).float()
    loss, tokens = (losses.reshape(-1).float() * mask).sum(), mask.sum().int()
    return loss, tokens.clone(), {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def inner(chunk: Any) -> Any:
    """Return the model inside of its wrappers, whose names a checkpoint has."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def state_of(args: Namespace, chunks: Sequence[Any], optimizer: Any, schedule: Any, loads: bool) -> dict[str, Any]:
    """Return what a checkpoint of Megatron-LM has, without random numbers."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state: dict[str, Any] = {
        name: inner(chunk).sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    if loads or args.iteration:  # before the first step there are no moments to write
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loads, metadata=metadata)
    state["opt_param_scheduler"] = schedule.state_dict()
    return state | {"args": args, "checkpoint_version": 3.0, "iteration": args.iteration}


def save(folder: str, *parts: Any) -> None:
    """Write a checkpoint of Megatron-LM (``torch_dist``) with ``parts`` of the state."""
    path = Path(folder, f"iter_{parts[0].iteration:07d}")
    path.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state_of(*parts, loads=False), str(path), ("torch_dist", 1))
    if int(os.environ["RANK"]) == 0:
        Path(folder, "latest_checkpointed_iteration.txt").write_text(str(parts[0].iteration))
    torch.distributed.barrier()


def load(folder: str, args: Namespace, chunks: Sequence[Any], optimizer: Any, schedule: Any) -> None:
    """Read a checkpoint into the parts of a run, with its optimizer and place in the data."""
    wanted = state_of(args, chunks, optimizer, schedule, loads=True)
    found = dist_checkpointing.load(wanted, folder)
    for i, chunk in enumerate(chunks):
        inner(chunk).load_state_dict(found["model" if len(chunks) == 1 else f"model{i}"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["opt_param_scheduler"])
    args.iteration, args.consumed_train_samples = found["iteration"], found["args"].consumed_train_samples


def train_step(args: Namespace, dataset: Any, chunks: Sequence[Any], optimizer: Any, schedule: Any) -> dict[str, float]:
    """Take one step; return loss and gradient norm, on the last stage."""
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    readers = [microbatches(args, dataset, args.consumed_train_samples) for _ in chunks]
    samples = get_current_global_batch_size()
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward, args),
        data_iterator=readers if len(chunks) > 1 else readers[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    rate = optimizer.param_groups[0]["lr"]
    successful, norm, _ = optimizer.step()
    norms = torch.tensor([-1.0 if norm is None else float(norm)])
    torch.distributed.all_reduce(norms, torch.distributed.ReduceOp.MAX)
    if successful:
        schedule.step(increment=samples)
    args.iteration += 1
    args.consumed_train_samples += samples
    moe_utils.clear_aux_losses_tracker()
    taken = {"grad_norm": norms.item(), "learning_rate": rate, "batch_size": samples}
    if losses:
        total = torch.vstack([each["lm loss"] for each in losses]).sum(0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        taken["lm loss"] = (total[0] / total[1]).item()
    return taken | {"skipped": int(not successful)}


def run(job: dict[str, Any]) -> None:
    """Run a job as one of its ranks."""
    torch.distributed.init_process_group("gloo")
    args = parse(job["flags"])
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    init_num_microbatches_calculator(
        int(os.environ["RANK"]),
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    exec(job.get("fault", ""), globals())
    config, chunks = build_model(args)
    optimizer, schedule = build_optimizer(args, chunks)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if getattr(args, "overlap_grad_reduce", False):
        config.no_sync_func = chunks[0].no_sync
    parts = (args, chunks, optimizer, schedule)
    if job.get("load"):
        load(job["load"], *parts)
    dataset = build_data(args)
    taken = []
    while True:
        if folder := job.get("save", {}).get(str(args.iteration)):
            save(folder, *parts)
        if args.consumed_train_samples >= in_samples(args, "train"):
            break
        taken.append(train_step(args, dataset, *parts[1:]))
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path(job["steps"]).write_text(json.dumps(taken))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def fork(rank: int, ranks: int, path: Path) -> int:
    """Start a rank of a job; return its process id, or end as that rank."""
    if process := os.fork():
        return process
    os.setpgid(0, 0)  # a group with the processes that saving leaves behind
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(path.parent)
    try:
        run(json.loads(path.read_text()))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, also if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run the jobs."""
    end_with_parent()  # at once, also while ranks run
    os.register_at_fork(after_in_child=end_with_parent)  # ranks, and the processes that saving starts in them
    for line in sys.stdin:
        ranks, path = line.split(maxsplit=1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        running = {fork(rank, int(ranks), Path(path.strip())) for rank in range(int(ranks))}
        status = 0
        while running:
            ended, code = os.wait()
            running.discard(ended)
            if code and not status:
                status = os.waitstatus_to_exitcode(code)
                for process in running:
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # usually nothing is left of it
                os.killpg(ended, signal.SIGKILL)
        print(status, flush=True)


if __name__ == "__main__":
    main()
