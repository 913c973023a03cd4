"""Options of training that Megatron-LM has, too, one case each: what is compared with megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 100
LOSS, NORM = 1e-6, 1e-5
"""Largest relative differences in fp32."""

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 384 --make-vocab-size-divisible-by 64 --seed 1234 --micro-batch-size 2 --global-batch-size 4 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --data-path data --split 100,0,0"
)
RATE = f"--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --train-iters {STEPS}"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
NONE = "--moe-router-load-balancing-type none"
AUX = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
SIGMOID = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid "
    "--moe-router-topk-scaling-factor 2.5"
)
BIAS = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
LATENT = (
    f"{LLAMA} --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--rotary-percent 1.0"
)
BIASED = (
    f"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 {AUX} --position-embedding-type rope "
    "--no-bias-gelu-fusion"
)
GROUPED = "--group-query-attention --num-query-groups 2"
TP = "--tensor-model-parallel-size 2"
CP = "--context-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        group: kind of option, a heading of the table.
        name: as in the table.
        flags: of both programs, beside `BASE` and, without a length of their own, `RATE`.
        ranks: processes of megatron-core; the run here has as many in the same layout, and one for ``alone``.
        loss: largest relative difference of the loss.
        norm: largest relative difference of the gradient norm.
        why: reason for other limits.
        theirs: flags of megatron-core alone.
        code: Python that changes megatron-core.
        stand_in: layers of `tests/megatron_core/torch_layers.py` that it has.
    """

    group: str
    name: str
    flags: str
    ranks: int = 1
    loss: float = LOSS
    norm: float = NORM
    why: str = ""
    theirs: str = ""
    code: str = ""
    stand_in: str = ""

    @property
    def all_flags(self) -> list[str]:
        """The flags of both programs."""
        own = set(self.flags.split())
        rate = RATE if not own & {"--train-iters", "--train-samples"} else ""
        words = [*BASE.split(), *rate.split()]
        replaced = {word for word in own if word.startswith("--")}
        kept: list[str] = []
        for word in words:
            if word.startswith("--"):
                name = word
            if name not in replaced:
                kept.append(word)
        return [*kept, *self.flags.split()]


MODELS = {
    "GPT-2": "",
    "GPT-2, GELU not fused": "--no-bias-gelu-fusion",
    "GPT-2, untied": "--untie-embeddings-and-output-weights",
    "Llama": f"{LLAMA} --untie-embeddings-and-output-weights",
    "Llama, tied, grouped queries": f"{LLAMA} {GROUPED} --norm-epsilon 1e-6 --ffn-hidden-size 80",
    "multi-query attention": f"{LLAMA} --group-query-attention --num-query-groups 1",
    "RoPE on half of the channels": "--position-embedding-type rope --rotary-percent 0.5",
    "RoPE, interleaved": f"{LLAMA} --rotary-interleaved",
    "RoPE, base 500000": f"{LLAMA} --rotary-base 500000",
    "RoPE, interpolated": f"{LLAMA} --rotary-seq-len-interpolation-factor 4",
    "RoPE, scaled as in Llama 3.1": f"{LLAMA} --use-rope-scaling --rope-scaling-factor 4 --rotary-base 500000",
    "RoPE in every second layer": f"{LLAMA} --no-rope-freq [0,1]",
    "no positions": f"{LLAMA.replace('rope', 'none')}",
    "squared ReLU": "--squared-relu --disable-bias-linear",
    "quick GEGLU": "--quick-geglu --disable-bias-linear --ffn-hidden-size 80",
    "SwiGLU with biases": "--swiglu --ffn-hidden-size 80",
    "SwiGLU, clamped, with offset": f"{LLAMA} --activation-func-clamp-value 0.5 --glu-linear-offset 1.0",
    "RMSNorm": "--normalization RMSNorm",
    "LayerNorm around 1": "--apply-layernorm-1p",
    "RMSNorm around 1": f"{LLAMA} --apply-layernorm-1p",
    "biases of q, k and v alone": f"{LLAMA} --add-qkv-bias",
    "norms of q and k": f"{LLAMA} --qk-layernorm --kv-channels 16",
    "LayerNorms of q and k": "--qk-layernorm",
    "gate of the attention's output": f"{LLAMA} --attention-output-gate {GROUPED} --qk-layernorm",
    "window of 8": f"{LLAMA} --window-size 7,0",
    "window in every second layer": f"{LLAMA} --window-size 7,0 --window-attn-skip-freq 2",
    "softmax, off by one": f"{LLAMA} --softmax-type off-by-one",
    "softmax, learnable offset": f"{LLAMA} --softmax-type learnable",
    "documents kept apart": f"{LLAMA} --reset-position-ids --reset-attention-mask",
    "recomputation": f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
MIXTURES = {
    "top 2, no balancing": f"{EXPERTS} {NONE}",
    "top 1": f"{EXPERTS} {NONE} --moe-router-topk 1 --moe-router-pre-softmax",
    "top 2 before the softmax": f"{EXPERTS} {NONE} --moe-router-pre-softmax",
    "auxiliary loss": f"{EXPERTS} {AUX}",
    "auxiliary loss, large": f"{EXPERTS} {AUX} --moe-aux-loss-coeff 1.0",
    "auxiliary loss of a sequence": f"{EXPERTS} {AUX} --moe-router-load-balancing-type seq_aux_loss",
    "two auxiliary losses": f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 0.02",
    "z-loss": f"{EXPERTS} {NONE} --moe-z-loss-coeff 1e-3",
    "z-loss and auxiliary loss": f"{EXPERTS} {AUX} --moe-z-loss-coeff 1e-3",
    "Sinkhorn": f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --micro-batch-size 1",
    "router in fp32": f"{EXPERTS} {AUX} --moe-router-dtype fp32",
    "scores times 2.5": f"{EXPERTS} {NONE} --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5",
    "sigmoid": f"{SIGMOID} {NONE} --seed 1235",
    "sigmoid, biases of experts": f"{SIGMOID} {NONE} {BIAS}",
    "sigmoid, auxiliary loss of a sequence": f"{SIGMOID} {AUX} --moe-router-load-balancing-type seq_aux_loss",
    "sigmoid, groups of experts": f"{SIGMOID} {NONE} {BIAS} --moe-router-num-groups 4 --moe-router-group-topk 2",
    "softmax, groups of experts": f"{EXPERTS} {NONE} --num-experts 8 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-pre-softmax",
    "shared expert": f"{EXPERTS} {AUX} --moe-shared-expert-intermediate-size 40",
    "shared expert with a gate": f"{EXPERTS} {AUX} --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    "capacity 1, by probability": f"{EXPERTS} {AUX} --moe-expert-capacity-factor 1.0",
    "capacity 1, by position": f"{EXPERTS} {AUX} --moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
    "dense layer before experts": f"{EXPERTS} {AUX} --moe-layer-freq [0,1] --ffn-hidden-size 80",
    "experts with biases": BIASED,
    "experts with GELU": f"{BIASED} --disable-bias-linear",
    "experts in a latent space": f"{EXPERTS} {AUX} --moe-latent-size 16",
    "experts in one product": f"{EXPERTS} {AUX} --moe-grouped-gemm",
}
LATENTS = {
    "latent attention": f"{LATENT} --rotary-scaling-factor 1 --mscale 1.0 --rope-type rope",
    "latent attention, YaRN": f"{LATENT} --rotary-base 500000 --rotary-scaling-factor 4 --mscale 0.7 "
    "--mscale-all-dim 0.5 --rope-type yarn",
    "latent queries, norms": f"{LATENT} --q-lora-rank 20 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 "
    "--mscale-all-dim 1.0 --rope-type yarn",
    "latent attention, DeepSeek-V3 router": f"{LATENT} --q-lora-rank 20 --qk-layernorm --rotary-scaling-factor 40 "
    f"--mscale 1.0 --mscale-all-dim 1.0 --rope-type yarn {SIGMOID.removeprefix(LLAMA)} {NONE} {BIAS} "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-shared-expert-intermediate-size 40",
    "further tokens, depth 1": f"{LLAMA} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
    "further tokens, depth 2": f"{LLAMA} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
}
PARALLEL = {
    "TP 2": (f"{LLAMA} {TP} {GROUPED}", 2),
    "TP 2, GPT-2": (TP, 2),
    "TP 2, sequence parallel": (f"{LLAMA} {TP} --sequence-parallel", 2),
    "TP 2, norms of q and k": (f"{LLAMA} {TP} --qk-layernorm", 2),
    "PP 2": (f"{LLAMA} {PP}", 2),
    "PP 2, untied": (f"{LLAMA} {PP} --untie-embeddings-and-output-weights", 2),
    "PP 2, interleaved": (
        f"{LLAMA} {PP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8",
        2,
    ),
    "DP 2": (LLAMA, 2),
    "DP 2, distributed optimizer": (f"{LLAMA} {DISTRIBUTED}", 2),
    "DP 2, distributed optimizer, overlapped": (f"{LLAMA} {DISTRIBUTED} {OVERLAPPED}", 2),
    "TP 2, PP 2": (f"{LLAMA} {TP} {PP}", 4),
    "TP 2, DP 2, distributed optimizer": (f"{LLAMA} {TP} {DISTRIBUTED}", 4),
    "EP 2": (f"{EXPERTS} {NONE} {EP}", 2),
    "EP 2, auxiliary loss": (f"{EXPERTS} {AUX} {EP}", 2),
    "EP 2, distributed optimizer": (f"{EXPERTS} {NONE} {EP} {DISTRIBUTED}", 2),
    "TP 2, experts": (f"{EXPERTS} {NONE} {TP} --sequence-parallel --moe-token-dispatcher-type alltoall", 2),
    "TP 2, EP 2": (f"{EXPERTS} {NONE} {TP} {EP} --sequence-parallel", 4),
    "PP 2, EP 2": (f"{EXPERTS} {NONE} {PP} {EP}", 4),
    "TP 2, latent attention": (f"{LATENTS['latent queries, norms']} {TP}", 2),
    "TP 2, latent attention, its gradient summed": (f"{LATENTS['latent queries, norms']} {TP}", 2),
    "TP 2, latent attention, sequence parallel": (f"{LATENTS['latent queries, norms']} {TP} --sequence-parallel", 2),
    "CP 2": (f"{LLAMA} {CP} {GROUPED}", 2),
    "CP 2, experts": (f"{EXPERTS} {NONE} {CP}", 2),
    "TP 2, CP 2": (f"{LLAMA} {TP} {CP}", 4),
}
CONSTANT = f"--lr 3e-3 --train-iters {STEPS}"
SCHEDULES = {
    "constant": f"{LLAMA} {CONSTANT} --lr-decay-style constant",
    "linear": f"{LLAMA} {CONSTANT} --lr-decay-style linear --lr-warmup-iters 10 --min-lr 1e-4",
    "cosine, shorter than the run": f"{LLAMA} {CONSTANT} --lr-decay-style cosine --lr-warmup-iters 10 --min-lr 1e-4 "
    "--lr-decay-iters 60",
    "inverse square root": f"{LLAMA} {CONSTANT} --lr-decay-style inverse-square-root --lr-warmup-iters 10",
    "warm-up from above 0": f"{LLAMA} {CONSTANT} --lr-decay-style cosine --lr-warmup-iters 20 --lr-warmup-init 1e-4",
    **{
        f"WSD, {style.replace('_', ' ')} decay": f"{LLAMA} {CONSTANT} --lr-decay-style WSD --lr-wsd-decay-iters 30 "
        f"--lr-wsd-decay-style {style} --lr-warmup-iters 10 --min-lr 1e-4"
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    },
    "growing weight decay": f"{LLAMA} --start-weight-decay 0.01 --end-weight-decay 0.3 "
    "--weight-decay-incr-style linear",
    "growing weight decay, cosine": f"{LLAMA} --start-weight-decay 0.01 --end-weight-decay 0.3 "
    "--weight-decay-incr-style cosine",
    "own rate of embeddings": f"{LLAMA} --untie-embeddings-and-output-weights --decoupled-lr 1e-3 "
    "--decoupled-min-lr 1e-4",
    "Adam, other constants": f"{LLAMA} --adam-beta1 0.8 --adam-beta2 0.999 --adam-eps 1e-6 --clip-grad 0.3",
    "no clipping": f"{LLAMA} --clip-grad 0",
    "no weight decay": f"{LLAMA} --weight-decay 0",
    "SGD": f"{LLAMA} --optimizer sgd --sgd-momentum 0.9",
    "batch ramp": f"{LLAMA} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-samples 40 "
    "--train-samples 698 --global-batch-size 8 --rampup-batch-size 2 2 200",
    "length in samples": f"{LLAMA} --lr 3e-3 --lr-decay-style cosine --train-samples 400 --lr-decay-samples 300",
    "per-token loss": f"{LLAMA} --calculate-per-token-loss",
    "per-token loss, ends of documents masked": f"{LLAMA} --calculate-per-token-loss --eod-mask-loss",
    "per-token loss, auxiliary and z-loss": f"{EXPERTS} {AUX} --moe-z-loss-coeff 1e-3 --calculate-per-token-loss",
    "DP 2, per-token loss, masked": f"{LLAMA} --calculate-per-token-loss --eod-mask-loss",
}
PRECISIONS = {
    "bf16": f"{LLAMA} --bf16",
    "bf16, experts": f"{EXPERTS} {AUX} --bf16 --moe-router-dtype fp32",
    "fp16": f"{LLAMA} --fp16 --initial-loss-scale 4096",
    "fp16, experts": f"{EXPERTS} {AUX} --fp16 --initial-loss-scale 4096 --moe-router-dtype fp32",
}
LIMITS = {
    "capacity 1, by position": (
        1e-2,
        1e-1,
        "there a top-k over equal values keeps tokens; with a stable one the runs agree within 2.2e-7",
    ),
    "TP 2, latent attention": (
        1e-3,
        1e-2,
        "there the gradient of the rotary key lacks the heads of other ranks: Megatron-LM issue 1699",
    ),
}
"""Other limits, with the reason."""
STAND_INS = {
    "--apply-layernorm-1p": "PyTorch's norm",
    "--sequence-parallel": "PyTorch's norm",
    "--multi-latent-attention": "values of other channels",
    "--context-parallel-size": "PyTorch's attention",
    "--moe-latent-size": "PyTorch's projections",
    "--moe-grouped-gemm": "PyTorch's products",
    "experts with biases": "copied products",
}
"""Layers that stand in the specs of megatron-core for those that need a GPU, by the flag or case that needs them."""
SUMMED = "torch_layers.LatentDotProduct = torch_layers.SummedLatentDotProduct"


def case(group: str, name: str, flags: str, ranks: int = 1) -> Case:
    """Return a case with its limits."""
    loss, norm, why = (1e-3, 3e-2, "rounding") if group == "precision" else LIMITS.get(name, (LOSS, NORM, ""))
    with_layers = dict.fromkeys(layer for part, layer in STAND_INS.items() if part in f"{name} {flags}")
    code = SUMMED if name.endswith("its gradient summed") else ""
    return Case(group, name, flags, ranks, loss, norm, why, code=code, stand_in=", ".join(with_layers))


CASES = [
    *(case("model", name, flags) for name, flags in MODELS.items()),
    *(case("experts", name, flags) for name, flags in MIXTURES.items()),
    *(case("latent attention and further tokens", name, flags) for name, flags in LATENTS.items()),
    *(case("layout", name, flags, ranks) for name, (flags, ranks) in PARALLEL.items()),
    *(
        case("optimizer, schedule and loss", name, flags, 2 if name.startswith("DP 2") else 1)
        for name, flags in SCHEDULES.items()
    ),
    *(case("precision", name, flags) for name, flags in PRECISIONS.items()),
]
