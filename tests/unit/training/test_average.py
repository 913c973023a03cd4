"""The moving average of the weights: from step to step, through checkpoints, and in exports of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import whole_box
from megatron.config.errors import UserError
from megatron.convert.saved_model import EMA_PREFIX, SavedModel
from megatron.convert.sources import SourceOptions, open_checkpoint
from megatron.evaluation.load import open_pretrained
from megatron.training.build import build_trainer
from megatron.training.step import evaluate
from tests.kit.runs import checkpoint, column, start, tiny_run
from tools.convert_checkpoint import main

DECAY = 0.75


def run(folder: Path, flags: str) -> str:
    """Return the output of a run of 6 steps that saves each of them."""
    printed = start(tiny_run(folder, f"--save {folder}/saved --save-interval 1 {flags}"))
    assert (printed.status, printed.err) == (0, "")
    return printed.out


def weights_and_average(folder: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors, _ = checkpoint(folder / f"saved/iter_{step:07d}")
    weights = {name: value.double() for name, value in tensors.items() if not name.startswith("optim.")}
    average = {n.removeprefix(EMA_PREFIX): value.double() for n, value in tensors.items() if n.startswith(EMA_PREFIX)}
    return weights, average


def check(folder: Path, average: dict[str, Tensor], first: int) -> None:
    """From the one before step ``first`` on, the average of each step follows from the weights that were saved."""
    for step in range(first, 7):
        weights, saved = weights_and_average(folder, step)
        assert saved.keys() == weights.keys()
        average = {name: DECAY * average[name] + (1 - DECAY) * weights[name] for name in weights}
        for name, expected in average.items():
            torch.testing.assert_close(saved[name], expected, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_the_average_of_every_step_follows_from_the_main_parameters(tmp_path: Path) -> None:
    run(tmp_path, f"--bf16 --ema-decay {DECAY}")
    check(tmp_path, weights_and_average(tmp_path, 1)[1], 2)


def test_evaluation_of_it_does_not_change_the_run(tmp_path: Path) -> None:
    """Later weights match a run without evaluations; the loss belongs to a model with the average."""
    flags = f"--ema-decay {DECAY} --params-dtype fp32"
    run(tmp_path / "quiet", flags)
    out = run(tmp_path / "run", f"{flags} --eval-iters 1 --eval-interval 2")
    for one, other in zip(weights_and_average(tmp_path / "quiet", 6), weights_and_average(tmp_path / "run", 6)):
        assert all(torch.equal(one[name], other[name]) for name in one)
    losses = column(tmp_path / "run", "lm loss validation ema", "lm loss validation")
    assert len(set(losses)) == 3
    assert f"ema {losses[0]:.4f}" in out
    trainer = build_trainer(tiny_run(tmp_path, "--eval-iters 1"), 0, 1)
    for name, value in weights_and_average(tmp_path / "run", 6)[1].items():
        weight = trainer.optimizer.main_params[name].data
        weight.zero_().view(-1)[: value.numel()] = value.view(-1).to(weight.dtype)
    assert evaluate(trainer).item() == losses[-1]


def test_the_average_starts_from_the_weights_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    run(tmp_path, "--exit-interval 3")
    out = run(tmp_path, f"--ema-decay {DECAY} --load {tmp_path}/saved --resume-mode new-schedule")
    assert "the checkpoint has no average of the weights: it starts from the weights" in out
    check(tmp_path, weights_and_average(tmp_path, 3)[0], 4)


def test_the_average_can_be_loaded_as_the_model(tmp_path: Path) -> None:
    run(tmp_path, f"--ema-decay {DECAY}")
    manifest, _ = open_checkpoint(tmp_path / "saved")
    weights, average = weights_and_average(tmp_path, 6)
    for wanted, found in ((weights, SavedModel(manifest)), (average, SavedModel(manifest, average=True))):
        for name, spec in found.specs.items():
            values = found.read(name, spec.view, whole_box(spec.view))
            assert torch.equal(values.double().view(spec.shape), wanted[name]), name
    name = "final_layernorm.weight"
    source = open_pretrained(f"{tmp_path}/saved", SourceOptions(average=True)).source
    assert torch.equal(source.read(name, (16,), whole_box((16,))).double(), average[name])
    assert main(["--load", f"{tmp_path}/saved", "--save-hf", f"{tmp_path}/hf", "--ema", "--no-check"]) == 0
    written = load_file(tmp_path / "hf/model.safetensors")["transformer.ln_f.weight"]
    assert torch.equal(written, average[name].to(written.dtype))


def test_a_missing_average_is_reported(tmp_path: Path) -> None:
    run(tmp_path, "")
    with pytest.raises(CheckpointError, match="iter_0000006 has no average of the weights"):
        open_pretrained(f"{tmp_path}/saved", SourceOptions(average=True))
    with pytest.raises(UserError, match=r"E803 --ema: .* one set of weights"):
        open_pretrained("hf:anywhere", SourceOptions(average=True))
