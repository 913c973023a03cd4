"""Layer patterns: grouping into blocks, numbering, cuts, heads, letters of plugins, and the form of a GPT."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import build_config, merge_values, resolve, to_dict
from megatron.config import plugins
from megatron.config.layer_pattern import LETTERS, PatternError, parse_pattern, without_pattern
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.layers.mixers.base import Mixer, output_std
from megatron.layers.parameters import gpt
from megatron.pipeline.partition import parse_layout
from tests.unit.arguments.command import problems, run

HEADS = "--num-attention-heads 4"
SHAPE = f"--hidden-size 32 {HEADS} --seq-length 16 --mock-data --vocab-size 64 --train-iters 1"
NAMES = {"*": "attention", "+": "latent-attention", "-": "mlp", "E": "experts"}


def grouped(symbols: str) -> list[str]:
    """Group symbols one after the other."""
    blocks: list[str] = []
    for symbol in symbols:
        if symbol in "-E" and blocks and len(blocks[-1]) == 1 and blocks[-1] not in "-E":
            blocks[-1] += symbol
        else:
            blocks.append(symbol)
    return blocks


def test_symbols_are_grouped_into_blocks() -> None:
    dice = random.Random(0)
    for symbols in ["*-*E-", *("".join(dice.choices("*-E", k=dice.randrange(1, 12))) for _ in range(200))]:
        blocks = grouped(symbols)
        model = ModelConfig(hybrid_layer_pattern=symbols, num_experts=4)
        assert model.num_layers == len(blocks)
        assert [model.mixers(n) for n in range(len(blocks))] == [tuple(map(NAMES.get, block)) for block in blocks]
        assert [model.residual_layer(n) for n in range(len(blocks))] == [
            len("".join(blocks[:n])) for n in range(len(blocks))
        ]
        assert model.residual_layers == len(symbols)
        assert model.expert_blocks == symbols.count("E")
        assert output_std(model) == pytest.approx(model.init_method_std / len(symbols) ** 0.5, rel=1e-15)


def test_a_model_of_equal_blocks_has_two_residual_layers_in_each() -> None:
    model = ModelConfig(num_layers=3)
    assert (model.residual_layers, [model.residual_layer(n) for n in range(3)]) == (6, [0, 2, 4])


@pytest.mark.parametrize(
    ("layers", "codes"),
    [
        ("--hybrid-layer-pattern M-ME", []),
        ("--token-mixers gated-delta-net --num-layers 2", []),
        ("--hybrid-layer-pattern M-*-", ["E011"]),
        ("--hybrid-layer-pattern M-/*-", ["E011"]),
        ("--token-mixers mamba2", ["E011"]),
    ],
)
def test_only_attention_needs_a_number_of_heads(layers: str, codes: list[str]) -> None:
    sizes = "--mamba-num-groups 1 --moe-router-topk 2" + " --num-experts 4" * ("E" in layers)
    found = problems(f"{layers} {sizes}", base=SHAPE.replace(HEADS, ""), read_model=None)
    assert [each.code for each in found] == codes


def test_lists_of_layers_count_symbols() -> None:
    lists = {
        "window_size": 4,
        "window_attn_skip_freq": "[1,1,0]",
        "position_embedding_type": "rope",
        "no_rope_freq": "[0,1]",
    }
    model = ModelConfig(hybrid_layer_pattern="*-**-*", **lists)
    starts = [0, 2, 3, 5]
    assert [model.pattern(n).window for n in range(4)] == [[4, 4, None][at % 3] for at in starts]
    assert [model.rotary_kind(n) for n in range(4)] == [["global", None][at % 2] for at in starts]
    model = ModelConfig(hybrid_layer_pattern="*-**-*", attention_pattern="local:2,local:3,local:4,local:5,local:6")
    assert [model.pattern(n).window for n in range(4)] == [2, 4, 5, 2]
    plain = without_pattern(ModelConfig(hybrid_layer_pattern="*-*-*-", **lists))
    assert plain.hybrid_layer_pattern is None
    assert [plain.pattern(n).window for n in range(3)] == [4, None, 4]
    assert [plain.rotary_kind(n) for n in range(3)] == ["global"] * 3


@pytest.mark.parametrize(
    ("pattern", "counts"),
    [("*-|*-", [1, 1]), ("-|*-*-|*|**-|E", [1, 2, 1, 2, 1]), ("|*-|", [0, 1, 0]), ("**|-", None), ("*-|*|E*-", None)],
)
def test_cuts_are_a_layout_and_no_part_of_the_model(pattern: str, counts: list[int] | None) -> None:
    if counts is None:
        with pytest.raises(PatternError, match="inside of the block") as caught:
            parse_pattern(pattern)
        assert all("|" in fix for fix in caught.value.fixes)
        return
    config = build_config({"hybrid_layer_pattern": pattern, "num_experts": 4})
    assert config.model == ModelConfig(
        hybrid_layer_pattern=pattern.replace("|", ""), num_experts=4, position_embedding_type="none"
    )
    stages = parse_layout(str(config.parallel.pipeline_model_parallel_layout), config.model.num_layers)
    assert [stage.count for stage in stages] == counts


def test_further_tokens_have_blocks_of_their_layers() -> None:
    model = ModelConfig(hybrid_layer_pattern="*-*E/*/*", num_experts=4)
    assert (model.prediction_depths, model.head_layers, model.mixers(2)) == (2, (2, 2), ("attention",))
    older = ModelConfig(hybrid_layer_pattern="*-*E", mtp_hybrid_override_pattern="*", mtp_num_layers=2, num_experts=4)
    assert older == model
    specs = gpt(replace(model, vocab_size=8))
    heads = {name.split(".")[4] for name in specs if name.startswith("mtp.layers.1.mtp_model_layer.")}
    assert heads == {"input_layernorm", "self_attention"}
    assert ("experts",) not in model.kinds_of_layers
    assert ModelConfig(hybrid_layer_pattern="*-/", mtp_num_layers=2).prediction_depths == 0
    assert replace(model, mtp_num_layers=None).prediction_depths == 0


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("*-*-", "--num-layers 2"),
        ("*-*E*E", "--num-layers 3 --num-experts 4 --moe-layer-freq '[0]*1+[1]*2'"),
        ("*E*-*E*-", "--num-layers 4 --num-experts 4 --moe-layer-freq 2"),
        ("*E*E/*E", "--num-layers 2 --num-experts 4 --mtp-num-layers 1"),
        ("+-+-", "--num-layers 2 --multi-latent-attention"),
    ],
)
def test_a_pattern_of_a_gpt_is_stored_as_one(pattern: str, flags: str) -> None:
    experts = "--num-experts 4" if "E" in pattern else ""
    assert (
        run(f"{SHAPE} --hybrid-layer-pattern '{pattern}' {experts}").config
        == run(f"{SHAPE} {flags} --position-embedding-type none").config
    )


def test_other_patterns_stay_patterns() -> None:
    for pattern in ("*-*", "*-*-/*", "**-", "-*-", "*-*E/*-"):
        model = run(f"{SHAPE} --hybrid-layer-pattern={pattern} {'--num-experts 4' * ('E' in pattern)}").config.model
        assert model.hybrid_layer_pattern == pattern.partition("/")[0]
        assert resolve(build_config({"hybrid_layer_pattern": pattern}), 1).model.hybrid_layer_pattern is not None


@pytest.fixture
def letter(monkeypatch: pytest.MonkeyPatch) -> type[Mixer]:
    """A plugin's mixer with a letter."""

    class Mine(Mixer):
        module = "mine"
        letter = "Z"

    monkeypatch.setitem(plugins._registered["mixer"], "mine", Mine)
    return Mine


def test_a_mixer_of_a_plugin_has_a_letter(letter: type[Mixer], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(hybrid_layer_pattern="Z-ZZE*", num_experts=4)
    assert [model.mixers(n) for n in range(4)] == [("mine", "mlp"), ("mine",), ("mine", "experts"), ("attention",)]
    for taken in ("Z", *LETTERS, "|", "D", "zz"):
        monkeypatch.setitem(plugins._registered["mixer"], "other", type("Other", (letter,), {"letter": taken}))
        (problem,) = problems(f"{SHAPE} --num-layers 1")
        assert problem.code == "E914"
        assert repr(taken) in problem.sentence


ALTERNATE, WINDOW = "--num-experts 4 --moe-layer-freq 2", "--window-size 4"


@pytest.mark.parametrize(
    ("one", "other", "codes"),
    [
        ("--token-mixers mamba2 attention --num-layers 3", "--hybrid-layer-pattern 'M-*-M-'", []),
        ("--token-mixers mamba2 attention --num-layers 3", "--hybrid-layer-pattern 'M-*-*-'", ["E821"]),
        (f"--num-layers 4 {ALTERNATE}", "--hybrid-layer-pattern '*E*-*E*-' --num-experts 4", []),
        (f"--num-layers 2 {ALTERNATE}", "--hybrid-layer-pattern '*-*E' --num-experts 4", ["E821"]),
        (
            f"{WINDOW} --num-layers 3 --window-attn-skip-freq 2",
            f"{WINDOW} --hybrid-layer-pattern '*-*-*-' --window-attn-skip-freq '[1,1,0,0]'",
            [],
        ),
        (f"{WINDOW} --num-layers 2", "--hybrid-layer-pattern '*-*-' --attention-pattern local:4", []),
        (f"{WINDOW} --num-layers 2", "--hybrid-layer-pattern '*-*-' --attention-pattern local:4*2,global", ["E822"]),
        (
            "--hybrid-layer-pattern '*-*/*/*'",
            "--hybrid-layer-pattern '*-*' --mtp-hybrid-override-pattern '*' --mtp-num-layers 2",
            [],
        ),
        ("--hybrid-layer-pattern '*-*/*'", "--hybrid-layer-pattern '*-*/-'", ["E821"]),
        ("--hybrid-layer-pattern '*-*/*'", "--hybrid-layer-pattern '*-*'", ["E822"]),
        ("--hybrid-layer-pattern '*-*|*-*'", "--hybrid-layer-pattern '*-|**-*'", []),
    ],
)
def test_a_resumed_run_is_compared_by_what_its_layers_are(one: str, other: str, codes: list[str]) -> None:
    shape = f"{SHAPE} --position-embedding-type none --mamba-num-groups 1"
    saved, now = (run(f"{shape} {flags}").config for flags in (one, other))
    found = compare_configs(to_dict(saved), now, "exact")
    assert [problem.code for problem in found.problems] == codes
    assert found.changed <= {"pipeline_model_parallel_layout"} or codes


def test_a_pattern_of_a_later_source_replaces_the_layers_of_an_earlier_one() -> None:
    checkpoint = {"num_layers": 2, "moe_layer_freq": "2", "multi_latent_attention": True, "mtp_num_layers": 1}
    config = build_config(merge_values([checkpoint, {"hybrid_layer_pattern": "*-*"}]))
    assert config.model == ModelConfig(hybrid_layer_pattern="*-*", position_embedding_type="none")
    stored = {"hybrid_layer_pattern": "*-*", "mtp_hybrid_override_pattern": "*", "mtp_num_layers": 2}
    assert build_config(stored).model.head_layers == (2, 2)
    assert build_config(merge_values([stored, {"hybrid_layer_pattern": "*-*"}])).model.head_layers == ()
    assert build_config(merge_values([stored, {"position_embedding_type": "rope"}])).model.mtp_num_layers == 2
    assert build_config({"hybrid_layer_pattern": "*-*/*", "mtp_num_layers": None}).model.head_layers == ()


def test_blocks_of_heads_are_in_fp8_if_the_last_layer_is() -> None:
    for ends, in_fp8 in ((0, True), (1, False)):
        config = PrecisionConfig(fp8_format="hybrid", first_last_layers_bf16=True, num_layers_at_end_in_bf16=ends)
        assert [config.layer_in_fp8(layer, 4) for layer in range(5)] == [False, True, True, in_fp8, in_fp8]


def test_a_checkpoint_with_the_mixer_of_a_plugin_that_is_not_loaded_names_the_plugin() -> None:
    now = resolve(build_config({"hybrid_layer_pattern": "*-", "vocab_size": 64}), 1)
    saved = to_dict(now)
    saved["model"]["hybrid_layer_pattern"] = "?-"
    assert compare_configs(saved, now, "exact").problems[0].fixes == ()
    saved["compute"]["plugin"] = ["absent_plugin"]
    assert compare_configs(saved, now, "exact").problems[0].fixes == ("--plugin absent_plugin",)
