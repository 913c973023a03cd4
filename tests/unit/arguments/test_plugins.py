"""``--plugin`` imports modules before flags are checked, so that they extend the choices of flags."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.config import plugins
from megatron.config.errors import UserError
from megatron.config.plugins import register, registered

RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "100", "--check-config"]
MODULE = """
from megatron.config.plugins import register

@register("optimizer", "{name}")
class Mine: ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with two plugins; what they register and import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_registered", {kind: {} for kind in plugins.KINDS})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "my_plugin.py").write_text(MODULE.format(name="mine"))
    (tmp_path / "other_plugin.py").write_text(MODULE.format(name="yours"))
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no\\ndisk')")
    (tmp_path / "needy_plugin.py").write_text("import not_installed")
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.endswith("_plugin"):
            del sys.modules[name]


def problems(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse([*RUN, *argv], {})
    return [str(problem) for problem in caught.value.problems]


def test_names_of_plugins_are_choices() -> None:
    (problem,) = problems("--optimizer", "mine")
    assert problem.startswith("E002 --optimizer: 'mine' is not one of adam")
    config = parse([*RUN, "--optimizer", "mine", "--plugin", "my_plugin"], {}).config
    assert (config.optimizer.optimizer, config.compute.plugin) == ("mine", ("my_plugin",))
    assert list(registered("optimizer")) == ["mine"]
    assert "mine" in problems("--optimizer", "hers", "--plugin", "my_plugin")[0]


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "run.yaml"],
        ["--set", "compute.plugin=my_plugin other_plugin", "optimizer.optimizer=yours"],
        ["--set", "optimizer.optimizer=yours", "--plugin", "my_plugin", "other_plugin"],
        ["--plugin", "other_plugin", "--optimizer", "yours", "--plugin", "my_plugin"],
    ],
    ids=str,
)
def test_plugins_of_every_source(argv: list[str], folder: Path) -> None:
    (folder / "run.yaml").write_text("optimizer: {optimizer: yours}\ncompute: {plugin: [my_plugin, other_plugin]}\n")
    config = parse([*RUN, *argv], {}).config
    assert config.optimizer.optimizer == "yours"
    assert set(config.compute.plugin) == {"my_plugin", "other_plugin"}
    assert set(registered("optimizer")) == {"mine", "yours"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_plugin", "no such module"),
        ("my_plugin.py", "not a file\n  fix: write --plugin my_plugin"),
        ("broken_plugin", "failed while it was imported: OSError: no disk"),
        ("needy_plugin", "failed while it was imported: ModuleNotFoundError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_the_only_problem(name: str, words: str) -> None:
    (problem,) = problems("--optimizer", "mine", "--plugin", name, "my_plugin")
    assert problem.startswith(f"E914 --plugin {name}")
    assert words in problem


def test_name_of_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: Any) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint("ours", "my_plugin", plugins.ENTRY_POINTS)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert parse([*RUN, "--optimizer", "mine", "--plugin", "ours"], {}).config.optimizer.optimizer == "mine"


def test_names_are_registered_once_and_kinds_are_known() -> None:
    register("optimizer", "a")(int)
    register("optimizer", "a")(int)
    with pytest.raises(ValueError, match="two plugins"):
        register("optimizer", "a")(float)
    with pytest.raises(ValueError, match="no kind"):
        register("optimiser", "a")


def test_a_registered_optimizer_has_the_formats_of_the_moments_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--optimizer", "mine", "--plugin", "my_plugin", "--exp-avg-dtype", "bf16", "--sgd-momentum", "0.5"]
    (problem,) = problems(*argv)
    assert problem.startswith("E601 --exp-avg-dtype has no effect without optimizer adam or lion")
    monkeypatch.setattr(registered("optimizer")["mine"], "state_kinds", ("exp_avg",), raising=False)
    parsed = parse([*RUN, *argv], {})
    assert parsed.config.optimizer.exp_avg_dtype == "bf16"
    assert not any("no effect" in note for note in parsed.notes)
