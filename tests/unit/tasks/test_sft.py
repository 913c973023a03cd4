"""Supervised fine-tuning through its command: from a folder of Hugging Face to one, and data that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tasks.finetune import sft
from tests.kit.runs import column, records
from tools import convert_checkpoint

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|end|>' if m.role == 'assistant' }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
FLAGS = "--device cpu --seq-length 48 --global-batch-size 2 --micro-batch-size 2 --lr 1e-2 --log-interval 1 --fp64"
PAIRS = ("ab", "cd", "ef", "gh", "ij")


def save_base(folder: Path) -> None:
    """A random Llama whose tokenizer ends documents with id 256, and has ``<|end|>`` as id 257, which is no eos."""
    from tests.kit.checkpoints import BYTES

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=264, eos_token_id=256, **sizes))
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, True
    model.save_pretrained(folder)
    for name, content in BYTES.items():
        (folder / name.removeprefix("tokenizer/")).write_bytes(content)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write(path: Path, pairs: tuple[str, ...] = PAIRS) -> None:
    turns = ([{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs)
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))


def test_a_chat_model_from_hugging_face_and_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tokenizer and template come from the model; it answers as taught, and stops, in `transformers`."""
    base, out = tmp_path / "base", tmp_path / "run"
    save_base(base)
    write(tmp_path / "train")
    write(tmp_path / "valid", PAIRS[:3])
    paths = f"--chat-data-path {tmp_path}/train --valid-chat-data-path {tmp_path}/valid --run-dir {out}"
    argv = f"--pretrained-checkpoint hf:{base} {paths} --save {out}/saved --num-epochs 90 {FLAGS}".split()
    argv += ["--lr-decay-style", "constant"]
    assert sft.main(argv) == 0
    assert column(out, "iteration", "lm loss validation") == [*range(2, 181, 2)], "at the end of every epoch"
    assert records(out)[-1]["lm loss"] < 0.05
    assert convert_checkpoint.main(["--load", f"{out}/saved", "--save-hf", f"{tmp_path}/chat", "--dtype", "fp32"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "chat")
    assert model.generation_config.eos_token_id == [257, 256]
    assert model.generation_config.temperature == 0.5
    for question, answer in PAIRS:
        asked: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        found = model.generate(**asked, max_new_tokens=9, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(found) == f"{answer}<|end|>"
    assert sft.main(argv) == 0
    assert "nothing to do: this run ends with step 180" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "line", ['{"messages": []}', '{"prompt": 5}', "{", '{"prompt": "", "completion": "%s"}' % ("x" * 60)]
)
def test_bad_lines_end_the_command_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base")
    write(tmp_path / "train")
    with open("train", "a") as file:
        file.write(line)
    argv = f"--pretrained-checkpoint hf:base --chat-data-path train --save saved --run-dir run {FLAGS}".split()
    for options in (argv, [*argv, "--check-config"]):
        assert sft.main(options) == 2
        reported = capfd.readouterr().err
        assert "1 of 6 conversations cannot be used: train:6" in reported
        assert "--bad-samples skip" in reported
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "train"]
    assert sft.main([*argv, "--bad-samples", "skip", "--check-config"]) == 0
    assert "left out: 1 of 6 conversations cannot be used: train:6" in capfd.readouterr().out


def test_a_model_without_a_template(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_base(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").unlink()
    write(tmp_path / "train")
    argv = f"--pretrained-checkpoint hf:{tmp_path}/base --chat-data-path {tmp_path}/train {FLAGS}".split()
    assert sft.main(argv) == 2
    assert "the tokenizer has no chat template\n  fix: --chat-template FILE.jinja" in capfd.readouterr().err
