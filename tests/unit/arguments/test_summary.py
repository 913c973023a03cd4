from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.presets import PRESETS
from megatron.arguments.summary import summary
from megatron.config.model import ModelConfig

SHAPE = {field.name for field in fields(ModelConfig)}
RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "1000"]


def rows(*argv: str, ranks: int) -> dict[str, str]:
    parsed = parse([*RUN, *argv], {"RANK": "0", "WORLD_SIZE": str(ranks)})
    lines = summary(parsed.config, ranks).splitlines()
    assert len(lines) <= 11
    return {name: text.strip() for name, text in ((line[:11].strip(), line[11:]) for line in lines)}


def test_everything_that_matters_is_said() -> None:
    argv = "--preset tiny-llama --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"
    printed = rows(*argv.split(), "--global-batch-size", "16", "--bf16", "--eval-iters", "3", ranks=8)
    assert printed["ranks"] == "8 = DP 4 (copies of the model) x TP 2 (tensor and sequence parallel)"
    assert "4 layers, hidden 128, 8 heads of 16 on 4 key/value heads, swiglu MLP of 384" in printed["model"]
    assert printed["parameters"].endswith("on each rank); vocabulary 257 padded to 512")
    parts = "weights 898.50 KiB, gradients 1.75 MiB, main params 1.75 MiB, moments 3.51 MiB"
    assert printed["memory"] == f"7.90 MiB on each rank, without activations: {parts}"
    assert printed["batch"] == "16 samples x 256 = 4,096 tokens a step: 2 micro-batches of 2 on each DP rank"
    assert printed["length"] == "1,000 steps, 16,000 samples, 4,096,000 tokens; evaluation on 3 batches at the end"
    assert printed["optimizer"] == "adam, learning rate 0.001 cosine to 0.0001, warm-up 5% of the decay, clip 1"
    assert printed["precision"] == "bf16, main parameters and gradients fp32"
    assert "ramp" not in printed


def test_zero_is_named_with_those_who_share() -> None:
    instances = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
    assert rows("--preset", "tiny-llama", *instances, ranks=8)["optimizer"].startswith("adam, ZeRO-1 over 4 ranks,")


EXPERTS = ["--num-experts", "8", "--moe-ffn-hidden-size", "96", "--expert-model-parallel-size", "2"]


def test_experts_have_a_grid_and_parameters_that_are_active() -> None:
    printed = rows("--preset", "tiny-llama", *EXPERTS, "--moe-shared-expert-intermediate-size", "64", ranks=4)
    assert printed["ranks"] == "4 = DP 4 (copies of the model) x TP 1 (tensor parallel); experts: DP 2 x EP 2 x TP 1"
    assert "2 of 8 swiglu experts of 96 and a shared one of 64, RMSNorm" in printed["model"]
    total, active, held = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}", printed["parameters"])[:3])
    expert = 4 * 3 * 96 * 128  # of all layers
    assert total - active == 6 * expert
    assert total - held == 4 * expert - 2 * (384 - 257) * 128  # half of the experts are elsewhere, two tables padded
    assert "active per token" in printed["parameters"]


PIPELINE = ["--preset", "tiny-llama", "--pipeline-model-parallel-size", "2", "--global-batch-size", "8"]


def test_a_pipeline_has_a_line_of_its_own() -> None:
    printed = rows(*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2", ranks=4)
    assert printed["ranks"] == "4 = PP 2 (pipeline, VPP 2) x DP 2 (copies of the model) x TP 1 (tensor parallel)"
    head = 257 * 128 / (4 * 4 * 128 * 128)  # of a layer, roughly: the last of four stages takes so much longer
    bubble = 1 / 9
    assert printed["pipeline"].startswith(f"interleaved, 4 stages of 1 layer, bubble {100 * bubble:.1f}% (")
    assert bubble < float(printed["pipeline"].partition("(")[2].partition("%")[0]) / 100 < bubble + head
    assert printed["pipeline"].endswith("as these stages cost), at most 5 micro-batches of a stage kept")
    assert "on the fullest rank" in printed["parameters"]
    assert "on the fullest rank" in printed["memory"]
    assert "pipeline" not in rows("--preset", "tiny-llama", ranks=1)


def test_stages_that_differ_are_shown_as_a_layout() -> None:
    printed = rows(*PIPELINE, "--num-layers", "5", "--pipeline-schedule", "zb-h1", ranks=2)
    assert printed["ranks"].startswith("2 = PP 2 (pipeline) x DP 1")
    assert printed["pipeline"].startswith("zb-h1, 2 stages Et*3|ttL, bubble ")
    unknown = "--mock-data --train-iters 10 --tokenizer-type ByteTokenizer --num-layers 5"
    parsed = parse([*unknown.split(), *PIPELINE], {"RANK": "0", "WORLD_SIZE": "2"})
    assert (
        "2 stages of equal cost; the cost of the output layer depends on the tokenizer, bubble 11.1%"
        in parsed.summary()
    )
    assert "5 layers do not divide over 2 stages" in parsed.summary()


def test_a_run_that_changed_its_batch_has_the_length_it_will_have() -> None:
    config = parse([*RUN, "--global-batch-size", "8", "--seq-length", "10"], {}).config
    assert "length     1,000 steps, 8,000 samples, 80,000 tokens" in summary(config, 1)
    assert "length     1,000 steps, 6,000 samples, 60,000 tokens" in summary(config, 1, 500, 2000)


def test_checkpoints_are_described_where_there_are_any() -> None:
    assert rows(ranks=1)["saves"] == "none: --save is not set"
    often = ["--preset", "llama2-7b", "--bf16", "--save", "ckpt", "--save-interval", "1000"]
    parameters = ModelConfig(**{n: v for n, v in PRESETS["llama2-7b"].items() if n in SHAPE}).num_parameters()
    size = f"{parameters * 12 / 2**30:,.2f} GiB"
    argv = [*often, "--vocab-size", "32000"]
    assert rows(*argv, ranks=1)["saves"] == f"every 1,000 steps and at the end, {size} each, to ckpt"
    kept = rows(*argv, "--keep-last", "3", "--keep-every", "50000", ranks=1)["saves"]
    assert kept.endswith(" to ckpt; the last 3 are kept, and those of every 50,000 steps")
    assert rows("--save", "ckpt", "--keep-last", "1", ranks=1)["saves"].endswith("to ckpt; the last is kept")
    local = ("--local-save", "/disk/{node}", "--local-save-interval", "50")
    assert rows("--save", "ckpt", *local, ranks=1)["saves"].endswith("; on the nodes every 50 steps, to /disk/{node}")


def test_the_ramp_is_shown_and_long_ones_are_cut() -> None:
    few = rows("--global-batch-size", "8", "--rampup-batch-size", "4", "2", "20", ranks=2)
    assert few["ramp"] == "4 from sample 0, 6 from sample 12, 8 from sample 24"
    many = rows("--global-batch-size", "64", "--rampup-batch-size", "4", "2", "2000", ranks=2)
    assert many["ramp"].count(",") < 6
    assert "more ..." in many["ramp"]
    assert ", 64 from sample 2," in many["ramp"]


def test_what_padding_costs_is_told() -> None:
    batch = ["--pad-global-batch", "--global-batch-size", "8"]
    printed = rows(*batch, ranks=3)
    assert printed["batch"].endswith(
        ": 3 micro-batches of 1 on each DP rank, 1 of 9 samples padding (11.1% of the work)"
    )
    assert "padding" not in rows(*batch, ranks=4)["batch"]
    ramp = ["--rampup-batch-size", "4", "2", "20"]
    assert rows(*batch, *ramp, ranks=4)["ramp"].endswith(" from sample 24; at most 25.0% of the work is padding")
    assert "padding" not in rows(*batch, *ramp, ranks=2)["ramp"]


def test_an_unknown_vocabulary_leaves_the_embeddings_out() -> None:
    argv = ["--mock-data", "--train-iters", "10", "--tokenizer-type", "ByteTokenizer"]
    printed = summary(parse(argv, {}).config, 1)
    assert "and the embeddings" in printed
    assert "memory" not in printed


@pytest.mark.parametrize("preset", PRESETS)
def test_summaries_of_presets_fit_a_screen(preset: str) -> None:
    lines = rows("--preset", preset, ranks=1)
    assert max(len(f"{name:<11}{text}") for name, text in lines.items()) <= 140
