from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.loggers.tensorboard import TensorBoardLogger


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Every curve as TensorBoard shows it; fails where a curve has a step twice."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert all(len(dict(points)) == len(points) for points in found.values())
    return {tag: dict(points) for tag, points in found.items()}


def values(step: int, loss: float) -> dict[str, object]:
    return {"consumed-samples": 4 * step, "consumed-tokens": 32 * step, "time": 1.0, "lm loss": loss}


def test_numbers_are_drawn_over_steps_and_over_samples(tmp_path: Path) -> None:
    sink = TensorBoardLogger(tmp_path, "a: 1\nb: 2\n", 0, 0)
    sink.log(1, values(1, 2.5))
    sink.log(2, values(2, math.nan))
    sink.log(2, {"consumed-samples": 8, "validation-set": "wiki", "lm loss validation": 3.0})
    sink.close()
    by_step, by_samples = curves(tmp_path), curves(tmp_path / "samples")
    assert by_step.keys() == {"lm loss", "lm loss validation-wiki"}
    assert by_step["lm loss"][1] == 2.5
    assert math.isnan(by_step["lm loss"][2])
    assert by_samples["lm loss vs samples"][4] == 2.5
    assert by_samples["lm loss validation-wiki vs samples"] == {8: 3.0}


def test_a_start_in_the_middle_draws_one_curve(tmp_path: Path) -> None:
    """The first start is killed at step 6, of which TensorBoard was told; the second goes on after step 4."""
    first = TensorBoardLogger(tmp_path, "", 0, 0)
    for step in range(1, 7):
        first.log(step, values(step, step))
    first.flush()
    second = TensorBoardLogger(tmp_path, "", 4, 16)
    for step in range(5, 9):
        second.log(step, values(step, 10 * step))
    second.close()
    expected = {1: 1, 2: 2, 3: 3, 4: 4, 5: 50, 6: 60, 7: 70, 8: 80}
    assert curves(tmp_path)["lm loss"] == expected
    twins = {4 * step: value for step, value in expected.items()}
    assert curves(tmp_path / "samples")["lm loss vs samples"] == twins
    first.close()


def test_the_configuration_and_errors_are_shown_as_text(tmp_path: Path) -> None:
    sink = TensorBoardLogger(tmp_path, "lr: 0.1\n", 0, 0)
    sink.event(3, "error", {"text": "it broke"})
    sink.event(3, "note", {"text": "a summary"})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts == {"config/text_summary": "    lr: 0.1", "error/text_summary": "it broke"}


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardLogger(tmp_path, "", 0, 0)
