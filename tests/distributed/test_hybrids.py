"""Hybrid models with the features of others: equal to a GPT where they are one, and the same in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.training.build import build_trainer
from tests.distributed.crash_runs import Setup
from tests.distributed.crashes import Trials
from tests.distributed.diloco_runs import largest_difference, run_replicas, take_step, weights
from tests.distributed.grid import FACTORS, MIXERS, STATES, case_of, choices, label
from tests.distributed.pairwise import Choice
from tests.distributed.resharding import draw, loading, saving
from tests.distributed.resume import gathered, load_and_go_on, save_and_go_on
from tests.distributed.test_generate import NEW, PROMPTS, continued_by_stages
from tests.distributed.test_layout_matrix import TOLERANCE_FP64
from tests.distributed.test_resharding import check as check_resharding
from tests.kit.cases import FP64, MODEL, Case, PackedConversations, compare_with_twin, run_on
from tests.kit.pool import Pool
from tests.kit.runs import tiny_run
from tests.kit.solo import Solo
from tests.unit.inference.test_generate import reread

PLAIN = {name: values[0] for name, values in FACTORS.items()}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}

LAYOUTS_OF_GPT: list[Choice] = [
    {"tp": "2sp", "cp": 2, "documents": "attention", "pattern": "local:5,global", "layers": 3, "positions": "rope"},
    {
        "pp": 2,
        "vpp": 2,
        "schedule": "interleaved",
        "experts": "balanced",
        "dp": 2,
        "zero": "3 freed",
        "heads": 2,
        "layers": 2,
    },
    {"pp": 2, "schedule": "zb-h1", "layers": 5, "recompute": "uniform 2", "dropout": "hidden", "biases": "qkv"},
]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(c, marks=pytest.mark.slow if c["layers"] == 5 else (), id=label(c)) for c in LAYOUTS_OF_GPT],
)
def test_a_pattern_of_a_gpt_trains_like_one_to_the_bit(pool: Pool, layout: Choice) -> None:
    gpt = case_of(PLAIN | {"positions": "rope"} | layout)
    pattern = case_of(PLAIN | {"positions": "rope"} | layout | {"mixers": "pure"})
    if pattern.model.attention_pattern:  # lists of layers count symbols
        pattern = replace(pattern, model=replace(pattern.model, attention_pattern="local:5*2,global*2"))
    assert pattern.model.hybrid_layer_pattern in ("*-*-*-", "*E*E", "*-" * 5)
    for one, other in zip(run_on(pool, gpt), run_on(pool, pattern), strict=True):
        assert (one.loss, one.grad_norm, one.drifted) == (other.loss, other.grad_norm, [])
        for found, expected in ((other.grads, one.grads), (other.weights, one.weights)):
            assert [*found] == [*expected]
            assert [name for name, tensor in expected.items() if not found[name].equal(tensor)] == []


RUN = (
    "--mock-data --device cpu --params-dtype fp64 --vocab-size 101 --seq-length 24 --hidden-size 32 --train-iters 12"
    " --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 1"
    " --position-embedding-type rope --num-experts 4 --moe-ffn-hidden-size 24"
)
SPELLINGS = {"gpt": "--num-layers 4 --moe-layer-freq [0,1,0,1]", "pattern": "--hybrid-layer-pattern *-*E*-*E"}


def run_of(flags: str, ranks: int) -> RunConfig:
    return parse(f"{RUN} {flags}".split(), {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


@pytest.mark.slow  # test_hybrid.py does it on one process
@pytest.mark.parametrize("saved", ["gpt", "pattern"])
def test_either_spelling_goes_on_with_a_checkpoint_of_the_other(pool: Pool, tmp_path: Path, saved: str) -> None:
    (loaded,) = SPELLINGS.keys() - {saved}
    cut = "--tensor-model-parallel-size 2 --sequence-parallel"
    whole = pool.run(2, save_and_go_on, saving(run_of(f"{SPELLINGS[saved]} {cut}", 2), tmp_path))
    again = pool.run(2, load_and_go_on, loading(run_of(f"{SPELLINGS[loaded]} {cut}", 2), tmp_path))
    assert again[0].losses == whole[0].losses
    stages = "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim"
    other = pool.run(4, load_and_go_on, loading(run_of(f"{SPELLINGS[loaded]} {stages}", 4), tmp_path))
    assert other[0].losses == pytest.approx(whole[0].losses, rel=1e-10)
    for loaded_weights in (gathered(again).weights, gathered(other).weights):
        assert all(weight.equal(loaded_weights[name]) for name, weight in gathered(whole).weights.items())


# A large epsilon, because a norm of nearly nothing multiplies rounding.
SIZES = {"norm_epsilon": 0.1} | {name: value for sizes in STATES.values() for name, value in sizes.items()}
HYBRID = replace(
    MODEL, hybrid_layer_pattern="M-G-M*-", position_embedding_type="none", normalization="RMSNorm", **SIZES
)
PACKED = PackedConversations()


def case(
    model: dict[str, Any] | None = None,
    dp: int = 1,
    training: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    optimizer: OptimizerConfig | None = None,
    cp: int = 1,
    **parallel: Any,
) -> Case:
    """The hybrid model, in samples of several documents."""
    return Case(
        replace(HYBRID, **model or {}),
        ParallelConfig(context_parallel_size=cp, **parallel),
        replace(FP64, **precision or {}),
        TrainingConfig(**training or {}),
        optimizer or OptimizerConfig(adam_eps=1e-5),
        dp,
        documents=PACKED,
    )


LORA = {"lora_rank": 3, "lora_target": ("linear_in", "linear_out")}
OFFLOAD = {"cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 1}
WHOLE = {"micro_batch_size": 4}
FEATURES = {
    "lora, sp, zero 3": case(LORA, 2, data_parallel_sharding_strategy="optim_grads_params", **SP),
    "dora, cp": case(LORA | {"lora_dora": True}, cp=2),
    "quantised, tp": case(
        LORA
        | {"frozen_weights_precision": "nf4", "hidden_size": 128, "ffn_hidden_size": 128, "linear_value_head_dim": 32},
        tensor_model_parallel_size=2,
    ),
    "fp8 by rows, sp": case(training=WHOLE, precision={"fp8_format": "e4m3", "fp8_recipe": "rowwise"}, **SP),
    "fp8, cp": case(training=WHOLE, precision={"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, cp=2),
    "offload, pp": case(training=OFFLOAD, **PP),
    "offload, cp, sp": case(training=OFFLOAD, cp=2, **SP),
    "overlap, sp": case(tp_comm_overlap=True, **SP),
    "muon, sp, cp": case(optimizer=OptimizerConfig("muon", adam_eps=1e-5, muon_num_ns_steps=2), cp=2, **SP),
    "late labels, cp 3": replace(case(cp=3), late_labels=True),
    "heads, cp": case({"hybrid_layer_pattern": "M-G-M*-/M-/M-"}, cp=2, **PP),
    "detached heads, sp": case({"hybrid_layer_pattern": "M-GM/G-", "mtp_detach_heads": True}, **SP),
    "experts, ep": case(
        {"hybrid_layer_pattern": "MEG-E*E", "num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 24},
        2,
        expert_model_parallel_size=2,
        cp=2,
    ),
    "dropout, sp, cp": case({"hidden_dropout": 0.2, "attention_dropout": 0.2}, cp=2, **SP),
    "whole norm, sp": case({"mamba_norm_groups": 1, "mamba_norm_before_gate": True, "mamba_proj_bias": True}, **SP),
    **{
        f"{module} recomputed, cp, pp": case(
            training={"recompute_granularity": "selective", "recompute_modules": (module,)}, cp=2, **PP
        )
        for module in choices("recompute_modules")
    },
}
SHORT = ("lora, sp, zero 3", "offload, cp, sp")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in FEATURES]
)
def test_features_train_like_one_process(pool: Pool, name: str) -> None:
    one = FEATURES[name]
    steps = run_on(pool, one)
    assert [step.drifted for step in steps] == [[]] * len(steps)
    for deviation in compare_with_twin(steps, one):
        assert deviation.error <= TOLERANCE_FP64, deviation


@pytest.mark.slow
@pytest.mark.parametrize("method", ["powersgd:2", "topk:0.1", "int8"])
def test_compressed_gradients_keep_copies_equal(pool: Pool, method: str) -> None:
    plain = replace(case(dp=2, **SP), precision=PrecisionConfig(params_dtype="bf16"), steps=4)
    compressed = replace(plain, parallel=replace(plain.parallel, grad_compression=method))
    found, expected = run_on(pool, compressed), run_on(pool, plain)
    assert [step.drifted for step in found] == [[]] * 4
    assert found[0].loss == expected[0].loss
    assert abs(found[-1].loss - expected[-1].loss) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("mixers", [name for name, blocks in MIXERS.items() if blocks])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_goes_on_whatever_was_cut(pool: Pool, tmp_path: Path, mixers: str, seed: int) -> None:
    check_resharding(pool, tmp_path, draw(seed, model={"mixers": mixers, "block": "pre", "clip": 1.0}))


FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
FLAGS = f"--hybrid-layer-pattern=M-G* {FLAGS}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--context-parallel-size 2 --bf16"])
def test_disturbed_runs_end_like_undisturbed_ones(tmp_path: Path, layout: str) -> None:
    trials = Trials(tmp_path, [Setup("hybrid", 2, f"{FLAGS} {layout}", "--save-interval 2 --async-save")], seed=3)
    made = [trials.make(number) for number in range(2)]
    assert [trial.wrong for trial in made] == [[]] * 2
    assert all(trial.faults for trial in made)


@pytest.mark.slow
def test_a_round_of_replicas_every_step_is_data_parallelism() -> None:
    sgd = f"{FLAGS} --params-dtype fp64 --clip-grad 0 --optimizer sgd --sgd-momentum 0 --lr 0.5 --weight-decay 0.1"
    replicas = run_replicas(f"{sgd} --diloco-sync-interval 1 --diloco-outer-lr 1 --diloco-outer-momentum 0")
    one = build_trainer(tiny_run(Path("unused"), f"{sgd} --global-batch-size 8"), 0, 1)
    for step in range(6):
        take_step(one)
        for replica in replicas:
            assert largest_difference(replica.history[step], weights(one)) < 1e-12


WRITERS = {
    "one rank": case(),
    "tp2-pp2": case(pipeline_model_parallel_size=2, tensor_model_parallel_size=2),
    "zero3": case(dp=2, data_parallel_sharding_strategy="optim_grads_params"),
    "cp2": case(cp=2),
}


def test_states_and_caches_write_what_rereading_does() -> None:
    chunk = Solo.build(replace(HYBRID, max_position_embeddings=64)).chunk
    greedy = SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy, NEW) for number, prompt in enumerate(PROMPTS)]
    assert len({token for ids in expected for token in ids}) > 4
    assert generate(chunk, PROMPTS, NEW, greedy, batch_size=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_writes_the_same(pool: Pool, name: str) -> None:
    one = WRITERS[name]
    (expected,) = pool.run(1, continued_by_stages, WRITERS["one rank"])
    assert pool.run(one.world_size, continued_by_stages, one) == [expected] * one.world_size
