"""Parallel layout: the rank grid, the pipeline and the sharding over data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "searched")
"""Names of schedules; :mod:`megatron.pipeline.schedules` builds them."""

ZERO_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2}
"""ZeRO stage (arXiv 1910.02054) of each data-parallel sharding strategy."""

SEVERAL_STAGES = Need("several_stages", "several stages")
INTERLEAVED = Need(
    "interleaved_stages",
    "the interleaved schedule and several stages per rank",
    "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the rank grid, pipeline schedule and data-parallel communication."""

    tensor_model_parallel_size: int = option(
        1, "Tensor parallelism: ranks that shard each layer's matrices (TP).", at_least=1, role="free"
    )
    sequence_parallel: bool = option(
        False,
        "Shard the sequence over TP ranks outside the tensor-parallel regions.",
        role="free",
        needs=Need(lambda c: c.parallel.tensor_model_parallel_size > 1, "TP above 1"),
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline parallelism: ranks that shard the layers (PP).", at_least=1, role="free"
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "Virtual stages per pipeline rank (VPP). Default: as many as the schedule needs.", at_least=1, role="free"
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers per virtual stage, instead of the number of stages per rank.", at_least=1, role="free"
    )
    pipeline_schedule: str | None = option(
        None,
        f"Pipeline schedule: {', '.join(PIPELINE_SCHEDULES)}, or a file of actions that ends in .csv. "
        "Default: 1f1b, or interleaved with several stages per rank.",
        role="free",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        "interleaved: micro-batches a stage processes before the rank switches to its next stage. Default: PP.",
        at_least=1,
        role="free",
        needs=INTERLEAVED,
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Layers of every stage: auto (stages of equal cost, counting embedding and output layer), or written out as in "
        "Megatron-LM, such as 'Et*3|(tt|)*6L'. Default: equally many layers, or auto where they do not divide.",
        role="free",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "Layers of the first pipeline rank; the others split the rest equally.", at_least=1, role="free"
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "Layers of the last pipeline rank; the others split the rest equally.", at_least=1, role="free"
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, "Count the embedding as a layer of the first stage.", role="free", needs=SEVERAL_STAGES
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "Count the output layer as a layer of the last stage.", role="free", needs=SEVERAL_STAGES
    )
    context_parallel_size: int = option(
        1, "Context parallelism: ranks that shard each sequence (CP).", at_least=1, role="free"
    )
    expert_model_parallel_size: int = option(
        1, "Expert parallelism: ranks that shard the experts (EP).", at_least=1, role="free"
    )
    expert_tensor_parallel_size: int | None = option(
        None, "TP of the experts. Default: that of the dense layers.", at_least=1, role="free"
    )
    distributed_backend: str | None = option(
        None,
        "Backend of torch.distributed. Default: nccl on GPUs, gloo on CPUs.",
        choices=("nccl", "gloo"),
        role="free",
    )
    distributed_timeout_minutes: float = option(
        10.0, "Timeout of every collective. A collective that takes longer ends the run.", above=0, role="free"
    )
    overlap_grad_reduce: bool = option(
        True, "Overlap the reduction of gradient buckets with the backward pass.", role="free"
    )
    ddp_bucket_size: int = option(40_000_000, "Elements per gradient bucket.", at_least=1, role="free")
    grad_reduce_in_bf16: bool = option(
        False, "Send gradients between data-parallel ranks as bf16. They are summed in fp32.", role="free"
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard main params and moments over data-parallel ranks (ZeRO-1), unless a sharding strategy is set.",
        role="free",
    )
    data_parallel_sharding_strategy: str | None = option(
        None,
        "What is sharded over data-parallel ranks: no_shard (nothing), optim (main params and moments, ZeRO-1), or "
        "optim_grads (gradients too, ZeRO-2). Default: no_shard, or optim with use_distributed_optimizer.",
        choices=tuple(ZERO_STAGES),
        role="free",
    )
    num_distributed_optimizer_instances: int = option(
        1, "Groups of data-parallel ranks that each hold a complete copy of the sharded state.", at_least=1, role="free"
    )
    overlap_param_gather: bool = option(
        False, "Overlap the all-gather of updated weights with the next forward pass.", role="free"
    )

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 0 shards nothing, 1 main params and moments, 2 gradients too."""
        default = "optim" if self.use_distributed_optimizer else "no_shard"
        return ZERO_STAGES[self.data_parallel_sharding_strategy or default]

    @property
    def optimizer_instances(self) -> int | None:
        """Copies of the sharded state; None if nothing is sharded."""
        return self.num_distributed_optimizer_instances if self.zero_stage else None

    @property
    def expert_tp(self) -> int:
        """TP size inside experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size (DP) of ``world_size`` ranks."""
        return max(1, world_size // self.model_ranks)
