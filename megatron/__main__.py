"""The commands ``megatron COMMAND`` and ``megatron-COMMAND``: ``pretrain_gpt.py`` and the programs in ``tools/``
and ``tasks/``.

In a checkout, ``python -m megatron COMMAND`` works without an installation. Does not import torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from megatron.config.launch import exit_process
from megatron.config.text import did_you_mean, echo, package_version

SHORT_NAMES = {"pretrain_gpt": "pretrain", "preprocess_data": "preprocess", "convert_checkpoint": "convert"}
"""Names of commands that are not those of their files."""

PROGRAMS = ("tools/[!_]*.py", "tasks/*/[!_]*.py")
"""Programs beside ``pretrain_gpt.py``."""

OF_DEVELOPERS = ("generate_docs", "trace_step")


def main() -> NoReturn:
    """Run the command that the name of this program or the first argument gives."""
    name = Path(sys.argv[0]).stem.partition("-")[2]
    arguments = [name, *sys.argv[1:]] if name else sys.argv[1:]
    try:
        status = run(arguments)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # | head
        status = 1
    exit_process(status)


def run(arguments: list[str]) -> int:
    """Run a command; return its exit status."""
    root = programs_root()
    paths = [root / "pretrain_gpt.py", *(p for each in PROGRAMS for p in sorted(root.glob(each)))]
    commands = {SHORT_NAMES.get(p.stem, p.stem.replace("_", "-")): p for p in paths if p.stem not in OF_DEVELOPERS}
    sys.path.insert(0, str(root))
    if "_ARGCOMPLETE" in os.environ:
        complete(commands)
    name, *flags = arguments or ["--help"]
    if name == "--version":
        echo(package_version())
        return 0
    if name in ("-h", "--help"):
        echo("usage: megatron COMMAND [flags]; megatron COMMAND --help describes the flags\n")
        for command, path in commands.items():
            echo(f"  {command:<20}{summary_line(path)}")
        echo("\nexample: megatron pretrain --preset tiny-llama --mock-data --vocab-size 512 --train-iters 20")
        return 0
    if name not in commands:
        meant = did_you_mean(name, [*commands, "--version"]) or "--help"
        echo(f"megatron: no command {name}; fix: megatron {meant}", file=sys.stderr)
        return 2
    path = commands[name]
    # a run records how to start it again; usage texts name the command
    sys.argv = [str(path) if name == "pretrain" else f"megatron {name}", *flags]
    return int(import_program(path).main(flags))


def import_program(path: Path) -> ModuleType:
    """Import ``pretrain_gpt.py`` or one of ``PROGRAMS``."""
    return importlib.import_module(".".join(path.relative_to(programs_root()).with_suffix("").parts))


def complete(commands: Mapping[str, Path]) -> None:
    """Print the completions of the shell's line in ``COMP_LINE``, for ``register-python-argcomplete``, and exit."""
    import argcomplete

    from megatron.arguments.help import make_parser
    from megatron.arguments.presets import PRESETS
    from megatron.config.settings import SPELLINGS

    program, *words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    name = Path(program).name.partition("-")[2]
    if not name and words and words[0] in commands:
        name = words[0]
        os.environ["_ARGCOMPLETE"] = "2"  # number of words before the flags
    if name:  # programs without a parser of their own take the flags of pretrain_gpt.py
        parser = getattr(import_program(commands[name]), "build_parser", make_parser)()
        for action in parser._actions:
            setting = SPELLINGS.get(max(action.option_strings, key=len, default=""))
            action.choices = action.choices or (setting.choices if setting else None)
            if "--preset" in action.option_strings:
                action.choices = PRESETS
    else:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("command", choices=[*commands])
    argcomplete.autocomplete(parser)


def programs_root() -> Path:
    """Return the checkout around this package, or the folder to which the wheel has copied the programs."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pretrain_gpt.py").exists():
        return checkout
    for path in importlib.metadata.files("megatron-pretrain") or ():
        if path.name == "pretrain_gpt.py":
            return Path(str(path.locate())).resolve().parent
    raise SystemExit("megatron: pretrain_gpt.py is not installed; fix: pip install --force-reinstall megatron-pretrain")


def summary_line(path: Path) -> str:
    """Return the first phrase of a program's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": `")[0].partition(". ")[0].replace("``", "").rstrip(".")


if __name__ == "__main__":
    main()
