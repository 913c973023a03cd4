"""Files of phases and of mixtures with several sequence lengths: what is refused, and the plan of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.arguments.phases import describe_plan, samples_of_tokens
from megatron.config.errors import UserError
from megatron.config.phases import Phase
from megatron.config.training import TrainingConfig
from megatron.data.errors import DataError
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training.start import Start, read_start

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --position-embedding-type rope "
MODEL += "--seq-length 32 --global-batch-size 4 --lr 1e-3 --device cpu"
RUN = f"{MODEL} --mock-data"


def read(folder: Path, phases: Any, flags: str = RUN) -> Start:
    file = folder / "phases.yaml"
    file.write_text(json.dumps(phases))
    return read_start(shlex.split(f"{flags} --save {folder}/saved --phases {file}"))


MAIN = {"name": "main", "tokens": 1000}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no list": ({"name": "a"}, "", "E341 --phases FILE must hold a list of phases"),
    "no mapping": (["a"], "", "E341 --phases FILE, phase 1 must be 'name: value' pairs, not 'a'"),
    "no name": ([{"tokens": 1}], "", "E341 --phases FILE, phase 1 needs a name of one word"),
    "no tokens": ([{"name": "a"}], "", "E341 --phases FILE, phase 1 needs its length"),
    "tokens of a dozen": ([{"name": "a", "tokens": "dozen"}], "", "needs its length"),
    "tokens below 1": ([{"name": "a", "tokens": 0}], "", "needs its length"),
    "one name twice": ([MAIN, MAIN], "", "E341 --phases FILE names several phases main"),
    "a length": (
        [{**MAIN, "train_iters": 5}],
        "",
        "phase 1 sets train_iters, but the length of a phase",
    ),
    "a folder": ([{**MAIN, "save": "x"}], "", "phase 1 sets save, which is the same in all phases"),
    "a folder in its group": (
        [{**MAIN, "checkpoint": {"save": "x"}}],
        "",
        "E341 --phases FILE, phase 1 sets save, which is the same in all phases",
    ),
    "a length in its group": ([{**MAIN, "training": {"train-iters": 5}}], "", "phase 1 sets train_iters, but"),
    "an option twice": ([{**MAIN, "lr": 1, "optimizer": {"lr": 2}}], "", "E341 --phases FILE, phase 1 sets lr twice"),
    "a wrong group": ([{**MAIN, "model": {"lr": 1}}], "", "E005 FILE, phase main: there is no option model.lr"),
    "steps": (
        [{**MAIN, "iterations_to_skip": [3, 4]}],
        "",
        "phase 1 sets iterations_to_skip, which is the same in all phases\n  fix: --iterations-to-skip 3 4",
    ),
    "a device": ([{**MAIN, "device": "cuda"}], "", "phase 1 sets device, which is the same in all phases"),
    "an unknown option": ([{**MAIN, "seq_lenght": 5}], "", "E005 FILE, phase main: there is no option seq_lenght"),
    "a value": ([MAIN, {**MAIN, "name": "b", "lr": "x"}], "", "E002 FILE, phase b: optimizer.lr"),
    "a length of the run": (
        [MAIN],
        "--train-iters 5",
        "E340 --train-iters and --phases both set the length",
    ),
    "another shape": (
        [MAIN, {**MAIN, "name": "b", "num_layers": 3}],
        "",
        "E821 phase b: the model is not that of phase main: ",
    ),
    "another optimizer": ([MAIN, {**MAIN, "name": "b", "optimizer": "sgd"}], "", "E824 phase b: the optimizer is not"),
    "too long": ([MAIN, {**MAIN, "name": "b", "seq_length": 64, "max_position_embeddings": 32}], "", "E105 phase b:"),
    "a batch of all": ([MAIN, {**MAIN, "name": "b"}], "--micro-batch-size 3", "E301 global batch 4 is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    phases, flags, expected = REFUSED[name]
    with pytest.raises(UserError) as refused:
        read(tmp_path, phases, f"{RUN} {flags}")
    assert expected in str(refused.value).replace(str(tmp_path / "phases.yaml"), "FILE")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"E341 --phases absent.yaml cannot be read: No such file"):
        read_start(shlex.split(f"{RUN} --save s --phases absent.yaml"))


@pytest.mark.parametrize("text", [1024, "1024", "1.024K", "1_024", "1.024e3"])
def test_tokens_are_reached_by_the_last_step_and_not_before(tmp_path: Path, text: Any) -> None:
    (phase,) = read(tmp_path, [{"name": "a", "tokens": text}]).plan
    assert (phase.steps, phase.tokens, phase.config.training.train_samples) == (8, 1024, 32)


def test_tokens_of_less_than_a_step_are_a_step(tmp_path: Path) -> None:
    (phase,) = read(tmp_path, [{"name": "a", "tokens": 3}]).plan
    assert (phase.steps, phase.tokens) == (1, 128)


@pytest.mark.parametrize("ramp", [None, (2, 2, 20)])
def test_the_number_of_samples_against_counting(ramp: tuple[int, int, int] | None) -> None:
    training = TrainingConfig(seq_length=8, global_batch_size=6, rampup_batch_size=ramp)
    for tokens in range(1, 600):
        samples = 0
        while samples * 8 < tokens:
            samples += 6 if ramp is None else next(s for end, s in ((10, 2), (20, 4), (10**9, 6)) if samples < end)
        assert samples_of_tokens(training, 1, tokens) == samples


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_path": ["{0}/short"]}, "phase b: .*short.bin: size is 8 bytes, expected 10000"),
        (
            {"skip_samples": ["8:40"]},
            "E542 phase b: the samples 8:32 to skip have been consumed.*\n.*skip-samples b/32:40",
        ),
    ],
)
def test_the_data_of_later_phases_are_opened_by_every_start_on_rank_0(
    tmp_path: Path, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetWriter(tmp_path / "web", np.uint16) as writer:
        writer.add_document([1] * 5000)
    (tmp_path / "short.idx").write_bytes((tmp_path / "web.idx").read_bytes())
    (tmp_path / "short.bin").write_bytes(b"\0" * 8)
    options = {name: [each.format(tmp_path) for each in value] for name, value in options.items()}
    phases = [MAIN, {**MAIN, "name": "b", **options}]
    flags = f"{MODEL} --data-path {tmp_path}/web --split 1 --eval-iters 0"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    read(tmp_path, phases, flags)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises((UserError, DataError), match=said):
        read(tmp_path, phases, flags)


def test_one_number_of_ranks_is_checked(tmp_path: Path) -> None:
    phases = [
        MAIN,
        {**MAIN, "name": "cp", "context_parallel_size": 2},
        {**MAIN, "name": "tp", "tensor_model_parallel_size": 4},
    ]
    start = read(tmp_path, phases, f"{RUN} --check-config")
    assert [each.parsed.world_size for each in start.phases] == [4] * 3


def test_a_schedule_of_its_own_has_lengths_of_its_own(tmp_path: Path) -> None:
    phases = [MAIN, {**MAIN, "name": "b", "lr": 1e-4}, {**MAIN, "name": "c", "seq_length": 64}]
    flags = f"{RUN} --lr-warmup-iters 3 --lr-decay-samples 20 --lr-decay-style cosine"
    main, own, common = (phase.config.optimizer for phase in read(tmp_path, phases, flags).plan)
    total = 1024 * 3
    assert main.schedule_tokens == common.schedule_tokens == (3 * 4 * 32, 20 * 32, 0, total)
    assert own.schedule_tokens is None
    for optimizer in (main, own, common):
        assert (optimizer.lr_warmup_iters, optimizer.lr_decay_samples) == (0, None)
    headings = describe_plan(read(tmp_path, phases, flags).plan, 1)
    assert "steps 17 to 20, 1,024 tokens to 3,072" in headings[2]
    assert "note: the learning rate jumps from 0 to 0.0001 where b begins" in headings[1]
    continued = read(tmp_path, phases[:2], f"{RUN} --lr-decay-style cosine --min-lr 1e-4").plan
    assert "jumps" not in describe_plan(continued, 1)[1]


def test_phases_with_a_schedule_of_their_own_at_the_end_do_not_change_that_of_the_others(tmp_path: Path) -> None:
    own = {**MAIN, "name": "b", "lr": 1e-4}
    for last, flags, expected in (
        ([], "", (0, 1024, 0, 1024)),
        ([own], "", (0, 1024, 0, 1024)),
        ([{**own, "tokens": 5000}], "", (0, 1024, 0, 1024)),
        ([own, {**MAIN, "name": "c"}], "", (0, 3072, 0, 3072)),
        ([own], "--schedule-tokens 128 4000 0 4096", (128, 4000, 0, 4096)),
    ):
        plan = read(tmp_path, [MAIN, *last], f"{RUN} {flags}").plan
        assert plan[0].config.optimizer.schedule_tokens == expected
        assert [phase.config.optimizer.schedule_tokens for phase in plan[1:2]] == [None] * len(last[:1])


@pytest.mark.parametrize("spelling", [{"optimizer": {"lr": 1e-4}}, {"optimizer.lr": 1e-4}])
def test_options_in_groups_are_those_of_the_phase(tmp_path: Path, spelling: dict[str, Any]) -> None:
    flat, grouped = (read(tmp_path, [MAIN, {**MAIN, "name": "b", **each}]).plan for each in ({"lr": 1e-4}, spelling))
    assert grouped == flat
    assert grouped[1].config.optimizer.schedule_tokens is None


def mixture(folder: Path, max_epochs: float) -> str:
    for name in ("web", "code"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for _ in range(100):
                writer.add_document([*range(1, 50), 0])
    stages = f"""
sources: {{web: {{path: {folder}/web}}, code: {{path: {folder}/code, max_epochs: {max_epochs}}}}}
stages:
- {{name: warm, share: 25%, mix: {{web: 1}}}}
- {{name: main, mix: {{web: 1, code: 1}}}}
- {{name: long, share: 25%, seq_length: 64, mix: {{code: 1}}}}
"""
    (folder / "mix.yaml").write_text(stages)
    return f"{MODEL} --data-mixture {folder}/mix.yaml --save {folder}/saved --train-samples 64"


def test_stages_of_another_sequence_length_are_phases(tmp_path: Path) -> None:
    start = read_start(shlex.split(f"{mixture(tmp_path, 1)} --check-config"))
    plan: list[Phase] = start.plan
    assert [phase.name for phase in plan] == ["warm-main", "long"]
    assert [phase.config.training.seq_length for phase in plan] == [32, 64]
    assert [phase.config.data.data_mixture_stages for phase in plan] == [("warm", "main"), ("long",)]
    assert [(phase.steps, phase.tokens) for phase in plan] == [(12, 1536), (2, 512)]


def test_epochs_over_all_phases_are_refused_before_the_run(tmp_path: Path) -> None:
    """A fifth of an epoch is 1,000 tokens: neither the 512 of main nor the 512 of long exceed them, but both do."""
    flags = mixture(tmp_path, 0.2)
    with pytest.raises(UserError, match=r"phase long: .*code .*max_epochs is 0.2"):
        read_start(shlex.split(flags))
