"""The factors of the layout matrix, the rules for combinations, and the case of a choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from operator import and_
from typing import Any

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import CP_COMM_TYPES, PIPELINE_SCHEDULES, ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.settings import SETTINGS
from megatron.config.training import TrainingConfig
from megatron.data.loader import MaskBuilder
from megatron.pipeline.schedules import SCHEDULES
from tests.distributed.pairwise import Choice
from tests.kit.cases import FP64, LR, MODEL, Case, PackedConversations, selective


def choices(name: str) -> tuple[str, ...]:
    """The words that a field allows: what is added to them is compared too."""
    return SETTINGS[name].option.choices


NEEDS: dict[str, dict[str, Any]] = {"yarn": {"rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32}}
"""The options that a kind of positions needs."""

POSITIONS: dict[str, dict[str, Any]] = {
    **{kind: {"position_embedding_type": kind, **NEEDS.get(kind, {})} for kind in choices("position_embedding_type")},
    "llama3": {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_original_max_position": 64},
}
ROTATING = {kind for kind, values in POSITIONS.items() if replace(MODEL, **values).rotary_dim}

ROTARY: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial interleaved": {"rotary_percent": 0.5, "rotary_interleaved": True},
    "of kinds": {"rotary_base_local": 30.0, "no_rope_freq": "[0,0,1]"},
}

QK_NORM: dict[str, dict[str, Any]] = {
    "no": {},
    "head": {"qk_layernorm": True},
    "all": {"qk_layernorm": True, "qk_layernorm_scope": "all"},
}

# A large epsilon, because a norm of nearly nothing multiplies rounding.
_AFTER: dict[str, Any] = {"apply_layernorm_1p": True, "norm_epsilon": 0.1}
BLOCKS: dict[str, dict[str, Any]] = {
    "pre": {},
    "parallel": {"parallel_attention": True, "residual_multiplier": 0.7},
    "post": {"layernorm_placement": "post", "logits_scaling": 1.5} | _AFTER,
    "sandwich": {"layernorm_placement": "sandwich", "embedding_multiplier": 2.0} | _AFTER,
}


RECOMPUTE: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{module: selective(module) for module in choices("recompute_modules")},
    "all modules": selective(*choices("recompute_modules")),
    "uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block 1": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}

LIKE_OTHERS = ("gelu", "geglu", "geglu_tanh", "quick_geglu")
"""Activations with the shape of another; all are computed element by element."""
ACTIVATIONS: dict[str, dict[str, Any]] = {
    **{name: {"activation": name} for name in choices("activation") if name not in LIKE_OTHERS},
    "clamped": {"activation": "quick_geglu", "activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0},
}

BIASES: dict[str, dict[str, Any]] = {
    "all": {},
    "qkv": {"add_bias_linear": False, "add_qkv_bias": True},
    "no": {"add_bias_linear": False},
}

DROPOUT: dict[str, dict[str, Any]] = {
    "no": {},
    "hidden": {"hidden_dropout": 0.2},
    "attention": {"attention_dropout": 0.2},
}
"""With ``hidden``, embeddings are noisy too."""

EOD = 5
DOCUMENTS: dict[str, MaskBuilder] = {
    "one": MaskBuilder(),
    "attention": MaskBuilder(EOD, reset_attention=True),
    "positions": MaskBuilder(EOD, reset_positions=True),
    "patterns": MaskBuilder(EOD, reset_attention=True, reset_pattern=True),
    "all": MaskBuilder(EOD, reset_positions=True, reset_attention=True, mask_eod_loss=True),
    "conversations": PackedConversations(),
}

PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": 5},
    **{
        text: {"attention_pattern": text}
        for text in ("local:5,global", "chunked:4,dilated:3:2", "local:3+first:2,prefix:4")
    },
}
"""Of layers in turn; each is at least once in a model."""

CAPPED = {"softmax_scale": 0.5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
"""Logits of attention and of the output layer, with a z-loss; without one they are plain."""

MOMENTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}

_MUON: dict[str, Any] = {"optimizer": "muon", "muon_num_ns_steps": 2}  # each a sum over TP of every matrix
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{rule: {"optimizer": rule} for rule in choices("optimizer")},
    "muon": _MUON,
    "muon, fused": {
        **_MUON,
        "muon_split_qkv": False,
        "muon_nesterov": True,
        "muon_scale_mode": "unit_rms_norm",
    },
}

EXPERTS: dict[str, dict[str, Any]] = {
    "none": {},
    "two of four": {"num_experts": 4, "moe_ffn_hidden_size": 24},
    "balanced": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.1),
        "moe_z_loss_coeff": 0.01,
    },
    "shared": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 32,
        "moe_aux_loss_coeff": (0.1,),
    },
}

_LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": _LATENT,
    "latent, whole queries": _LATENT | {"q_lora_rank": None, "qk_layernorm": True},
    "gated": {"attention_output_gate": True},
}
"""Of the product; the matrix has the first one."""

STATES: dict[str, dict[str, Any]] = {
    "mamba2": {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 4, "mamba_chunk_size": 5},
    "gated-delta-net": {
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_conv_kernel_dim": 5,
    },
}
"""Sizes of recurrent mixers that TP of 4 divides; the latter convolution reaches back further than a chunk of CP 4."""

MIXERS: dict[str, tuple[str, ...]] = {
    "attention": (),
    "pure": ("*F",),
    "mamba": ("MF", "*F"),
    "mamba alone": ("MF", "M", "M", "*F"),
    "delta": ("GF", "G", "*F"),
    "both": ("MF", "F", "G", "*"),
}
"""Blocks that a layer pattern repeats, in which F is an MLP or experts; without one, all blocks are of attention."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "lora": {"lora_rank": 4},
    "lora of parts": {"lora_rank": 2, "lora_alpha": 3.0, "lora_target": ("linear_qkv.[qv]", "layers.1.*")},
    "dora": {"lora_rank": 3, "lora_dora": True},
}
"""The second leaves stages of a pipeline without a parameter to train."""

_STAGE_3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
ZERO: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"use_distributed_optimizer": True},
    "2": {"data_parallel_sharding_strategy": "optim_grads"},
    "1 twice": {"data_parallel_sharding_strategy": "optim", "num_distributed_optimizer_instances": 2},
    "2 twice": {"data_parallel_sharding_strategy": "optim_grads", "num_distributed_optimizer_instances": 2},
    "3": _STAGE_3,
    "3 kept": _STAGE_3 | {"reshard_after_forward": False, "param_gather_prefetch": 0},
    "3 freed": _STAGE_3 | {"reshard_after_forward": True, "param_gather_prefetch": 2},
    "3 twice": _STAGE_3 | {"num_distributed_optimizer_instances": 2},
}
"""The stage, the instances of the optimizer where there are two, and when weights are freed and gathered."""

FP8: dict[str, PrecisionConfig] = {
    "no": FP64,
    "tensorwise": replace(FP64, fp8_format="hybrid", fp8_recipe="tensorwise"),
    "rowwise": replace(FP64, fp8_format="e4m3", fp8_recipe="rowwise"),
}
"""Blocks of the other recipes do not fit these sizes."""

GROUPS: dict[str, dict[str, Any]] = {
    "two": {},
    "many": {
        "decoupled_lr": LR,
        "lr_factors": ("layers.1.*=0.5", "*.mlp.*=2"),
        "weight_decay_factors": ("*norm*=0.5", "embedding.*=0"),
    },
}

MAX_RANKS = 8
"""Of a case: what the pool has."""
MAX_COLLECTIVES = 48
"""Layers x micro-batches x TP x CP of a case: roughly what it costs, where many ranks share few cores."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "schedule": ("1f1b", *(name for name in PIPELINE_SCHEDULES if name != "1f1b")),
    "tp": ("1", "2", "2sp", "4", "4sp"),
    "dp": (1, 2, 3, 4),
    "cp": (1, 2, 4, 3),
    "cp_type": CP_COMM_TYPES,
    "zero": ("0", "1", "2", "3 kept", "3 freed", "3 twice"),  # the others are in the product
    "gather": (False, True),
    "experts": tuple(EXPERTS),
    "ep": (1, 2),
    "etp": (None, 1, 2),
    "samples": (4, 8, 6),
    "micro_batch": (1, 2, 4),
    "recompute": ("nothing", "all modules", "uniform 2", "block 1"),
    "mlp_chunk": (None, 2),  # of 3 to 24 rows
    "positions": tuple(POSITIONS),
    "rotary": tuple(ROTARY),
    "mixers": tuple(MIXERS),
    "layers": (2, 3, 5, 8),  # on 1, 2, 4 or 8 stages
    "untied": (False, True),
    "kv_heads": (4, 2, 1),  # MHA, GQA and MQA; fewer than TP 4 in both of the latter
    "kv_channels": (None, 12),  # the latter with sinks
    "vocab": (128, 101, 13),  # even, odd, and so small that a rank of TP 4 holds nothing
    "norm": choices("normalization"),
    "qk_norm": tuple(QK_NORM),
    "block": tuple(BLOCKS),
    "biases": tuple(BIASES),
    "activation": tuple(ACTIVATIONS),
    "pattern": tuple(PATTERNS),
    # Conversations have all masks, and other cases; their patterns restart too.
    "documents": tuple(name for name in DOCUMENTS if name not in ("all", "patterns")),
    "masked": (True, False),
    "dropout": tuple(DROPOUT),
    "z_loss": (0.0, 1e-2),
    "loss_chunk": (1024, 7),
    "overlap": (True, False),
    "bucket": (4000, 40_000_000),
    "optimizer": tuple(OPTIMIZERS),
    "moments": tuple(MOMENTS),
    "fp8": tuple(FP8),
    "groups": tuple(GROUPS),
    "clip": (1.0, 0.0),
    "heads": (None, 2),
}


OF_ADAPTERS = {
    **{name: FACTORS[name] for name in ("pp", "vpp", "tp", "layers", "recompute", "mlp_chunk", "kv_heads", "biases")},
    "schedule": ("dualpipe-v", "interleaved", "zb-h1", "1f1b"),
    "dp": (1, 2, 4),
    "cp": (1, 2),
    "zero": ("3 freed", "3 twice", "0", "1 twice", "2"),
    "experts": ("none", "shared"),
    "activation": ("gelu_tanh", "swiglu"),
    "optimizer": ("adam", "muon"),
    "adapters": tuple(ADAPTERS)[1:],
}
"""Factors whose pairs are covered with adapters too; others have their first value."""

LAYOUT = ("pp", "vpp", "schedule", "tp", "dp", "cp", "samples", "micro_batch", "layers")
"""Factors that rules of the rank grid and of the pipeline connect."""

SHARING = ("tp", "dp", "cp", "zero", "gather", "experts", "ep", "etp", "biases")
"""Factors that rules of what replicas cut, and of experts, connect."""

CONTEXT = ("tp", "dp", "cp", "cp_type")
"""Factors that rules of context parallelism connect."""

Grid = tuple[str, int, int]
"""TP, DP and CP: all that ``LAYOUT``, ``SHARING`` and ``CONTEXT`` have in common."""


def valid(choice: Choice) -> bool:
    """Return True if a choice can be completed without breaking a rule."""
    if choice.get("fp8", "no") != "no":
        shared = int(choice.get("tp", "1")[0]) > choice.get("kv_heads", 4)  # heads whose gradients are in parts
        if choice.get("optimizer") == "lion" and choice.get("qk_norm") == "all":  # follows signs of rounding
            return False
        if shared or choice.get("mlp_chunk") or "adapters" in choice or choice.get("experts", "none") != "none":
            return False
        choice = choice | {"experts": "none"}
    rules = (layouts, LAYOUT), (sharings, SHARING), (contexts, CONTEXT)
    if not frozenset.intersection(*(_grids(fitting, _known(choice, names)) for fitting, names in rules)):
        return False
    if choice.get("mixers", "attention") != "attention" and choice.get("block") == "parallel":
        return False
    if choice.get("heads") and (
        choice.get("positions", "rope") == "learned_absolute"
        or "prefix" in choice.get("pattern", "")
        or "adapters" in choice
    ):
        return False
    if choice.get("optimizer") == "lion" and _has_key_bias(choice):
        return False
    if choice.get("qk_norm") == "all" and choice.get("norm", "RMSNorm") != "RMSNorm":
        return False
    return choice.get("positions", "rope") in ROTATING or choice.get("rotary", "plain") == "plain"


Fitting = Callable[[], tuple[Choice, ...]]


def _known(choice: Choice, names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, choice[name]) for name in names if name in choice)


@cache
def _grids(fitting: Fitting, known: tuple[tuple[str, Any], ...]) -> frozenset[Grid]:
    """The grids of what fits together and has these values."""
    whole, grids = _members(fitting)
    members = reduce(and_, (whole.get(value, 0) for value in known), -1)
    return frozenset(grid for grid, of_grid in grids.items() if of_grid & members)


@cache
def _members(fitting: Fitting) -> tuple[Mapping[tuple[str, Any], int], Mapping[Grid, int]]:
    """Return bit sets of the choices with each value and each grid: bit ``i`` for choice ``i``."""
    values: dict[tuple[str, Any], int] = defaultdict(int)
    grids: dict[Grid, int] = defaultdict(int)
    for i, c in enumerate(fitting()):
        grids[c["tp"], c["dp"], c["cp"]] |= 1 << i
        for value in c.items():
            values[value] |= 1 << i
    return values, grids


@cache
def layouts() -> tuple[Choice, ...]:
    """Every combination of the values in ``LAYOUT`` that fits together."""
    found = []
    for values in product(*(FACTORS[name] for name in LAYOUT)):
        c = dict(zip(LAYOUT, values))
        tp = int(c["tp"][0])
        if tp * c["pp"] * c["dp"] * c["cp"] > MAX_RANKS:
            continue
        fits = stages_on_a_rank(c["schedule"]) in (None, c["vpp"])
        filled = c["pp"] * c["vpp"] <= c["layers"] + 2  # the first and the last stage may have no block
        micro_batches, rest = divmod(c["samples"], c["micro_batch"] * c["dp"])
        small = c["layers"] * micro_batches * tp * c["cp"] <= MAX_COLLECTIVES
        in_turn = rest == 0 and (micro_batches > 1 or c["pp"] == 1)  # one alone has no order to get wrong
        if fits and filled and small and in_turn:
            found.append(c)
    return tuple(found)


@cache
def sharings() -> tuple[Choice, ...]:
    """Every combination of the values in ``SHARING`` that fits together, and of more that the full product has."""
    found = []
    sets = FACTORS | {"zero": tuple(ZERO), "ep": (1, 2, 4)}
    for values in product(*(sets[name] for name in SHARING)):
        c = dict(zip(SHARING, values))
        tp, replicas = int(c["tp"][0]), c["dp"] * c["cp"]
        copies, rest = divmod(tp * replicas, c["ep"] * (c["etp"] or tp))  # of every expert
        alone = c["experts"] == "none" and c["ep"] == 1 and c["etp"] is None
        mixed = c["experts"] != "none" and c["tp"] in ("1", "2sp", "4sp") and rest == 0
        halved = replicas % 2 == 0 and (alone or copies % 2 == 0)
        cut = replicas > 1 and (halved or not c["zero"].endswith("twice"))
        overlaps = c["zero"][0] in "12" or not c["gather"]  # ZeRO-0 has nothing to gather, ZeRO-3 always overlaps
        if (alone or mixed) and overlaps and (cut or c["zero"] == "0"):
            found.append(c)
    return tuple(found)


@cache
def contexts() -> tuple[Choice, ...]:
    """Every combination of the values in ``CONTEXT`` that fits together."""
    found = []
    for values in product(*(FACTORS[name] for name in CONTEXT)):
        c = dict(zip(CONTEXT, values))
        heads = MODEL.num_attention_heads // int(c["tp"][0])
        fits = {"p2p": True, "all_gather": c["cp"] > 1, "a2a": c["cp"] > 1 and heads % c["cp"] == 0}
        if fits.get(c["cp_type"], c["cp"] == 4 and heads % 2 == 0):
            found.append(c)
    return tuple(found)


def _has_key_bias(choice: Choice) -> bool:
    """Return True if keys have a bias: its gradient may be rounding alone, whose sign Lion would follow."""
    normed = choice.get("qk_norm", "no") != "no" and choice.get("norm", "RMSNorm") == "LayerNorm"
    return normed or choice.get("biases", "no") != "no"


def case_of(choice: Choice) -> Case:
    """The run that a complete choice stands for."""
    c = choice
    model = replace(
        MODEL,
        num_layers=c["layers"],
        num_query_groups=c["kv_heads"],
        kv_channels=c["kv_channels"],
        softmax_type="learnable" if c["kv_channels"] else "vanilla",
        vocab_size=c["vocab"],
        untie_embeddings_and_output_weights=c["untied"],
        normalization=c["norm"],
        z_loss_coeff=c["z_loss"],
        mtp_num_layers=c.get("heads"),
        **PATTERNS[c["pattern"]],
        **(CAPPED if c["z_loss"] else {}),
        **POSITIONS[c["positions"]],
        **ROTARY[c["rotary"]],
        **QK_NORM[c["qk_norm"]],
        **BLOCKS[c["block"]] | hybrid(c),
        **ACTIVATIONS[c["activation"]],
        **BIASES[c["biases"]],
        **DROPOUT[c["dropout"]],
        **EXPERTS[c["experts"]],
        **ATTENTION[c.get("attention", "plain")],
        **ADAPTERS[c.get("adapters", "none")],
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=int(c["tp"][0]),
        pipeline_model_parallel_size=c["pp"],
        num_virtual_stages_per_pipeline_rank=c["vpp"],
        pipeline_schedule=c["schedule"],
        context_parallel_size=c["cp"],
        cp_comm_type=c["cp_type"],
        hierarchical_context_parallel_sizes=(2, 2) if c["cp_type"] == "a2a+p2p" else (),
        sequence_parallel=c["tp"].endswith("sp"),
        ddp_bucket_size=c["bucket"],
        overlap_grad_reduce=c["overlap"],
        overlap_param_gather=c["gather"],
        expert_model_parallel_size=c["ep"],
        expert_tensor_parallel_size=c["etp"],
        **ZERO[c["zero"]],
    )
    training = TrainingConfig(
        micro_batch_size=c["micro_batch"],
        cross_entropy_chunk_size=c["loss_chunk"],
        mlp_chunk_size=c["mlp_chunk"],
        neftune_alpha=5.0 if c["dropout"] == "hidden" else 0.0,
        **RECOMPUTE[c["recompute"]],
    )
    optimizer = OptimizerConfig(
        clip_grad=c["clip"],
        adam_eps=1e-5,
        **OPTIMIZERS[c["optimizer"]],
        **MOMENTS[c["moments"]],
        **GROUPS[c["groups"]],
    )
    documents = DOCUMENTS[c["documents"]]
    return Case(
        model,
        parallel,
        FP8[c["fp8"]],
        training,
        optimizer,
        dp=c["dp"],
        samples=c["samples"],
        masked=c["masked"],
        documents=documents,
    )


def hybrid(choice: Choice) -> dict[str, Any]:
    """Return the options of a model with a layer pattern; none if all blocks are of attention."""
    blocks = MIXERS[choice.get("mixers", "attention")]
    if not blocks:
        return {}
    pattern = "".join(blocks[i % len(blocks)] for i in range(choice["layers"]))
    more = {name: value for each in STATES.values() for name, value in each.items()}
    if "G" in pattern:  # whose norm of each head may be one of nearly nothing
        more["norm_epsilon"] = 0.1
    pattern += f"/{blocks[(choice['layers'] - 1) % len(blocks)]}" * (choice.get("heads") or 0)
    return {"hybrid_layer_pattern": pattern.replace("F", "-" if choice["experts"] == "none" else "E"), **more}


def stages_on_a_rank(schedule: str) -> int | None:
    """Return the number of stages per rank that a schedule needs; None for any number."""
    return SCHEDULES[schedule].chunks if schedule in SCHEDULES else None


IN_LABEL = ("pp", "vpp", "schedule", "tp", "dp", "cp", "cp_type", "micro_batch", "samples")


def label(choice: Choice) -> str:
    """A name for people: the layout, then what is not the first value of its factor."""
    c = {name: values[0] for name, values in FACTORS.items()} | choice
    context = f"cp{c['cp']} {c['cp_type']} " if c["cp"] > 1 else ""
    layout = f"pp{c['pp']}x{c['vpp']} {c['schedule']} tp{c['tp']} dp{c['dp']} {context}"
    layout += f"mb{c['micro_batch']}of{c['samples']}"
    rest = [f"{n}={v}" for n, v in choice.items() if n not in IN_LABEL and v != FACTORS.get(n, (None,))[0]]
    return ",".join([layout, *rest]).replace(" ", "-")
