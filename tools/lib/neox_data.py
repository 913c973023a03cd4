"""The weighted data of gpt-neox's configurations, as the lists of weights and prefixes of --train-data-path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset

DEFAULT_ALPHA = 1.0
"""The default of ``weighted_sampler_alpha``."""


def with_blends(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which ``train_data_paths`` and so on are weights and prefixes in turn.

    Without weights, gpt-neox gives all datasets the same one. With ``weight_by_num_documents`` it replaces those that
    are given. Files for each split replace ``data_path``.

    Raises:
        ValueError: if there are not as many weights as paths, or files whose documents count cannot be read.
    """
    found = dict(settings)
    by_documents, alpha = found.pop("weight_by_num_documents", False), found.pop("weighted_sampler_alpha", None)
    for split in ("train", "valid", "test"):
        name = f"{split}_data_paths"
        paths, weights = found.pop(name, None), found.pop(f"{split}_data_weights", None)
        if not paths:
            continue
        weights = weights or [1.0] * len(paths)
        if len(weights) != len(paths):
            raise ValueError(f"{split}_data_weights has {len(weights)} numbers for the {len(paths)} of {name}")
        if by_documents:
            weights = weights_by_documents(
                [_documents(path) for path in paths], DEFAULT_ALPHA if alpha is None else alpha
            )
        found[name] = [word for pair in zip(weights, paths) for word in pair]
    if "train_data_paths" in found:
        found.pop("data_path", None)
        found.pop("split", None)
    return found


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Return the weights of datasets by their numbers of documents.

    With ``p`` the share of a dataset in the documents, its weight is ``p^alpha / sum p^alpha`` (arXiv 1911.02116,
    section 3.1) times ``1 - p``, normalised.
    """
    if len(documents) == 1:
        return [1.0]
    shares = [count / sum(documents) for count in documents]
    total = sum(share**alpha for share in shares)
    weights = [share**alpha / total * (1 - share) for share in shares]
    return [weight / sum(weights) for weight in weights]


def _documents(prefix: str) -> int:
    try:
        return len(IndexedDataset(prefix, verify=False))
    except DataError as error:
        raise ValueError(f"weight_by_num_documents needs the token files: {error}") from error
