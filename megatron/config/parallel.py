"""How ranks share a model: the grid, and the pipeline that runs along one of its axes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option
from megatron.pipeline.schedules import SCHEDULES

STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2}
"""Strategies of sharding over data-parallel ranks, and the ZeRO stage (arXiv 1910.02054) that each is."""


@dataclass(frozen=True)
class ParallelConfig:
    """The rank grid and how its groups talk."""

    tensor_model_parallel_size: int = option(1, "Ranks that share each layer's matrices (TP).", at_least=1)
    sequence_parallel: bool = option(False, "Shard the sequence between TP regions instead of repeating it.")
    pipeline_model_parallel_size: int = option(1, "Ranks of a pipeline, each with some of the layers (PP).", at_least=1)
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "Stages of the pipeline on each of its ranks (VPP). Default: as many as the schedule needs.", at_least=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers of a stage, instead of the number of stages on a rank.", at_least=1
    )
    pipeline_schedule: str | None = option(
        None,
        f"Order of the pipeline's work: {', '.join(SCHEDULES)}, searched, or a file of actions that ends in .csv. "
        "Default: 1f1b, and interleaved with several stages on a rank.",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        "With interleaved: micro-batches that a stage takes before the rank's next stage has its turn. Default: PP.",
        at_least=1,
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Layers of every stage: auto (of equal cost, embedding and output layer counted), or written out as in "
        "Megatron-LM, such as 'Et*3|(tt|)*6L'. Default: equally many, or auto where they cannot be.",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "Layers of the first pipeline rank; the others share the rest equally.", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "Layers of the last pipeline rank; the others share the rest equally.", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "Count the embedding as a layer of the first stage.")
    account_for_loss_in_pipeline_split: bool = option(False, "Count the output layer as a layer of the last stage.")
    context_parallel_size: int = option(1, "Ranks that share each sequence (CP).", at_least=1)
    expert_model_parallel_size: int = option(1, "Ranks that share the experts (EP).", at_least=1)
    expert_tensor_parallel_size: int | None = option(
        None, "TP inside experts. Default: as the dense layers.", at_least=1
    )
    distributed_backend: str | None = option(
        None, "Collective library. Default: nccl on GPUs, gloo on CPUs.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = option(
        10.0, "A collective that takes longer ends the run, in every group.", above=0
    )
    overlap_grad_reduce: bool = option(True, "Reduce each gradient bucket while backward still runs.")
    ddp_bucket_size: int = option(40_000_000, "Elements of a gradient bucket.", at_least=1)
    grad_reduce_in_bf16: bool = option(
        False, "Let gradients travel between data-parallel ranks as bf16; they are added up in fp32."
    )
    use_distributed_optimizer: bool = option(
        False, "Cut masters and moments among data-parallel ranks (ZeRO-1), unless another strategy is said."
    )
    data_parallel_sharding_strategy: str | None = option(
        None,
        "What data-parallel ranks cut among themselves: no_shard (nothing), optim (masters and moments, ZeRO-1), or "
        "optim_grads (gradients as well, ZeRO-2). Default: no_shard, or optim with use_distributed_optimizer.",
        choices=tuple(STAGES),
    )
    num_distributed_optimizer_instances: int = option(
        1, "Copies of what is cut: data-parallel ranks fall into as many groups that each hold one.", at_least=1
    )
    overlap_param_gather: bool = option(
        False, "Gather the weights that other ranks have updated while the next forward already runs."
    )

    @property
    def zero_stage(self) -> int:
        """What data-parallel ranks cut among themselves: 0 nothing, 1 masters and moments, 2 gradients as well."""
        default = "optim" if self.use_distributed_optimizer else "no_shard"
        return STAGES[self.data_parallel_sharding_strategy or default]

    @property
    def optimizer_instances(self) -> int | None:
        """Copies of what is cut; None where nothing is."""
        return self.num_distributed_optimizer_instances if self.zero_stage else None

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model that ``world_size`` ranks hold (DP)."""
        return max(1, world_size // self.model_ranks)
