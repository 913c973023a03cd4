"""Data-parallel replicas that survive each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option
from megatron.config.text import counted
from megatron.config.training import parse_batch_steps

ELASTIC = Need("elastic_replicas")


@dataclass(frozen=True)
class ElasticConfig:
    """Data-parallel replicas that go on without those that are lost, and take in those that return."""

    elastic_replicas: int | None = option(None, role="free", at_least=1)
    """Replicas, each a run of its own, that exchange gradients in every step; as many as may be there at a time."""
    elastic_server: str | None = option(None, role="start", needs=ELASTIC)
    """HOST:PORT of tools/diloco_server.py, the same for all replicas; tools/elastic.py sets it."""
    elastic_secret_file: str | None = option(None, role="start", needs=ELASTIC)
    """File with a secret of 16 characters or more, the same for the server and all replicas; others are refused."""
    elastic_replica: int | None = option(None, role="start", at_least=0, needs=ELASTIC)
    """Index of this replica, from 0. Default: the first one without a living replica."""
    elastic_batch: str = option("keep", role="free", choices=("keep", "shrink"), needs=ELASTIC)
    """Treatment of the micro-batches of a lost replica: keep lets the others compute them, shrink leaves them out."""
    elastic_timeout: float = option(10.0, role="start", above=0, needs=ELASTIC)
    """Seconds of silence after which a replica is lost. One that ends, or closes its connections, is lost at once."""

    refused: ClassVar = """
    elastic_replicas and diloco_sync_interval
    E970 --elastic-replicas exchanges gradients in every step, and DiLoCo exchanges weights instead
      fix: drop --elastic-replicas | drop --diloco-sync-interval

    elastic_replicas and phases
    E970 --elastic-replicas does not support --phases: a replica that returns would have to enter another phase
      fix: drop --elastic-replicas | drop --phases

    elastic_replicas and data_mixture
    E970 --elastic-replicas is untested with --data-mixture
      fix: drop --elastic-replicas | drop --data-mixture

    elastic_replicas and log_loss_per_source
    E970 --log-loss-per-source does not count the samples of other replicas
      fix: drop --log-loss-per-source | drop --elastic-replicas

    elastic_replicas and cuda_graph=optimizer|step
    E970 --cuda-graph {cuda_graph} cannot capture the exchange of --elastic-replicas
      fix: --cuda-graph none

    elastic_replicas and not grad_compression=none
    E970 --grad-compression {grad_compression} keeps errors that a lost replica takes with it
      fix: --grad-compression none | drop --elastic-replicas

    elastic_replicas and grad_reduce_in_bf16
    E970 --elastic-replicas is untested with --grad-reduce-in-bf16
      fix: --no-grad-reduce-in-bf16 | drop --elastic-replicas

    elastic_replicas and params_dtype=fp16
    E970 --elastic-replicas is untested with fp16
      fix: drop --elastic-replicas

    elastic_replicas and optimizer_cpu_offload
    E970 --optimizer-cpu-offload is untested with --elastic-replicas
      fix: drop --optimizer-cpu-offload | drop --elastic-replicas

    elastic_replicas and replay_check
    E970 --replay-check {replay_check} is untested with --elastic-replicas
      fix: drop --replay-check | drop --elastic-replicas

    elastic_replicas and lora_rank
    E970 --elastic-replicas is untested with --lora-rank
      fix: drop --elastic-replicas | drop --lora-rank

    elastic_replicas and local_save
    E970 --local-save does not support --elastic-replicas: nodes of other replicas have no part of a checkpoint
      fix: drop --local-save | drop --elastic-replicas

    num_experts and moe_router_enable_expert_bias and elastic_replicas
    E970 an expert bias moves by the loads of all replicas, which --elastic-replicas does not count together
      fix: --no-moe-router-enable-expert-bias | drop --elastic-replicas

    num_experts and moe_router_load_balancing_type=global_aux_loss and elastic_replicas
    E970 the loss global_aux_loss has the loads of all replicas, which --elastic-replicas does not count together
      fix: --moe-router-load-balancing-type seq_aux_loss | drop --elastic-replicas

    elastic_replicas and elastic_replica>=elastic_replicas
    E971 --elastic-replica {elastic_replica}: the {elastic_replicas} replicas have the indices 0 to {elastic_replicas-1}
      fix: --elastic-replica {elastic_replicas-1} | --elastic-replicas {elastic_replica+1}
    """

    def check_elastic_server(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that there is a server to meet at, and that its address can be read."""
        fix = "--elastic-server 127.0.0.1:29400"
        if not self.elastic_replicas or config.training.skip_train:
            return
        if self.elastic_server is None:
            place = "the --elastic-server at which replicas meet (tools/elastic.py starts one)"
            yield Problem("E972", f"--elastic-replicas needs {place}", (fix, "drop --elastic-replicas"))
            return
        host, _, port = self.elastic_server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            yield Problem("E972", f"--elastic-server {self.elastic_server} is not HOST:PORT", (fix,))

    def check_elastic_batch(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that every replica has a micro-batch in every step."""
        model_ranks, training = config.parallel.model_ranks, config.training
        if self.elastic_replicas is None or world_size % model_ranks:
            return
        unit, ramp = training.micro_batch_size * (world_size // model_ranks), training.rampup_batch_size
        sizes = [size for _, size in parse_batch_steps(training.step_batch_size_schedule)]
        sizes = sizes or [ramp[0] if ramp else training.global_batch_size or unit]
        smallest, needed = min(sizes), self.elastic_replicas * unit
        if smallest < needed:
            sentence = (
                f"a global batch of {smallest} has no micro-batch for each of --elastic-replicas "
                f"{self.elastic_replicas}, which need {needed} samples"
            )
            yield Problem("E973", sentence, () if ramp or len(sizes) > 1 else (f"--global-batch-size {needed}",))

    def row_elastic(self, config: Run, world_size: int) -> str:
        """Return the replicas and the policy."""
        if self.elastic_replicas is None:
            return ""
        rest = "the others compute its micro-batches" if self.elastic_batch == "keep" else "its samples are left out"
        return (
            f"up to {counted(self.elastic_replicas, 'replica')} of {counted(world_size, 'rank')} divide the "
            f"micro-batches of a step; if one is lost, {rest}"
        )
