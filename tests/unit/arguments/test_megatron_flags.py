"""Flags of Megatron-LM and of other trainers: the same here, ignored, refused by name, or replaced."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megatron import arguments
from megatron.arguments.cli import OWN_FLAGS
from megatron.arguments.megatron_flags import foreign_flags
from megatron.config.settings import SETTINGS, SPELLINGS, Setting
from tests.unit.arguments.command import codes, problems, run

FLAGS = foreign_flags()
GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class Flag:
    """A flag in the list of Megatron-LM's."""

    spelling: str
    default: str
    kind: str
    choices: tuple[str, ...] = ()


def read() -> list[Flag]:
    flags = []
    for line in (GOLDEN / "megatron_flags.txt").read_text().splitlines()[1:]:
        match = re.fullmatch(r"`(--[^`]*)` \[(.*?)\](?: \{(.*)\})? \((.*)\)", line)
        assert match, line
        choices = tuple(filter(None, (match[3] or "").split(",")))
        flags += [Flag(spelling, match[2], match[4], choices) for spelling in match[1].split()]
    return flags


MEGATRON = {flag.spelling: flag for flag in read()}
DIFFERENT_DEFAULTS = [setting.flag for setting in SETTINGS.values() if setting.option.megatron.default]
OURS = [flag for flag in MEGATRON.values() if flag.spelling in SPELLINGS]


def test_every_flag_of_megatron_is_ours_or_in_the_table() -> None:
    assert len(MEGATRON) > 870
    foreign = set(MEGATRON) - set(SPELLINGS)
    assert [name for name in foreign if FLAGS.find(name) is None] == []
    assert not set(SPELLINGS) & set(FLAGS.handled)
    for name, flag in FLAGS.handled.items():
        if name.endswith("-"):
            assert flag.kind != "ignored" or any(other.startswith(name) for other in foreign), name
            of_ours = any(ours.startswith(name) for ours in SPELLINGS)
            assert flag.kind in ("refused", "setting") or not of_ours, "a misspelt flag of ours would be ignored"


def test_no_flag_is_in_the_table_twice() -> None:
    tree = yaml.safe_load((Path(arguments.__file__).parent / "megatron_flags.yaml").read_text())
    names = [name for section in ("applied", "ignored", "refused", "refused_prefixes") for name in tree[section]]
    names += tree["settings_of"].values()
    words = [word for name in names for word in name.split()]
    assert [word for word in set(words) if words.count(word) > 1] == []


def test_names_of_other_trainers_are_in_one_table_and_fixes_name_flags() -> None:
    theirs = [*FLAGS.renamed, *FLAGS.replaced]
    assert len(theirs) == len(set(theirs))
    assert [name for name in theirs if name in SPELLINGS or name in MEGATRON] == []
    assert set(FLAGS.renamed.values()) <= set(SPELLINGS)
    for name, flag in [*FLAGS.handled.items(), *FLAGS.replaced.items()]:
        offered = set(re.findall(r"--[a-z][\w-]+", " ".join(flag.instead)))
        assert offered <= {*SPELLINGS, *OWN_FLAGS, name, "--nproc-per-node"}, name


def test_an_applied_flag_sets_its_options() -> None:
    beside = "--preset tiny-gpt2 --recompute-granularity full --num-layers 4 --bf16 --qk-layernorm"
    values = {
        "--activations-checkpoint-granularity": "full",
        "--activations-checkpoint-method": "block",
        "--warmup": "0.01",
        "--hybrid-override-pattern": "'*-*-'",
    }
    for spelling, flag in FLAGS.handled.items():
        if flag.kind == "applied":
            value = values.get(spelling, "4") if "{}" in flag.words else ""
            given = run(f"{beside} {spelling} {value}", ranks=4)
            assert given.config == run(f"{beside} {flag.words.replace('{}', value)}", ranks=4).config, spelling
            assert any(note.startswith("applied: ") and spelling in note for note in given.notes)
    assert (
        run(f"{beside} --checkpoint-num-layers 2 --recompute-num-layers 4").config
        == run(f"{beside} --recompute-num-layers 4").config
    ), "a flag that is given itself wins"


# Megatron-LM reads these as whole numbers, or as floats what is one: every value it takes is taken here.
WIDER = {
    "--rotary-base",
    "--rotary-seq-len-interpolation-factor",
    "--distributed-timeout-minutes",
    "--loss-scale-window",
    "--exit-duration-in-mins",
}


def test_flags_that_are_ours_take_the_same_kind_of_value() -> None:
    for flag in OURS:
        setting = SPELLINGS[flag.spelling]
        takes_none = setting.scalar is bool or flag.spelling in setting.option.aliases
        assert takes_none == (flag.kind == "flag"), flag
        scalar = {
            "int": int,
            "float": float,
            "str": str,
            "tuple_type": int,
            "no_rope_freq_type": str,
            "moe_freq_type": str,
            "la_freq_type": str,
        }.get(flag.kind.split(" ")[0])
        assert takes_none or flag.spelling in WIDER or setting.scalar is scalar, flag


def test_defaults_match_megatron_or_differ_for_a_reason() -> None:
    def same(setting: Setting, default: str) -> bool:
        words = shlex.split(setting.spell(setting.default))[1:]
        if default == "None" or setting.default is None:
            return default == "None" or setting.default is None
        if default == "[]":
            return setting.default == ()
        if setting.scalar in (int, float):
            return float(default) == float(words[0])
        return default in (str(setting.default) if setting.scalar is bool else words[0], str(words))

    main = {flag.spelling: flag for flag in OURS if flag.spelling == SPELLINGS[flag.spelling].flag}
    assert {s for s, flag in main.items() if not same(SPELLINGS[s], flag.default)} <= set(DIFFERENT_DEFAULTS)
    assert set(DIFFERENT_DEFAULTS) <= set(MEGATRON)


def test_a_script_of_megatron_runs() -> None:
    script = """
        --use-mcore-models --transformer-impl local --attention-backend auto --num-layers 2 --hidden-size 64
        --num-attention-heads 8 --group-query-attention --num-query-groups 2 --ffn-hidden-size 176 --seq-length 128
        --max-position-embeddings 128 --position-embedding-type rope --no-position-embedding --rotary-base 500000
        --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --no-bias-swiglu-fusion
        --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
        --micro-batch-size 2 --global-batch-size 16 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
        --lr-decay-iters 90 --lr-warmup-iters 10 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
        --bf16 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --no-masked-softmax-fusion
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --distributed-backend nccl --distributed-timeout-minutes 60
        --eval-interval 50 --eval-iters 2 --log-interval 10 --log-throughput --make-vocab-size-divisible-by 128
        --num-workers 8 --dataloader-type single --seed 42 --split 99,1,0
    """
    parsed = run(" ".join(script.split()), ranks=4)
    model = parsed.config.model
    assert (model.kv_groups, model.head_dim, model.activation, model.add_bias_linear) == (2, 8, "swiglu", False)
    (ignored,) = (note for note in parsed.notes if note.startswith("ignored, as docs/flags.md explains: --"))
    assert set(re.findall(r"--[\w-]+", ignored)) == {word for word in script.split() if FLAGS.find(word)}
    assert len(parsed.summary().splitlines()) <= 15 - len(("train", "valid")), "a run adds the lines of its data"
    assert (parsed.config.parallel.zero_stage, parsed.config.parallel.overlap_param_gather) == (1, True)


def test_ignored_flags_change_nothing() -> None:
    beside = {"--group-query-attention": "--num-query-groups 4", "--no-position-embedding": "--swiglu"}
    beside["--is-hybrid-model"] = "--hybrid-layer-pattern *-*"
    for spelling in [name for name in MEGATRON if (flag := FLAGS.find(name)) and flag.kind in ("ignored", "setting")]:
        if FLAGS.find(spelling).values is not None:
            continue
        flags = f"--use-rotary-position-embeddings {beside.get(spelling, '')}"
        value = "" if MEGATRON[spelling].kind == "flag" else "1"
        with_it, without = run(f"{flags} {spelling} {value}"), run(flags)
        assert with_it.config == without.config
        assert next(n for n in with_it.notes if n not in without.notes).startswith(f"ignored: {spelling}")


def test_other_names_are_corrected_with_their_value() -> None:
    for name, ours in FLAGS.renamed.items():
        written = name.replace("-", "_").replace("__", "--", 1)
        value = SPELLINGS[ours].choices[0] if SPELLINGS[ours].choices else 7
        assert problems(f"{written} {value}")[0].fixes == (f"{ours} {value}",)
    launcher = ("torchrun --nproc-per-node 2 pretrain_gpt.py",)
    assert problems("--nproc 2")[0].fixes == problems("--nproc_per_node=2")[0].fixes == launcher
    assert problems("--wandb-mode offline")[0].fixes[0] == "WANDB_MODE=offline"
    length = codes("--max-steps 10", base="--mock-data --vocab-size 257")
    assert length == ["E001"], "the run's length is not also missing"


WITH_EFFECT = {"--rerun-mode", "--fim-rate"}
"""Flags whose default does something in Megatron-LM, or did in earlier releases."""


@pytest.mark.parametrize(
    "beside", ["", "--num-experts 4 --disable-bias-linear", "--optimizer muon", "--fp8-format e4m3"]
)
def test_defaults_that_are_written_out_change_nothing(beside: str) -> None:
    ours = {setting.name for setting in map(SPELLINGS.get, beside.split()) if setting is not None}
    written = []
    for flag in MEGATRON.values():
        setting = SPELLINGS.get(flag.spelling)
        absent = flag.kind == "flag" or flag.default in ("None", "[]", "") or flag.spelling in WITH_EFFECT
        if absent or (setting and (setting.name in ours or flag.spelling in DIFFERENT_DEFAULTS)):
            continue
        written.append(
            f"{flag.spelling} {flag.default.rpartition('.')[2] if 'Backend' in flag.default else flag.default}"
        )
    given = [
        line.replace("[", "").replace("]", "")
        for line in written
        if not re.match("--(distributed-backend|model-|hybrid)", line)
    ]
    assert len(given) > 150
    assert problems(f"{beside} {' '.join(given)}") == ()


def test_values_of_missing_features_are_named() -> None:
    for flag in OURS:
        have = SPELLINGS[flag.spelling].choices
        for value in set(flag.choices) - set(have) if have else ():
            if value in SPELLINGS[flag.spelling].option.megatron.values:
                continue
            beside = "--optimizer muon" if "muon" in flag.spelling else ""
            beside += " --num-experts 4 --disable-bias-linear --fp8-format e4m3"
            found = problems(f"{beside} {flag.spelling} {value}")
            named = [p for p in found if p.sentence.startswith(flag.spelling)]
            assert [bool(re.search("is not supported: .{12}", p.sentence)) for p in named] == [True], (flag, found)
            assert flag.spelling == "--tokenizer-type" or named[0].fixes == named[0].choices == ()


HERE = {
    "conversation": "--chat-data-path",
    "distill": "--objective distillation|--teacher-logits|tasks/finetune/precompute.py",
    "context parallel": "--context-parallel-size",
    "learning rates": "--lr-factors",
    "window": "--attention-pattern",
}
"""An existing feature, and an option that a reason which names it must state."""


def test_reasons_are_true() -> None:
    reasons = {flag.reason for flag in [*FLAGS.handled.values(), *FLAGS.replaced.values()] if flag.kind == "refused"}
    reasons |= {reason for setting in SETTINGS.values() for reason in setting.option.megatron.missing.values()}
    for reason in reasons:
        for word, options in HERE.items():
            assert word not in reason.lower() or any(option in reason for option in options.split("|")), reason
        named = set(re.findall(r"--[a-z][\w-]+\w", reason))
        assert named <= {*SPELLINGS, *OWN_FLAGS, *FLAGS.handled, *FLAGS.replaced}, reason
        for path in re.findall(r"\b(?:tools|tasks)/[\w/]+\.py", reason):
            assert (GOLDEN.parents[1] / path).is_file(), reason
        assert not re.search("no counterpart|other values", reason)


def test_no_refusal_of_a_flag_has_a_fix_that_drops_it() -> None:
    on = "--num-experts 4 --disable-bias-linear --fp8-format e4m3 --position-embedding-type yarn"
    on += " --yarn-original-max-position-embeddings 64"
    refused = [name for name, flag in {**FLAGS.handled, **FLAGS.replaced}.items() if flag.kind == "refused"]
    found = problems(f"{on} {' '.join(f'{name}x 7' if name.endswith('-') else f'{name} 7' for name in refused)}")
    assert len(found) > 100
    assert [p for p in found if any(fix.startswith("drop ") for fix in p.fixes) and p.code in ("E001", "E004")] == []
