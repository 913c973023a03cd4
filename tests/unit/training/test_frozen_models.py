"""Runs with frozen models: every way to give a reference or a teacher trains alike, resumes, and is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.data.build import resolve_epochs
from tasks.finetune import precompute
from tests.kit.runs import FLAGS, before_step, column, differences, kill, records, start, steps, tiny_run

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MODEL = "--vocab-size 257 --seq-length 16 --max-position-embeddings 16 --fp64"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that tuning begins with, after a step on noise."""
    folder = tmp_path_factory.mktemp("base")
    assert start(tiny_run(folder, f"{MODEL} --train-iters 1 --save {folder}/save --hidden-size 16")).status == 0
    return folder / "save"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"prompt": str(i), "chosen": "a" * (i % 3 + 1), "rejected": "b" * (i % 4)} for i in range(12)]
    records.append({"prompt": "", "chosen": "ac", "rejected": "bb"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def flags_of(pairs: Path, more: str = "") -> str:
    data = f"--tokenizer-type ByteTokenizer --no-mock-data --set data.chat_data_path={pairs}"
    return f"{MODEL} --objective dpo --train-iters 5 {more} {data}"


def run_of(folder: Path, pairs: Path, more: str = "") -> RunConfig:
    return resolve_epochs(tiny_run(folder, flags_of(pairs, more)), 1)


def trained(folder: Path, config: RunConfig) -> dict[int, dict[str, Any]]:
    outcome = start(config)
    assert (outcome.status, outcome.err) == (0, ""), outcome.err
    return steps(folder)


def precomputed(kind: str, output: Path, flags: str) -> Path:
    """The output of ``precompute.py`` with the flags of a run."""
    assert precompute.main([kind, "--output", str(output), *FLAGS.split(), *flags.split()]) == 0
    return output


def test_the_reference_is_given_in_three_ways(tmp_path: Path, base: Path, pairs: Path) -> None:
    """A model beside the run, columns of the data, and with adapters the model itself: LoRA starts where it does."""
    start_point = f"--pretrained-checkpoint {base}"
    beside = trained(tmp_path / "beside", run_of(tmp_path / "beside", pairs, start_point))
    named = run_of(tmp_path / "named", pairs, f"{start_point} --reference-model {base}")
    written = precomputed("dpo", tmp_path / "pairs.jsonl", flags_of(pairs, start_point))
    columns = trained(tmp_path / "columns", run_of(tmp_path / "columns", written, start_point))
    assert beside == trained(tmp_path / "named", named)
    for step, numbers in columns.items():
        assert numbers["lm loss"] == pytest.approx(beside[step]["lm loss"], rel=1e-12)
        assert numbers["grad-norm"] == pytest.approx(beside[step]["grad-norm"], rel=1e-10)
    assert column(tmp_path / "beside", "rewards/margins")[0] == 0.0
    assert column(tmp_path / "beside", "rewards/margins")[-1] > 0.0

    lora = f"{start_point} --lora-rank 4"
    own = trained(tmp_path / "own", run_of(tmp_path / "own", pairs, lora))
    other = trained(tmp_path / "other", run_of(tmp_path / "other", pairs, f"{lora} --reference-model {base}"))
    assert own[1]["lm loss"] == pytest.approx(beside[1]["lm loss"], rel=1e-12)
    assert own[5]["lm loss"] != own[1]["lm loss"]
    for step, numbers in own.items():
        assert numbers["lm loss"] == pytest.approx(other[step]["lm loss"], rel=1e-12)


def test_the_reference_of_adapters_trained_before_has_them(tmp_path: Path, base: Path, pairs: Path) -> None:
    lora = f"--pretrained-checkpoint {base} --lora-rank 4"
    first = tmp_path / "first"
    trained(first, tiny_run(first, f"{MODEL} --train-iters 3 --lr 0.1 {lora} --save {first}/save"))
    more = f"{lora} --load {first}/save"
    both = trained(tmp_path / "dpo", run_of(tmp_path / "dpo", pairs, f"{more} --resume-mode weights-only"))
    assert both[1]["lm loss"] == pytest.approx(0.6931471805599453, rel=1e-12)  # -log(1/2): the policy is the reference
    assert both[5]["lm loss"] != both[1]["lm loss"]


def test_a_teacher_beside_the_run_and_in_a_file(tmp_path: Path, base: Path) -> None:
    """Also of validation data, and with fewer logits than the file has."""
    flags = f"{MODEL} --objective distillation --distillation-top-k 6 --eval-iters 2 --hidden-size 32"
    config = tiny_run(tmp_path / "beside", f"{flags} --teacher-model {base}")
    written = precomputed(
        "distill",
        tmp_path / "logits",
        f"{flags.replace('-k 6', '-k 9')} --teacher-model {base}",
    )
    read = tiny_run(tmp_path / "read", f"{flags} --teacher-logits {written}")
    assert trained(tmp_path / "beside", config) == trained(tmp_path / "read", read)
    divergences = [column(tmp_path / name, "kl divergence") for name in ("beside", "read")]
    assert divergences[0] == divergences[1] == column(tmp_path / "read", "lm loss")[:6]


@pytest.mark.parametrize(
    ("change", "seen"),
    {
        "--seed 5": "train belongs to other samples",
        "--train-iters 9": "train has 24 samples of 16 tokens with 6 logits, not 36 samples of 16 tokens with 6 logits",
        "--distillation-top-k 7": "not 24 samples of 16 tokens with 7 logits",
        "--teacher-logits none": "--teacher-logits none cannot be read: ",
    }.items(),
)
def test_logits_of_other_samples_are_refused(tmp_path: Path, base: Path, change: str, seen: str) -> None:
    flags = f"{MODEL} --objective distillation --distillation-top-k 6"
    written = precomputed("distill", tmp_path / "logits", f"{flags} --teacher-model {base}")
    outcome = start(tiny_run(tmp_path / "run", f"{flags} --teacher-logits {written} {change}"))
    assert outcome.status == 2
    assert seen in outcome.err
    assert "fix: python tasks/finetune/precompute.py distill --output FOLDER" in outcome.err


@pytest.mark.parametrize("lora", [pytest.param("", marks=pytest.mark.slow), "--lora-rank 4"])
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, base: Path, pairs: Path, lora: str) -> None:
    def config(name: str) -> RunConfig:
        save = f"--save {tmp_path / name}/save --save-interval 2 --pretrained-checkpoint {base} {lora}"
        return run_of(tmp_path / name, pairs, save)

    whole = trained(tmp_path / "whole", config("whole"))
    assert start(config("killed"), before_step(4, kill)).status is None
    assert trained(tmp_path / "killed", config("killed")) == whole
    assert differences(*(tmp_path / name / "save" / "iter_0000005" for name in ("whole", "killed"))) == []


def test_a_missing_or_incompatible_reference_model_is_refused(tmp_path: Path, base: Path, pairs: Path) -> None:
    outcome = start(run_of(tmp_path / "none", pairs))
    assert outcome.status == 2
    assert "E322 --objective dpo needs --reference-model\n  fix: --reference-model CHECKPOINT" in outcome.err
    small = tmp_path / "small"
    assert start(tiny_run(small, f"{MODEL} --train-iters 1 --save {small}/save --vocab-size 30")).status == 0
    outcome = start(run_of(tmp_path / "other", pairs, f"--pretrained-checkpoint {base} --reference-model {small}/save"))
    assert outcome.status == 2
    assert "E321 --reference-model" in outcome.err
    assert "has a vocabulary of 30, the model one of 257" in outcome.err


def test_references_of_some_data_only_are_refused(tmp_path: Path, base: Path, pairs: Path) -> None:
    written = precomputed("dpo", tmp_path / "pairs.jsonl", flags_of(pairs, f"--pretrained-checkpoint {base}"))
    more = f"--pretrained-checkpoint {base} --eval-iters 1 --valid-chat-data-path {pairs}"
    outcome = start(run_of(tmp_path / "run", written, more))
    assert outcome.status == 2
    assert "the validation data have no ref_chosen_logps and ref_rejected_logps, which other data have" in outcome.err


def test_evaluation_reads_the_frozen_model_too(tmp_path: Path, base: Path, pairs: Path) -> None:
    more = f"--pretrained-checkpoint {base} --eval-iters 1 --eval-interval 1 --lr 0 --valid-chat-data-path {pairs}"
    numbers = trained(tmp_path, run_of(tmp_path, pairs, more))
    assert numbers[5]["lm loss validation"] == pytest.approx(0.6931471805599453, rel=1e-12)  # -log(1/2): nothing learnt
    last = records(tmp_path, "lm loss validation")[-1]
    assert (last["rewards/accuracies validation"], last["rewards/margins validation"]) == (0.0, 0.0)
    assert "lm loss validation ppl" not in last
