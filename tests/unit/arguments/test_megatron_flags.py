"""A Megatron-LM argument list means the same here, or is ignored or refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.megatron_flags import OWN_FLAGS, foreign_flags, refusal
from megatron.config.errors import UserError
from megatron.config.settings import SPELLINGS, Setting

FLAGS = foreign_flags()
LIST = Path(__file__).parents[2] / "golden" / "megatron_flags.txt"
RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "100"]


@dataclass(frozen=True)
class Flag:
    spelling: str
    default: str
    choices: tuple[str, ...]
    kind: str


def read() -> list[Flag]:
    flags = []
    for line in LIST.read_text().splitlines()[1:]:
        match = re.fullmatch(r"`(--[^`]*)` \[(.*?)\](?: \{(.*)\})? \((.*)\)", line)
        assert match, line
        spellings, default, choices, kind = match.groups()
        flags += [Flag(s, default, tuple((choices or "").split(",")), kind) for s in spellings.split()]
    return flags


MEGATRON = read()
NAMES = {flag.spelling for flag in MEGATRON}


def test_the_list_is_whole() -> None:
    assert len(NAMES) > 870


@pytest.mark.parametrize("flag", MEGATRON, ids=lambda flag: flag.spelling)
def test_every_flag_is_ours_or_named(flag: Flag) -> None:
    kinds = [flag.spelling in SPELLINGS, flag.spelling in FLAGS.ignored, flag.spelling in FLAGS.refused]
    assert sum(kinds) <= 1, "in two tables"
    assert any(kinds) or refusal(flag.spelling) is not None


def test_the_tables_name_nothing_else() -> None:
    assert {*FLAGS.ignored, *FLAGS.refused, *FLAGS.unsupported} <= NAMES
    assert [p for p in FLAGS.refused_prefixes if not any(name.startswith(p) for name in NAMES - set(SPELLINGS))] == []


def test_the_rest_is_in_no_other_table() -> None:
    rest = FLAGS.unsupported
    assert len(rest) == len(set(rest))
    named = {*FLAGS.ignored, *FLAGS.refused}
    assert [flag for flag in rest if flag in named or flag.startswith(tuple(FLAGS.refused_prefixes))] == []


def test_what_is_offered_instead_is_a_flag() -> None:
    for flag in FLAGS.refused.values():
        for spelling in re.findall(r"--[a-z-]+", " ".join(flag.instead)):
            assert spelling in SPELLINGS or spelling in OWN_FLAGS or f"drop {spelling}" in flag.instead, spelling


@pytest.mark.parametrize("flag", [f for f in MEGATRON if f.spelling in SPELLINGS], ids=lambda flag: flag.spelling)
def test_flags_that_are_ours_take_the_same_kind_of_value(flag: Flag) -> None:
    setting = SPELLINGS[flag.spelling]
    takes_none = setting.kind.scalar is bool or flag.spelling in setting.option.aliases
    assert takes_none == (flag.kind == "flag")
    scalar = {"int": int, "float": float, "str": str, "tuple_type": int}.get(flag.kind.split(" ")[0])
    if not takes_none and flag.spelling not in WIDER:
        assert setting.kind.scalar is scalar


# Megatron-LM reads these as whole numbers, or as floats what is one: every value it takes is taken here.
WIDER = {"--rotary-base", "--distributed-timeout-minutes", "--loss-scale-window", "--exit-duration-in-mins"}


def test_defaults_are_those_of_megatron_or_differ_for_a_reason() -> None:
    def same(setting: Setting, default: str) -> bool:
        words = setting.spell(setting.default).split()[1:]
        if default == "None" or setting.default is None:
            return default == "None" or setting.default is None
        if default == "[]":
            return setting.default == ()
        if setting.kind.scalar in (int, float):
            return float(default) == float(words[0])
        return default == (str(setting.default) if setting.kind.scalar is bool else words[0])

    differing = [f.spelling for f in MEGATRON if f.spelling in SPELLINGS and f.spelling == SPELLINGS[f.spelling].flag]
    differing = [s for s in differing if not same(SPELLINGS[s], next(f.default for f in MEGATRON if f.spelling == s))]
    assert set(differing) <= set(FLAGS.different_defaults)
    assert set(FLAGS.different_defaults) <= set(SPELLINGS) & NAMES


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
    parsed = parse([*RUN, *script.split()], {"RANK": "0", "WORLD_SIZE": "4"})
    model = parsed.config.model
    assert (model.kv_groups, model.head_dim, model.activation, model.add_bias_linear) == (2, 8, "swiglu", False)
    (ignored,) = (note for note in parsed.notes if note.startswith("ignored, as docs/flags.md explains: --"))
    assert set(re.findall(r"--[\w-]+", ignored)) == set(script.split()) & set(FLAGS.ignored)
    assert len(parsed.summary().splitlines()) <= 15 - len(("train", "valid")), "those of the data are added to a run's"
    assert (parsed.config.parallel.zero_stage, parsed.config.parallel.overlap_param_gather) == (1, True)


def test_a_precision_aware_optimizer_is_said_by_the_formats_of_its_moments() -> None:
    parsed = parse([*RUN, "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"], {})
    (note,) = parsed.notes
    assert "--exp-avg-dtype, --exp-avg-sq-dtype and --store-param-remainders select it" in note
    assert parsed.config.optimizer.exp_avg_dtype == "bf16"


def test_the_data_of_a_script_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LIST.parent)
    script = """
        --data-path 0.3 megatron/case0 0.7 megatron/case0 --split 949,50,1 --data-cache-path cache
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --vocab-size 50257
        --reset-position-ids --reset-attention-mask --eod-mask-loss --seq-length 128 --train-samples 1000
        --num-dataset-builder-threads 4 --mid-level-dataset-surplus 0.005 --null-tokenizer-pad-id -1 --no-mmap-bin-files
    """
    parsed = parse(script.split(), {})
    data = parsed.config.data
    assert data.data_path == ("0.3", "megatron/case0", "0.7", "megatron/case0")
    assert (data.split, data.data_cache_path, data.vocab_file) == ("949,50,1", "cache", "vocab.json")
    assert (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss) == (True, True, True)
    printed = [note.partition(":")[0] for note in parsed.notes]
    assert printed == ["ignored", "ignored", "ignored", "--data-path contains megatron/case0 more than once"]


@pytest.mark.parametrize("spelling", sorted(name for name, flag in FLAGS.ignored.items() if flag.values is None))
def test_ignored_flags_change_nothing(spelling: str) -> None:
    beside = {"--group-query-attention": ["--num-query-groups", "4"], "--no-position-embedding": ["--swiglu"]}
    argv = [*RUN, "--use-rotary-position-embeddings", *beside.get(spelling, [])]
    value = [] if next(f for f in MEGATRON if f.spelling == spelling).kind == "flag" else ["1"]
    with_it, without = parse([*argv, spelling, *value], {}), parse(argv, {})
    assert with_it.config == without.config
    assert next(n for n in with_it.notes if n not in without.notes).startswith(f"ignored: {spelling}")


def test_values_that_are_not_harmless_are_refused() -> None:
    assert parse([*RUN, "--dataloader-type=single"], {}).notes
    with pytest.raises(UserError, match="E004 --dataloader-type cyclic"):
        parse([*RUN, "--dataloader-type", "cyclic"], {})


def test_masks_that_megatron_would_not_make_are_made_and_noted() -> None:
    files = ["--data-path", str(LIST.parent / "megatron" / "case0"), "--set", "data.mock_data=false"]
    argv = [*RUN, *files, "--no-create-attention-mask-in-dataloader"]
    printed = "attention is restricted to documents; Megatron-LM would not restrict it without masks"
    assert printed in parse([*argv, "--reset-attention-mask"], {}).notes
    assert printed not in parse(argv, {}).notes
