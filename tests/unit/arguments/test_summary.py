from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megatron.arguments.presets import PRESETS
from megatron.arguments.summary import summary
from megatron.config.model import ModelConfig
from megatron.layers.parameters import num_parameters
from tests.unit.arguments.command import run

SHAPE = {field.name for field in fields(ModelConfig)}


def rows(flags: str = "", ranks: int = 1) -> dict[str, str]:
    lines = summary(run(f"--train-iters 1000 {flags}", ranks).config, ranks).splitlines()
    assert len(lines) <= 14
    return {line[:11].strip(): line[11:].strip() for line in lines}


def test_every_row() -> None:
    argv = "--preset tiny-llama --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"
    printed = rows(f"{argv} --global-batch-size 16 --bf16 --eval-iters 3", ranks=8)
    assert printed["ranks"] == "8 = DP 4 (copies of the model) x TP 2 (tensor and sequence parallel)"
    assert "4 layers, hidden 128, 8 heads of 16 on 4 key/value heads, swiglu MLP of 384" in printed["model"]
    assert printed["parameters"].endswith("on each rank); vocabulary 257 padded to 512")
    parts = "weights 898.50 KiB, gradients 1.75 MiB, main params 1.75 MiB, moments 3.51 MiB"
    assert printed["memory"] == f"7.90 MiB on each rank: {parts}"
    assert printed["peak"] == (
        "780.70 MiB in a step: activations 4.24 MiB, logits 576.00 KiB, NCCL estimate 768.00 MiB are added"
    )
    assert printed["batch"] == "16 samples x 256 = 4,096 tokens a step: 2 micro-batches of 2 on each DP rank"
    assert (
        printed["length"]
        == "1,000 steps, 16,000 samples, 4,096,000 tokens; evaluation on 3 batches every 1000 steps and at the end"
    )
    assert printed["optimizer"] == "adam, learning rate 0.001 cosine to 0.0001, warm-up 5% of the decay, clip 1"
    assert printed["precision"] == "bf16, main parameters and gradients fp32"
    assert "ramp" not in printed
    scaled = "--lr 6e-4 --min-lr 6e-5 --lr-scaling linear --lr-base-batch-size 256 --global-batch-size 1024"
    rate = "adam, learning rate 0.0006 x 4 (linear, batch 1,024 over 256) = 0.0024 cosine to 0.00024,"
    assert rows(f"--preset tiny-llama {scaled}")["optimizer"].startswith(rate)
    zero = rows("--preset tiny-llama --use-distributed-optimizer --num-distributed-optimizer-instances 2", ranks=8)
    assert zero["optimizer"].startswith("adam, ZeRO-1 over 4 ranks,")
    lengths = summary(run("--train-iters 1000 --global-batch-size 8 --seq-length 10").config, 1, 500, 2000)
    assert "length     1,000 steps, 6,000 samples, 60,000 tokens" in lengths, "the batch changed after 500 steps"


def test_context_parallelism() -> None:
    flags = "--preset tiny-llama --context-parallel-size 4 --use-distributed-optimizer"
    printed = rows(f"{flags} --cp-comm-type a2a", ranks=8)
    assert printed["ranks"] == "8 = DP 2 (copies of the model) x CP 4 (a2a) x TP 1 (tensor parallel)"
    assert printed["optimizer"].startswith("adam, ZeRO-1 over 8 ranks,")
    both = rows(f"{flags} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", ranks=4)
    assert both["ranks"] == "4 = DP 1 (copies of the model) x CP 4 (a2a+p2p 2 x 2) x TP 1 (tensor parallel)"


def test_attention_unless_it_is_plain() -> None:
    patterns = {
        "": None,
        "--window-size 100": "local:100",
        "--attention-pattern global": "global",
        "--attention-pattern 'local:64*3, global'": "local:64 x 3, global",
        "--attention-pattern 'local:64*3,global' --num-layers 8": "local:64 x 3, global (repeated)",
        "--attention-pattern local:64+first:4": "local:64+first:4",
    }
    for flags, row in patterns.items():
        assert rows(f"--preset tiny-llama {flags}").get("attention") == row


def test_experts_have_a_grid_and_active_parameters() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 96 --expert-model-parallel-size 2"
    printed = rows(f"--preset tiny-llama {experts} --moe-shared-expert-intermediate-size 64", ranks=4)
    assert printed["ranks"] == "4 = DP 4 (copies of the model) x TP 1 (tensor parallel); experts: DP 2 x EP 2 x TP 1"
    assert printed["experts"] == (  # 256 x 2 / 8 x 2
        "2 of 8 swiglu experts of 96 and a shared one of 64; 4 on a rank, 128 tokens each at balance"
    )
    total, active, held = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}", printed["parameters"])[:3])
    expert = 4 * 3 * 96 * 128  # of all layers
    assert total - active == 6 * expert
    assert total - held == 4 * expert - 2 * (384 - 257) * 128  # half of the experts are elsewhere, two tables padded


def test_kinds_of_experts() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 96 --moe-latent-size 32 --moe-layer-freq [0,1]"
    shared = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
    tp = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"
    printed = rows(f"--preset tiny-llama {experts} {shared} {tp}", ranks=2)
    shape = "2 of 8 swiglu experts of 96 in a space of 32 and a gated shared one of 64 (in 2 layers an MLP of 384)"
    assert printed["experts"] == f"{shape}; 1/2 of 8 on a rank, 256 tokens each at balance"
    forced = rows(f"--preset tiny-llama {experts} --moe-router-force-load-balancing")["experts"]
    assert "in a space of 32 (in 2 layers an MLP of 384), chosen at random; " in forced


def test_pipelines() -> None:
    pipeline = "--preset tiny-llama --pipeline-model-parallel-size 2 --global-batch-size 8"
    printed = rows(f"{pipeline} --num-virtual-stages-per-pipeline-rank 2", ranks=4)
    assert printed["ranks"] == "4 = PP 2 (pipeline, VPP 2) x DP 2 (copies of the model) x TP 1 (tensor parallel)"
    head = 257 * 128 / (4 * 4 * 128 * 128)  # of a layer, roughly: the last of four stages takes so much longer
    bubble = 1 / 9
    assert printed["pipeline"].startswith(f"interleaved, 4 stages of 1 layer, bubble {100 * bubble:.1f}% (")
    assert bubble < float(printed["pipeline"].partition("(")[2].partition("%")[0]) / 100 < bubble + head
    assert printed["pipeline"].endswith("as these stages cost), at most 5 micro-batches of a stage kept")
    assert "on the fullest rank" in printed["parameters"]
    assert "on the fullest rank" in printed["memory"]
    assert "pipeline" not in rows("--preset tiny-llama")
    uneven = rows(f"{pipeline} --num-layers 5 --pipeline-schedule zb-h1", ranks=2)
    assert uneven["pipeline"].startswith("zb-h1, 2 stages Et*3|ttL by cost, bubble ")
    own = rows(
        "--preset tiny-llama --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|mL "
        "--mtp-num-layers 1",
        ranks=2,
    )
    assert own["pipeline"].startswith("1f1b, 2 stages Et*4|mL, bubble ")
    base = "--mock-data --train-iters 10 --tokenizer-type ByteTokenizer --num-layers 5"
    unknown = run(pipeline, 2, base).summary()
    assert "2 stages of equal cost; the cost of the output layer depends on the tokenizer, bubble 11.1%" in unknown
    assert "5 layers do not divide over 2 stages" in unknown
    assert "and the embeddings" in unknown
    assert "memory" not in unknown


def test_checkpoints() -> None:
    assert rows()["saves"] == "none: --save is not set"
    often = "--preset llama2-7b --bf16 --save ckpt --save-interval 1000 --vocab-size 32000"
    parameters = num_parameters(ModelConfig(**{n: v for n, v in PRESETS["llama2-7b"].items() if n in SHAPE}))
    size = f"{parameters * 12 / 2**30:,.2f} GiB"
    assert rows(often)["saves"] == f"every 1,000 steps and at the end, {size} each, to ckpt"
    kept = rows(f"{often} --keep-last 3 --keep-every 50000")["saves"]
    assert kept.endswith(" to ckpt; the last 3 are kept, and those of every 50,000 steps")
    assert rows("--save ckpt --keep-last 1")["saves"].endswith("to ckpt; the last is kept")
    local = rows("--save ckpt --local-save '/disk/{node}' --local-save-interval 50")["saves"]
    assert local.endswith("; on the nodes every 50 steps, to /disk/{node}")


def test_ramps_and_padding() -> None:
    few = rows("--global-batch-size 8 --rampup-batch-size 4 2 20", ranks=2)
    assert few["ramp"] == "4 from sample 0, 6 from sample 12, 8 from sample 24"
    many = rows("--global-batch-size 64 --rampup-batch-size 4 2 2000", ranks=2)["ramp"]
    assert many.count(",") < 6
    assert "more ..." in many
    batch = "--pad-global-batch --global-batch-size 8"
    padded = ": 3 micro-batches of 1 on each DP rank, 1 of 9 samples padding (11.1% of the work)"
    assert rows(batch, ranks=3)["batch"].endswith(padded)
    assert "padding" not in rows(batch, ranks=4)["batch"]
    ramp = f"{batch} --rampup-batch-size 4 2 20"
    assert rows(ramp, ranks=4)["ramp"].endswith(" from sample 24; at most 25.0% of the work is padding")
    assert "padding" not in rows(ramp, ranks=2)["ramp"]


@pytest.mark.parametrize("preset", PRESETS)
def test_summaries_of_presets_fit_a_screen(preset: str) -> None:
    assert max(len(f"{name:<11}{text}") for name, text in rows(f"--preset {preset}").items()) <= 140
