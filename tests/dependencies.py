"""The packages that this one needs, from the metadata of installed ones, with their origin and licences.

python -m tests.dependencies                     all: name, version, licence, and the extra that brings it
python -m tests.dependencies | grep -c ' core '  how many a run needs
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that requirements need here, with all dependencies but torch's CUDA libraries."""
    found, todo = set[tuple[str, frozenset[str]]](), [Requirement(text) for text in requirements]
    while todo:
        wanted = todo.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key not in found:
            found.add(key)
            needed = map(Requirement, distribution(wanted.name).requires or ())
            extras = wanted.extras or {""}
            todo += [r for r in needed if not r.marker or any(r.marker.evaluate({"extra": name}) for name in extras)]
    return {name for name, _ in found if not name.startswith(("nvidia-", "cuda-", "triton"))}


def by_extra() -> dict[str, set[str]]:
    """Distributions of a run (``core``), and what each extra adds to them."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    core = closure(project["dependencies"])
    return {"core": core} | {
        extra: closure(requirements) - core for extra, requirements in project["optional-dependencies"].items()
    }


def licence(package: Distribution) -> str:
    """The licence that a package names; in older ones a classifier does, or a text."""
    classifiers = package.metadata.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    text = (
        package.metadata.get("License-Expression") or ", ".join(named) or package.metadata.get("License") or "unknown"
    )
    return text.splitlines()[0]


if __name__ == "__main__":
    extras = by_extra()
    for name in sorted(set().union(*extras.values())):
        package = distribution(name)
        brings = ",".join(extra for extra, names in extras.items() if name in names)
        print(f"{name:<42} {package.version:<18} {brings:<20} {licence(package)}")
