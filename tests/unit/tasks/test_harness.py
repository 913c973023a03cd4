"""Answers to lm-eval's requests, compared one by one with its own model of Hugging Face folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from megatron.checkpoint.format import Manifest
from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.evaluation.harness import language_model_class
from tasks.evaluate.harness import main
from tests.kit.checkpoints import save_model
from tests.kit.solo import Solo, tiny
from tests.parity.test_hf import precision
from tests.unit.tasks.local_tasks import TASKS, write_tasks
from tests.unit.tasks.models import save_transformers_model


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and its model in fp64."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_transformers_model(request.param, folder)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Return the tasks in files, without lm-eval's own, which take seconds to list."""
    return TaskManager(include_path=write_tasks(tmp_path_factory.mktemp("tasks")), include_defaults=False)


@pytest.fixture
def _only_local_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line list the tasks in files only."""
    init = TaskManager.__init__
    local = {"include_defaults": False}
    monkeypatch.setattr(TaskManager, "__init__", lambda self, *args, **named: init(self, *args, **named | local))


def answers(model: Any, manager: TaskManager, **options: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The metrics of every task, and the answer to every request."""
    found = simple_evaluate(model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0, **options)
    responses = {
        name: [(sample["arguments"], sample["resps"]) for sample in samples]
        for name, samples in found["samples"].items()
    }
    return found["results"], responses


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Nested lists, with equal texts and close numbers."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other, tolerance)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name], tolerance)
    else:
        assert found == expected


@pytest.mark.parametrize("fewshot", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_answer_matches_the_hf_model(theirs: tuple[Path, Any], manager: TaskManager, fewshot: int) -> None:
    folder, model = theirs
    with precision(torch.float64):
        reference = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3)
        metrics, expected = answers(reference, manager, num_fewshot=fewshot)
    ours = language_model_class().create_from_arg_obj({"load": f"hf:{folder}", "dtype": "fp64"}, {"batch_size": 3})
    found_metrics, found = answers(ours, manager, num_fewshot=fewshot)
    assert_same(found, expected, 1e-10)
    assert_same(found_metrics, metrics, 1e-10)
    if not fewshot:  # in longer contexts the models predict nothing
        assert {flag for _, resps in found["choices"] for resp in resps for _, flag in resp} == {True, False}
        assert len({text for _, resps in found["written"] for (text,) in resps}) > 2


def test_texts_that_end_are_found_in_the_last_tokens(theirs: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to look for them does not grow with the continuation."""
    folder, _ = theirs
    model = language_model_class().create_from_arg_obj({"load": f"hf:{folder}"}, {"batch_size": 1})
    decode, seen = model.tokenizer.decode, list[int]()

    def counting(ids: list[int], **named: Any) -> str:
        seen.append(len(ids))
        return str(decode(ids, **named))

    monkeypatch.setattr(model.tokenizer, "decode", counting)
    (whole,) = model.shared.continue_texts([[*b"one"]], 20, ["\n\n"], {"temperature": 0.0})
    assert len(whole) > 15
    assert max(seen) == 6
    stop = decode(whole[9:12])
    (ended,) = model.shared.continue_texts([[*b"one"]], 20, [stop], {"temperature": 0.0})
    assert ended == whole[: len(ended)]
    assert decode(ended).find(stop) == len(ended) - 3


def run_main(flags: str, output: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Run the command line; return its status, the results that it writes, and what it prints to stderr."""
    status = main([*flags.split(), "--output_path", str(output), "--device", "cpu"])
    written = [json.loads(path.read_text()) for path in output.parent.glob(f"{output.stem}*.json")]
    return status, written[0]["results"] if written else {}, capsys.readouterr().err


@pytest.mark.usefixtures("_only_local_tasks")
def test_a_checkpoint_is_evaluated_like_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line, with the tokenizer that the checkpoint carries."""
    model = tiny(vocab_size=257, max_position_embeddings=24, position_embedding_type="rope", normalization="RMSNorm")
    model = replace(model, activation="swiglu", add_bias_linear=False, untie_embeddings_and_output_weights=True)
    path = save_model(Solo.build(model, torch.float32).chunk, tmp_path / "save")
    convert_to_huggingface(SavedModel(Manifest.open(path)), tmp_path / "hf", lambda *_: None, shard_bytes=10**9)
    folder = write_tasks(tmp_path)
    reference = HFLM(pretrained=str(tmp_path / "hf"), batch_size=3, device="cpu")
    manager = TaskManager(include_path=folder, include_defaults=False)
    expected, _ = answers(reference, manager)
    flags = f"--model_args load={tmp_path}/save --include_path {folder} --batch_size 2 --tasks {','.join(TASKS)}"
    status, found, _ = run_main(flags, tmp_path / "out.json", capsys)
    assert status == 0
    for task in TASKS:
        numbers = {name: value for name, value in expected[task].items() if isinstance(value, float)}
        assert numbers == pytest.approx({name: found[task][name] for name in numbers}, rel=1e-4)


def test_chat_templates_match_the_hf_model(theirs: tuple[Path, Any]) -> None:
    folder, model = theirs
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}<{{ m.role }}>"
        "{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    reference = HFLM(pretrained=model, tokenizer=tokenizer)
    ours = language_model_class().create_from_arg_obj({"load": f"hf:{folder}"}, {"batch_size": 1})
    ours.tokenizer.chat_template = template
    assert ours.chat_template(True) == reference.chat_template(True) == template
    history = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    for messages, prompt in ((history[1:2], True), (history[1:], False), (history[:2], True)):
        assert ours.apply_chat_template(messages, prompt) == reference.apply_chat_template(messages, prompt)
    assert ours.tokenizer_name.endswith(folder.name)


@pytest.mark.usefixtures("_only_local_tasks")
def test_wrong_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tasks(tmp_path)
    task = folder / "written.yaml"
    (folder / "long.yaml").write_text(task.read_text().replace("max_gen_toks: 9", "max_gen_toks: 24") + "task: long\n")
    (folder / "beams.yaml").write_text(
        task.read_text().replace("max_gen_toks: 9", "max_gen_toks: 9, num_beams: 4") + "task: beams\n"
    )
    save_model(Solo.build(tiny(), torch.float32).chunk, tmp_path / "bare", files={})
    save_model(Solo.build(tiny(vocab_size=257, max_position_embeddings=24), torch.float32).chunk, tmp_path / "save")
    good = f"--include_path {folder} --model_args load={tmp_path}/save"
    for flags, sentence in (
        (
            f"--tasks choices --include_path {folder} --model_args load={tmp_path}/bare",
            "no tokenizer, which texts need",
        ),
        (f"--tasks choices --include_path {folder} --model_args tokenizer=x", "--model_args names no model"),
        (f"--tasks choices {good},pretrained=x", "--model_args pretrained: there is no such argument"),
        (f"--tasks choices {good} --batch_size auto", "--batch_size auto: must be a number"),
        (f"--tasks choices {good},pipeline_model_parallel_size=2", "1 ranks are not a multiple of TP x PP x CP = 2"),
        (f"--tasks choices {good},max_length=25", "max_length=25: must be at least 1 and at most 24, the model's"),
        (f"--tasks nothing {good}", "Tasks not found: nothing"),
        (f"--tasks long {good}", "generates up to 24 tokens, and the model has 24 positions"),
        (f"--tasks beams {good}", "a task sets num_beams"),
    ):
        status, found, error = run_main(flags, tmp_path / "out.json", capsys)
        assert (status, found) == (2, {}), flags
        assert sentence in error
