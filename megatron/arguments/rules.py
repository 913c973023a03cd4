"""Combinations of options that are refused, as a table: a condition on fields, and the message.

Rules that need more than the values of fields are functions in ``checks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, holds


@dataclass(frozen=True)
class Rule:
    """A configuration for which the condition holds is refused."""

    condition: str  # as `holds` reads it
    code: str
    sentence: str  # ``{field}`` is the value of a field
    fixes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a paragraph of `RULES`: the condition, then code and sentence, then ``fix:`` and fixes between bars."""
        found = re.fullmatch(r"(.*) (E\d{3}) (.*) fix: (.*)", " ".join(text.split()))
        if found is None:
            raise ValueError(f"no rule: {text}")
        condition, code, sentence, fixes = found.groups()
        return cls(condition, code, sentence, tuple(fixes.split(" | ")))

    def problem(self, config: RunConfig) -> Problem:
        """Return the problem of a configuration for which the condition holds."""
        values = _Values(config)
        return Problem(self.code, self.sentence.format_map(values), tuple(fix.format_map(values) for fix in self.fixes))


class _Values(dict[str, str]):
    """The values of fields as text, by name."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __missing__(self, name: str) -> str:
        return SETTINGS[name].show(SETTINGS[name].value_in(self._config))


def broken_rules(rules: Iterable[Rule], config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of rules whose condition holds."""
    return (rule.problem(config) for rule in rules if holds(rule.condition, config))


NO_CUDA_GRAPH = "--cuda-graph none"
OPTIMIZER_ONLY = ("--cuda-graph optimizer", NO_CUDA_GRAPH)

_RULES = """\
seq_length>max_position_embeddings
E105 samples of {seq_length} tokens exceed the model's {max_position_embeddings} positions
  fix: --seq-length {max_position_embeddings} | --max-position-embeddings {seq_length}

use_rope_scaling and rope_low_freq_factor>=rope_high_freq_factor
E107 --rope-low-freq-factor {rope_low_freq_factor} is not below --rope-high-freq-factor {rope_high_freq_factor}
  fix: --rope-low-freq-factor 1 --rope-high-freq-factor 4

use_rope_scaling and rotary_seq_len_interpolation_factor!=1.0
E107 --use-rope-scaling and --rotary-seq-len-interpolation-factor both stretch the rotary frequencies
  fix: drop --use-rope-scaling | drop --rotary-seq-len-interpolation-factor

position_embedding_type=yarn and not yarn_original_max_position_embeddings
E107 yarn needs the context length of the model before its extension
  fix: --yarn-original-max-position-embeddings {seq_length}

position_embedding_type=yarn and yarn_beta_slow>=yarn_beta_fast
E107 --yarn-beta-slow {yarn_beta_slow} is not below --yarn-beta-fast {yarn_beta_fast}
  fix: --yarn-beta-slow 1 --yarn-beta-fast 32

window_size and attention_pattern
E109 --window-size {window_size} and --attention-pattern both set what a token attends to
  fix: drop --window-size | drop --attention-pattern

qk_layernorm and qk_layernorm_scope=all and normalization!=RMSNorm
E110 --qk-layernorm-scope all divides by an RMS, which --normalization {normalization} does not
  fix: --qk-layernorm-scope head | --normalization RMSNorm

lora_rank and fp8_format
E113 --fp8-format does not support --lora-rank
  fix: drop --fp8-format | drop --lora-rank

num_experts and moe_router_topk>num_experts
E214 --moe-router-topk {moe_router_topk} exceeds the {num_experts} experts
  fix: --moe-router-topk {num_experts}

num_experts and tensor_model_parallel_size>1 and not sequence_parallel
E214 experts with TP {tensor_model_parallel_size} need sequence parallelism
  fix: --sequence-parallel | --tensor-model-parallel-size 1

distributed_backend=nccl and device=cpu
E206 the nccl backend cannot serve CPUs
  fix: --distributed-backend gloo | --device cuda

use_distributed_optimizer and data_parallel_sharding_strategy=no_shard
E215 --use-distributed-optimizer and no_shard contradict each other
  fix: drop --use-distributed-optimizer | --data-parallel-sharding-strategy optim

grad_compression!=none and grad_reduce_in_bf16
E216 --grad-compression {grad_compression} and --grad-reduce-in-bf16 are two ways to send gradients
  fix: --no-grad-reduce-in-bf16 | --grad-compression none

params_dtype=fp16 and not loss_scale and min_loss_scale>initial_loss_scale
E406 --initial-loss-scale {initial_loss_scale} is below --min-loss-scale {min_loss_scale}
  fix: --min-loss-scale {initial_loss_scale} | --initial-loss-scale {min_loss_scale}

fp8_format and fp8_recipe=delayed
E920 --fp8-recipe delayed is not supported: scales always come from the current tensor
  fix: --fp8-recipe tensorwise

fp8_format=hybrid and fp8_recipe=blockwise|mxfp8
E920 --fp8-recipe {fp8_recipe} has e4m3 gradients only; their blocks need no wider range
  fix: --fp8-format e4m3 | --fp8-recipe tensorwise

fp8_format and num_experts
E922 --fp8-format does not support --num-experts: experts are not multiplied in FP8
  fix: drop --fp8-format

tp_comm_overlap_method=symmetric_memory and device=cpu
E930 --tp-comm-overlap-method symmetric_memory needs GPUs, and this run uses CPUs
  fix: --tp-comm-overlap-method pipelined

recompute_granularity=full and recompute_num_layers>num_layers
E306 {recompute_num_layers} layers cannot be recomputed: the model has {num_layers}
  fix: --recompute-num-layers {num_layers}

recompute_granularity=selective and not recompute_modules
E306 --recompute-granularity selective needs --recompute-modules
  fix: --recompute-modules layernorm activation | drop --recompute-granularity

skip_train and not eval_iters>0
E312 --skip-train only evaluates, and --eval-iters 0 turns evaluation off
  fix: --eval-iters 100 | drop --skip-train

objective=dpo and not chat_data_path
E320 --objective dpo reads pairs of answers, from --chat-data-path
  fix: --chat-data-path PAIRS.jsonl | --objective next_token

objective=distillation and distillation_top_k>vocab_size
E323 --distillation-top-k {distillation_top_k}: the vocabulary has {vocab_size} tokens
  fix: --distillation-top-k {vocab_size}

objective=distillation and final_logit_softcapping and distillation_temperature!=1.0
E323 --distillation-temperature other than 1 cannot be used with --final-logit-softcapping
  fix: --distillation-temperature 1

chat_data_path and eval_iters>0 and not valid_chat_data_path
E505 there are no conversations to evaluate on
  fix: --valid-chat-data-path FILE | --eval-iters 0

save_hf_interval and save and not save_interval
E805 --save-hf-interval needs --save-interval, because it exports checkpoints
  fix: --save-interval {save_hf_interval} | drop --save-hf-interval

diloco_sync_interval and optimizer_cpu_offload
E941 --optimizer-cpu-offload is untested with --diloco-sync-interval
  fix: drop --optimizer-cpu-offload | drop --diloco-sync-interval

cpu_offloading_num_layers>num_layers
E942 --cpu-offloading-num-layers {cpu_offloading_num_layers}: the model has {num_layers} layers
  fix: --cpu-offloading-num-layers {num_layers}

diloco_sync_interval and async_save and diloco_delay>0
E953 --async-save does not support --diloco-delay: its buffer has no room for averages to be merged
  fix: --no-async-save | --diloco-delay 0

diloco_sync_interval and local_save
E953 --local-save does not support DiLoCo, whose outer weights nodes do not send each other
  fix: drop --local-save | drop --diloco-sync-interval
"""

_GRAPH_RULES = """\
cuda_graph=optimizer|step and device=cpu
E906 --cuda-graph {cuda_graph} needs a GPU, and this run uses a CPU
  fix: --cuda-graph none

cuda_graph=step and hidden_dropout>0 or cuda_graph=step and attention_dropout>0
E907 --cuda-graph step does not support dropout: every step would drop the same elements
  fix: --hidden-dropout 0 --attention-dropout 0 | --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and neftune_alpha>0
E907 --cuda-graph step does not support --neftune-alpha: every step would add the same noise
  fix: --neftune-alpha 0 | --cuda-graph optimizer | --cuda-graph none

cuda_graph=optimizer|step and weight_decay_incr_style!=constant
E908 --cuda-graph {cuda_graph} needs a constant weight decay, and --weight-decay-incr-style
  {weight_decay_incr_style} changes it
  fix: --weight-decay-incr-style constant | --cuda-graph none

cuda_graph=step and pipeline_model_parallel_size>1
E912 --cuda-graph step is untested with pipeline parallelism; there are {pipeline_model_parallel_size} pipeline
  ranks
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and reset_attention_mask
E910 --cuda-graph step cannot capture attention to documents, which end at other tokens in every step
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and data_parallel_sharding_strategy=optim_grads_params
E913 --cuda-graph step cannot capture optim_grads_params, which frees and allocates weights (ZeRO-3)
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=optimizer|step and overlap_param_gather and data_parallel_sharding_strategy=optim|optim_grads or
cuda_graph=optimizer|step and overlap_param_gather and use_distributed_optimizer and not
data_parallel_sharding_strategy
E913 --cuda-graph {cuda_graph} cannot capture --overlap-param-gather, which ends in the next step
  fix: --no-overlap-param-gather | --cuda-graph none

cuda_graph=step and context_parallel_size>1
E917 --cuda-graph step is untested with context parallelism; there are {context_parallel_size} context-parallel
  ranks
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and attn_logit_softcapping
E917 --cuda-graph step is untested with --attn-logit-softcapping {attn_logit_softcapping}
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and softmax_type!=vanilla
E917 --cuda-graph step is untested with --softmax-type {softmax_type}
  fix: --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and tp_comm_overlap_method=symmetric_memory
E931 --tp-comm-overlap-method symmetric_memory is untested with --cuda-graph step
  fix: --tp-comm-overlap-method pipelined | --cuda-graph optimizer | --cuda-graph none

cuda_graph=step and num_experts
E214 --cuda-graph step does not support experts: their numbers of tokens differ in every step
  fix: --cuda-graph none

cuda_graph=step and lora_rank
E113 --cuda-graph step is untested with --lora-rank
  fix: --cuda-graph none | drop --lora-rank

cuda_graph=step and grad_compression!=none
E918 --cuda-graph step cannot capture --grad-compression {grad_compression}
  fix: --cuda-graph optimizer | --grad-compression none

cuda_graph=optimizer|step and optimizer_cpu_offload
E940 --cuda-graph {cuda_graph} cannot capture the updates of --optimizer-cpu-offload, which the host computes
  fix: --cuda-graph none | drop --optimizer-cpu-offload

cuda_graph=step and cpu_offloading_num_layers>0
E940 --cuda-graph step is untested with --cpu-offloading-num-layers
  fix: --cuda-graph none | --cuda-graph optimizer | --cpu-offloading-num-layers 0

cuda_graph=step and objective=dpo|distillation
E919 --cuda-graph step is untested with --objective {objective}
  fix: --cuda-graph optimizer | --cuda-graph none
"""

RULES, GRAPH_RULES = ([Rule.parse(each) for each in text.split("\n\n")] for text in (_RULES, _GRAPH_RULES))
"""All rules; those of ``--cuda-graph`` on a GPU are apart."""
