"""Steps that change or drop documents before they are encoded: ``--map``, ``--filter`` and ``--quality``.

`DocumentTransforms` applies the steps in the order of the command line. A function whose first parameter is annotated
``str`` gets the text under each key; any other gets the whole record, a line's JSON object or a table's row as a dict.
For a table, a function's attribute ``columns`` names the columns that it reads besides those of ``--json-keys``;
without it all are read.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.durable_files import checksum
from megatron.config.text import clipped
from megatron.data.errors import DataError

MAP, FILTER, QUALITY = "--map", "--filter", "--quality"


class Step(NamedTuple):
    """A step of the command line."""

    flag: str  # MAP, FILTER or QUALITY
    name: str  # package.module:function, or a quality filter

    def __str__(self) -> str:
        return f"{self.flag} {self.name}"


class StepError(Exception):
    """A step failed at a document; the message is a sentence without its subject."""

    def __init__(self, seen: str, fix: str = "mend the function") -> None:
        super().__init__(seen)
        self.fix = fix


Record = dict[str, Any]


class LoadedStep(NamedTuple):
    """A step that is ready to be applied."""

    step: Step
    fingerprint: str  # of the code of its function
    takes_text: bool
    columns: tuple[str, ...] | None  # of a table, besides those of the texts; None for all
    apply: Callable[[Any], tuple[Any, str]]  # from a record or text to the new one or None, and the reason for None


class DocumentTransforms:
    """Apply steps to documents, one after the other."""

    def __init__(self, steps: Sequence[Step], keys: Sequence[str]) -> None:
        """Load the functions of the ``steps``; ``keys`` are those of the texts.

        Raises:
            DataError: if one cannot be imported.
        """
        self._keys = keys
        self.steps = [_load(step) for step in steps]
        # whether whole records are needed, not only their texts
        self.takes_records = not all(step.takes_text for step in self.steps)

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of a table that are read; None for all."""
        columns = [*self._keys]
        for step in self.steps:
            if not step.takes_text:
                if step.columns is None:
                    return None
                columns += step.columns
        return tuple(dict.fromkeys(columns))

    def describe(self) -> list[dict[str, str]]:
        """Return the steps as a manifest lists them."""
        return [{"step": str(loaded.step), "fingerprint": loaded.fingerprint} for loaded in self.steps]

    def __call__(self, record: Record) -> Record | str:
        """Return the record after all steps, or the reason for which one dropped it.

        Raises:
            StepError: if a function raises an exception, or returns something else than it should.
        """
        for step in self.steps:
            if step.takes_text:
                for key in self._keys:
                    if isinstance(text := record.get(key), str):
                        record[key], reason = step.apply(text)
                        if record[key] is None:
                            return reason
            else:
                record, reason = step.apply(record)
                if record is None:
                    return reason
        return record


def _load(step: Step) -> LoadedStep:
    if step.flag == QUALITY:
        from megatron.data.preprocess.quality import load_quality_filter

        quality = load_quality_filter(step.name)

        def apply_quality(text: Any) -> tuple[Any, str]:
            result: tuple[Any, str] = _call(step, quality.apply, text, "another --quality")
            return result

        return LoadedStep(step, *quality._replace(apply=apply_quality))
    function = _import_function(step)
    takes_text = _takes_text(function)
    wanted = str if takes_text else dict

    def map_document(document: Any) -> tuple[Any, str]:
        result = _call(step, function, document)
        if not isinstance(result, wanted | None):
            kind = f"{type(result).__name__}, not {wanted.__name__} or None"
            raise StepError(f": {step} returned {kind}")
        return result, str(step)

    def filter_document(document: Any) -> tuple[Any, str]:
        result = _call(step, function, document)
        if type(result).__name__ not in ("bool", "bool_"):  # of Python or numpy
            raise StepError(f": {step} returned {type(result).__name__}, not True or False")
        return document if result else None, str(step)

    columns = getattr(function, "columns", None)
    apply = map_document if step.flag == MAP else filter_document
    return LoadedStep(
        step, _fingerprint(function, step.name.partition(":")[0]), takes_text, columns and tuple(columns), apply
    )


def _import_function(step: Step) -> Callable[[Any], object]:
    """Import a function; modules of the working directory are found too, as by ``python -m``."""
    fix = f"{step.flag} package.module:function"
    module, separator, path = step.name.partition(":")
    if not separator or not module or not path:
        raise DataError(f"{step}: a function is named by its module, a colon and its name", fix)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        reason = f"{type(error).__name__}: {clipped(error)}"
        raise DataError(f"{step}: the import of {module} failed: {reason}", f"python -c 'import {module}'") from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise DataError(f"{step}: {module} has no function {path}", fix)
    function: Callable[[Any], object] = found
    return function


def _takes_text(function: Callable[..., object]) -> bool:
    """Return True if the first parameter of a function is annotated ``str``."""
    call = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        parameters = list(inspect.signature(function).parameters)
        hints = typing.get_type_hints(call)
    except (ValueError, TypeError, NameError):
        return False
    return bool(parameters) and hints.get(parameters[0]) is str


def _fingerprint(function: Callable[..., object], module: str) -> str:
    """Return a checksum of the code of a function of ``module``.

    It covers the file that defines it, the module's file, the files below the working folder that these import, and
    the arguments of `functools.partial`.
    """
    arguments = []
    while isinstance(function, functools.partial):
        arguments.append(re.sub(" at 0x[0-9a-f]+", "", repr((function.args, function.keywords))))
        function = function.func
    found = [getattr(sys.modules[module], "__file__", None), _source_file(function)]
    files = dict.fromkeys(Path(file).resolve() for file in found if file and os.path.isfile(file))
    unread = [*files]
    while unread:
        for file in _local_imports(unread.pop()):
            if file not in files:
                files[file] = None
                unread.append(file)
    sums = sorted({checksum(file.read_bytes()) for file in files})
    return checksum(repr((sums or repr(function), arguments)).encode())


def _source_file(function: Callable[..., object]) -> str | None:
    """Return the file that defines a function; None if there is none."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # of a class instance, or compiled
        module = sys.modules.get(getattr(function, "__module__", "") or type(function).__module__)
        return getattr(module, "__file__", None)


def _local_imports(file: Path) -> Iterator[Path]:
    """Yield the files below the working folder that a Python file imports, also inside functions."""
    root = Path.cwd().resolve()
    packages = (folder / "__init__.py" for folder in file.parents if folder.is_relative_to(root))
    yield from (package.resolve() for package in packages if package.is_file())
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (ValueError, SyntaxError):  # compiled
        return
    for node in nodes:
        names = [alias.name.split(".") for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        folder = root
        if isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else root
            base = node.module.split(".") if node.module else []
            names = [base, *([*base, *name] for name in names)]
        for parts in names:
            for end in range(1, len(parts) + 1):
                path = folder.joinpath(*parts[:end])
                for found in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                    if found.is_relative_to(root) and found.is_file():
                        yield found.resolve()


def _call(step: Step, function: Callable[[Any], Any], document: Any, fix: str = "mend the function") -> Any:
    try:
        return function(document)
    except (Exception, SystemExit) as error:  # a user's function may fail in any way
        raise StepError(f": {step} raised {type(error).__name__}: {clipped(error)}", fix) from error
