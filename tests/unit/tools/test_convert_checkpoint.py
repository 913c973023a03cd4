from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron.contrib.object_store import RemotePath
from megatron.convert.huggingface.check import OutputDifference
from megatron.convert.huggingface.convert import ConversionResult
from megatron.layers.parameters import num_parameters
from tests.unit.convert.folders import llama, random_weights, write_checkpoint, write_folder
from tools.convert_checkpoint import PercentPrinter, main, parse_size


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    write_folder(tmp_path / "hf", model, random_weights(model))
    assert main(["--load-hf", f"{tmp_path}/hf", "--save", f"{tmp_path}/save"]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {tmp_path}/save/iter_0000000: {num_parameters(model):,} parameters" in out
    assert "transformers computes the same: logits by " in out
    assert "%" not in err
    back = [
        "--load",
        f"{tmp_path}/save",
        "--save-hf",
        f"{tmp_path}/back",
        "--dtype",
        "bf16",
        "--max-shard-size",
        "20KB",
    ]
    assert main([*back, "--no-check"]) == 0
    out, err = capsys.readouterr()
    assert "not compared with transformers" in out
    assert err == f"convert_checkpoint: from {tmp_path}/save/iter_0000000, step 0\n"
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2


def test_from_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(RemotePath("memory://convert/run/iter_0000007"), llama())
    assert main(["--load", "memory://convert/run", "--save-hf", f"{tmp_path}/hf", "--no-check"]) == 0
    assert "from memory://convert/run/iter_0000007, step 7" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--load-hf", f"{tmp_path}/hf", "--save", "s3://bucket/run"])
    assert "s3://bucket/run is in an object store" in capsys.readouterr().err


def test_what_was_passed_over_and_what_was_not_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama(window_size=500, max_position_embeddings=1000)
    for step in (7, 9):
        write_checkpoint(tmp_path / "save" / f"iter_{step:07d}", model)
    (tmp_path / "save" / "iter_0000009" / "COMPLETE").unlink()
    assert main(["--load", f"{tmp_path}/save", "--save-hf", f"{tmp_path}/hf"]) == 0
    out, err = capsys.readouterr()
    assert "not compared: the window of 500 tokens, because the rows compared have 32\n" in out
    first, second = err.splitlines()
    assert first == f"convert_checkpoint: from {tmp_path}/save/iter_0000007, step 7"
    assert second.startswith(f"convert_checkpoint: passed over {tmp_path}/save/iter_0000009: ")


@pytest.mark.parametrize(
    ("rotary", "logits", "said"),
    [
        (0.0, 0.0, "logits by 0.0e+00 (0.0e+00 of the largest)"),
        (1e-7, 2e-7, "logits by 2.0e-07 (2.0e-07 of the largest)"),
        (3e-7, 2e-7, "logits by 2.0e-07 (2.0e-07 of the largest); at worst rotary by 3.0e-07 (3.0e-07 of the largest)"),
    ],
)
def test_the_worst_difference_is_told_beside_that_of_the_logits(
    rotary: float, logits: float, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = [OutputDifference("rotary", rotary, rotary), OutputDifference("logits", logits, logits)]
    done = ConversionResult(Path("x"), llama(), differences)
    monkeypatch.setattr("tools.convert_checkpoint.convert", lambda args: done)
    assert main(["--load", "a", "--save-hf", "x"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"transformers computes the same: {said}"


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load-hf", f"{tmp_path}/none", "--save", f"{tmp_path}/save"]) == 1
    assert capsys.readouterr().err.startswith(f"convert_checkpoint: E850 {tmp_path}/none holds no config.json")
    assert main(["--load", f"{tmp_path}/none", "--save-hf", f"{tmp_path}/out"]) == 1
    assert capsys.readouterr().err == f"convert_checkpoint: {tmp_path}/none does not hold a checkpoint\n"
    model = llama()
    weights = random_weights(model)
    del weights["model.norm.weight"]
    write_folder(tmp_path / "hf", model, weights)
    assert main(["--load-hf", f"{tmp_path}/hf", "--save", f"{tmp_path}/save"]) == 1
    assert capsys.readouterr().err == f"convert_checkpoint: {tmp_path}/hf lacks: model.norm.weight\n"
    assert not (tmp_path / "save").exists()
    assert main(["--plugin", "no_such_module", "--load", "a", "--save-hf", "b"]) == 1
    assert "E914" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of the arguments --load-hf --load --load-megatron is required"),
        (["--load-hf", "a"], "one of the arguments --save --save-megatron --save-hf is required"),
        (["--load-hf", "a", "--save-hf", "b"], "--load-hf goes with --save"),
        (["--load", "a", "--save", "b"], "--load with --save-hf"),
        (["--load-megatron", "a", "--save-megatron", "b"], "--load-megatron with the first two"),
        (["--load-megatron", "a", "--save", "b", "--dtype", "bf16"], "--dtype: only with --save-hf"),
        (["--load-hf", "a", "--save", "b", "--dtype", "bf16"], "--dtype: only with --save-hf"),
        (["--load-hf", "a", "--save", "b", "--ckpt-step", "3"], "--ckpt-step: only with --save-hf"),
        (["--load-hf", "a", "--save", "b", "--ema"], "--ema: only with --save-hf"),
        (["--load", "a", "--save-hf", "b", "--max-shard-size", "5XB"], "'5XB' is not a size such as 5GB"),
    ],
)
def test_wrong_flags(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5kb", "2MiB", "7", "7B")] == [5 * 10**9, 1500, 2 * 2**20, 7, 7]
    for text in ("0", "GB", "-1MB", "1 TB"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(text)


def test_tenths_of_what_takes_long_are_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PercentPrinter, "SILENT_SECONDS", 0.0)
    percent = PercentPrinter()
    for done in (1, 5, 15, 16, 99, 100):
        percent("x", done, 100)
    assert capsys.readouterr().err == "10% x\n90% x\n100% x\n"
