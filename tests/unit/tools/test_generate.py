"""The generation tool, as a person runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

from megatron.inference.generate import SamplingParams, generate, generate_scored
from megatron.inference.text import TextCodec
from megatron.model.gpt import GPTChunk
from tests.kit.checkpoints import BYTES, save_model
from tests.kit.solo import Solo, tiny
from tools.generate import main

ROOT = Path(__file__).parents[3]
CODEC = TextCodec({name.removeprefix("tokenizer/"): content for name, content in BYTES.items()})
PROMPT = "héllo"


def model(seed: int = 0) -> GPTChunk:
    """Far from its first weights, so that steps differ."""
    chunk = Solo.build(tiny(vocab_size=257, max_position_embeddings=40), torch.float32).chunk
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in chunk.params.values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return chunk


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 10 and 20, which differ."""
    folder = tmp_path_factory.mktemp("save")
    for step in (10, 20):
        save_model(model(step), folder, step)
    return folder


def expected(step: int, prompt: str, new: int, sampling: SamplingParams, number: int = 0) -> str:
    """Prompt and continuation, computed on the model itself; prompts before it make its number."""
    prompts = [CODEC.encode(prompt)] * (number + 1)
    ids = generate(model(step), prompts, new, sampling, [256], batch_size=1)[number]
    ids = ids[:-1] if ids[-1] == 256 else ids
    return CODEC.decode(prompts[0] + ids)


def test_the_newest_checkpoint_writes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", str(saved), "--prompt", PROMPT, "--max-new-tokens", "12", "--greedy"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(20, PROMPT, 12, SamplingParams(0.0)) + "\n"
    note, speed = err.splitlines()
    assert note == f"generate: from {saved}/iter_0000020, step 20"
    assert re.fullmatch(r"generate: \d+ tokens in [\d.]+ s, [\d.,]+ tokens/s; the first after [\d.]+ s", speed)


def test_with_batch_invariance_log_probabilities_are_the_same_in_every_batch(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[GPTChunk] = []
    monkeypatch.setattr("megatron.inference.generate.generate", lambda chunk, *rest: chunks.append(chunk))
    assert main(["--load", str(saved), "--prompt", PROMPT, "--batch-invariant"]) == 0
    prompts = [list(range(1, length)) for length in (3, 25, 8, 14, 2)]
    alone, together = (generate_scored(chunks[0], prompts, 12, SamplingParams(0.0), batch_size=size) for size in (1, 5))
    assert alone == together


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_samples_of_an_older_checkpoint(saved: Path, stream: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ckpt-step", "10", "--temperature", "1.3", "--top-k", "100", "--top-p", "0.9", "--seed", "7"]
    prompts = [PROMPT, "x", ""]
    assert main(["--load", str(saved), "--prompt", *prompts, "--max-new-tokens", "9", *flags, *stream]) == 0
    sampling = SamplingParams(1.3, 100, 0.9, 7)
    texts = [expected(10, prompt, 9, sampling, number) for number, prompt in enumerate(prompts[:2])]
    blocks = capsys.readouterr().out.split("\n\n--- ")
    assert blocks[:2] == [f"--- 1 of 3\n{texts[0]}", f"2 of 3\n{texts[1]}"]
    assert blocks[2].startswith("3 of 3\n")


def test_one_checkpoint_by_its_own_folder_and_prompts_from_a_file(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = (PROMPT, "x\u2028y", "z")  # lines end with a newline and nothing else
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3", "--greedy"]
    assert main(["--load", str(saved / "iter_0000010"), *flags]) == 0
    texts = [expected(10, prompt, 3, SamplingParams(0.0)) for prompt in prompts]
    blocks = [f"--- {number} of 3\n{text}\n" for number, text in enumerate(texts, start=1)]
    assert capsys.readouterr().out == "\n".join(blocks)


def test_the_prompt_on_standard_input(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(f"{PROMPT}\n".encode())))
    assert main(["--load", str(saved), "--greedy", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == expected(20, PROMPT, 3, SamplingParams(0.0)) + "\n"


def test_without_a_number_as_many_as_fit(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", str(saved), "--prompt", "x" * 30, "--greedy"]) == 0
    assert capsys.readouterr().out == expected(20, "x" * 30, 10, SamplingParams(0.0)) + "\n"


def test_a_model_without_a_tokenizer_reads_and_writes_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(model(), tmp_path, files={})
    flags = ["--load", str(tmp_path), "--max-new-tokens", "4", "--greedy"]
    assert main([*flags, "--prompt", "7 11"]) == 0
    ids = generate(model(), [[7, 11]], 4, SamplingParams(0.0))[0]
    assert capsys.readouterr().out == " ".join(map(str, [7, 11, *ids])) + "\n"
    assert main([*flags, "--prompt", "seven"]) == 2
    assert "a prompt is token ids" in capsys.readouterr().err


def test_weights_are_rounded_into_the_format_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(model(), tmp_path, params_dtype="bf16")
    flags = ["--load", str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "12", "--greedy"]
    assert main(flags) == 0
    rounded = model().to(torch.bfloat16)
    assert not rounded.rotary
    prompt = CODEC.encode(PROMPT)
    ids = [token for token in generate(rounded, [prompt], 12, SamplingParams(0.0), [256])[0] if token != 256]
    assert capsys.readouterr().out == CODEC.decode(prompt + ids) + "\n"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--prompt", "x" * 41], 2, "prompt 1 has 41 tokens; the model has 40 positions"),
        (["--prompt", "x", "--max-new-tokens", "40"], 2, "fix: --max-new-tokens 39"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "must be at least 1"),
        (["--prompt", "x", "--top-k", "0"], 2, "fix: --top-k 50"),
        (["--prompt", "x", "--greedy", "--top-k", "5"], 2, "have no effect"),
        (["--prompt", "x", "--batch-size", "0"], 2, "--batch-size 0"),
        (["--prompt", "x", "--ckpt-step", "15"], 1, "a checkpoint of step 15"),
        (["--prompt", "x", "--ema"], 1, "has no average of the weights"),
        (["--prompt", "x", "--tensor-model-parallel-size", "2"], 2, "torchrun --nproc-per-node 2 tools/generate.py"),
        (["--prompt", "\udcff"], 2, "not text in UTF-8"),
        (["--prompts", "/none"], 2, "--prompts /none cannot be read: No such file or directory"),
    ],
)
def test_invalid_arguments_are_refused(
    saved: Path, flags: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--load", str(saved), *flags]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("generate: ")
    assert message in err


@pytest.mark.parametrize(
    ("load", "status", "message"),
    [
        ("FOLDER/missing", 1, "FOLDER/missing does not hold a checkpoint"),
        ("hf:FOLDER/missing", 2, "FOLDER/missing"),
        ("FOLDER", 2, "--load FOLDER is a Hugging Face model, not a folder of checkpoints\n  fix: --load hf:FOLDER\n"),
        ("", 2, "--load '' names no folder\n  fix: --load "),
        ("hf:", 2, "--load 'hf:' names no folder\n  fix: --load "),
    ],
)
def test_nothing_to_load(
    tmp_path: Path, load: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["--load", load.replace("FOLDER", str(tmp_path)), "--prompt", "x"]) == status
    assert message.replace("FOLDER", str(tmp_path)) in capsys.readouterr().err


def test_skipped_checkpoints_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        path = save_model(model(step), tmp_path, step)
    (path / "COMPLETE").unlink()
    assert main(["--load", str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "2", "--greedy"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(10, PROMPT, 2, SamplingParams(0.0)) + "\n"
    assert err.startswith(f"generate: from {tmp_path}/iter_0000010, step 10\ngenerate: passed over {path}: ")


def test_help_of_tools_needs_no_torch() -> None:
    names = "convert_checkpoint diff_runs draw_schedule generate inspect_checkpoint inspect_dataset launch"
    names += " merge_datasets preprocess_data train_tokenizer"
    program = (
        "import contextlib, importlib, sys\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(f'tools.{name}').main(['--help'])\n"
    )
    command = [sys.executable, "-c", program, *names.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(names.split()) + 1, "inspect_dataset has two uses"


def test_a_closed_pipe_ends_it_quietly(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    closed = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", closed)
    assert main(["--load", str(saved), "--prompt", "x", "--max-new-tokens", "30"]) == 1
    assert sys.stdout is not closed, "the end of the process writes what is left in it"
    assert capsys.readouterr().err == f"generate: from {saved}/iter_0000020, step 20\n"
    with suppress(BrokenPipeError):
        closed.close()
