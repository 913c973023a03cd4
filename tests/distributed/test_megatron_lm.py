"""A run of Megatron-LM goes on here, in any layout: its main params, moments, step, samples and schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.arguments.cli import parse
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.training.resume_source import preview_start, stored_config
from pretrain_gpt import main
from tests.distributed.resume import gathered, load_and_go_on
from tests.kit.pool import Pool
from tests.kit.runs import records, start
from tests.unit.convert.megatron_lm import change_arguments, expected, moments_of, unpack

RUN = (
    "--seq-length 32 --vocab-size 300 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --device cpu"
)
"""Flags of the run that wrote the checkpoints, without model flags, which the checkpoint has."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that Megatron-LM has written."""
    return unpack(tmp_path_factory.mktemp("megatron"))


def run_from(folder: Path, flags: str = "", ranks: int = 1) -> RunConfig:
    """A run that starts from a folder of Megatron-LM."""
    argv = [*RUN.split(), *flags.split(), "--load", f"megatron:{folder}"]
    return parse(argv, {"RANK": "0", "WORLD_SIZE": str(ranks)}, recall=stored_config).config


@pytest.mark.parametrize(
    ("kind", "layout"), [("gpt2", "torch_dist_tp2"), ("gpt2", "legacy_tp1"), ("llama", "torch_dist_tp2")]
)
def test_a_run_goes_on_the_same_in_every_layout(pool: Pool, written: Path, kind: str, layout: str) -> None:
    folder, bf16 = written / f"{kind}_{layout}", "--bf16" if kind == "gpt2" else ""
    one = pool.run(1, load_and_go_on, run_from(folder, bf16))
    cut = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    four = pool.run(4, load_and_go_on, run_from(folder, f"{bf16} {cut}", 4))
    wanted = expected(written, kind)
    for legs in (one, four):
        loaded = gathered(legs)
        assert loaded.weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(loaded.weights[name].flatten(), tensor.flatten()), name
            for moment, value in moments_of(tensor).items():
                assert torch.equal(loaded.grads[f"optim.{moment}.{name}"].flatten(), value.flatten()), name
    assert len(one[0].losses) == 15
    assert four[0].losses == pytest.approx(one[0].losses, rel=2e-2 if bf16 else 1e-5)
    assert four[0].digest == one[0].digest


def test_step_samples_and_schedule_go_on(written: Path, tmp_path: Path) -> None:
    flags = f"--log-interval 1 --exit-interval 6 --save {tmp_path / 'save'} --run-dir {tmp_path}"
    done = start(run_from(written / "llama_torch_dist_tp2", flags))
    assert done.status == 0, done.err
    (record,) = records(tmp_path)
    assert (record["iteration"], record["consumed-samples"]) == (6, 24)
    assert record["learning-rate"] == 0.0009397114317029975  # of the optimizer's groups in the checkpoint
    assert list(done.samples) == [6]
    assert [number for number, _ in done.samples[6]] == [20, 21, 22, 23]
    again = start(run_from(written / "llama_torch_dist_tp2", flags.replace("interval 6", "interval 7")))
    assert again.status == 0, again.err
    state = Manifest.open(tmp_path / "save" / "iter_0000007").state  # resumed from its own checkpoint
    assert (state["optimizer"], state["consumed_samples"]) == ({"steps": 7}, 28)


def test_a_plain_folder_gets_the_prefix(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written / "gpt2_torch_dist_tp2"
    for path in (folder, folder / "iter_0000005"):
        assert main([*RUN.split(), "--load", str(path), "--check-config"]) == 2
        assert f"fix: --load megatron:{path}" in capsys.readouterr().err
        assert main([*RUN.split(), "--bf16", "--load", f"megatron:{path}", "--check-config"]) == 0
        assert f"checkpoint: {folder / 'iter_0000005'}" in capsys.readouterr().out


def test_weights_alone_need_a_mode_that_is_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*RUN.split(), "--load", f"megatron:{written / 'llama_legacy_tp2_pp2'}", "--check-config"]
    assert main(flags) == 2
    assert "it was saved without its optimizer state" in (output := capsys.readouterr().err)
    assert "fix: --resume-mode weights-only" in output
    assert main([*flags, "--resume-mode", "weights-only"]) == 0


@pytest.mark.parametrize(
    ("flags", "code"),
    [("--hidden-size 64", "E821"), ("--norm-epsilon 1e-4", "E822"), ("--seq-length 16", "E823"), ("--lr 2e-3", "E825")],
)
def test_a_checkpoint_that_contradicts_the_command_line_is_refused(written: Path, flags: str, code: str) -> None:
    with pytest.raises(UserError) as error:
        preview_start(run_from(written / "llama_torch_dist_tp2", flags), 1)
    assert code in {problem.code for problem in error.value.problems}


def test_a_new_schedule_keeps_the_state(written: Path) -> None:
    flags = "--lr 2e-3 --train-iters 30 --resume-mode new-schedule"
    assert preview_start(run_from(written / "llama_torch_dist_tp2", flags), 1).iteration == 5


def test_an_option_that_is_missing_here_is_named(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = change_arguments(written / "llama_legacy_tp1", tmp_path / "run", qk_l2_norm=True, use_mup=True)
    assert main([*RUN.split(), "--load", f"megatron:{folder}", "--resume-mode", "weights-only", "--check-config"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("E854 ")
    assert "qk_l2_norm True, use_mup True: the model here has no such option" in output


def test_the_newest_checkpoint_is_the_one_that_megatron_lm_recorded(written: Path, tmp_path: Path) -> None:
    source, folder = written / "llama_torch_dist_tp2", tmp_path / "run"
    for step in (5, 9, 12):
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        for file in (source / "iter_0000005").iterdir():
            (folder / f"iter_{step:07d}" / file.name).symlink_to(file)
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    assert "iter_0000009" in str(preview_start(run_from(folder), 1).notes)
    assert "iter_0000005" in str(preview_start(run_from(folder, "--ckpt-step 5"), 1).notes)
    (folder / "iter_0000012").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert str(folder / "release") in str(preview_start(run_from(folder), 1).notes)
