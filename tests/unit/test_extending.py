"""Every python block of docs/extending.md is a plugin module that runs and does what the page describes."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.checkpoint.format import Manifest
from megatron.config import plugins
from megatron.config.attention_pattern import AttentionPattern
from megatron.config.errors import UserError
from megatron.config.optimizer import OptimizerConfig, state_kinds
from megatron.config.settings import SETTINGS
from megatron.kernels.activation import ACTIVATIONS
from megatron.kernels.attention_mask import AttentionMask
from megatron.optimizer.lr_scheduler import CURVES, STYLES, Rates
from megatron.optimizer.rules import RULES
from megatron.pipeline import plan
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.schedules import make_schedule
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed import grid
from tests.kit.runs import FLAGS, before_step, checkpoint, column, differences, records, tiny_run
from tools import convert_checkpoint, draw_schedule

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
NAMES = (
    "weight_norm",
    "loss_average",
    "restarts",
    "late_tokens",
    "strided",
    "plain_attention",
    "signum",
    "stablelm",
    "loss_table",
)
"""In the page's order."""

WITH_WHOLE_MATRICES = ("muon",)
"""Optimizers that are no element-wise rules, and so are not in ``RULES``."""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Write the page's modules to a folder; return ``run(folder, flags)``, which trains in this process."""
    assert len(BLOCKS) == len(NAMES)
    for name, block in zip(NAMES, BLOCKS):
        (tmp_path / f"{name}.py").write_text(block)
        monkeypatch.setitem(sys.modules, name, None)  # so that the import is undone
        del sys.modules[name]
    for kind in plugins.KINDS:
        monkeypatch.setitem(plugins._registered, kind, {})
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)

    def train(folder: Path, flags: str) -> int:
        return pretrain_gpt.main([*FLAGS.split(), "--fp64", *flags.split(), "--run-dir", str(folder)])

    return train


@pytest.mark.parametrize(("name", "block"), list(zip(NAMES, BLOCKS)), ids=NAMES)
def test_blocks_are_short(name: str, block: str) -> None:
    assert len(block.splitlines()) <= 50


def test_callback(run: Run, tmp_path: Path) -> None:
    folder, save = tmp_path / "run", tmp_path / "save"
    assert run(folder, f"--train-iters 3 --plugin weight_norm --save {save} --save-interval 1") == 0
    notes = [r["text"] for r in records(folder, "text") if "weight norm" in r["text"]]
    found = dict(re.findall(r"after step (\d): ([\d.]+)", " ".join(notes)))
    assert list(found) == ["1", "2", "3"]
    for step, norm in found.items():
        tensors, _ = checkpoint(save / f"iter_{int(step):07d}")
        weights = [t for name, t in tensors.items() if name in names_of_weights(tmp_path)]
        assert sum(t.square().sum().item() for t in weights) ** 0.5 == pytest.approx(float(norm), abs=1e-8)


def test_callback_with_state(run: Run, tmp_path: Path) -> None:
    save = f"--plugin loss_average --save {tmp_path}/save"
    assert run(tmp_path / "run", f"--train-iters 6 --exit-interval 3 {save}") == 0
    assert run(tmp_path / "run", f"--train-iters 6 {save}") == 0
    average = 0.0
    for loss in column(tmp_path / "run", "lm loss"):
        average += 0.1 * (loss - average)
    assert records(tmp_path / "run", "mine/loss-average")[-1]["mine/loss-average"] == pytest.approx(average)
    _, state = checkpoint(tmp_path / "save/iter_0000006")
    assert state["callback loss-average"] == {"average": pytest.approx(average)}
    plugins._registered["callback"].clear()
    assert run(tmp_path / "run", f"--train-iters 6 --save {tmp_path}/save") == 0
    (note,) = (r["text"] for r in records(tmp_path / "run", "text") if "loss-average" in r["text"])
    assert note == "the checkpoint has state of the callback loss-average, which no plugin registers: it is not kept"


def names_of_weights(folder: Path) -> set[str]:
    return set(build_trainer(tiny_run(folder / "names", "--fp64"), 0, 1).params)


RESTARTS = "--plugin restarts --lr-decay-style restarts --min-lr 1e-3"


def test_options_and_a_learning_rate_schedule(run: Run, tmp_path: Path) -> None:
    """The learning rate follows the formula; flags, files and checkpoints have the option."""
    save, file = tmp_path / "save", tmp_path / "mine.yaml"
    assert run(tmp_path / "run", f"{RESTARTS} --restart-samples 8 --save {save}") == 0
    expected = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * (4 * step % 8) / 8)) for step in range(6)]
    assert column(tmp_path / "run", "learning-rate") == pytest.approx(expected, rel=1e-12)
    notes = re.findall(r"restart after step (\d)", str(records(tmp_path / "run", "text")))
    assert notes == ["2", "4", "6"]
    assert Manifest.open(save / "iter_0000006").config["restarts"] == {"restart_samples": 8}
    file.write_text("plugin: restarts\nrestarts: {restart_samples: 8}\nlr_decay_style: restarts\nmin_lr: 1e-3")
    assert run(tmp_path / "file", f"--config {file}") == 0
    assert column(tmp_path / "file", "learning-rate") == column(tmp_path / "run", "learning-rate")


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (f"{RESTARTS} --restart-sampels 8", "E001", "did you mean --restart-samples?"),
        (f"{RESTARTS} --restart-samples 0", "E600", "must be at least 1"),
        (f"{RESTARTS} --restart-samples many", "E002", "not a whole number"),
        (f"{RESTARTS} --set restarts.restart_sampels=8", "E005", "did you mean restarts.restart_samples?"),
        ("--restart-samples 8", "E001", "no such flag"),
        ("--lr-decay-style restarts", "E002", "one of constant, linear"),
    ],
)
def test_options_of_a_plugin_are_checked(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, code: str, text: str
) -> None:
    assert run(tmp_path / "run", flags) == 2
    error = capsys.readouterr().err
    assert code in error
    assert text in error


def test_options_without_effect_and_the_help(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "run", "--plugin restarts --restart-samples 8 --check-config") == 0
    note = "--restart-samples has no effect without --lr-decay-style restarts"
    assert note in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", "--plugin restarts --help restarts")
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert "Cosine decay with warm restarts" in text
    assert "Samples between two restarts. Must be at least 1." in text


@pytest.mark.parametrize(
    ("role", "mode", "status"),
    [("schedule", "exact", 2), ("schedule", "new-schedule", 0), ("state", "new-schedule", 2), ("free", "exact", 0)],
)
def test_the_role_of_an_option_decides_whether_a_resumed_run_may_change_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, mode: str, status: int
) -> None:
    module, save, changed = tmp_path / "restarts.py", tmp_path / "save", "--restart-samples 4"
    module.write_text(module.read_text().replace('role="schedule"', f'role="{role}"'))
    assert run(tmp_path / "first", f"{RESTARTS} --restart-samples 8 --save {save} --exit-interval 2") == 0
    more = f"{RESTARTS} {changed} --save {save} --load {save} --resume-mode {mode}"
    assert run(tmp_path / "second", more) == status
    error = capsys.readouterr().err
    assert ("--restart-samples: checkpoint 8 -> now 4" in error) == (status == 2)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("restart_samples: int", "lr: int", "names of other options: --lr, lr"),
        ("restart_samples: int", "set: int", "--set"),
        ('"options", "restarts"', '"options", "data"', "names of other options: data"),
        ("frozen=True", "frozen=False", "register a frozen dataclass"),
        ("restart_samples: int", "restart_samples: object", "an option is an int, float, bool or str"),
        ('= option(1000, role="schedule", at_least=1, needs="lr_decay_style=restarts")', "= 1000", "with option(...)"),
    ],
)
def test_options_that_cannot_be_flags_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, text: str
) -> None:
    module = tmp_path / "restarts.py"
    assert before in module.read_text()
    module.write_text(module.read_text().replace(before, after))
    assert run(tmp_path / "run", "--plugin restarts") == 2
    error = capsys.readouterr().err
    assert "E914" in error
    assert text in error


COUNTING = '''
from dataclasses import dataclass

import numpy as np

from megatron.config.option import option
from megatron.config.plugins import register
from megatron.data.dataset import MockDataset, Sample, SampleRequest, fingerprint


@register("options", "counting")
@dataclass(frozen=True)
class Counting:
    """Numbers in order."""

    counting_stride: int = option(1, role="data", at_least=1)
    """Difference of neighbours."""


class Numbers(MockDataset):
    def __init__(self, request: SampleRequest) -> None:
        self.request, self.seq_length = request, request.seq_length
        self.stride = request.data.plugin(Counting).counting_stride

    def __len__(self) -> int:
        return self.request.samples

    def describe(self, tokens: int) -> str:
        return "numbers"

    @property
    def fingerprint(self) -> str:
        return fingerprint("numbers", self.stride)

    def sample_hashes(self, places):
        return (places + self.request.first).astype(np.uint64)

    def __getitem__(self, i: int) -> Sample:
        ids = (self.request.first + i + np.arange(self.seq_length + 1)) * self.stride
        return Sample.of(ids % self.request.vocab_size)


register("dataset", "numbers")(Numbers)
'''


def test_dataset(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run reads the samples of a plugin; its data are compared when the run resumes."""
    (tmp_path / "counting.py").write_text(COUNTING)
    save, flags = tmp_path / "save", "--plugin counting --no-mock-data --plugin-dataset numbers --eval-iters 1"
    seen: list[list[int]] = []
    with before_step(1, lambda trainer: seen.extend(trainer.data.datasets["train"][i].tokens.tolist() for i in (0, 3))):
        assert run(tmp_path / "run", f"{flags} --counting-stride 2 --save {save} --exit-interval 2") == 0
    assert seen == [[(n + k) * 2 % 31 for k in range(8)] for n in (0, 3)]
    assert column(tmp_path / "run", "lm loss")[-1] > 0
    assert run(tmp_path / "more", f"{flags} --counting-stride 2 --save {save} --load {save}") == 0
    assert run(tmp_path / "other", f"{flags} --counting-stride 3 --save {save} --load {save} --train-iters 9") == 2
    assert "E823" in capsys.readouterr().err


def test_objective(run: Run, tmp_path: Path) -> None:
    """The loss of the first step from the losses of one position each, computed with the built-in objective."""
    assert run(tmp_path / "run", "--train-iters 2 --plugin late_tokens --objective late-tokens") == 0
    trainer = build_trainer(tiny_run(tmp_path / "plain", "--fp64"), 0, 1)
    batches = list(trainer.next_batches())
    total, weights = 0.0, 0.0
    for position in range(8):
        masks = [torch.zeros_like(batch.loss_mask) for batch in batches]
        for mask in masks:
            mask[:, position] = 1
        parts = [replace(batch, loss_mask=mask) for batch, mask in zip(batches, masks)]
        total += (position + 1) / 8 * train_step(trainer, parts, Rates(0.0, 0.0)).loss.item()
        weights += (position + 1) / 8
    assert column(tmp_path / "run", "lm loss")[0] == pytest.approx(total / weights, rel=1e-6)


@pytest.mark.parametrize(("sizes", "pattern"), [("3, 100", "local:3"), ("1, 1", "global"), ("8, 9", "global")])
def test_attention_pattern(run: Run, tmp_path: Path, sizes: str, pattern: str) -> None:
    """With these sizes the rule equals a built-in pattern, alone and before a layer of another one."""
    module = tmp_path / "strided.py"
    module.write_text(module.read_text().replace("WINDOW, STRIDE = 128, 64", f"WINDOW, STRIDE = {sizes}"))
    for layers in ("{}", "{},local:2"):
        ours, theirs = tmp_path / f"ours {layers}", tmp_path / f"theirs {layers}"
        assert run(ours, f"--train-iters 2 --plugin strided --attention-pattern {layers.format('strided')}") == 0
        assert run(theirs, f"--train-iters 2 --attention-pattern {layers.format(pattern)}") == 0
        assert column(ours, "lm loss") == pytest.approx(column(theirs, "lm loss"), rel=1e-12)


def test_the_mask_of_an_attention_pattern_is_its_rule(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "run", "--train-iters 1 --plugin strided --attention-pattern strided") == 0
    mask = AttentionMask.of_sequence(300, torch.device("cpu"), AttentionPattern.parse("strided")).dense()[0, 0]
    for query in range(300):
        seen = {key for key in range(query + 1) if query - key < 128 or key % 64 == 63}
        assert set(mask[query].nonzero().flatten().tolist()) == seen


def without_torch_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("torch computes attention")

    return lambda trainer: monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)


def test_attention_kernel(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "torch", "--train-iters 2") == 0
    with before_step(1, without_torch_attention(monkeypatch)):
        flags = "--train-iters 2 --plugin plain_attention --kernels attention=plain"
        assert run(tmp_path / "plain", flags) == 0
    assert column(tmp_path / "plain", "lm loss") == pytest.approx(column(tmp_path / "torch", "lm loss"), rel=1e-9)


def test_a_wrong_attention_kernel_is_refused(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "plain_attention.py"
    module.write_text(module.read_text().replace("scores.factor", "1.1 * scores.factor"))
    flags = "--train-iters 2 --plugin plain_attention --kernels attention=plain"
    assert run(tmp_path / "run", flags) != 0
    assert "E903" in capfd.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not records(tmp_path / "run")


def test_optimizer(run: Run, tmp_path: Path) -> None:
    """Weights follow the formula between checkpoints; a resumed run ends with the same bits."""
    save, again = tmp_path / "save", tmp_path / "again"
    flags = "--plugin signum --optimizer signum --train-iters 3 --lr-decay-style constant --weight-decay 0.1"
    assert run(tmp_path / "run", f"{flags} --save {save} --save-interval 1") == 0
    before, _ = checkpoint(save / "iter_0000002")
    after, _ = checkpoint(save / "iter_0000003")
    moved = 0
    for name in names_of_weights(tmp_path):
        (state,) = (n for n in after if n.endswith(name) and "momentum_buffer" in n)
        decay = 0.1 if before[name].dim() > 1 else 0.0
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * after[state].sign()
        torch.testing.assert_close(after[name], expected, rtol=1e-12, atol=1e-14)
        moved += int((after[name] != before[name]).sum())
    assert moved > 1000
    assert run(tmp_path / "first", f"{flags} --save {again} --save-interval 1 --exit-interval 2") == 0
    assert run(tmp_path / "second", f"{flags} --save {again} --load {again}") == 0
    assert differences(save / "iter_0000003", again / "iter_0000003") == []


def test_model_family(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random StableLM of transformers becomes a checkpoint and the same files again; both are compared with it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 16, "use_qkv_bias": True}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    config = transformers.StableLmConfig(**shape, **sizes, rope_parameters=rope)
    model = transformers.StableLmForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    model.save_pretrained(tmp_path / "hf")
    source, save, back = (str(tmp_path / name) for name in ("hf", "save", "back"))
    assert convert_checkpoint.main(["--load-hf", source, "--save", save]) == 1  # E851 without the plugin
    assert convert_checkpoint.main(["--plugin", "stablelm", "--load-hf", source, "--save", save]) == 0
    assert convert_checkpoint.main(["--plugin", "stablelm", "--load", save, "--save-hf", back]) == 0
    output = capsys.readouterr()
    assert "E851" in output.err
    assert output.out.count("transformers computes the same") == 2
    written, original = (load_file(Path(f) / "model.safetensors") for f in (back, source))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], t) for name, t in original.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "stablelm"


def test_metric_logger(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "run", "--train-iters 3 --plugin loss_table --eval-iters 0") == 0
    with (tmp_path / "run" / "loss.tsv").open() as file:
        rows = [(int(step), float(loss)) for step, loss in csv.reader(file, delimiter="\t")]
    assert [step for step, _ in rows] == [1, 2, 3]
    assert [loss for _, loss in rows] == pytest.approx(column(tmp_path / "run", "lm loss"), rel=1e-6)


def test_tables_match_the_choices_of_the_flags() -> None:
    for names, setting in (
        (set(ACTIVATIONS), "activation"),
        ({*RULES, *WITH_WHOLE_MATRICES}, "optimizer"),
        (set(STYLES), "lr_decay_style"),
        (set(CURVES), "lr_wsd_decay_style"),
    ):
        assert names == set(SETTINGS[setting].option.choices)


def test_optimizers_keep_as_many_moments_as_the_table_has() -> None:
    for name, rule in RULES.items():
        state = rule([torch.zeros(3)], OptimizerConfig()).state
        assert sum(t.numel() == 3 for tensors in state.values() for t in tensors) == len(state_kinds(name))


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("activation", "activation"),
        ("normalization", "norm"),
        ("optimizer", "optimizer"),
        ("position_embedding_type", "positions"),
    ],
)
def test_a_new_choice_is_in_the_layout_matrix(monkeypatch: pytest.MonkeyPatch, name: str, factor: str) -> None:
    setting = SETTINGS[name]
    more = replace(setting.option, choices=(*setting.option.choices, "new"))
    monkeypatch.setattr(setting, "option", more)
    assert "new" in runpy.run_path(grid.__file__)["FACTORS"][factor]


def test_modules_that_are_recomputed_are_so_in_the_layout_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS["recompute_modules"]
    more = replace(setting.option, choices=(*setting.option.choices, "new"))
    monkeypatch.setattr(setting, "option", more)
    known = runpy.run_path(grid.__file__)
    assert "all modules" in known["FACTORS"]["recompute"]
    assert "new" in known["RECOMPUTE"]["all modules"]["recompute_modules"]


def test_schedule_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (text,) = re.findall(r"^```csv\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    mine = tmp_path / "mine.csv"
    mine.write_text(text)
    schedule = PipelineSchedule.load(mine)
    assert schedule.ranks[0] == make_schedule("gpipe", 2, 1, 3).ranks[0]
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {mine} --micro-batch-size 1 --global-batch-size 3"
    tiny = "--mock-data --vocab-size 257 --train-iters 10 --preset tiny-llama"
    config = parse(f"{tiny} {flags}".split(), {"RANK": "0", "WORLD_SIZE": "2"}).config
    assert plan.build_program(config.parallel, 3).only(("F", "B")).ranks == schedule.ranks
    assert draw_schedule.main(["--schedule", str(mine)]) == 0
    assert "mine.csv" in capsys.readouterr().out
    mine.with_name("missing.csv").write_text(text.replace("1B0,", ""))
    with pytest.raises(UserError, match=r"missing\.csv: .*1B0") as raised:
        parse(f"{tiny} {flags.replace('mine', 'missing')}".split(), {"RANK": "0", "WORLD_SIZE": "2"})
    assert [problem.code for problem in raised.value.problems] == ["E208"]
