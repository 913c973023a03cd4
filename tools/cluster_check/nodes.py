"""Compare the nodes of a job for ``tools/doctor.py``: what differs, and which node, rank or link is slow.

All ranks compute at the same time, then exchange messages in pairs. A rate is compared with the median of its kind.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from megatron.config.errors import UserError
from megatron.config.launch import Launch
from megatron.config.text import echo, listed_ranks
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.launch import destroy_distributed, init_distributed, world_group
from megatron.training.build_model import choose_device
from megatron.training.failure_report import host_name
from tools.cluster_check.checks import COMPARED_FACTS, REQUIRED_EQUAL, machine_facts
from tools.cluster_check.network import Pair, measure_pairs
from tools.lib.findings import BAD, NOTE, Finding, counts, lines_of

K = TypeVar("K", bound=Hashable)

GROUP = "between nodes"
JOIN_SECONDS = 120
"""Seconds in which all ranks must have joined."""

ROUNDS, SECONDS = 4, 0.25
"""Measurements of a rank's speed, of which the best counts, and the length of each."""
WIDTHS = {"cuda": 8192, "cpu": 512}
"""Of the square matrices that are multiplied."""
COPIED = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Bytes of a buffer that is copied, larger than a cache."""

SLOWER = {"cuda": 0.08, "cpu": 0.25}
"""Share of the median that a rate lacks at least where something is called slow; cores of CPUs are often shared."""
SLOWER_LINK = 0.4
"""The same of messages between two ranks, whose times vary more."""
DEVIATIONS = 5.0
"""And so many standard deviations, estimated from the median absolute deviation of four or more."""
CLOCKS_APART = 0.5


class RankRecord(NamedTuple):
    """What one rank reports to the others."""

    host: str
    local_rank: int
    # Of the node; None on its other ranks.
    findings: list[dict[str, Any]] | None
    facts: dict[str, Any] | None


class Speed(NamedTuple):
    """Rates of one rank, the higher the better."""

    # Floating-point operations and copied bytes per second.
    products: float
    copies: float


def outliers(rates: Mapping[K, float], least: float) -> dict[K, float]:
    """Return what is slower than the others, with the share that it lacks.

    From three rates on, they are compared with the median; of two, the slower one with the faster one.

    Args:
        rates: what is compared, the higher the better.
        least: share of the reference that has to be missing.
    """
    if len(rates) < 2:
        return {}
    reference = statistics.median(rates.values()) if len(rates) > 2 else max(rates.values())
    spread = statistics.median(abs(rate - reference) for rate in rates.values()) if len(rates) > 3 else 0.0
    allowed = max(least * reference, DEVIATIONS * 1.4826 * spread)
    return {key: 1 - rate / reference for key, rate in rates.items() if reference - rate > allowed}


def slow_links(rates: Mapping[tuple[K, K], float], least: float) -> tuple[dict[K, float], dict[tuple[K, K], float]]:
    """Return ends that are slow with every partner, slow pairs of the other ends, and the shares that they lack."""
    best: dict[K, float] = {}
    for pair, rate in rates.items():
        for end in pair:
            best[end] = max(rate, best.get(end, 0.0))
    ends = outliers(best, least) if len(best) > 2 else {}
    return ends, outliers({pair: rate for pair, rate in rates.items() if not ends.keys() & {*pair}}, least)


def examine_job(
    own: Sequence[Finding],
    device_name: str,
    launch: Launch,
    environ: Mapping[str, str],
    as_json: bool,
    everything: bool,
) -> int:
    """Examine all nodes of a job together; rank 0 prints. Collective over all ranks.

    Args:
        own: findings of this node, if this is its first rank.
        device_name: ``auto``, ``cpu`` or ``cuda``.
        launch: of this rank.
        environ: of this rank.
        as_json: print one JSON object.
        everything: also print what is in order.

    Returns:
        The exit status, equal on all ranks once they have joined.
    """
    host = host_name(environ)
    try:
        device = choose_device(device_name)
        init_distributed(None, timedelta(seconds=JOIN_SECONDS), device)
    except (UserError, RuntimeError, TimeoutError, OSError) as error:  # as of a start: the node's findings may say why
        echo("\n".join([f"{host}, rank {launch.rank}: the ranks could not join: {error}", *lines_of(own)]))
        return 1
    world = world_group(launch.rank, launch.world_size)
    first = launch.local_rank == 0
    mine = {
        "host": host,
        "local_rank": launch.local_rank,
        "findings": [finding.to_json() for finding in own] if first else None,
        "facts": machine_facts(device.type, environ) if first else None,
    }
    gathered: list[dict[str, Any]] = comm.all_gather_objects(mine, world)
    records = [RankRecord(**each) for each in gathered]
    speeds = [Speed(*each) for each in comm.all_gather_objects(list(measure_speed(world, device)), world)]
    clocks = comm.all_gather_objects(time.time(), world)  # at most as far apart as the ranks leave the last gathering
    pairs = [*measure_pairs(world, min(map(len, ranks_by_host(records).values())), device)]
    destroy_distributed()
    hosts = [record.host for record in records]
    found = [*merged(records), *differences(records), *slow_ranks(hosts, speeds, SLOWER[device.type])]
    found += [*slow_pairs(hosts, pairs)]
    if (apart := max(clocks) - min(clocks)) > CLOCKS_APART:
        sentence = f"clocks are {apart:.1f} s apart: times in logs cannot be compared"
        found.append(Finding(GROUP, "clocks", NOTE, sentence, "start chronyd on all nodes"))
    if launch.rank == 0:
        _print(records, speeds, pairs, found, as_json, everything)
    return int(any(finding.verdict == BAD for finding in found))


def ranks_by_host(records: Sequence[RankRecord]) -> dict[str, list[int]]:
    """Return the ranks of each node, in the order of ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        ranks.setdefault(record.host, []).append(rank)
    return ranks


def measure_speed(world: Group, device: torch.device) -> Speed:
    """Return this rank's speed while all ranks compute, the best of some rounds. Collective over all ranks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = WIDTHS[device.type]
    a = torch.ones(width, width, dtype=dtype, device=device)
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    out, target = torch.empty_like(a), torch.empty_like(source)
    best = Speed(0.0, 0.0)
    for _ in range(ROUNDS):
        comm.all_gather_objects(0, world)  # all begin together
        products = 2 * width**3 * _per_second(lambda: torch.mm(a, a, out=out), device)
        copies = len(source) * _per_second(lambda: target.copy_(source), device)
        best = Speed(max(best.products, products), max(best.copies, copies))
    return best


def _per_second(act: Any, device: torch.device) -> float:
    act()
    _wait(device)
    begun, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < SECONDS / 2:
        act()
        count += 1
        _wait(device)
    return count / taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def merged(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield the notes and the bad findings of all nodes; equal ones once, with the nodes that have them."""
    nodes = [record for record in records if record.findings is not None]
    seen: dict[tuple[str, ...], list[str]] = {}
    for record in nodes:
        for each in record.findings or ():
            if each["verdict"] in (NOTE, BAD):
                key = tuple(each[name] for name in ("group", "name", "verdict", "sentence", "todo"))
                seen.setdefault(key, []).append(record.host)
    for (group, name, verdict, sentence, todo), hosts in seen.items():
        where = "all nodes" if len(hosts) == len(nodes) else ", ".join(hosts)
        yield Finding(group, name, verdict, f"{where}: {sentence}", todo, {"nodes": hosts})


def differences(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield what is not the same on all nodes; versions that must be are bad."""
    nodes = {record.host: record.facts for record in records if record.facts is not None}
    for name in COMPARED_FACTS:
        by_value: dict[str, list[str]] = {}
        for host, facts in nodes.items():
            by_value.setdefault(json.dumps(facts[name]), []).append(host)
        if len(by_value) > 1:
            sentence = "; ".join(f"{', '.join(hosts)}: {value}" for value, hosts in by_value.items())
            rarest = min(by_value.values(), key=len)
            required = name in REQUIRED_EQUAL
            todo = f"install the same on all nodes, or --exclude={','.join(rarest)}" if required else ""
            yield Finding(GROUP, f"{name} differs", BAD if required else NOTE, sentence, todo, {"values": by_value})


def slow_ranks(hosts: Sequence[str], speeds: Sequence[Speed], least: float) -> Iterator[Finding]:
    """Yield nodes that compute more slowly than the others, and ranks that do than the others of their node."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    for kind in Speed._fields:
        what = "computes" if kind == "products" else "copies memory"
        rates = {rank: float(getattr(speed, kind)) for rank, speed in enumerate(speeds)}
        nodes = {host: statistics.median(rates[rank] for rank in own) for host, own in ranks.items()}
        slow = outliers(nodes, least)
        for host, lacks in slow.items():
            sentence = f"node {host} ({listed_ranks(ranks[host])}) {what} {lacks:.0%} slower than the others"
            todo = f"--exclude={host}, and run `python tools/doctor.py` there: temperature, power, clocks, other jobs"
            yield Finding(GROUP, "slow node", BAD, sentence, todo, {"node": host, "lacks": lacks, "of": kind})
        for host, own in ranks.items():
            for rank, lacks in outliers({rank: rates[rank] for rank in own}, least).items():
                sentence = f"rank {rank}, {own.index(rank)} on {host}, {what} {lacks:.0%} slower than the others there"
                todo = f"`python tools/doctor.py` on {host}: its GPU or cores are throttled, shared or bound wrongly"
                facts = {"rank": rank, "node": host, "lacks": lacks, "of": kind}
                yield Finding(GROUP, "slow rank", BAD, sentence, todo, facts)


def slow_pairs(hosts: Sequence[str], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield nodes, ranks and pairs of them between which messages are slower than elsewhere."""
    across: dict[tuple[str, str], float] = {}
    within: dict[str, dict[tuple[int, int], float]] = {}
    for pair in pairs:
        ends = hosts[pair.first], hosts[pair.second]
        if ends[0] == ends[1]:
            within.setdefault(ends[0], {})[pair.first, pair.second] = pair.bandwidth
        else:
            across[ends] = max(pair.bandwidth, across.get(ends, 0.0))
    nodes, links = slow_links(across, SLOWER_LINK)
    for host, lacks in nodes.items():
        rate = max(rate for ends, rate in across.items() if host in ends)
        sentence = f"node {host} exchanges {lacks:.0%} less than the others: {rate / 1e9:.3g} GB/s one way at best"
        todo = f"--exclude={host}; check its cable, its interface (`ethtool`, `ibstat`) and NCCL_SOCKET_IFNAME"
        yield Finding(GROUP, "slow network", BAD, sentence, todo, {"node": host, "lacks": lacks})
    for ends, lacks in links.items():
        sentence = f"{ends[0]} and {ends[1]} exchange {lacks:.0%} less than other pairs: {across[ends] / 1e9:.3g} GB/s"
        yield Finding(
            GROUP, "slow link", BAD, sentence, "check the switch between them", {"nodes": ends, "lacks": lacks}
        )
    inside = {host: max(rates.values()) for host, rates in within.items()}
    for host, lacks in outliers(inside, SLOWER_LINK).items():
        sentence = f"ranks of {host} exchange {lacks:.0%} less with each other than those of other nodes"
        todo = f"--exclude={host}, and `nvidia-smi nvlink -s` there"
        yield Finding(GROUP, "slow link", BAD, sentence, todo, {"node": host, "lacks": lacks})
    for host, rates in within.items():
        ranks, links_inside = slow_links(rates, SLOWER_LINK)
        for rank, lacks in ranks.items():
            sentence = f"rank {rank} on {host} exchanges {lacks:.0%} less with each rank of its node than the others"
            todo = "`nvidia-smi topo -m` and `nvidia-smi nvlink -s` there"
            yield Finding(GROUP, "slow link", BAD, sentence, todo, {"rank": rank, "lacks": lacks})
        for pair_, lacks in links_inside.items():
            sentence = (
                f"ranks {pair_[0]} and {pair_[1]} on {host} exchange {lacks:.0%} less than other pairs of the node"
            )
            todo = "`nvidia-smi topo -m` there: they may be on different sockets"
            yield Finding(GROUP, "slow link", NOTE, sentence, todo, {"ranks": pair_, "lacks": lacks})


def node_table(records: Sequence[RankRecord], speeds: Sequence[Speed], pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield a table of the nodes: ranks, devices and median rates."""
    yield f"{'node':<16}{'ranks':<10}{'devices':<28}{'TFLOP/s':>9}{'copy GB/s':>11}{'link GB/s':>11}"
    for host, own in ranks_by_host(records).items():
        facts = next((records[rank].facts for rank in own if records[rank].facts), None) or {"gpus": [], "cpus": 0}
        gpus = facts["gpus"]
        device = f"{len(gpus)} x {gpus[0]}"[:27] if gpus else f"{facts['cpus']} cores"
        products = statistics.median(speeds[rank].products for rank in own) / 1e12
        copies = statistics.median(speeds[rank].copies for rank in own) / 1e9
        links = [pair.bandwidth for pair in pairs if (pair.first in own) != (pair.second in own)]
        links = links or [pair.bandwidth for pair in pairs if pair.first in own]
        rate = f"{max(links) / 1e9:.3g}" if links else "-"
        numbers = f"{own[0]}-{own[-1]}"
        yield f"{host:<16}{numbers:<10}{device:<28}{products:>9.3g}{copies:>11.3g}{rate:>11}"


def _print(
    records: Sequence[RankRecord],
    speeds: Sequence[Speed],
    pairs: Sequence[Pair],
    found: Sequence[Finding],
    as_json: bool,
    everything: bool,
) -> None:
    if as_json:
        whole = {
            "findings": [finding.to_json() for finding in found],
            "counts": counts(found),
            "ranks": [record._asdict() | speed._asdict() for record, speed in zip(records, speeds)],
            "pairs": [pair._asdict() for pair in pairs],
        }
        echo(json.dumps(whole, indent=1))
        return
    lines = [*node_table(records, speeds, pairs)]
    if everything:
        lines += lines_of(Finding(**each) for each in records[0].findings or ())
    number = counts(found)
    echo("\n".join([*lines, *lines_of(found), "", f"{number['bad']} bad, {number['note']} notes"]))
