"""Whether all ranks do the same: a machine may have data of its own, older ones, or a library that others lack."""

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

MOST_RANKS = 4  # named of those that read the same


def check_same_data(data: DataSource, world: Group) -> None:
    """Compare what the ranks are about to read; collective.

    Raises:
        DataError: on every rank, when they read different data, or the same in another order.

    """
    seen = comm.all_gather_objects((gethostname(), laid_out(data)), world)
    hosts, by_rank = [host for host, _ in seen], [splits for _, splits in seen]
    names = dict.fromkeys(name for splits in by_rank for name in splits)
    differing = [name for name in names if len({splits.get(name) for splits in by_rank}) > 1]
    if differing:
        versions = [splits.get(differing[0], "nothing") for splits in by_rank]
        raise DataError(
            f"the {' and '.join(map(spoken, differing))} data are not the same on all ranks: {_told(versions, hosts)}",
            "copy the same files to every machine, or name files on a disk that all of them share",
        )


def check_same_kernels(chosen: str, world: Group) -> None:
    """Compare which kernels the ranks have chosen; collective.

    Copies of a weight stay equal to the bit only where all ranks compute with the same ones.

    Raises:
        UserError: on every rank, when they differ.

    """
    if told := _differences(chosen, world):
        raise UserError([Problem("E904", f"ranks would compute differently: {told}", ("--kernels torch",))])


def check_same_schedule(schedule: Schedule, world: Group) -> None:
    """Compare the files from which the ranks have their schedule; collective.

    With different ones they would wait for each other until the timeout.

    Raises:
        UserError: on every rank, when they differ.

    """
    digest = hashlib.blake2b(repr(schedule.ranks).encode(), digest_size=8).hexdigest()
    if told := _differences(digest, world):
        sentence = f"{schedule.name} is not the same on all ranks: {told}"
        raise UserError([Problem("E212", sentence, ("copy the same file to every machine",))])


def laid_out(data: DataSource) -> dict[str, str]:
    """By split name, the content of the data and how much of them is laid out."""
    return {
        name: f"content {fingerprint}, {len(data.datasets[name]):,} samples laid out for "
        + " + ".join(f"{count:,}" for count in data.stretches[name])
        for name, fingerprint in data.fingerprints.items()
    }


def _differences(mine: str, world: Group) -> str:
    """Which ranks have what, where they have different things, else nothing; collective."""
    seen = comm.all_gather_objects((gethostname(), mine), world)
    hosts, versions = [host for host, _ in seen], [version for _, version in seen]
    return _told(versions, hosts) if len(set(versions)) > 1 else ""


def _told(versions: Sequence[str], hosts: Sequence[str]) -> str:
    """Every version of something, and who has it."""
    return "; ".join(f"{_named(version, versions, hosts)}: {version}" for version in dict.fromkeys(versions))


def _named(version: str, versions: Sequence[str], hosts: Sequence[str]) -> str:
    """The ranks that have a version of something, and their machines."""
    ranks = [rank for rank, other in enumerate(versions) if other == version]
    machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {_some(ranks)} ({_some(machines)})"


def _some(items: Sequence[object]) -> str:
    more = f" and {len(items) - MOST_RANKS:,} more" if len(items) > MOST_RANKS else ""
    return ", ".join(map(str, items[:MOST_RANKS])) + more
