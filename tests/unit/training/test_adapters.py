"""Runs with adapters: their start points, checkpoints and resumption."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.evaluation.load import open_pretrained
from megatron.kernels.quantized import dequantize, normal_float_codes
from megatron.layers.linear import ParallelLinear
from megatron.layers.parameters import gpt, trainable
from megatron.training.resume_source import preview_start
from megatron.training.trainer import Trainer
from tests.kit.runs import Outcome, before_step, checkpoint, differences, kill, start, steps, tiny_run
from tests.kit.solo import one_rank_mesh
from tests.unit.convert.folders import random_weights, write_folder
from tools.convert_checkpoint import main as convert

SAVING = "--micro-batch-size 2 --save-interval 2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 2 of a run."""
    folder = tmp_path_factory.mktemp("base")
    assert start(tiny_run(folder, f"{SAVING} --train-iters 2 --save {folder}/saved")).status == 0
    return folder / "saved" / "iter_0000002"


def run(folder: Path, base: Path | str, flags: str = "--lora-rank 2", step: int = 0) -> Outcome:
    """Fine-tune; be killed before ``step``."""
    return start(config_of(folder, base, flags), before_step(step, kill) if step else None)


def config_of(folder: Path, base: Path | str, flags: str) -> RunConfig:
    return tiny_run(folder, f"{SAVING} --save {folder}/saved --pretrained-checkpoint {base} {flags}")


def llama_folder(tmp_path: Path) -> str:
    llama = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    model = tiny_run(tmp_path, llama).model
    return f"hf:{write_folder(tmp_path / 'hf', model, random_weights(model))}"


@pytest.mark.parametrize(
    "flags",
    ["--lora-rank 2 --lora-target linear_qkv.v mlp.*", "--lora-rank 3 --lora-dora --bf16 --ema-decay 0.9"],
    ids=["lora", "dora"],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, base: Path, flags: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, base, flags).status == 0
    assert run(parts, base, flags, step=5).status is None
    resumed = run(parts, base, flags)
    assert resumed.status == 0
    assert f"frozen weights from {base}" in resumed.out
    assert steps(parts) == steps(whole)
    last = "saved/iter_0000006"
    assert differences(parts / last, whole / last) == []


def test_checkpoints_hold_the_adapters_alone(tmp_path: Path, base: Path) -> None:
    assert run(tmp_path, base, "--lora-rank 2 --lora-dora").status == 0
    tensors, state = checkpoint(tmp_path / "saved" / "iter_0000006")
    config = tiny_run(tmp_path, f"--lora-rank 2 --lora-dora --pretrained-checkpoint {base}").model
    names = {*trainable(gpt(config))}
    assert {*tensors} == names | {f"optim.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names}
    assert state["base"]["location"] == str(base)
    weights, _ = checkpoint(base)
    magnitude = tensors["layers.0.mlp.linear_fc2.lora_magnitude"]
    torch.testing.assert_close(magnitude, weights["layers.0.mlp.linear_fc2.weight"].norm(dim=1), rtol=0.5, atol=0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("checkpoint", "fp64"), ("hf", "fp64"), pytest.param("checkpoint", "bf16", id="bf16")],
)
def test_starts_as_the_base(tmp_path: Path, base: Path, kind: str, dtype: str) -> None:
    """The loss of the first step, before any update, equals the loss of the frozen weights."""
    location, losses = llama_folder(tmp_path) if kind == "hf" else str(base), []
    for name, flags in {"full": "", "lora": "--lora-rank 2", "dora": "--lora-rank 2 --lora-dora"}.items():
        assert run(tmp_path / name, location, f"{flags} --train-iters 1 --params-dtype {dtype}").status == 0
        losses.append(steps(tmp_path / name)[1]["lm loss"])
    assert losses[1:] == (losses[:1] * 2 if dtype == "bf16" else pytest.approx(losses[:1] * 2, rel=1e-12))


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_frozen_weights_are_quantised_as_they_are_read(tmp_path: Path, precision: str) -> None:
    """A run killed and resumed is exact; each weight is the base's, up to half a step of its block."""
    wide = f"--hidden-size 64 --ffn-hidden-size 128 {SAVING} --save"
    assert start(tiny_run(tmp_path / "b", f"{wide} {tmp_path}/b/saved --train-iters 2")).status == 0
    location = tmp_path / "b" / "saved" / "iter_0000002"
    flags = f"{wide} {{}}/saved --pretrained-checkpoint {location} --lora-rank 2 --frozen-weights-precision {precision}"
    kept: list[Trainer] = []
    for name, event in {"whole": before_step(6, kept.append), "parts": before_step(4, kill), "": None}.items():
        folder = tmp_path / (name or "parts")
        assert start(tiny_run(folder, flags.format(folder)), event).status == (None if name == "parts" else 0)
    assert differences(tmp_path / "whole/saved/iter_0000006", tmp_path / "parts/saved/iter_0000006") == []
    (chunk,), (weights, _) = kept[0].chunks.values(), checkpoint(location)
    step = 1 / 127 if precision == "int8" else max(b - a for a, b in pairwise(normal_float_codes()))
    for linear in (m for m in chunk.modules() if isinstance(m, ParallelLinear)):
        values = weights[f"{linear.name}.weight"]
        found, blocks = dequantize(linear.weight, precision, torch.float32), values.unflatten(1, (-1, 64))
        error = (found - values).abs().unflatten(1, (-1, 64)).amax(2) / blocks.abs().amax(2)
        assert step / 4 < error.max() <= step / 2 * (1 + 1e-5)


def test_another_base_is_refused_by_name(tmp_path: Path, base: Path) -> None:
    other = tmp_path / "other"
    assert start(tiny_run(other, f"{SAVING} --train-iters 2 --seed 5 --save {other}/saved")).status == 0
    assert run(tmp_path / "run", base, step=4).status is None
    refused = run(tmp_path / "run", other / "saved")
    assert refused.status == 2
    assert f"E818 {tmp_path}/run/saved/iter_0000002 holds adapters of {base}, whose weights are not" in refused.err
    assert f"fix: --pretrained-checkpoint {base}" in refused.err
    moved = tmp_path / "moved" / base.name
    moved.parent.mkdir()
    (moved).symlink_to(base)
    resumed = run(tmp_path / "run", moved)
    assert resumed.status == 0
    assert f"the frozen weights were read from {base} before" in resumed.out
    last = tmp_path / "run" / "saved" / "iter_0000006"
    for flags in ("--lora-rank 2", "--lora-rank 3"):
        chained = run(tmp_path / "chained", tmp_path / "run" / "saved", flags)
        assert chained.status == 2
        assert f"E806 {last} holds adapters of {moved}, not a model" in chained.err
        (fixes,) = [line for line in chained.err.splitlines() if "fix:" in line]
        merge = f"python tools/edit_checkpoint.py --load {last} --merge --save NEW"
        continued = f"--load {last} --resume-mode weights-only --pretrained-checkpoint {moved}"
        assert fixes.split("fix: ")[1].split(" | ") == [merge, continued]
    assert run(tmp_path / "continued", moved, f"--lora-rank 2 --load {last} --resume-mode weights-only").status == 0


def test_adapters_do_not_start_from_a_whole_model(tmp_path: Path, base: Path) -> None:
    loaded = run(tmp_path / "a", base, f"--lora-rank 2 --load {base} --resume-mode weights-only")
    assert start(tiny_run(tmp_path / "b", f"{SAVING} --train-iters 2 --save {tmp_path}/b/saved")).status == 0
    resumed = run(tmp_path / "b", base)
    for refused, path, fix in (
        (loaded, base, "drop --load"),
        (resumed, tmp_path / "b" / "saved" / base.name, "--save ANOTHER"),
    ):
        assert refused.status == 2
        assert f"E806 {path} holds a whole model, not adapters\n  fix: {fix}\n" in refused.err
    adapters = f"--lora-rank 2 --pretrained-checkpoint {base} --load {base} --resume-mode weights-only"
    with pytest.raises(UserError, match=r"E806 .* holds a whole model, not adapters"):  # as under --check-config
        preview_start(tiny_run(tmp_path / "c", adapters), 1)
    folder = llama_folder(tmp_path)
    with pytest.raises(UserError, match=rf"E806 --load {folder} holds no adapters, .*\n  fix: drop --load"):
        config_of(tmp_path, base, f"--lora-rank 2 --load {folder}")


def test_the_default_scale_may_be_written_out(tmp_path: Path, base: Path) -> None:
    assert run(tmp_path, base, step=4).status is None
    changed = run(tmp_path, base, "--lora-rank 2 --lora-alpha 5")
    assert "E822 " in changed.err
    assert run(tmp_path, base, "--lora-rank 2 --lora-alpha 4").status == 0


@pytest.mark.parametrize("kind", ["checkpoint", "hf"])
def test_options_that_change_the_base(
    tmp_path: Path, base: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are reported, and PEFT, which cannot have them, gets no such adapters."""
    location = llama_folder(tmp_path) if kind == "hf" else str(base)
    changed = run(tmp_path / "run", location, "--lora-rank 2 --norm-epsilon 1e-3 --train-iters 2")
    assert changed.status == 0
    assert "--norm-epsilon: base 1e-05 -> now 0.001" in changed.out
    export = ["--load", f"{tmp_path}/run/saved"]
    assert convert([*export, "--save-peft", f"{tmp_path}/peft"]) == 1
    assert "does not compute what the base's does: --norm-epsilon: base 1e-05" in capsys.readouterr().err
    assert not (tmp_path / "peft").exists()
    if kind == "checkpoint":  # a folder's is read with the flags
        assert "E821 " in run(tmp_path / "wide", location, "--lora-rank 2 --ffn-hidden-size 64").err


@pytest.mark.parametrize(("flags", "code"), [("--lora-rank 2", "E806"), ("", "E812")])
def test_a_missing_base_is_named(tmp_path: Path, flags: str, code: str) -> None:
    refused = run(tmp_path, tmp_path / "nothing", flags)
    assert refused.status == 2
    assert f"{code} " in refused.err
    assert f"{tmp_path}/nothing" in refused.err
    assert "fix: --pretrained-checkpoint ANOTHER" in refused.err
    assert not [*tmp_path.glob("saved/iter_*")]


def test_without_adapters_it_is_a_start_from_weights(tmp_path: Path, base: Path) -> None:
    """As ``--load`` with weights only; a later start resumes exactly."""
    loaded = start(tiny_run(tmp_path / "a", f"{SAVING} --save {tmp_path}/a/saved --load {base} --finetune"))
    assert loaded.status == 0
    assert run(tmp_path / "b", base, "", step=5).status is None
    resumed = run(tmp_path / "b", base, "")
    assert resumed.status == 0
    assert "resumed from" in resumed.out
    assert differences(tmp_path / "a/saved/iter_0000006", tmp_path / "b/saved/iter_0000006") == []


def test_loaded_weights_equal_the_trained_ones(tmp_path: Path, base: Path) -> None:
    """From the checkpoint of adapters alone, for inference."""
    kept = []
    config = config_of(tmp_path, base, "--lora-rank 2 --params-dtype fp64")
    assert start(config, before_step(6, kept.append)).status == 0
    (chunk,) = kept[0].chunks.values()
    model = open_pretrained(str(tmp_path / "saved")).build(one_rank_mesh(), "fp64", torch.device("cpu"))
    tokens = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(model.logits(tokens), chunk.eval().logits(tokens), rtol=1e-12, atol=1e-12)
    with chunk.context.adapters.off():
        frozen = open_pretrained(str(base)).build(one_rank_mesh(), "fp64", torch.device("cpu"))
        torch.testing.assert_close(frozen.logits(tokens), chunk.logits(tokens), rtol=0, atol=0)
    assert not torch.allclose(frozen.logits(tokens), model.logits(tokens))


def test_a_run_starts_from_an_adapter_of_peft_as_from_its_own(tmp_path: Path, base: Path) -> None:
    assert run(tmp_path / "first", base, "--lora-rank 2 --lora-target linear_qkv.v mlp.*").status == 0
    first, again, adapter = tmp_path / "first" / "saved", tmp_path / "again", tmp_path / "peft"
    assert convert(["--load", f"{first}", "--save-peft", f"{adapter}"]) == 0
    assert convert(["--load-peft", f"{adapter}", "--pretrained-checkpoint", f"{base}", "--save", f"{again}"]) == 0
    for name, saved in {"a": first / "iter_0000006", "b": again / "iter_0000000"}.items():
        targets = " ".join(Manifest.open(saved).config["model"]["lora_target"])
        flags = f"--resume-mode weights-only --load {saved} --train-iters 2 --lora-rank 2 --lora-target {targets}"
        assert run(tmp_path / name, base, flags).status == 0
    assert steps(tmp_path / "a") == steps(tmp_path / "b")
