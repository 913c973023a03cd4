"""Command lines that must be refused, and their messages: ``tests/golden/bad_configs.txt``.

Regenerate the file, then read the difference: ``python -m tests.unit.arguments.bad_configs``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.convert.huggingface.config import read_model_values

GOLDEN = Path(__file__).parents[2] / "golden" / "bad_configs.txt"
MODEL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 1024"
RUN = f"{MODEL} --mock-data --vocab-size 257 --train-iters 100"
FILES = f"{MODEL} --vocab-size 257 --train-iters 100"
SCHEDULES = "tests/golden/schedules"
THERE = "tests/golden/megatron/case0"


@dataclass(frozen=True)
class Case:
    """A command line after ``RUN`` (or ``base``), on ``ranks`` ranks; srun starts the ranks of several ``machines``."""

    flags: str
    ranks: int = 1
    base: str = RUN
    machines: int = 1

    @property
    def title(self) -> str:
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        machines = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"[{ranks}{machines}] {self.base} {self.flags}".strip()

    def reported(self) -> str:
        environ = {"RANK": "0", "WORLD_SIZE": str(self.ranks)}
        if self.machines > 1:
            place = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
            environ = place | {"SLURM_NTASKS": str(self.ranks), "SLURM_NNODES": str(self.machines)}
        try:
            parse(shlex.split(f"{self.base} {self.flags}"), environ, read_model=read_model_values)
        except UserError as error:
            return str(error)
        return "accepted"


CASES = (
    # credentials, which the message does not repeat
    Case("--save memory://user:LEAK@host/run --data-path=https://me:LE@AK@host/corpus"),
    Case("--set checkpoint.save=s3://KEY:LE/AK@bucket/run --wandb-notes 'for hf_LEAKabcdefghijklmnopqrstuvwxyz0123'"),
    Case("--config tests/golden/credentials.yaml --unknown-flag s3://KEY:LEAK@bucket"),
    # offload
    Case("--cuda-graph optimizer --optimizer-cpu-offload --device cuda"),
    Case("--cuda-graph step --cpu-offloading-num-layers 2 --device cuda"),
    Case("--optimizer-cpu-offload --diloco-sync-interval 4 --diloco-server localhost:1"),
    Case("--optimizer-offload-fraction 1.5 --optimizer-cpu-offload --cpu-offloading-num-layers 3"),
    Case("--data-parallel-sharding-strategy optim_grads_params --param-cpu-offload --optimizer muon", 2),
    Case(
        "--data-parallel-sharding-strategy optim_grads_params --param-cpu-offload --optimizer-cpu-offload "
        "--optimizer-offload-fraction 0.5",
        2,
    ),
    # objectives
    Case("--objective dpo --dpo-beta 0 --dpo-label-smoothing 0.5"),
    Case("--objective dpo --dpo-loss-type hinge"),
    Case("--objective distillation --distillation-top-k 258"),
    Case("--objective distillation --teacher-model a --teacher-logits b --cuda-graph step --device cuda"),
    Case(
        "--objective distillation --teacher-model a --distillation-temperature 2 --final-logit-softcapping 30 "
        "--distillation-label-weight 1.5"
    ),
    # spelling
    Case("--hiden-size 256"),
    Case("--num-atention-heads 6 --no-sequence-paralel"),
    Case("--frobnicate 3"),
    Case("--learning_rate 3e-4 --num-heads 8 --n-layer 2 --max-steps 10 --gradient-accumulation-steps 4 --dtype bf16"),
    Case("--data-impl cached --dataset-impl=mmap --num_layers 2"),
    Case("stray words"),
    Case("--world-size x --frobnicate 1 --sequence-parallel=yes --config --lr fast --preset"),
    Case("--lr 1e-4 3e-4"),
    Case("--lr"),
    Case("--lr fast --seq-length 1e3 --hidden-size 12.5"),
    Case("--lr nan --min-lr=inf"),
    Case("--normalization BatchNorm --lr-decay-style exponential"),
    Case("--token-mixers gated"),
    Case("--recompute-granularity selective --recompute-modules layernorm mlp core-attn"),
    Case("--rampup-batch-size 16 16"),
    Case("--rampup-batch-size 16 8 many"),
    Case("--window-size 128,128"),
    Case("--window-size wide"),
    Case("--no-rope-freq 0"),
    Case("--no-rope-freq [0]*3+[2]"),
    Case("--no-rope-freq [1]*20000"),
    Case("--attention-pattern local"),
    Case("--attention-pattern local:64*2,dilated:16:0"),
    Case("--attention-pattern global+first:4"),
    Case("--attention-pattern first:4"),
    Case("--attention-pattern local:4k,global"),
    Case("--attention-pattern local:64,"),
    Case("--attention-pattern strided"),
    Case("--bf16 --fp16"),
    Case("--swiglu --squared-relu"),
    Case("--use-rotary-position-embeddings --position-embedding-type yarn"),
    Case("--tensor-model-parallel-size 3", ranks=16, machines=2),
    # Megatron-LM's flags
    Case("--load docs --no-load-optim --ckpt-convert-format torch --pretrained-checkpoint docs"),
    # adapters
    Case("--lora-rank 4 --lora-target linear_q --lora-target layers.2.* --fp8-format e4m3"),
    Case("--lora-rank 0"),
    Case("--lora-rank 2 --pretrained-checkpoint docs --frozen-weights-precision nf4 --tensor-model-parallel-size 4", 4),
    Case(
        "--lora-rank 2 --pretrained-checkpoint docs --frozen-weights-precision int8 "
        "--data-parallel-sharding-strategy optim_grads_params",
        ranks=2,
    ),
    Case("--lora-rank 4 --num-experts 4 --lora-target *.experts.* --pretrained-checkpoint hf:"),
    Case("--lora-rank 4 --pretrained-checkpoint docs --cuda-graph step --device cuda"),
    Case("--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2", ranks=2),
    Case("--num-experts 6 --expert-model-parallel-size 4 --disable-bias-linear", ranks=4),
    Case(
        "--num-experts 4 --expert-model-parallel-size 4 --disable-bias-linear --tensor-model-parallel-size 2", ranks=4
    ),
    Case(
        "--num-experts 4 --moe-router-topk 5 --disable-bias-linear --moe-ffn-hidden-size 9 "
        "--expert-tensor-parallel-size 2",
        2,
    ),
    Case(
        "--num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 9 --ffn-hidden-size 9 "
        "--moe-ffn-hidden-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
        ranks=2,
    ),
    Case("--expert-model-parallel-size 2 --moe-aux-loss-coeff 0.1 --moe-ffn-hidden-size 8", ranks=2),
    Case("--num-experts 4 --disable-bias-linear --cuda-graph step --device cuda"),
    Case("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", ranks=2),
    Case("--num-distributed-optimizer-instances 2 --overlap-param-gather", ranks=2),
    Case("--use-distributed-optimizer --num-distributed-optimizer-instances 3", ranks=4),
    # compressed gradients
    Case("--grad-compression powersgd"),
    Case("--grad-compression topk:1.5"),
    Case("--grad-compression powersgd:4 --grad-reduce-in-bf16", ranks=2),
    Case("--grad-compression int8 --grad-reduce-in-bf16", ranks=2),
    Case("--grad-compression topk:0.01 --use-distributed-optimizer", ranks=9),
    Case("--grad-compression powersgd:4 --use-distributed-optimizer"),
    Case("--grad-compression powersgd:4 --fp16", ranks=2),
    Case("--grad-compression int8 --fp16", ranks=2),
    Case("--grad-compression int8 --cuda-graph step --device cuda --micro-batch-size 1", ranks=2),
    Case("--use-distributed-optimizer --overlap-param-gather --cuda-graph optimizer --device cuda", ranks=2),
    Case(
        "--data-parallel-sharding-strategy optim_grads_params --cuda-graph step "
        "--hidden-dropout 0 --attention-dropout 0",
        ranks=2,
    ),
    Case("--local-save-interval 10 --moe-layer-freq 2 --moe-router-score-function sigmoid --num-experts 4"),
    Case("--dataloader-type cyclic"),
    Case("--reset-position-ids --eod-mask-loss --train-data-path a b"),
    Case("--fp8-format hybrid --cuda-graph-impl local --optimizer muon"),
    Case("--group-query-attention"),
    Case("--no-position-embedding"),
    Case("--use-checkpoint-opt_param-scheduler --override-opt_param-scheduler --load docs"),
    # files, presets, --set
    Case("--preset gpt2-124M"),
    Case("--preset bloom"),
    Case("--config no/such/file.yaml"),
    Case("--config tests/unit/config/__init__.py"),
    Case("--set model.hiden_size=64 training.hidden_size=64 lr=x mock_data"),
    Case("--world-size 4"),
    Case("--check-config --world-size 0"),
    Case("--fake-world"),
    Case("--fake-world --world-size 64", ranks=4),
    Case("--fake-world --fake-rank 64 --world-size 64"),
    Case("--fake-rank 3"),
    Case("--fake-process-group"),
    # ranges
    Case("--num-layers 0 --hidden-size -64 --micro-batch-size 0"),
    Case(
        "--num-layers 10001 --vocab-size 10000000000 --global-batch-size 10000000 --save-interval 9223372036854775808"
    ),
    Case("--hidden-size 16777216 --ffn-hidden-size 33554432"),
    Case("--hidden-dropout 1 --adam-beta1 1.0 --rotary-percent 0 --clip-grad -1"),
    Case("--rampup-batch-size 0 8 100 --global-batch-size 16"),
    Case("--profile-pipeline --profile-step-start 4 --profile-step-end 4"),
    Case("--profile-ranks -1 --run-dir runs/a --timing-log-level 3 --exit-duration-in-mins -5"),
    Case("--seed -1 --lr-warmup-fraction 1"),
    # shape
    Case("--hidden-size 100 --num-attention-heads 12"),
    Case("--num-attention-heads 12 --hidden-size 384 --num-query-groups 5"),
    Case("--swiglu --hidden-size 16"),
    Case("", base="--mock-data --train-iters 100"),
    Case("--tokenizer-type NullTokenizer", base="--mock-data --train-iters 100"),
    Case("--seq-length 2048 --max-position-embeddings 1024"),
    Case("--position-embedding-type rope --hidden-size 60 --num-attention-heads 4"),
    Case("--position-embedding-type rope --rotary-percent 0.3"),
    Case("--window-size 64 --attention-pattern local:64,global --num-layers 2"),
    Case("--attention-pattern 'local:64*5,global'"),
    Case("--qk-layernorm --qk-layernorm-scope all"),
    Case("--position-embedding-type rope --no-rope-freq ([0]*3+[1])*9"),
    Case("--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2"),
    Case("--attention-pattern local:64,prefix:1024"),
    Case("--attention-pattern prefix:1024 --max-position-embeddings 1024"),
    Case("--position-embedding-type yarn --yarn-beta-fast 1 --yarn-beta-slow 2"),
    Case("--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 4"),
    # layout
    Case("--context-parallel-size 3", ranks=6),
    Case("--context-parallel-size 8 --cp-comm-type a2a", ranks=8),
    Case(
        "--context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 24 --num-query-groups 8 --hidden-size 96 "
        "--tensor-model-parallel-size 8",
        ranks=16,
    ),
    Case("--context-parallel-size 8 --cp-comm-type a2a+p2p --num-attention-heads 8", ranks=8),
    Case("--context-parallel-size 3 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 3 1", ranks=3),
    Case(
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --seq-length 1022",
        ranks=4,
    ),
    Case("--context-parallel-size 2 --cp-comm-type p2p a2a", ranks=2),
    Case("--context-parallel-size 2 --cp-comm-type ring", ranks=2),
    Case("--tensor-model-parallel-size 4", ranks=6),
    Case("--tensor-model-parallel-size 2"),
    Case("--tensor-model-parallel-size 16", ranks=24),
    Case("--tensor-model-parallel-size 8 --num-attention-heads 12 --hidden-size 384", ranks=8),
    Case("--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 384 --num-query-groups 6", ranks=4),
    Case("--tensor-model-parallel-size 4 --ffn-hidden-size 342", ranks=4),
    Case("--tensor-model-parallel-size 4 --sequence-parallel --seq-length 1022", ranks=4),
    Case(
        "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 1020",
        ranks=8,
    ),
    Case("--distributed-backend nccl --device cpu"),
    # pipelines
    Case("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", ranks=6),
    Case("--pipeline-model-parallel-size 4 --num-layers 4", ranks=6),
    Case("--pipeline-model-parallel-size 2 --pipeline-schedule interleave", ranks=2),
    Case("--pipeline-model-parallel-size 2 --pipeline-schedule chimera", ranks=2),
    Case("--pipeline-model-parallel-size 2 --pipeline-schedule no/such/file.csv", ranks=2),
    Case(f"--pipeline-model-parallel-size 2 --pipeline-schedule {SCHEDULES}/missing.csv", ranks=2),
    Case(f"--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-schedule {SCHEDULES}/two_ranks.csv", ranks=4),
    Case(f"--pipeline-model-parallel-size 2 --pipeline-schedule {SCHEDULES}/two_ranks.csv", ranks=2),
    Case(
        f"--pipeline-model-parallel-size 2 --pipeline-schedule {SCHEDULES}/two_ranks.csv"
        " --global-batch-size 8 --rampup-batch-size 4 2 100 --micro-batch-size 2",
        ranks=4,
    ),
    Case(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
        " --microbatch-group-size-per-virtual-pipeline-stage 1",
        ranks=2,
    ),
    Case("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule zb-v", ranks=2),
    Case(
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-virtual-stages-per-pipeline-rank 2"
        " --num-layers-per-virtual-pipeline-stage 2",
        ranks=2,
    ),
    Case("--pipeline-model-parallel-size 2 --num-layers 80 --num-layers-per-virtual-pipeline-stage 3", ranks=2),
    Case(
        "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
        " --decoder-first-pipeline-num-layers 3",
        ranks=2,
    ),
    Case(
        "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
        " --pipeline-model-parallel-layout auto",
        ranks=2,
    ),
    Case("--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4", ranks=8),
    Case("--pipeline-model-parallel-size 8 --num-layers 2", ranks=8),
    Case("--pipeline-model-parallel-size 4 --num-layers 1", ranks=4),
    Case("--num-microbatches 8"),
    Case(
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 80"
        " --account-for-embedding-in-pipeline-split",
        ranks=4,
    ),
    Case("--pipeline-model-parallel-size 4 --num-layers 10 --decoder-first-pipeline-num-layers 3", ranks=4),
    Case(
        "--pipeline-model-parallel-size 2 --num-layers 10 --decoder-first-pipeline-num-layers 3"
        " --decoder-last-pipeline-num-layers 4",
        ranks=2,
    ),
    Case(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 10"
        " --decoder-last-pipeline-num-layers 3",
        ranks=2,
    ),
    Case(
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto --decoder-first-pipeline-num-layers 1",
        ranks=2,
    ),
    Case(
        "--pipeline-model-parallel-size 2 --num-layers 4 --decoder-last-pipeline-num-layers 1"
        " --account-for-loss-in-pipeline-split",
        ranks=2,
    ),
    *(
        Case(f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{layout}'", ranks=2)
        for layout in (
            "E|t|L",
            "Et|t*2L",
            "Ett",
            "Et||tL",
            "Et|tmL",
            "Et|xL",
            "Et|(tL",
            "Et*|tL",
            "Et|t*99999999L",
            "Et|t*0L",
            "Et|tE|t|L",
            "t|t",
            "et|tl",
            "Et*|(t|tL",
        )
    ),
    # batch
    Case("--global-batch-size 100 --micro-batch-size 8", ranks=4),
    Case("--global-batch-size 30 --micro-batch-size 4", ranks=8),
    Case("--pad-global-batch", ranks=3),
    Case("--rampup-batch-size 64 8 1000 --global-batch-size 64"),
    Case("--rampup-batch-size 16 10 1000 --global-batch-size 64"),
    Case("--rampup-batch-size 16 8 1000 --global-batch-size 64 --micro-batch-size 2", ranks=8),
    Case("--rampup-batch-size 8 8 1000 --global-batch-size 64 --micro-batch-size 8", ranks=8),
    Case("", base="--mock-data --vocab-size 257"),
    Case("--train-samples 1000"),
    Case("--train-samples 10 --global-batch-size 64", base="--mock-data --vocab-size 257"),
    Case("--recompute-granularity full --recompute-num-layers 3"),
    Case("--recompute-granularity selective --recompute-modules"),
    # optimizer
    Case("--lr 1e-5 --min-lr 1e-4 --lr-warmup-iters 10 --lr-warmup-init 2e-5"),
    Case("--lr-warmup-iters 10 --lr-warmup-fraction 0.1"),
    Case("--lr-decay-iters 50 --lr-decay-samples 50"),
    Case("--lr-warmup-iters 100"),
    Case("--lr-decay-style constant --lr-warmup-samples 4000000"),
    Case("--lr-decay-style WSD"),
    Case("--lr-decay-style WSD --lr-wsd-decay-iters 80 --lr-warmup-iters 30"),
    Case("--lr-decay-style WSD --lr-wsd-decay-samples 80 --lr-warmup-fraction 0.3 --lr-decay-samples 90"),
    Case("--lr-decay-iters 5 --lr-warmup-iters 5 --global-batch-size 8"),
    Case("--start-weight-decay 0.1"),
    Case("--weight-decay-incr-style cosine --start-weight-decay 0.1"),
    Case("--fp16 --initial-loss-scale 1 --min-loss-scale 2"),
    Case("--lr 1e-3 --decoupled-lr 1e-5 --min-lr 1e-4"),
    Case("--lr-scaling linear --global-batch-size 8"),
    Case("--lr 1e-4 --lr-scaling sqrt --lr-base-batch-size 4 --lr-warmup-iters 10 --lr-warmup-init 6e-5"),
    Case("--lr 1e-3 --decoupled-lr 1e-5 --decoupled-min-lr 1e-4"),
    Case("--lr-factors 'layers.2.*=0.5' --weight-decay-factors 'nobody*=2' '*.bias=1'"),
    Case("--lr-factors embedding --weight-decay-factors '*.bias=-1' 'x=fast'"),
    Case("--optimizer lion --exp-avg-sq-dtype bf16 --ema-decay 1 --skip-spikes 0"),
    # data
    Case("", base=FILES),
    Case("--chat-data-path none.jsonl --chat-template no.jinja --eval-iters 2", base=FILES),
    Case("--chat-data-path README.md --valid-chat-data-path none.jsonl --mock-data --num-epochs 2", base=FILES),
    Case("--chat-data-path README.md --attention-pattern prefix:4", base=FILES),
    Case("--chat-data-path README.md", base=f"{MODEL} --vocab-size 257"),
    Case("--num-epochs 2", base=f"{MODEL} --vocab-size 257 --mock-data"),
    Case("--chat-data-path README.md --num-epochs 2 --train-samples 9", base=FILES),
    Case("--cuda-graph step --neftune-alpha 5 --hidden-dropout 0 --attention-dropout 0 --device cuda"),
    Case("--data-path corpus --mock-data", base=FILES),
    Case("--train-data-path a --valid-data-path b --data-args-path c --mock-data", base=FILES),
    Case("--data-path 0.3 no/a 0.7 no/b", base=FILES),
    Case("--data-path no/a 0.7 no/b", base=FILES),
    Case("--data-path no/a 0.3 no/b 0.7", base=FILES),
    Case("--data-path 0.3 no/a no/b 0.7", base=FILES),
    Case("--data-path 0.3 no/a 0 no/b -1 no/c nan no/d inf no/e", base=FILES),
    Case("--data-path 0 no/a 0 no/b", base=FILES),
    Case("--data-path 1e308 no/a 1e308 no/b", base=FILES),
    Case("--data-path 0.3 '' 0.7 no/b", base=FILES),
    Case("--data-path no/a ' ' no/b", base=FILES),
    Case("--data-path '0.3 no/a 0.7 no/b'", base=FILES),
    Case("--data-path 0.7 no/a no/b 0.3", base=FILES),
    Case("--data-path README.md --tokenizer-type HuggingFaceTokenizer --tokenizer-model no/model", base=FILES),
    Case("--data-path tests/golden/megatron", base=FILES),
    Case("--data-path 0.5 docs 0.5 tests/golden/megatron", base=FILES),
    Case(f"--data-path {THERE} --valid-data-path {THERE}", base=FILES),
    Case("--data-args-path tests/golden/data_args/comments.txt", base=FILES),
    Case("--data-path no/such/corpus", base=FILES),
    Case("--data-path no/such/corpus_text_document", base=FILES),
    Case("--data-path no/such/corpus.bin", base=FILES),
    Case("--train-data-path 1 no/a.idx 2 no/b --valid-data-path no/a no/c", base=FILES),
    Case("--data-path " + " ".join(f"no/shard{i}" for i in range(20)), base=FILES),
    Case(f"--data-path {THERE}.bin", base=FILES),
    Case("--data-args-path tests/golden/data_args/zero_weight.txt", base=FILES),
    Case("--data-args-path tests/golden/data_args/empty.txt", base=FILES),
    Case("--data-args-path no/such/file", base=FILES),
    Case("--per-split-data-args-path tests/golden/megatron/case0.bin", base=FILES),
    Case("--per-split-data-args-path tests/golden/data_args/cut_off.json", base=FILES),
    Case("--per-split-data-args-path tests/golden/data_args/list.json", base=FILES),
    Case("--per-split-data-args-path tests/golden/data_args/strange.json", base=FILES),
    Case("--per-split-data-args-path tests/golden/data_args/nothing.json", base=FILES),
    Case("--per-split-data-args-path ''", base=FILES),
    Case("--per-split-data-args-path tests/golden/data_args/no_train.json --eval-iters 1", base=FILES),
    Case("--split 90:5:5"),
    Case(f"--data-path {THERE} --split 90 5 5 --data-cache-path my cache", base=FILES),
    Case(f"--data-path {THERE} --split ''", base=FILES),
    Case("--data-path no/such/corpus --split 0,100,0", base=FILES),
    Case("--data-path no/such/corpus --split 100,0,0 --eval-iters 5", base=FILES),
    Case(f"--train-data-path {THERE} --eval-iters 5", base=FILES),
    Case(f"--valid-data-path {THERE}", base=FILES),
    Case(
        f"--train-data-path {THERE} --valid-data-path {THERE} no/b --multiple-validation-sets"
        " --validation-set-names wiki wiki web",
        base=FILES,
    ),
    Case(f"--data-path {THERE} --multiple-validation-sets --validation-set-names wiki web", base=FILES),
    Case(f"--data-path {THERE} --multiple-validation-sets --validation-set-names ''", base=FILES),
    Case(f"--data-path {THERE} --multiple-validation-sets --validation-set-names en/wiki", base=FILES),
    Case(f"--data-path {THERE} --reset-attention-mask --eod-id 257", base=FILES),
    Case(f"--data-path {THERE} --tokenizer-type BertWordPieceLowerCase --tokenizer-model bert", base=FILES),
    Case(f"--data-path {THERE} --tokenizer-type SFTTokenizer", base=FILES),
    Case(f"--data-path {THERE} --tokenizer-type TikTokenizer --merge-file x --tiktoken-pattern v3", base=FILES),
    Case("--reset-attention-mask --tiktoken-num-special-tokens -1 --vocab-extra-ids 3 --full-validation"),
    Case("--mid-level-dataset-surplus 0.01 --dataloader-inter-document-masking --null-tokenizer-eod-id 5 --sft"),
    # options without effect
    # checkpoints
    Case("--save checkpoints --keep-last 0 --save-interval 0 --exit-duration-in-mins 0"),
    Case("--save ''"),
    Case("--load ''"),
    Case("--load hf:"),
    Case("--load megatron:runs/absent"),
    Case("--load docs --save docs/flags.md/checkpoints"),
    Case("--load tests/golden/hf_bert"),
    Case("--save checkpoints/iter_0001000"),
    Case("--save checkpoints --load checkpoints --finetune"),
    Case("--save checkpoints --resume-mode weights-only"),
    Case("--load docs/iter_100 --ckpt-step 200"),
    Case("--save checkpoints --save-hf-interval 100"),
    Case("--save checkpoints --save-interval 30 --save-hf-interval 100"),
    Case("--save memory://a/b --save-interval 50 --save-hf-interval 100"),
    Case("--local-save /disk/{rank}"),
    Case("--save checkpoints --local-save checkpoints --local-save-interval 10"),
    Case("--save checkpoints --local-save '' --local-save-interval 10"),
    Case("--load hf:docs"),
    Case("--load hf:tests/golden/hf_bert --num-layers 0"),
    Case("--load hf:tests/golden/hf_llama --override-opt-param-scheduler --ckpt-step 100"),
    Case("--load hf:tests/golden/hf_linked --seq-length 32 --norm-epsilon 1e-5"),
    Case("--load hf:tests/golden/hf_llama --preset tiny-llama --seq-length 32 --norm-epsilon 1e-5"),
    Case("--load hf:tests/golden/hf_llama --vocab-size 500 --tensor-model-parallel-size 8 --lr fast", ranks=8),
    # ends
    Case("--stop-file="),
    Case("--stop-file runs/nowhere/stop"),
    Case("--stop-file tests/golden"),
    Case("--stop-file s3://bucket/stop"),
    Case("--skip-train"),
    Case("--skip-train --save tests/golden --eval-iters 2"),
    Case("--exit-on-missing-checkpoint --save tests/golden --load runs/absent"),
    # where a run reports to
    Case("--run-dir= --wandb-project= --tensorboard-dir="),
    Case("--run-dir README.md"),
    Case("--run-dir README.md/runs/a --wandb-mode offline --nproc 2"),
    # profiles
    Case("--profile --run-dir runs/a --profile-step-start 20"),
    Case("--profile --run-dir runs/a --profile-step-start 20 --profile-step-end 41"),
    Case("--profile-memory --run-dir runs/a --profile-ranks 1 --profile-step-start 5 --profile-step-end 4"),
    Case("--run-dir runs/a --profile-ranks 1 8 9", ranks=8),
    Case("--sample-prompts x --eval-iters 1 --pipeline-model-parallel-size 2", ranks=2),
    Case("--evaluate-tasks hellaswag --evaluate-tasks-path missing"),
    Case("--evaluate-tasks-interval 10 --evaluate-tasks-limit 5"),
    # kernels
    Case("--kernels compiled norm=triton attenton=cudnn fast"),
    Case("--kernels norm"),
    Case("--kernels attention=flash_attn --attention-dropout 0.1"),
    Case("--kernels attention=flash_attn --context-parallel-size 2 --attention-dropout 0", ranks=2),
    # recorded steps
    Case("--plugin no_such_plugin --optimizer mine"),
    Case("--plugin tests/fixtures/mine.py"),
    Case("--cuda-graph step --device cpu --hidden-dropout 0.1"),
    Case("--cuda-graph optimizer --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear"),
    Case("--cuda-graph step --distributed-backend gloo", ranks=2),
    Case("--cuda-graph step --pipeline-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0", ranks=2),
    Case("--tp-comm-overlap --tp-comm-overlap-method symmetric_memory --device cpu", ranks=2),
    Case("--tp-comm-overlap-method symmetric_memory --cuda-graph step --device cuda", ranks=2),
    # DiLoCo
    Case("--diloco-sync-interval 10"),
    Case("--diloco-sync-interval 10 --diloco-server 29400"),
    Case("--diloco-sync-interval 9 --diloco-fragments 2 --diloco-server h:29400"),
    Case("--diloco-sync-interval 9 --diloco-fragments 3 --diloco-server h:29400"),
    Case("--diloco-sync-interval 10 --diloco-fragments 2 --diloco-delay 6 --diloco-server h:29400"),
    Case("--diloco-sync-interval 10 --diloco-replica 2 --diloco-server h:29400"),
    Case("--diloco-sync-interval 10 --diloco-delay 1 --diloco-server h:29400 --async-save --save runs/a"),
    Case("--diloco-sync-interval 10 --diloco-server h:29400 --local-save /tmp/n --local-save-interval 5 --save runs/a"),
    Case("--cuda-graph step --reset-attention-mask --eod-id 0 --kernels auto norm=torch"),
    Case("--cuda-graph step --attn-logit-softcapping 50 --softmax-type learnable --hidden-dropout 0"),
    Case(
        "--cuda-graph step --context-parallel-size 2 --attention-pattern local:64,chunked:64 --hidden-dropout 0 "
        "--attention-dropout 0",
        ranks=2,
    ),
    # everything at once
    Case(
        "--preset tiny-llama --lr abc --hiden-size 100 --num-query-groups 3 --save x --global-batch-size 7"
        " --tensor-model-parallel-size 2 --hidden-dropout 2 --lr-warmup-iters 200",
        ranks=4,
    ),
    # FP8
    Case("--fp8-format hybrid --fp8-recipe delayed"),
    Case("--fp8-format hybrid --fp8-recipe mxfp8"),
    Case("--fp8-format e4m3 --num-experts 4"),
    Case("--fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2", ranks=2),
    Case("--fp8-format hybrid --seq-length 1000"),
    Case("--fp8-format hybrid --first-last-layers-bf16"),
    Case("--fp8-format hybrid --fp8-output-proj"),
    Case("--fp8-format hybrid --mlp-chunk-size 256"),
    Case("--fp8-format e4m3 --fp8-recipe mxfp8 --micro-batch-size 8 --mlp-chunk-size 10"),
)


def render() -> str:
    """The whole golden file."""
    return "\n".join(f"{case.title}\n{case.reported()}\n" for case in CASES)


if __name__ == "__main__":
    GOLDEN.write_text(render())
