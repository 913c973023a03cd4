"""Every program names the model of every location in one way: it opens the same weights, or refuses with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import load_file

from megatron.evaluation.harness import language_model_class
from pretrain_gpt import main as pretrain
from tasks.evaluate.perplexity import main as perplexity
from tests.kit.checkpoints import BYTES
from tests.unit.convert.folders import llama, random_weights, write_adapters, write_folder
from tools.convert_checkpoint import main as convert
from tools.edit_checkpoint import main as edit
from tools.generate import main as generate
from tools.inspect_checkpoint import main as inspect

MODEL = llama(vocab_size=259, max_position_embeddings=32)
BASE = ("own", "store", "hf", "megatron")
"""Forms of one model. The others are forms of the same model with adapters."""

ADAPTED = ("adapters", "peft")
CHECKPOINTS = ("own", "store", "megatron", "adapters")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Locations of the model, by form."""
    top = tmp_path_factory.mktemp("forms")
    hf = write_folder(top / "hf", MODEL, random_weights(MODEL))
    write_adapters(top / "adapters" / "iter_0000007", hf, lora_target=("linear_qkv", "linear_fc2"))
    assert convert(["--load", f"hf:{hf}", "--save", f"{top}/own", "--no-check"]) == 0
    assert convert(["--load", f"{top}/own", "--save-megatron", f"{top}/megatron"]) == 0
    assert convert(["--load", f"{top}/adapters", "--save-peft", f"{top}/peft"]) == 0
    fsspec.filesystem("memory").put(f"{top}/own", "/sources/run", recursive=True)
    return {
        "own": f"{top}/own",
        "store": "memory://sources/run",
        "hf": f"hf:{hf}",
        "megatron": f"megatron:{top}/megatron",
        "adapters": f"{top}/adapters",
        "peft": f"peft:{top}/peft",
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, which the forms do not have."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in BYTES.items():
        (folder / name.removeprefix("tokenizer/")).write_bytes(content)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], location: str) -> str:
    """The last lines on stderr, which name the location."""
    seen = capsys.readouterr().err
    assert location in seen
    assert "Traceback" not in seen
    return seen


def test_generation(forms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for form, location in forms.items():
        flags = ["--prompt", "17 4", "--max-new-tokens", "12", "--params-dtype", "fp64", "--greedy"]
        assert generate(["--load", location, *flags]) == 0
        texts[form] = capsys.readouterr().out
    assert len({texts[form] for form in BASE}) == len({texts[form] for form in ADAPTED}) == 1
    assert texts["own"] != texts["peft"]


def test_perplexity(forms: dict[str, str], tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Two and two is four. The sky is blue.")
    losses = {}
    for form, location in forms.items():
        flags = ["--data", f"{tmp_path}/text.txt", "--output", f"{tmp_path}/{form}", "--params-dtype", "fp64"]
        assert perplexity(["--load", location, "--tokenizer-model", str(tokenizer), *flags]) == 0
        losses[form] = json.loads((tmp_path / form).read_text())["loss"]
    assert len({losses[form] for form in BASE}) == len({losses[form] for form in ADAPTED}) == 1
    assert losses["own"] != losses["peft"]


def test_harness(forms: dict[str, str], tokenizer: Path) -> None:
    scores = {}
    for form, location in forms.items():
        arguments = {"load": location, "tokenizer": str(tokenizer), "dtype": "fp64"}
        model = language_model_class().create_from_arg_obj(arguments, {"batch_size": 1})
        scores[form] = model.shared.score([([5, 6, 7, 8], 2)])[0][0]
    assert len({scores[form] for form in BASE}) == len({scores[form] for form in ADAPTED}) == 1
    assert scores["own"] != scores["peft"]


def test_conversion(forms: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form, location in forms.items():
        if form in CHECKPOINTS:
            flags = ["--save-hf", f"{tmp_path}/{form}", "--no-check", "--dtype", "fp32"]
            assert convert(["--load", location, *flags]) == 0
        else:
            assert convert(["--load", location, "--save", f"{tmp_path}/{form}-own"]) == 0
            assert convert(["--load", f"{tmp_path}/{form}-own", "--save-hf", f"{tmp_path}/{form}", "--no-check"]) == 0
    written = {form: (tmp_path / form / "model.safetensors").read_bytes() for form in forms}
    assert len({written[form] for form in BASE}) == len({written[form] for form in ADAPTED}) == 1
    assert load_file(tmp_path / "own/model.safetensors").keys() == random_weights(MODEL).keys()
    with pytest.raises(SystemExit, match="2"):
        convert(["--load", forms["hf"], "--save-hf", f"{tmp_path}/again"])
    assert "nanotron: go with --save" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hf", "megatron", "peft"])
def test_older_flags_of_the_conversion(name: str, forms: dict[str, str], tmp_path: Path) -> None:
    scheme, _, folder = forms[name].partition(":")
    assert scheme == name
    assert convert(["--load", forms[name], "--save", f"{tmp_path}/new"]) == 0
    assert convert([f"--load-{name}", folder, "--save", f"{tmp_path}/old"]) == 0
    new, old = ([p.read_bytes() for p in sorted(tmp_path.glob(f"{way}/**/*.safetensors"))] for way in ("new", "old"))
    assert len(new) == 1
    assert new == old


def test_programs_that_read_checkpoints_alone(
    forms: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, location in forms.items():
        changed = ["--load", location, "--drop-layers", "0", "--save", f"{tmp_path}/{form}"]
        if form in CHECKPOINTS:
            assert inspect(["show", location]) == 0
            assert edit(changed) == 0
            continue
        for program, arguments in ((inspect, ["show", location]), (edit, changed)):
            with pytest.raises(SystemExit, match="2"):
                program(arguments)
            assert f"convert_checkpoint.py --load {location} --save NEW" in refusal(capsys, location)


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint", "--reference-model", "--teacher-model"])
@pytest.mark.parametrize("form", [*BASE, "peft"])
def test_training(flag: str, form: str, forms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = "--mock-data --seq-length 16 --train-iters 4 --global-batch-size 1 --device cpu --lr 1e-3 --check-config"
    argv = [*run.split(), flag, forms[form]]
    if flag == "--load":
        argv += ["--resume-mode", "weights-only"]
    elif flag == "--teacher-model":
        argv += ["--objective", "distillation", "--load", forms["hf"]]
    elif flag == "--reference-model":  # without pairs of answers the objective is refused, but not the location
        argv += ["--objective", "dpo", "--load", forms["hf"]]
    status, place = pretrain(argv), forms[form]
    printed = capsys.readouterr()
    if form == "peft" and flag in ("--load", "--pretrained-checkpoint"):
        assert status == 2
        assert f"E801 {flag} {place} is an adapter of PEFT" in printed.err
        assert f"convert_checkpoint.py --load {place} --save NEW" in printed.err
    elif flag == "--reference-model":
        assert place not in printed.err
    else:
        assert status == 0, printed.err


@pytest.mark.parametrize("location", ["", "hf:", "megatron:", "peft:"])
def test_no_location(location: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(["--load", location, "--prompt", "1"]) == 2
    assert f"E801 --load '{location}' names no folder" in capsys.readouterr().err
    assert pretrain(["--mock-data", "--vocab-size", "9", "--load", location, "--check-config"]) == 2
    assert f"E801 --load '{location}' has no folder name" in capsys.readouterr().err


def test_options_that_do_not_apply(forms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for form, *flags in (
        ("hf", "--ckpt-step", "3"),
        ("hf", "--ema"),
        ("hf", "--pretrained-checkpoint", "x"),
        ("peft", "--ckpt-step", "3"),
        ("peft", "--ema"),
    ):
        assert generate(["--load", forms[form], "--prompt", "1", *flags]) == 2
        assert f"E803 {flags[0]}" in (seen := capsys.readouterr().err)
        assert f"fix: drop {flags[0]}" in seen
