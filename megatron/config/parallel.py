"""Parallel layout: the rank grid, the pipeline and the sharding over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, lcm, prod
from typing import ClassVar

from megatron.config.dispatch import DispatchOptions
from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, Need, Run, option
from megatron.config.text import divisors, flag, flag_fixes, multiples_as_fixes, nearest, nearest_multiples

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "searched")
"""Names of schedules; :mod:`megatron.pipeline.schedules` builds them."""

ZERO_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage (arXiv 1910.02054) of each data-parallel sharding strategy."""

TP_OVERLAP_METHODS = ("pipelined", "symmetric_memory")
"""Ways to overlap tensor-parallel communication; :mod:`megatron.distributed.mappings` has them."""

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Communication of context-parallel attention; :mod:`megatron.distributed.context_parallel` has them."""


@dataclass(frozen=True)
class GradCompression:
    """Method of ``grad_compression``; :mod:`megatron.optimizer.grad_compression` has them."""

    # powersgd, topk or int8
    method: str
    # powersgd: rank of the approximation
    rank: int = 0
    # topk: share of the elements that are sent
    ratio: float = 0.0

    @classmethod
    def parse(cls, text: str) -> GradCompression | None:
        """Read ``none``, ``powersgd:RANK``, ``topk:RATIO`` or ``int8``; None for ``none``.

        Raises:
            ValueError: for another text.
        """
        method, colon, number = text.partition(":")
        try:
            if not colon and method in ("none", "int8"):
                return None if method == "none" else cls(method)
            if method == "powersgd" and int(number) >= 1:
                return cls(method, rank=int(number))
            if method == "topk" and 0.0 < float(number) < 1.0:
                return cls(method, ratio=float(number))
        except ValueError:
            pass
        raise ValueError(
            f"{text!r} is not none, powersgd:RANK with a rank of at least 1, topk:RATIO with a ratio between 0 and 1, "
            "or int8"
        )

    @property
    def has_errors(self) -> bool:
        """True for error feedback: what is not sent is kept for the next step."""
        return self.method != "int8"

    def kept(self, elements: int) -> int:
        """Return the number of elements that topk sends of so many."""
        return ceil(self.ratio * elements)


CONTEXT_PARALLEL = Need("context_parallel_size>1", "CP above 1")
ZERO_3 = Need("data_parallel_sharding_strategy=optim_grads_params")
SEVERAL_STAGES = Need("several_stages", "several stages")
INTERLEAVED = Need("interleaved_stages", "the interleaved schedule and several stages per rank")


@dataclass(frozen=True)
class ParallelConfig(DispatchOptions):
    """Sizes of the rank grid, pipeline schedule and data-parallel communication."""

    tensor_model_parallel_size: int = option(1, role="free", at_least=1, spellings=("--model-parallel-size",))
    """Tensor parallelism: ranks that shard each layer's matrices (TP)."""
    sequence_parallel: bool = option(False, role="free", needs=Need("tensor_model_parallel_size>1", "TP above 1"))
    """Shard the sequence over TP ranks outside the tensor-parallel regions."""
    tp_comm_overlap: bool = option(False, role="free", needs="sequence_parallel")
    """Overlap the all-gathers and reduce-scatters of tensor-parallel linears with their matrix products."""
    tp_comm_overlap_method: str | None = option(None, role="free", choices=TP_OVERLAP_METHODS, needs="tp_comm_overlap")
    """pipelined (collectives of parts), or symmetric_memory (PyTorch's fused operations). Default: the latter where
    the TP ranks are GPUs that read each other's memory, and the step is not captured."""
    pipeline_model_parallel_size: int = option(1, role="free", at_least=1)
    """Pipeline parallelism: ranks that shard the layers (PP)."""
    num_virtual_stages_per_pipeline_rank: int | None = option(None, role="free", at_least=1)
    """Virtual stages per pipeline rank (VPP). Default: as many as the schedule needs."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, role="free", at_least=1)
    """Layers per virtual stage, instead of the number of stages per rank."""
    pipeline_schedule: str | None = option(None, role="free")
    """Pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, searched, or a file of actions that
    ends in .csv. Default: 1f1b, or interleaved with several stages per rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, role="free", at_least=1, needs=INTERLEAVED
    )
    """interleaved: micro-batches a stage processes before the rank switches to its next stage. Default: PP."""
    pipeline_model_parallel_layout: str | None = option(None, role="free")
    """Layers of every stage: auto (stages of equal cost, counting the output layer and further predictions), or written
    out as in Megatron-LM, such as 'Et*3|(tt|)*6mL'. Default: equally many layers; auto where they do not divide, or
    differ in cost, as those of hybrid models, so that equal numbers would leave ranks idle for over 3% of the time."""
    decoder_first_pipeline_num_layers: int | None = option(None, role="free", at_least=1)
    """Layers of the first pipeline rank; the others split the rest equally."""
    decoder_last_pipeline_num_layers: int | None = option(None, role="free", at_least=1)
    """Layers of the last pipeline rank; the others split the rest equally."""
    account_for_embedding_in_pipeline_split: bool = option(False, role="free", needs=SEVERAL_STAGES)
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = option(False, role="free", needs=SEVERAL_STAGES)
    """Count the output layer as a layer of the last stage."""
    context_parallel_size: int = option(1, role="free", at_least=1)
    """Context parallelism: ranks that shard each sequence (CP)."""
    cp_comm_type: str = option(
        "p2p",
        role="free",
        choices=CP_COMM_TYPES,
        needs=CONTEXT_PARALLEL,
        parse=lambda text: text.replace("allgather", "all_gather"),
    )
    """Communication of attention under CP: p2p (keys and values are sent to the ranks that see them: ring attention),
    all_gather (of keys and values), a2a (exchange of sequence for heads: Ulysses), or a2a+p2p (a2a inside groups of
    ranks, p2p between them)."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (), role="free", at_least=1, needs=Need("cp_comm_type=a2a+p2p")
    )
    """a2a+p2p: ranks of an a2a group, and number of the groups; both are above 1, and their product is CP."""
    expert_model_parallel_size: int = option(1, role="free", at_least=1)
    """Expert parallelism: ranks that shard the experts (EP)."""
    expert_tensor_parallel_size: int | None = option(None, role="free", at_least=1, needs="num_experts")
    """TP of the experts. Default: that of the dense layers."""
    distributed_backend: str | None = option(None, role="free", choices=("nccl", "gloo"))
    """Backend of torch.distributed. Default: nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: float = option(10.0, role="free", above=0)
    """Timeout of every collective. A collective that takes longer ends the run."""
    overlap_grad_reduce: bool = option(
        True, role="free", megatron=MegatronOption("off", "the results are the same, and it is not slower")
    )
    """Overlap the reduction of gradient buckets with the backward pass."""
    ddp_bucket_size: int | None = option(None, role="free", at_least=1)
    """Elements per gradient bucket. Default: 40 million, or 1 million times DP x CP if that is more."""
    grad_reduce_in_bf16: bool = option(False, role="free")
    """Send gradients between data-parallel ranks as bf16. They are summed in fp32."""
    grad_compression: str = option("none", role="free", check=GradCompression.parse)
    """Compress the gradients that data-parallel ranks send: powersgd:RANK (low-rank factors) or topk:RATIO (the largest
    elements), both with error feedback and for the all-reduce between optimizer instances or without ZeRO, or int8
    (stochastically rounded, also for the reduce-scatter of ZeRO). Default: none."""
    use_distributed_optimizer: bool = option(False, role="free")
    """Shard main params and moments over data-parallel ranks (ZeRO-1), unless a sharding strategy is set."""
    data_parallel_sharding_strategy: str | None = option(None, role="free", choices=tuple(ZERO_STAGES))
    """State to shard over data-parallel ranks: no_shard (nothing), optim (main params and moments, ZeRO-1),
    optim_grads (gradients too, ZeRO-2), or optim_grads_params (weights too, ZeRO-3, also called FSDP). Default:
    no_shard, or optim with use_distributed_optimizer."""
    num_distributed_optimizer_instances: int = option(1, role="free", at_least=1)
    """Groups of data-parallel ranks that each hold a complete copy of the sharded state."""
    overlap_param_gather: bool = option(False, role="free")
    """Overlap the all-gather of updated weights with the next forward pass. ZeRO-3 always overlaps it."""
    reshard_after_forward: bool | None = option(None, role="free", needs=ZERO_3)
    """ZeRO-3: free a block's weights after its forward, and gather them again for backward. Otherwise they are kept to
    the end of the step. Default: on with one pipeline rank, off with several."""
    param_gather_prefetch: int = option(1, role="free", at_least=0, needs=ZERO_3)
    """ZeRO-3: blocks whose weights are gathered while another one computes."""
    param_cpu_offload: bool = option(False, role="free", needs=ZERO_3)
    """ZeRO-3: keep each rank's shards of the weights in host memory, and copy them to the device for every gather.
    Needs optimizer_cpu_offload."""

    refused: ClassVar = """
    tp_comm_overlap_method=symmetric_memory and device=cpu
    E930 --tp-comm-overlap-method symmetric_memory needs GPUs, and this run uses CPUs
      fix: --tp-comm-overlap-method pipelined

    cuda_graph=step and tp_comm_overlap_method=symmetric_memory
    E931 --tp-comm-overlap-method symmetric_memory is untested with --cuda-graph step
      fix: --tp-comm-overlap-method pipelined | --cuda-graph optimizer | --cuda-graph none

    cuda_graph=step and pipeline_model_parallel_size>1
    E912 --cuda-graph step is untested with pipeline parallelism; there are {pipeline_model_parallel_size} pipeline
      ranks
      fix: --cuda-graph optimizer | --cuda-graph none

    cuda_graph=step and context_parallel_size>1
    E917 --cuda-graph step is untested with context parallelism; there are {context_parallel_size} context-parallel
      ranks
      fix: --cuda-graph optimizer | --cuda-graph none

    distributed_backend=nccl and device=cpu
    E206 the nccl backend cannot serve CPUs
      fix: --distributed-backend gloo | --device cuda

    grad_compression!=none and grad_reduce_in_bf16
    E216 --grad-compression {grad_compression} and --grad-reduce-in-bf16 are two ways to send gradients
      fix: --no-grad-reduce-in-bf16 | --grad-compression none

    grad_compression!=none|int8 and params_dtype=fp16
    E216 --grad-compression {grad_compression} keeps errors of gradients, and the loss scale of fp16 changes their
      unit
      fix: --bf16 | --grad-compression int8

    cuda_graph=step and grad_compression!=none
    E918 --cuda-graph step cannot capture --grad-compression {grad_compression}
      fix: --cuda-graph optimizer | --grad-compression none

    use_distributed_optimizer and data_parallel_sharding_strategy=no_shard
    E215 --use-distributed-optimizer and no_shard contradict each other
      fix: drop --use-distributed-optimizer | --data-parallel-sharding-strategy optim

    cuda_graph=step and zero_stage=3
    E913 --cuda-graph step cannot capture optim_grads_params, which frees and allocates weights (ZeRO-3)
      fix: --cuda-graph optimizer | --cuda-graph none

    num_distributed_optimizer_instances>1 and zero_stage=0
    E215 {num_distributed_optimizer_instances} optimizer instances need a sharded optimizer
      fix: --use-distributed-optimizer | --num-distributed-optimizer-instances 1

    overlap_param_gather and zero_stage=0
    E215 --overlap-param-gather needs a sharded optimizer: without one, no weights are gathered
      fix: --use-distributed-optimizer | --no-overlap-param-gather

    cuda_graph=optimizer|step and overlap_param_gather and zero_stage=1|2
    E913 --cuda-graph {cuda_graph} cannot capture --overlap-param-gather, which ends in the next step
      fix: --no-overlap-param-gather | --cuda-graph none

    offloads_weights and optimizer=muon
    E943 --param-cpu-offload: muon updates matrices on the device
      fix: drop --param-cpu-offload

    offloads_weights and optimizer!=muon and not optimizer_cpu_offload or offloads_weights and optimizer!=muon and
    optimizer_offload_fraction!=1.0
    E943 --param-cpu-offload needs --optimizer-cpu-offload of all parameters
      fix: --optimizer-cpu-offload --optimizer-offload-fraction 1 | drop --param-cpu-offload
    """

    def bucket_size(self, data_parallel_ranks: int) -> int:
        """Return the elements per gradient bucket; by default they grow with the ranks that a bucket is cut for."""
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * data_parallel_ranks)

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 0 shards nothing, 1 main params and moments, 2 gradients too, 3 weights too."""
        default = "optim" if self.use_distributed_optimizer else "no_shard"
        return ZERO_STAGES[self.data_parallel_sharding_strategy or default]

    @property
    def gathers_during_compute(self) -> bool:
        """True if weights are gathered while a step computes."""
        return self.zero_stage == 3 or (self.zero_stage > 0 and self.overlap_param_gather)

    @property
    def reshards_after_forward(self) -> bool:
        """True if ZeRO-3 frees a block's weights after its forward."""
        one_stage = self.pipeline_model_parallel_size == 1
        return self.zero_stage == 3 and (
            one_stage if self.reshard_after_forward is None else self.reshard_after_forward
        )

    @property
    def offloads_weights(self) -> bool:
        """True if the shards of the weights are in host memory."""
        return self.zero_stage == 3 and self.param_cpu_offload

    @property
    def optimizer_instances(self) -> int | None:
        """Copies of the sharded state; None if nothing is sharded."""
        return self.num_distributed_optimizer_instances if self.zero_stage else None

    @property
    def compression(self) -> GradCompression | None:
        """Compression of gradients; None for none."""
        return GradCompression.parse(self.grad_compression)

    @property
    def cp_head_ranks(self) -> int:
        """Context-parallel ranks that exchange the sequence for heads (a2a)."""
        sizes = {"a2a": self.context_parallel_size, "a2a+p2p": next(iter(self.hierarchical_context_parallel_sizes), 1)}
        return sizes.get(self.cp_comm_type, 1)

    def context_parallel_methods(self, heads: int, most: int) -> list[ParallelConfig]:
        """Return the layout with each method that the attention heads allow: p2p, a2a+p2p and a2a.

        Args:
            heads: of the model.
            most: largest number of ranks that exchange heads; a2a+p2p has as many as possible.
        """
        size, found = self.context_parallel_size, {}
        for among in divisors(size):
            method = "p2p" if among == 1 else "a2a" if among == size else "a2a+p2p"
            sizes = (among, size // among) if method == "a2a+p2p" else ()
            if among <= max(1, most) and heads // self.tensor_model_parallel_size % among == 0:
                found[method] = replace(self, cp_comm_type=method, hierarchical_context_parallel_sizes=sizes)
        return [*found.values()]

    @property
    def context_parallel_flags(self) -> str:
        """The flags of the method."""
        sizes = self.hierarchical_context_parallel_sizes if self.cp_comm_type == "a2a+p2p" else ()
        groups = f" --hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}" if sizes else ""
        return f"--cp-comm-type {self.cp_comm_type}{groups}"

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which the rows of a sequence are distributed."""
        return self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def sequence_multiple(self) -> int:
        """Number that divides the sequence length: every rank gets equally many tokens, and a ring rank two chunks."""
        ring = self.context_parallel_size // self.cp_head_ranks
        return lcm(self.sequence_ranks, 2 * ring if ring > 1 else 1)

    def kv_copies(self, groups: int) -> int:
        """Return how many times a2a repeats each of ``groups`` key/value heads, so that its ranks can share them."""
        of_rank = max(1, groups // self.tensor_model_parallel_size)
        return lcm(of_rank, self.cp_head_ranks) // of_rank

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

    def weight_replicas(self, world_size: int) -> int:
        """Return the ranks that hold the same weights and reduce their gradients: DP x CP."""
        return self.data_parallel_size(world_size) * self.context_parallel_size

    @property
    def replica_axes(self) -> str:
        """The axes of the ranks that hold the same weights."""
        return "DP" if self.context_parallel_size == 1 else "DP x CP"

    def check_world_size(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the ranks of one model divide the world size."""
        if world_size % self.model_ranks == 0:
            return
        name = "TP" if self.model_ranks == self.tensor_model_parallel_size else "TP x PP"
        name += " x CP" if self.context_parallel_size > 1 else ""
        ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
        smaller: list[str] = []
        for axis in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            size = getattr(self, axis)
            others = self.model_ranks // size
            fit = [n for n in divisors(size) if n < size and world_size % (n * others) == 0]
            smaller += flag_fixes(flag(axis), fit[-1:])
        enough = max(nearest_multiples(world_size, self.model_ranks))
        start = f"torchrun --nproc-per-node {enough}" if enough <= 8 else f"start {enough} ranks"
        yield Problem("E202", f"{ranks} not a multiple of {name} = {self.model_ranks}", (*smaller, start))

    def check_instances(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the optimizer instances divide the data-parallel ranks, and the ranks with the same experts."""
        count = self.num_distributed_optimizer_instances
        if not self.zero_stage or world_size % self.model_ranks:
            return
        replicas = self.weight_replicas(world_size)
        sizes = {self.replica_axes: replicas}
        experts = self.expert_model_parallel_size * self.expert_tp * self.pipeline_model_parallel_size
        if config.model.num_experts is not None and world_size % experts == 0:
            sizes["expert DP"] = world_size // experts
        for name, size in sizes.items():
            if size % count:
                sentence = f"{count} optimizer instances do not divide {name} = {size}"
                fit = [n for n in divisors(size) if all(other % n == 0 for other in sizes.values())]
                fit = [n for n in fit if n < replicas] or fit  # one rank per instance would shard nothing
                fixes = flag_fixes("--num-distributed-optimizer-instances", nearest(count, fit))
                yield Problem("E215", sentence, fixes)

    def check_grad_compression(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Reject error feedback without an all-reduce."""
        replicas, compression = self.weight_replicas(world_size), self.compression
        if compression is None or not compression.has_errors or self.optimizer_instances != 1 or replicas == 1:
            return
        sentence = (
            f"--grad-compression {self.grad_compression} compresses the all-reduce between optimizer instances, but "
            f"there is one instance: its {replicas} ranks reduce by a reduce-scatter"
        )
        instances = f"--num-distributed-optimizer-instances {divisors(replicas)[1]}"
        without = "--data-parallel-sharding-strategy no_shard"
        yield Problem("E216", sentence, (instances, without, "--grad-compression int8"))

    def check_context_parallel(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the context-parallel ranks form the groups of the method, and that sequence and heads divide."""
        length, sizes = config.training.seq_length, self.hierarchical_context_parallel_sizes
        size, method = self.context_parallel_size, self.cp_comm_type
        if size == 1:
            return
        if method == "a2a+p2p" and (len(sizes) != 2 or prod(sizes) != size or min(sizes) == 1):
            given = f", not {' '.join(map(str, sizes))}" if sizes else ""
            sentence = (
                f"a2a+p2p needs the ranks of an a2a group and the number of groups, above 1 and with product {size}"
            )
            fixes = sorted(self._methods_as_fixes(config), key=lambda fix: method not in fix)
            yield Problem("E201", sentence + given, tuple(fixes))
            return
        among = self.cp_head_ranks
        ring = size // among
        if length % replace(self, sequence_parallel=False).sequence_multiple:
            parts = f"{2 * ring} chunks, two per rank" if among == 1 else f"{size} parts"
            if 1 < among < size:
                parts = f"{2 * ring} chunks, of which two are shared by {among} ranks"
            sentence = f"CP {size} ({method}): samples of {length} tokens do not divide into {parts}"
            yield Problem("E201", sentence, multiples_as_fixes("--seq-length", length, self.sequence_multiple))
        tp = self.tensor_model_parallel_size
        heads = config.model.num_attention_heads // tp
        if not (config.model.has_attention or config.model.has_latent_attention):
            return
        if heads % among and config.model.num_attention_heads % tp == 0:  # E203 reports the latter
            per_rank = " per TP rank" if tp > 1 else ""
            sentence = f"{method}: {heads} heads{per_rank} do not divide over {among} ranks"
            yield Problem("E201", sentence, self._methods_as_fixes(config))

    def _methods_as_fixes(self, config: Run) -> tuple[str, ...]:
        methods = self.context_parallel_methods(config.model.num_attention_heads, self.context_parallel_size)
        return tuple(each.context_parallel_flags for each in methods)
