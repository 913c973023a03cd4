"""Check that all ranks have the same data, kernels and pipeline schedule; machines may differ in files or libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from socket import gethostname

from megatron.config.problems import Problem, UserError
from megatron.data.errors import DataError
from megatron.data.loader import DataSource
from megatron.data.splits import spoken
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.pipeline.actions import Schedule

MOST_RANKS = 4  # listed in an error, of those with the same version


def check_same_data(data: DataSource, world: Group) -> None:
    """Check that all ranks read the same data in the same order; collective.

    Raises:
        DataError: on every rank, if they do not.

    """
    gathered = comm.all_gather_objects((gethostname(), laid_out(data)), world)
    hosts = [host for host, _ in gathered]
    by_rank = [splits for _, splits in gathered]
    names = dict.fromkeys(name for splits in by_rank for name in splits)
    differing = [name for name in names if len({splits.get(name) for splits in by_rank}) > 1]
    if differing:
        versions = [splits.get(differing[0], "nothing") for splits in by_rank]
        kinds = " and ".join(map(spoken, differing))
        raise DataError(
            f"the {kinds} data are not the same on all ranks: {_describe_versions(versions, hosts)}",
            "copy the same files to every machine, or use files on a shared file system",
        )


def check_same_kernels(chosen: str, world: Group) -> None:
    """Check that all ranks have chosen the same kernels; collective.

    Otherwise copies of a weight would not stay equal to the bit.

    Raises:
        UserError: on every rank, if they differ.

    """
    if differences := _differences(chosen, world):
        raise UserError([Problem("E904", f"ranks would compute differently: {differences}", ("--kernels torch",))])


def check_same_schedule(schedule: Schedule, world: Group) -> None:
    """Check that all ranks have read the same pipeline schedule from their files; collective.

    With different schedules the ranks would deadlock.

    Raises:
        UserError: on every rank, if they differ.

    """
    digest = hashlib.blake2b(repr(schedule.ranks).encode(), digest_size=8).hexdigest()
    if differences := _differences(digest, world):
        sentence = f"{schedule.name} is not the same on all ranks: {differences}"
        raise UserError([Problem("E212", sentence, ("copy the same file to every machine",))])


def laid_out(data: DataSource) -> dict[str, str]:
    """Return, by split name, the fingerprint of the data and the numbers of samples that were laid out."""
    return {
        name: f"content {fingerprint}, {len(data.datasets[name]):,} samples laid out for "
        + " + ".join(f"{count:,}" for count in data.stretches[name])
        for name, fingerprint in data.fingerprints.items()
    }


def _differences(mine: str, world: Group) -> str:
    """Describe which ranks have which version, or return an empty string if all have the same; collective."""
    gathered = comm.all_gather_objects((gethostname(), mine), world)
    hosts = [host for host, _ in gathered]
    versions = [version for _, version in gathered]
    return _describe_versions(versions, hosts) if len(set(versions)) > 1 else ""


def _describe_versions(versions: Sequence[str], hosts: Sequence[str]) -> str:
    """Return a phrase such as ``ranks 0, 1 (node1): A; rank 2 (node2): B``."""
    described = []
    for version in dict.fromkeys(versions):
        ranks = [rank for rank, other in enumerate(versions) if other == version]
        machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
        described.append(f"rank{'s' if len(ranks) > 1 else ''} {_shorten(ranks)} ({_shorten(machines)}): {version}")
    return "; ".join(described)


def _shorten(items: Sequence[object]) -> str:
    more = f" and {len(items) - MOST_RANKS:,} more" if len(items) > MOST_RANKS else ""
    return ", ".join(map(str, items[:MOST_RANKS])) + more
