"""Mixture files, and the numbers of samples that follow from them."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.config.errors import UserError
from megatron.config.mixture import Mixture, Quota, plan_segments, plan_stages, read_mixture, stage_tokens

STAGES = """
sources:
  web: {path: data/web}
  code: {path: [data/code, data/more], max_epochs: 3}
stages:
  - {name: warm-up, share: 10%, mix: {web: {share: 0.9}, code: 10%}}
  - {name: main, tokens: 6.5K, mix: {web: 1, code: {epochs: 1.5}}}
  - {name: long, seq_length: 100, mix: {web: {tokens: 1_000}, code: {share: 2}}}
"""


def mixture(folder: Path, text: str) -> Mixture:
    path = folder / "mixture.yaml"
    path.write_text(text)
    return read_mixture(str(path))


def test_a_file_is_read(tmp_path: Path) -> None:
    found = mixture(tmp_path, STAGES)
    assert found.prefixes == {"train": ("data/web", "data/code", "data/more"), "valid": ()}
    assert found.sources["code"].max_epochs == 3
    warm_up, main, long = found.stages
    assert (warm_up.share, main.tokens, long.seq_length) == (Fraction(1, 10), 6500, 100)
    assert warm_up.mix == {"web": Quota("share", Fraction(9, 10)), "code": Quota("share", Fraction(1, 10))}
    assert main.mix["code"] == Quota("epochs", Fraction(3, 2))
    assert long.mix == {"web": Quota("tokens", Fraction(1000)), "code": Quota("share", Fraction(2))}


def test_json_and_the_short_form_mean_the_same(tmp_path: Path) -> None:
    short = mixture(tmp_path, "sources: {web: {path: a, share: 70%}, code: {path: b, epochs: 2}}")
    text = {
        "sources": {"web": {"path": "a"}, "code": {"path": "b"}},
        "stages": [{"name": "main", "mix": {"web": 0.7, "code": {"epochs": 2}}}],
    }
    assert mixture(tmp_path, json.dumps(text)).summary() == short.summary()
    assert mixture(tmp_path, "sources: {web: a}").stages[0].mix == {"web": Quota("share", Fraction(1))}


def test_a_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b.idx", "a.idx", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    assert mixture(tmp_path, f"sources: {{web: {tmp_path}}}").prefixes["train"] == (f"{tmp_path}/a", f"{tmp_path}/b")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    assert [*mixture(tmp_path, "sources: {web: a}").sources] == ["web"]
    assert [*mixture(tmp_path, "sources: {books: a}").sources] == ["books"]


def test_stages_are_planned_by_the_numbers_in_the_file(tmp_path: Path) -> None:
    once = {"web": 4000, "code": 2000}
    plans = plan_stages(mixture(tmp_path, STAGES), 10_000, 10, once, {"web": 7, "code": 0})
    # 10% of 10,000; 6,500 with 1.5 epochs of code; what is left, in samples of 100, with 1,000 tokens of web
    assert [(plan.seq_length, plan.counts) for plan in plans] == [(10, (90, 10)), (10, (350, 300)), (100, (10, 15))]
    assert [plan.begins for plan in plans] == [(7, 0), (907, 100), (4407, 3100)]
    assert plans[-1].ends == (5407, 4600)


def test_shares_are_those_of_the_file_within_a_sample(tmp_path: Path) -> None:
    draw = random.Random(3)
    for _ in range(50):
        names = "abcdefg"[: draw.randint(1, 7)]
        weights = {name: draw.randint(1, 50) for name in names}
        text = {"sources": {name: {"path": name, "share": weight} for name, weight in weights.items()}}
        samples = draw.randint(1, 500)
        (plan,) = plan_stages(mixture(tmp_path, json.dumps(text)), samples * 8, 8, dict.fromkeys(names, 1000))
        assert plan.samples == samples
        for count, weight in zip(plan.counts, weights.values()):
            assert abs(Fraction(samples * weight, sum(weights.values())) - count) < 1


def test_the_stages_of_one_length_are_a_section(tmp_path: Path) -> None:
    found = mixture(tmp_path, STAGES)
    (early, _, _), (late, _, _) = sections = found.sections(10_000, 10)
    assert [(length, tokens) for _, length, tokens in sections] == [(10, 7500), (100, 2500)]
    assert [stage.name for stage in early] == ["warm-up", "main"]
    assert found.select(["long"]).stages == late


def problems(folder: Path, text: str, tokens: int = 10_000, **once: int) -> str:
    with pytest.raises(UserError) as caught:
        plan_stages(mixture(folder, text), tokens, 10, once or {"web": 4000, "code": 2000})
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "sources: {web: {path: a, share: 1}, code: {path: b, epochs: 9}}",
            "tokens and epochs of stage main sum to 18",
        ),
        ("sources: {web: {path: a, tokens: 1K}, code: {path: b, epochs: 1}}", "nothing with a share fills it"),
        ("sources: {web: {path: a, share: 1}, code: {path: b, share: 1, max_epochs: 2}}", "reads code 2.50 times"),
        (STAGES.replace("6.5K", "9.5K"), "the run has 10,000"),
        (STAGES.replace("seq_length: 100", "tokens: 1K"), "the stages have 8,500 tokens"),
    ],
)
def test_a_mixture_that_does_not_fit_the_run_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in problems(tmp_path, text)


def test_the_last_stage_ends_with_the_run(tmp_path: Path) -> None:
    text = "sources: {web: a}\nstages: [{name: x, tokens: 500, mix: {web: 1}}, {name: y, tokens: 400, mix: {web: 1}}]"
    for tokens in (850, 950):
        plans = plan_stages(mixture(tmp_path, text), tokens, 10, {"web": 1000}, slack=50)
        assert [plan.samples for plan in plans] == [50, tokens // 10 - 50]
    assert "the run has 960" in problems(tmp_path, text, 960, web=1000)


def test_repeats_are_counted_from_what_was_consumed(tmp_path: Path) -> None:
    text = "sources: {web: {path: a, max_epochs: 2}}"
    once, found = {"web": 1000}, mixture(tmp_path, text)
    assert math.isclose(plan_stages(found, 1000, 10, once, {"web": 1000})[0].ends[0], 2000)
    with pytest.raises(UserError, match=r"reads web 2\.01 times"):
        plan_stages(found, 1000, 10, once, {"web": 1010})


def test_what_is_read_beyond_the_plan_counts(tmp_path: Path) -> None:
    """The last stage goes on in its proportions: of 100 more samples of 10 tokens, half is code."""
    found = mixture(tmp_path, "sources: {web: {path: a, share: 1}, code: {path: b, share: 1, max_epochs: 2}}")
    once = {"web": 1000, "code": 500}
    plans = plan_segments(found, [100, 40, 60], 10, once, {"code": 0}, 0)
    assert [plan.counts for (plan,) in plans] == [(50, 50), (20, 20), (30, 30)]
    assert plans[-1][0].ends == (1000, 1000)
    with pytest.raises(UserError, match=r"the run reads code 2.02 times \(1,010 tokens of 500\)"):
        plan_segments(found, [100, 40, 62], 10, once, {}, 0)


READ: dict[str, str] = {
    "a number": "sources: {2023: {path: a, share: 1}, web: {path: b, share: 3}}",
    "a number in stages": "sources: {2023: a, web: b}\nstages: [{name: 1, mix: {2023: 1, web: 3}}]",
}


@pytest.mark.parametrize("name", READ)
def test_names_may_be_numbers(tmp_path: Path, name: str) -> None:
    found = mixture(tmp_path, READ[name])
    assert [*found.sources] == ["2023", "web"]
    assert plan_stages(found, 400, 10, {"2023": 100, "web": 100})[0].counts == (10, 30)


ONE_SENTENCE: dict[str, tuple[str, str]] = {
    "a list": ("[1, 2]", "it must hold 'name: value' entries, not [1, 2]"),
    "an empty file": ("", "it must hold 'name: value' entries, not None"),
    "no sources": ("sources: {}", "there are no sources"),
    "a name of YAML's": ("sources: {no: {path: a}}", "sources has a name that YAML reads as False"),
    "a stage of that name": (
        "sources: {web: a}\nstages: [{name: off, mix: {web: 1}}]",
        "stages, 1 has a name that YAML reads as False",
    ),
    "one path twice": ("sources: {web: [a, ./a]}", "web reads a, web reads ./a, the same file: it would be repeated"),
    "in two sources": (
        "sources: {web: {path: a, share: 1}, code: {path: b/../a, share: 1}}",
        "web reads a, code reads b/../a, the same file: it would be repeated",
    ),
    "less than a token": (
        "sources: {web: a}\nstages: [{name: x, tokens: 0.1, mix: {web: 1}}, {name: y, mix: {web: 1}}]",
        "stage x, tokens must be at least 1, not 0.1",
    ),
}


@pytest.mark.parametrize("name", ONE_SENTENCE)
def test_a_fault_is_one_sentence(tmp_path: Path, name: str) -> None:
    text, sentence = ONE_SENTENCE[name]
    with pytest.raises(UserError) as refused:
        mixture(tmp_path, text)
    (problem,) = refused.value.problems
    assert problem.sentence == f"--data-mixture {tmp_path}/mixture.yaml: {sentence}"
    assert problem.fixes


FITTING: dict[str, tuple[str, str]] = {
    "epochs": ("sources: {web: {path: a, share: 1}, code: {path: b, epochs: 9}}", "epochs: 9"),
    "without shares": ("sources: {web: {path: a, epochs: 3}, code: {path: b, tokens: 3K}}", "epochs: 3"),
    "tokens": ("sources: {web: {path: a, share: 1}, code: {path: b, tokens: 70K}}", "tokens: 70K"),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_fix_of_an_amount_fits(tmp_path: Path, name: str) -> None:
    text, wrong = FITTING[name]
    fix = problems(tmp_path, text).partition("{")[2].partition("}")[0]
    assert fix.partition(":")[0] == wrong.partition(":")[0]
    once = {"web": 4000, "code": 2000}
    assert plan_stages(mixture(tmp_path, text.replace(wrong, fix)), 10_000, 10, once)[0].samples == 1000


def test_a_fix_of_the_length_fits(tmp_path: Path) -> None:
    for text in (STAGES.replace("6.5K", "9.5K"), STAGES.replace("seq_length: 100", "tokens: 1K")):
        length = problems(tmp_path, text).partition("a run of ")[2].partition(" tokens")[0]
        tokens = int(length.replace(",", ""))
        assert sum(stage_tokens(mixture(tmp_path, text), tokens, 10, slack=10)) == tokens
