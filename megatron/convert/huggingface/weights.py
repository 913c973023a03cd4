"""Weights of a Hugging Face folder by our parameter names, and loading a rank's weights from any such source.

`map_tensors` applies the weight tables of `families`. `HuggingFaceWeights` maps the safetensors files and reads any box
of any of our tensors without the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby, product
from math import prod
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from megatron.checkpoint.errors import MAX_NAMES, CheckpointError, DamagedCheckpointError, raise_if_any
from megatron.checkpoint.format import intersect, relative_box
from megatron.checkpoint.tensor_file import TensorFile
from megatron.config.errors import Problem, UserError
from megatron.config.files import TABLE_FILE_BYTES, parse_json, read_small
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.text import listed
from megatron.config.training import TrainingConfig
from megatron.convert.frameworks.pieces import PartialTensor, PartialTensors
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    WEIGHTS_INDEX_FILE,
    fp8_block,
    read_config,
    read_model_type,
)
from megatron.convert.huggingface.families import model_families
from megatron.convert.huggingface.keys import ModelFamily
from megatron.convert.huggingface.quantized import FP8_FACTORS, StoredTensor, dequantized
from megatron.convert.tokenizer_files import SmallFiles, find_tokenizer_files
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.context import DTYPES, BuildContext
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.multi_token_parameters import BLOCK
from megatron.layers.parameters import gpt
from megatron.model.gpt import GPTChunk, build_gpt

WEIGHTS_FILE = "model.safetensors"
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorMapping:
    """One Hugging Face tensor, or a part of one, as a part of one of ours."""

    ours: str  # name of our tensor
    name: str  # in the Hugging Face model
    shape: tuple[int, ...]  # as stored
    order: tuple[int, ...]  # its axes, as dimensions of our view
    box: Box  # the part of our view that it fills
    # Of a stored tensor that joins several parts: its shape, the dimension that joins them, and where this one starts.
    stored: tuple[int, ...] = ()
    joined: int = 0
    start: int = 0

    def arrange(self, theirs: Tensor) -> Tensor:
        """Return a stored tensor ``[*stored]`` as our box ``[*box.size]``, without copying."""
        part = theirs.narrow(self.joined, self.start, self.shape[self.joined])
        unfolded = part.view([self.box.size[axis] for axis in self.order])
        return unfolded.permute([self.order.index(axis) for axis in range(len(self.order))])

    def rows(self, slices: tuple[slice, ...]) -> range:
        """Return the rows of a stored tensor between which a part of our box lies."""
        index = torch.arange(self.stored[0]).view(-1, *(1 for _ in self.stored[1:])).expand(self.stored)
        part = self.arrange(index)[slices]
        first, last = (int(part[(corner,) * part.dim()]) for corner in (0, -1))
        return range(first, last + 1)


def map_tensors(
    kind: str, model: ModelConfig, specs: Mapping[str, ShardSpec], stacked: bool = False
) -> dict[str, tuple[TensorMapping, ...]]:
    """Return the Hugging Face tensors of which each of our tensors consists.

    Args:
        kind: key of `model_families`.
        model: architecture.
        specs: specs of our tensors, all or some; only their shapes matter.
        stacked: the experts of a layer are stored as one tensor, if the family may do so.

    Raises:
        UserError: naming our tensors that the family lacks.
    """
    family = model_families()[kind]
    rows = {**family.weights, **(family.stacked if stacked else {})}
    found: dict[str, tuple[TensorMapping, ...]] = {}
    missing = []
    for name, spec in specs.items():
        pattern, numbers = _split_layer(name, model)
        module, _, parameter = pattern.rpartition(".")
        suffix = "" if pattern in rows else f".{parameter}"
        row = rows.get(pattern) or rows.get(module)
        if row is None:
            missing.append(name)
            continue
        axes, theirs = row
        names = axes.split()
        sizes = dict(zip(names, spec.view))
        # a bias lacks the last axis, its weight's inputs
        lacking = names[-1] if parameter == "bias" and len(names) == len(sizes) + 1 else None
        mappings: list[TensorMapping] = []
        for pattern, their_axes in theirs.items():
            for expert in range(sizes["e"]) if "{e}" in pattern else (0,):
                numbers["e"] = expert
                stored = their_axes.format_map(numbers)
                mappings += _map_tensor(
                    name, pattern.format_map(numbers) + suffix, stored, sizes, family.numbers(model), lacking
                )
        found[name] = tuple(mappings)
    if missing:
        sentence = f"Hugging Face's {kind} has nothing for {listed(missing, MAX_NAMES)}"
        raise UserError([Problem("E852", sentence)])
    return found


def map_copies(
    kind: str,
    model: ModelConfig,
    specs: Mapping[str, ShardSpec],
    found: Mapping[str, Sequence[TensorMapping]],
) -> dict[str, tuple[TensorMapping, ...]]:
    """Return where a family stores tensors again, by our names; ``found`` is their first place."""
    heads = sorted({name.split(".")[2] for name in specs if name.startswith("mtp.")})
    copies: dict[str, tuple[TensorMapping, ...]] = {}
    for pattern, ours in model_families()[kind].copies.items():
        ours = ours if ours in specs else "embedding.word_embeddings.weight"  # a tied output layer
        names = [pattern.replace("{i}", str(model.num_layers + int(head))) for head in heads]
        copies[ours] = (*copies.get(ours, ()), *(replace(found[ours][0], name=name) for name in names))
    return copies


def huggingface_tensors(kind: str, model: ModelConfig, specs: Mapping[str, ShardSpec]) -> list[list[TensorMapping]]:
    """Return the tensors of a Hugging Face model in the order of an export, each as the parts that it joins.

    Arguments and errors are those of :func:`map_tensors`; ``specs`` are all of the model.
    """
    mappings = map_tensors(kind, model, specs)
    copies = map_copies(kind, model, specs, mappings)
    every = (mapping for name in specs for mapping in (*mappings[name], *copies.get(name, ())))
    return [[*parts] for _, parts in groupby(every, lambda part: part.name)]


def _split_layer(name: str, model: ModelConfig) -> tuple[str, dict[str, int]]:
    """Return the pattern of a name in the rows of a family, and the numbers that stand for its braces."""
    found = re.match(rf"(mtp\.)?layers\.(\d+)\.({BLOCK}\.)?", name)
    if found is None:
        return name, {}
    head, layer, block = found.groups()
    local = name[found.end() :]
    if head:
        numbers = {"i": int(layer) + model.num_layers}
    else:
        numbers = {"i": int(layer), "symbol": model.residual_layer(int(layer)) + _position(model, int(layer), local)}
    return ("mtp.layers.{i}." if head and not block else "layers.{i}.") + local, numbers


def _position(model: ModelConfig, layer: int, local: str) -> int:
    """Return which of the residual layers of a block has a parameter, by its local name."""
    module = local.partition(".")[0]
    names = [(mixer.norm, mixer.module, mixer.post_norm) for mixer in block_mixers(model, layer)]
    return next(position for position, each in enumerate(names) if module in each)


def _map_tensor(
    ours: str, name: str, their_axes: str, sizes: Mapping[str, int], numbers: Mapping[str, int], lacking: str | None
) -> Iterator[TensorMapping]:
    """Parse axes such as ``g x[:-2] d, h`` or ``G*(r[:K] + r[K:]), h``, without the axis that a bias is ``lacking``.

    Yield one mapping, or one for each part that a dimension joins. ``sizes`` are those of our axes, in their order,
    and ``numbers`` the family's.
    """
    dimensions = [
        [*_parts(dimension, sizes, numbers)] for dimension in their_axes.split(",") if dimension.strip() != lacking
    ]
    parts = [_map_part(ours, name, part, sizes) for part in product(*dimensions)]
    joined = next((i for i, each in enumerate(dimensions) if len(each) > 1), 0)
    stored, start = list(parts[0].shape), 0
    stored[joined] = sum(part.shape[joined] for part in parts)
    for part in parts:
        yield replace(part, stored=tuple(stored), joined=joined, start=start)
        start += part.shape[joined]


Part = list[tuple[str, int, int]]
"""A part of a dimension: our axes, each with the first of its elements and their number."""


def _parts(dimension: str, sizes: Mapping[str, int], numbers: Mapping[str, int]) -> Iterator[Part]:
    """Yield the parts that a dimension joins."""
    *factors, terms = dimension.split("*")
    letters = [factor.strip(" (") for factor in factors]
    counts = {letter: {**numbers, **sizes}[letter] for letter in letters}
    pieces = prod(count for letter, count in counts.items() if letter not in sizes)
    for indices in product(*map(range, counts.values())):
        fixed = [(axis, index, 1) for axis, index in zip(counts, indices) if axis in sizes]
        piece = 0
        for letter, index in zip(counts, indices):
            piece = piece if letter in sizes else piece * counts[letter] + index
        for term in terms.strip(" ()").split("+"):
            part: Part = []
            for axis, first, colon, stop in re.findall(r"(\w)(?:\[(-?\w*)(:?)(-?\w*)\])?", term):
                start, length = _selected(sizes[axis], first, colon, stop, numbers)
                if first or stop:
                    length //= pieces
                    start += piece * length
                part.append((axis, start, length))
            yield fixed + part


def _selected(size: int, first: str, colon: str, stop: str, numbers: Mapping[str, int]) -> tuple[int, int]:
    """Return start and length of what brackets select of an axis."""

    def number(text: str) -> int | None:
        return numbers[text] if text.isalpha() else int(text) if text else None

    begin, end = number(first), number(stop)
    if begin is not None and not colon:
        end = begin + 1 or None
    start, stop_, _ = slice(begin, end).indices(size)
    return start, stop_ - start


def _map_part(ours: str, name: str, dimensions: Iterable[Part], sizes: Mapping[str, int]) -> TensorMapping:
    box = {axis: (0, size) for axis, size in sizes.items()}  # start and size
    order, shape = [], []
    for dimension in dimensions:
        shape.append(prod(length for _, _, length in dimension))
        for axis, start, length in dimension:
            box[axis] = (start, length)
            order.append(list(sizes).index(axis))
    starts, extents = zip(*box.values())
    return TensorMapping(ours, name, tuple(shape), tuple(order), Box(starts, extents))


def build_on_meta(model: ModelConfig, training: TrainingConfig | None = None) -> GPTChunk:
    """Build the complete model on the meta device, as on a single rank; no memory is allocated."""
    mesh = Mesh(Layout.from_config(ParallelConfig(), 1), 0)
    context = BuildContext(mesh, GradAccumulator(), device=torch.device("meta"))
    return build_gpt(model, training or TrainingConfig(), context)


class HuggingFaceWeights:
    """The weights in a Hugging Face folder, by our parameter names and in our arrangement.

    Files are memory-mapped, and only the elements of a box are read; quantised ones are dequantised then. Names, shapes
    and dtypes are checked on opening.
    """

    notes: Sequence[str] = ()

    def __init__(
        self, folder: Path, model: ModelConfig, tensors: PartialTensors | None = None, kind: str | None = None
    ) -> None:
        """Open the files and check that they hold exactly the tensors of ``model``.

        Args:
            folder: with config.json, and safetensors files.
            model: architecture.
            tensors: those of another program's checkpoint, by the names of Hugging Face; None for the files.
            kind: model type of transformers; None for that in config.json.

        Raises:
            UserError: when the model type in config.json is not supported.
            CheckpointError: naming the tensors that are missing, unused, or of another shape or dtype.
            DamagedCheckpointError: when a file cannot be read.
        """
        self.folder, self.model = folder, model
        self.converted = tensors is not None  # transformers cannot read the files
        self.config_file = folder / CONFIG_FILE if tensors is None or (folder / CONFIG_FILE).is_file() else None
        kind = kind or read_model_type(read_config(folder), str(self.config_file))
        self._files: Mapping[str, PartialTensor | TensorFile] = open_weights(folder) if tensors is None else tensors
        stacked = any(re.search(r"\.experts\.\D", key) for key in self._files)
        experts = 1 if stacked else model.num_experts or 1
        if len(self._files) < model.num_layers + model.expert_blocks * (experts - 1):
            described = f"{model.num_layers:,} layers" + (f" of {experts:,} experts" if experts > 1 else "")
            raise CheckpointError(
                f"{folder / CONFIG_FILE} has {described}, but {folder} has {len(self._files):,} tensors"
            )
        self.specs: Mapping[str, ShardSpec] = gpt(model)  # of all tensors, by our names
        mappings = map_tensors(kind, model, self.specs, stacked)
        family = model_families()[kind]
        # a model saved without its head has no prefix
        prefix = "" if any(key.startswith(family.prefix) for key in self._files) else family.prefix

        def in_files(found: Sequence[TensorMapping]) -> tuple[TensorMapping, ...]:
            """Return mappings with the names of the files."""
            return tuple(replace(mapping, name=mapping.name.removeprefix(prefix)) for mapping in found)

        copies = map_copies(kind, model, self.specs, mappings)
        self.mappings = {name: in_files(found) for name, found in mappings.items()}
        self._copies = {name: in_files(found) for name, found in copies.items()}
        self._check(family)
        # the narrowest dtype that holds all tensors as they are stored, but for those that are always in fp32
        narrow = [name for name, spec in self.specs.items() if not spec.wide]
        dtype = reduce(torch.promote_types, map(self.dtype_of, narrow))
        self.precision = next(name for name, known in DTYPES.items() if known == dtype)

    def small_files(self) -> SmallFiles:
        """Return the tokenizer files and generation settings in the folder."""
        return find_tokenizer_files(self.folder)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of one of our tensors that each lie in one stored tensor."""
        return tuple(mapping.box for mapping in self.mappings[name])

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box``, of shape ``box.size``, as stored.

        The result may share memory with the mapped file and must not be modified.

        Args:
            name: key of ``specs``.
            view: view of the tensor's spec, in which the box is given.
            box: elements to read.
        """
        if view != self.specs[name].view:
            raise ValueError(f"{name} is viewed {list(self.specs[name].view)}, not {list(view)}")
        parts = [(mapping, part) for mapping in self.mappings[name] if (part := intersect(mapping.box, box))]
        if len(parts) == 1:
            return self._read_part(*parts[0])
        out = torch.empty(box.size, dtype=self.dtype_of(name))
        for mapping, part in parts:
            out[relative_box(part, box).slices] = self._read_part(mapping, part)
        return out

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that one of our tensors is stored with."""
        return reduce(torch.promote_types, (self._files[part.name].dtype(part.name) for part in self.mappings[name]))

    def _read_part(self, mapping: TensorMapping, box: Box) -> Tensor:
        held, slices = self._files[mapping.name], relative_box(box, mapping.box).slices
        if isinstance(held, TensorFile):
            return mapping.arrange(held.tensor(mapping.name))[slices]
        return mapping.arrange(held.tensor(mapping.name, mapping.rows(slices)))[slices]

    def _check(self, family: ModelFamily) -> None:
        expected = {mapping.name: mapping.stored for found in self.mappings.values() for mapping in found}
        unused = {
            key
            for key in self._files.keys() - expected.keys()
            if not any(re.fullmatch(pattern, key.removeprefix(family.prefix)) for pattern in family.buffers)
        }
        # A tied output layer may be stored too, if it equals the embedding; copies likewise.
        embedding = self.mappings["embedding.word_embeddings.weight"][0].name
        untied = [family.head] if family.head in unused and not self._are_equal(family.head, embedding) else []
        copies = {copy.name: self.mappings[ours][0].name for ours, found in self._copies.items() for copy in found}
        unequal = {name for name, first in copies.items() if name in unused and not self._are_equal(name, first)}
        unused -= {family.head, *copies}
        findings = {
            **tensor_findings(self._files, expected),
            "ties the output layer to the embedding in config.json, but stores another": untied,
            "holds other tensors for further tokens than for the next one, which must be equal": unequal,
            "holds tensors that the model does not have": unused,
        }
        raise_if_any(self.folder, findings)

    def _are_equal(self, name: str, other: str) -> bool:
        """Return True if two stored tensors are bitwise equal."""
        if other not in self._files:
            return False
        a, b = (self._files[key].tensor(key) for key in (name, other))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def tensor_findings(
    files: Mapping[str, PartialTensor | TensorFile], expected: Mapping[str, tuple[int, ...]], *more: torch.dtype
) -> dict[str, Collection[str]]:
    """Return the tensors that are missing, or not as ``expected``, by what is wrong with them.

    Args:
        files: the file of each tensor.
        expected: shapes by name.
        more: data types besides ``SUPPORTED_DTYPES`` that are read.
    """
    held = {key: files[key] for key in expected if key in files}
    return {
        "lacks": expected.keys() - held.keys(),
        "holds tensors of another shape than its configuration asks for": [
            f"{key} {list(file.shape(key))} instead of {list(expected[key])}"
            for key, file in held.items()
            if file.shape(key) != expected[key]
        ],
        "holds tensors of an unsupported data type": [
            f"{key} {file.dtype(key)}"
            for key, file in held.items()
            if file.dtype(key) not in (*SUPPORTED_DTYPES, *more)
        ],
    }


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return what holds each tensor: its file, or what dequantises it. Raises as `open_files`."""
    files = open_files(folder)
    in_fp8 = any(key.endswith(FP8_FACTORS) for key in files)
    return dequantized(files, fp8_block(read_config(folder)) if in_fp8 else (1, 1))


def open_files(folder: Path) -> dict[str, TensorFile]:
    """Return the file of every tensor as it is stored, by key.

    Raises:
        CheckpointError: when there are no safetensors files. Pickled weights are refused, because they can run code.
        DamagedCheckpointError: when the index and the files contradict each other.
    """
    if (folder / WEIGHTS_FILE).exists():
        file = TensorFile(folder / WEIGHTS_FILE)
        return dict.fromkeys(file.keys, file)
    if (folder / WEIGHTS_INDEX_FILE).exists():
        return _open_shards(folder)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        names = str(folder), f"{folder}-safetensors"
        load = (
            "from transformers import AutoModelForCausalLM as M; "
            "M.from_pretrained({!r}, trust_remote_code=False).save_pretrained({!r})"
        )
        raise CheckpointError(
            f"{folder} holds pickled weights, which can run any code when they are loaded; only {WEIGHTS_FILE} is "
            "read. The command loads them: use it only if you trust whoever made them",
            f"python -c {quote(load.format(*names))}",
        )
    raise CheckpointError(f"{folder} holds neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}")


def _open_shards(folder: Path) -> dict[str, TensorFile]:
    path = folder / WEIGHTS_INDEX_FILE
    try:
        weight_map = parse_json(read_small(path, TABLE_FILE_BYTES))["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if {"/", "\0"} & set(name) or name in ("", ".", "..")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is no index of weights: {error!r}") from error
    if outside:
        raise DamagedCheckpointError(f"{path} names files outside its folder: {listed(outside, MAX_NAMES)}")
    files = {name: TensorFile(folder / name) for name in names}
    stored = {name: set(file.keys) for name, file in files.items()}
    missing = [f"{key} in {name}" for key, name in weight_map.items() if key not in stored[name]]
    wrong_file = [
        f"{key} in {name}" for name, file in files.items() for key in file.keys if weight_map.get(key, name) != name
    ]
    if missing or wrong_file:
        wrong = listed(missing + wrong_file, MAX_NAMES)
        raise DamagedCheckpointError(f"{path} and the files beside it do not match: {wrong}")
    return {key: file for file in files.values() for key in file.keys}
