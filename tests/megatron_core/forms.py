"""The forms in which models are exported to Megatron-LM, and runs of both programs with the same flags.

Megatron-LM is found by two variables: ``MEGATRON_LM``, the folder of a clone of github.com/NVIDIA/Megatron-LM, and
``MEGATRON_LM_PYTHON``, the Python of an environment of its own, made by::

    python3 -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install torch==2.13.0 numpy packaging einops tqdm regex six pyyaml psutil pybind11
    ENVIRONMENT/bin/pip install --no-deps triton
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.kit.processes import free_port
from tests.unit.data import pairs

DRIVER = Path(__file__).with_name("driver.py")
STEPS = 14
SAVED = 4
"""The step whose checkpoint is exported."""

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 384 --seed 1234 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --eval-iters 0 "
    f"--eval-interval 1000 --log-interval 1 --num-workers 0 --train-iters {STEPS}"
)
DATA = "--data-path data --split 100,0,0"
THEIRS = (
    f"{DATA} --ckpt-format torch_dist --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    "--save-interval 100 --use-cpu-initialization"
)
"""Flags of Megatron-LM alone."""

GROUPED = "--moe-grouped-gemm"
"""Its flag for experts in one module, which only Transformer Engine has."""

LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01"
)
SIGMOID = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-router-dtype fp32"
)
"""A router as in DeepSeek-V3."""
LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--rotary-percent 1.0"
)
HYBRID = (
    "--position-embedding-type none --normalization RMSNorm --disable-bias-linear --spec "
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --mamba-head-dim 8 --mamba-num-groups 2 "
    "--mamba-state-dim 16"
)
DELTA = "--linear-key-head-dim 4 --linear-value-head-dim 6 --linear-num-key-heads 2 --linear-num-value-heads 4"
FORMS = {
    "gpt": "",
    "gpt untied": "--untie-embeddings-and-output-weights --no-bias-gelu-fusion",
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2 --rotary-base 500000 --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 80",
    "rope": "--position-embedding-type rope --rotary-percent 0.5",
    "no positions": "--position-embedding-type none --squared-relu --disable-bias-linear --normalization RMSNorm",
    "qk norm": f"{LLAMA} --qk-layernorm --add-qkv-bias --kv-channels 16",
    "experts": f"{LLAMA} {MIXTURE}",
    "experts with gelu": f"--disable-bias-linear --no-bias-gelu-fusion {MIXTURE} --qk-layernorm",
    "shared experts": f"{LLAMA} {MIXTURE} --moe-shared-expert-intermediate-size 40 --moe-z-loss-coeff 1e-3 "
    "--untie-embeddings-and-output-weights",
    "output gate": f"{LLAMA} --attention-output-gate --group-query-attention --num-query-groups 2 --qk-layernorm",
    "windows": f"{LLAMA} --window-size 7,0 --window-attn-skip-freq 2",
    "dense and experts": f"{LLAMA} {MIXTURE} --moe-layer-freq [0,1] --ffn-hidden-size 80",
    "expert bias": f"{LLAMA} {SIGMOID} --moe-shared-expert-intermediate-size 40",
    "latent experts": f"{LLAMA} {MIXTURE} --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
    "--moe-latent-size 16",
    "multi-token": f"{LLAMA} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
    "latent attention": f"{LLAMA} {LATENT} --rotary-base 500000 --rotary-scaling-factor 4 --mscale 0.7",
    "latent queries": f"{LLAMA} {SIGMOID} {LATENT} --q-lora-rank 20 --qk-layernorm --rotary-scaling-factor 40 "
    "--mscale 1 --mscale-all-dim 1 --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 40 --mtp-num-layers 1 "
    "--untie-embeddings-and-output-weights --moe-router-load-balancing-type none --moe-router-bias-update-rate 0",
    "yarn": f"{LLAMA.replace('rope', 'yarn')} --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 16",
    "hybrid": f"{HYBRID} --squared-relu --hybrid-layer-pattern M-M*-- --mamba-num-heads 6",
    "hybrid experts": f"{HYBRID} --swiglu {DELTA} {MIXTURE} --moe-shared-expert-intermediate-size 40 "
    "--hybrid-layer-pattern ME*EG- --untie-embeddings-and-output-weights --ffn-hidden-size 80",
    "hybrid further tokens": f"{HYBRID} --swiglu {DELTA} {SIGMOID} --moe-router-load-balancing-type none "
    "--moe-router-bias-update-rate 0 --hybrid-layer-pattern MEG-*E/*E/*E",
    "hybrid latent attention": f"{HYBRID} --swiglu {LATENT} --q-lora-rank 20 --qk-layernorm --hybrid-layer-pattern M+-",
    "linear attention": f"{LLAMA} {DELTA} --experimental-attention-variant gated_delta_net --linear-attention-freq 2",
}
"""Flags of models that both programs have; all but the first two differ from a default in several ways. Further tokens
after the end of a sample are token 0 in Megatron-LM: experts beside them would not have the same loads."""

PATTERNS = {"pattern of blocks": f"{HYBRID.replace('none', 'rope')} --swiglu --hybrid-layer-pattern *-*-"}
"""Flags of hybrid models that are a GPT here, and are exported as one, which Megatron-LM's hybrid runs read, too."""

TRANSFORMER_ENGINE_ALONE = (
    *("latent experts", "multi-token", "latent attention", "latent queries", "linear attention"),
    *(form for form in FORMS if "--hybrid-layer-pattern" in FORMS[form]),
)
"""Forms that its own layers do not have."""


def missing() -> str:
    """Why Megatron-LM cannot be run; empty if it can."""
    places = {name: Path(os.environ.get(name, "")) for name in ("MEGATRON_LM", "MEGATRON_LM_PYTHON")}
    found = (places["MEGATRON_LM"] / "pretrain_gpt.py").is_file() and places["MEGATRON_LM_PYTHON"].is_file()
    return "" if found else "needs Megatron-LM: MEGATRON_LM and MEGATRON_LM_PYTHON, see tests/megatron_core/forms.py"


def write_data(folder: Path) -> None:
    """Write the token files that both read."""
    numbers = random.Random(0)
    documents = [[numbers.randrange(384) for _ in range(numbers.randrange(5, 90))] for _ in range(300)]
    pairs.write(folder / "data", documents)


def run_theirs(folder: Path, flags: Sequence[str], ranks: int = 1, layers: str = "local") -> list[dict[str, float]]:
    """Run Megatron-LM in a folder to the end; return the loss and gradient norm of each step.

    Args:
        folder: where it runs.
        flags: its flags.
        ranks: processes.
        layers: ``local``, or ``transformer_engine`` for its layers of Transformer Engine, over a stand-in.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    python, steps = os.environ["MEGATRON_LM_PYTHON"], folder / "steps.json"
    steps.unlink(missing_ok=True)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    ran = subprocess.run(
        [python, *start, str(DRIVER), os.environ["MEGATRON_LM"], str(steps), *flags, "--transformer-impl", layers],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}")
    found: list[dict[str, float]] = json.loads(steps.read_text())
    return found
