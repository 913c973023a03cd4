"""The rules of the repository as functions of source text: each returns sentences, one per place that breaks it.

They read the syntax tree and import nothing of the project, so that they also work on a made-up module.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    *("config", "kernels", "distributed", "layers", "pipeline", "optimizer", "planner", "model"),
    *("checkpoint", "data", "arguments", "convert", "inference", "training", "evaluation"),
)
"""The packages of the library, bottom to top. A package imports only itself and those before it."""

LAYERS = (
    *(f"megatron.{package}" for package in PACKAGES),
    *("pretrain_gpt", "pretrain_hybrid", "tools", "tasks", "megatron.__main__"),
)
"""Everything that may be imported, bottom to top."""

TORCH_FREE = (
    *("megatron.config", "megatron.arguments", "megatron.planner"),
    *(f"megatron.distributed.{part}" for part in ("layout", "sharding", "param_layout")),
    *(
        f"megatron.pipeline.{part}"
        for part in ("actions", "schedules", "communication", "validate", "simulate", "search", "partition", "plan")
    ),
    *(f"megatron.layers.{part}" for part in ("adapter_parameters", "mixers", "parameters", "recompute_plan")),
    *("megatron.optimizer.lr_scheduler", "megatron.optimizer.param_groups"),
)
"""The half that computes no tensors: importing these must not import torch."""

OPTIONAL = ("apex", "fla", "flash_attn", "transformer_engine", "liger_kernel", "triton")
"""Packages that only make things faster: they are not installed with this one, and nothing may need them at import."""

TRITON = tuple(f"megatron.kernels.triton_{name}" for name in ("adam", "grouped", "latent_qkv", "regions", "rows"))
"""Modules that need triton; other modules import them inside functions."""

LAZY = (
    *TRITON,
    *("wandb", "tensorboard", "torch.utils.tensorboard", "gigatoken", "awkward", "orjson"),
    *("matplotlib", "datasets", "pyarrow", "lm_eval"),
)
"""Packages of the extras, which a run goes without where they are missing."""

COMMUNICATORS = (
    *(f"megatron.distributed.{part}" for part in ("comm", "mesh", "launch")),
    "megatron.training.replicas.members",
)
"""The modules that may touch torch.distributed: every communication is found, and mutated, there."""

STORAGE = {
    "megatron.checkpoint.dcp_reader": "torch.distributed.checkpoint",
    "megatron.convert.megatron_lm.save": "torch.distributed.checkpoint",
    "megatron.distributed.sharding": "torch.distributed.tensor",
}
"""Further parts of torch.distributed that a module may use: a library that brings its own communication."""

PICKLES = ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
"""Packages whose files and messages run code when they are read."""

PIPES = {"megatron.data.preprocess.workers": "pickle"}
"""Modules that may use one of them, for pipes to child processes of their own."""

OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""torch's collectives for Python objects, which unpickle what other ranks send."""

DISTRIBUTION_OF = {
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "tiktoken_ext": "tiktoken",
    "google": "protobuf",
    "lm_eval": "lm-eval",
}
"""Import names that differ from the name of the package to install."""


@dataclass(frozen=True)
class Module:
    """One source file: dotted name and syntax tree."""

    name: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, source: str) -> Module:
        """A module from its text."""
        return cls(name, ast.parse(source))


def load(root: Path, *patterns: str) -> list[Module]:
    """The modules under ``root`` whose files match one of the glob ``patterns``."""
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)})
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [Module.parse(name, path.read_text(encoding="utf-8")) for name, path in zip(names, paths)]


def imports(module: Module, at_import: bool = False) -> set[str]:
    """Dotted names the module imports; ``from a import b`` gives ``a.b``, and ``import_module("a")`` gives ``a``.

    Args:
        module: the source.
        at_import: only what runs when the module is imported, not what functions or ``if TYPE_CHECKING`` import.
    """
    names: set[str] = set()
    for node in _running(module.tree) if at_import else ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return names


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below ``node`` that are executed on import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def prefix_of(name: str, prefixes: Iterable[str]) -> str | None:
    """The longest of ``prefixes`` that is ``name`` or a package around it."""
    return max((p for p in prefixes if name == p or name.startswith(p + ".")), key=len, default=None)


def misplaced_imports(modules: Sequence[Module]) -> list[str]:
    """Return imports that go upward between packages, and modules that belong to no package."""
    level = {prefix: height for height, prefix in enumerate(LAYERS)}
    found = []
    for module in modules:
        here = prefix_of(module.name, level)
        if here is None:
            found.append(f"{module.name} belongs to no package")
            continue
        for target in sorted(imports(module)):
            there = prefix_of(target, level)
            if there is not None and level[there] > level[here]:
                found.append(f"{module.name} imports {target}, which is above it")
    return found


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """Modules that import themselves by way of others."""
    graph = _graph(modules, at_import=False)
    return [f"{name} imports itself by way of others" for name in graph if name in _reachable(graph, name)]


def torch_users(modules: Sequence[Module], torch_free: Sequence[str] = TORCH_FREE) -> list[str]:
    """Modules that should not but do import torch when they are imported, themselves or by way of others."""
    graph = _graph(modules, at_import=True)
    heavy = {m.name for m in modules if any(prefix_of(name, ("torch",)) for name in imports(m, at_import=True))}
    pure = [m.name for m in modules if prefix_of(m.name, torch_free)]
    return [f"{name} imports torch" for name in pure if heavy & (_reachable(graph, name) | {name})]


def _graph(modules: Sequence[Module], at_import: bool) -> Mapping[str, set[str]]:
    names = [module.name for module in modules]
    targets = {module.name: {prefix_of(name, names) for name in imports(module, at_import)} for module in modules}
    return {name: {target for target in found if target} for name, found in targets.items()}


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def eager_optional_imports(modules: Sequence[Module]) -> list[str]:
    """Packages that a run goes without, and modules that need one, imported when a module is imported."""
    found = [(m.name, name) for m in modules for name in sorted(imports(m, at_import=True)) if m.name not in TRITON]
    return [
        f"{module} imports {name} at its top level" for module, name in found if prefix_of(name, (*OPTIONAL, *LAZY))
    ]


def stray_communication(modules: Sequence[Module]) -> list[str]:
    """Uses of torch.distributed outside ``COMMUNICATORS``."""
    found = []
    for module in modules:
        if module.name in COMMUNICATORS:
            continue
        names = imports(module) | {ast.unparse(n) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)}
        allowed = [engine for package, engine in STORAGE.items() if prefix_of(module.name, (package,))]
        if any(prefix_of(name, ("torch.distributed",)) and not prefix_of(name, allowed) for name in names):
            found.append(f"{module.name} uses torch.distributed; communication goes through {', '.join(COMMUNICATORS)}")
    return found


def unpickling(modules: Sequence[Module]) -> list[str]:
    """Places that may run what a file or another rank contains: pickles, and torch's functions that read them."""
    found = []
    for module in modules:
        used = sorted(name for name in imports(module) if prefix_of(name, PICKLES))
        found += [f"{module.name} imports {name}" for name in used if name != PIPES.get(module.name)]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
                found.append(f"{module.name}:{node.lineno} exchanges pickles, which comm's own collectives do not")
            if isinstance(node, ast.Call) and module.name != "tools.cluster_check.checks":
                text = ast.unparse(node)
                if text.startswith("torch.load(") and "weights_only=True" not in text:
                    found.append(f"{module.name}:{node.lineno} may unpickle a file: weights_only=True")
    return found


def function_lengths(modules: Sequence[Module]) -> dict[str, int]:
    """Lines of every function, by ``module:name:line``."""
    functions = [
        (module.name, node)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {f"{name}:{f.name}:{f.lineno}": (f.end_lineno or f.lineno) - f.lineno + 1 for name, f in functions}


def unannotated(modules: Sequence[Module]) -> list[str]:
    """Functions with an argument or a result that has no type."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_annotated(node):
                continue
            decorators = map(ast.unparse, node.decorator_list)
            if not any(each.startswith("triton.jit") for each in decorators):  # arguments without Python types
                found.append(f"{module.name}:{node.name}:{node.lineno} lacks an annotation")
    return found


def _is_annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return bool(function.returns) and all(x.annotation or x.arg in ("self", "cls") for x in arguments)


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Return class names that two modules of the library define."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and prefix_of(module.name, ("megatron",)):
                homes.setdefault(node.name, []).append(module.name)
    return [f"class {name} is defined in {', '.join(found)}" for name, found in homes.items() if len(found) > 1]


def imports_of_tests(modules: Sequence[Module]) -> list[str]:
    """Return imports of the tests or of pytest, which a user's environment does not have."""
    names = [(module.name, target) for module in modules for target in sorted(imports(module))]
    return [f"{name} imports {target}" for name, target in names if prefix_of(target, ("tests", "pytest", "_pytest"))]


def asserts(modules: Sequence[Module]) -> list[str]:
    """Assert statements: outside tests an error is raised, with a sentence."""
    return [f"{m.name}:{n.lineno} asserts" for m in modules for n in ast.walk(m.tree) if isinstance(n, ast.Assert)]


PRINTERS = (
    "megatron.config.text",
    *("tools.generate_docs", "tools.trace_step"),
)
"""Modules that may call ``print``: the module of `echo`, and programs that print no names from files."""


def plain_prints(modules: Sequence[Module]) -> list[str]:
    """Calls of ``print``, which pass control characters in names of untrusted files on to a terminal."""
    return [
        f"{module.name}:{node.lineno} prints; names are escaped by megatron.config.text.echo"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id == "print" and prefix_of(module.name, PRINTERS) is None
    ]


def remote_code(text: str) -> list[str]:
    """Loads of ``transformers``, also in texts and scripts, that may ask to run code beside a model, or run it."""
    inner = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
    classes = {"AutoModel", *re.findall(r"\bAuto\w+ as (\w+)", text)}
    found = []
    for match in re.finditer(rf"(\w+)\s*\.\s*(from_pretrained|from_config)\(({inner})\)", text):
        loads = match[2] == "from_pretrained" or match[1].startswith("Auto") or match[1] in classes
        if loads and "trust_remote_code=False" not in match[3]:
            found.append(f"{match[0].splitlines()[0]} lacks trust_remote_code=False")
    return found


def absolute_paths(text: str) -> list[str]:
    """Absolute paths of one machine in ``text``."""
    return re.findall(r"(?<![\w.$}/\])>-])/(?:home|root|work|Users|mnt|scratch|opt|data|workspace)/[\w./-]+", text)


def third_party(modules: Sequence[Module], own: Sequence[str], standard: Iterable[str]) -> set[str]:
    """Distributions imported anywhere in ``modules``, optional packages left out."""
    roots = {name.split(".")[0] for module in modules for name in imports(module)}
    return {DISTRIBUTION_OF.get(root, root) for root in roots - set(own) - set(standard) - set(OPTIONAL)}


def declared_dependencies(pyproject: str) -> set[str]:
    """Names of all dependencies in the text of a pyproject.toml, extras included."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    return {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in requirements}
