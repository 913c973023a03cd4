"""Join and leave torch.distributed, and pass messages between ranks through its key-value store.

The store works outside of collectives, so ranks can report failures through it while their peers are blocked.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.privacy import redact_json
from megatron.config.text import echo, listed_ranks
from megatron.distributed import comm
from megatron.distributed.comm import FAKE_BACKEND, Group
from megatron.distributed.places import FAILED, PLACE, UNTRACKED

T = TypeVar("T")


def init_distributed(backend: str | None, timeout: timedelta, device: torch.device) -> None:
    """Initialise torch.distributed; a no-op for a single process, or when it is already initialised.

    Args:
        backend: ``nccl`` or ``gloo``; None picks by the device.
        timeout: of the default group.
        device: where this rank computes.

    Raises:
        UserError: when the backend does not support the device, the address of rank 0 is unknown or its port is in use,
            or two processes have the same rank.
        MissingRanksError: when not all ranks join within ``timeout``.
    """
    launch = Launch.read(os.environ)
    if launch.world_size == 1 or dist.is_initialized():
        return
    problems = [*launch.problems()]
    if backend == "nccl" and device.type != "cuda":
        problems.append(Problem("E206", "the nccl backend cannot serve CPUs", ("--distributed-backend gloo",)))
    if problems:
        raise UserError(problems)
    os.environ.setdefault("MASTER_ADDR", str(launch.master))
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    store = open_store(launch, timeout)
    dist.init_process_group(chosen, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


class MissingRanksError(TimeoutError):
    """Some ranks did not join in time."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        """Name the ``ranks`` that are missing."""
        super().__init__(text)
        self.ranks = ranks


LATE_SECONDS = 8.0
"""Seconds after which ranks that have not joined are reported, and once a minute from then on."""


def _wait_for_ranks(
    done: Callable[[], bool], missing: Callable[[], Sequence[int]], place: str, end: float, reports: bool
) -> None:
    """Poll until ``done()``, so that signals are handled meanwhile; print the missing ranks if ``reports``.

    Args:
        done: True when the ranks have joined.
        missing: returns those that have not.
        place: ranks that are to join, and where.
        end: of the timeout, on the monotonic clock.
        reports: this rank prints.

    Raises:
        MissingRanksError: after the timeout.
    """
    pause, report_at = 0.01, time.monotonic() + LATE_SECONDS
    while not done():
        expired = time.monotonic() > end
        if expired or (reports and time.monotonic() > report_at):
            report_at = time.monotonic() + 60.0
            ranks = missing()
            text = f"waiting for {len(ranks)} of {place}: {listed_ranks(ranks)}"
            if expired:
                raise MissingRanksError(f"{text}; --distributed-timeout-minutes are over", ranks)
            echo(text, file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(0.5, 1.25 * pause)


def open_store(launch: Launch, timeout: timedelta) -> dist.distributed_c10d.Store:
    """Connect to the store at ``MASTER_ADDR:MASTER_PORT``, which rank 0 hosts, and wait until all ranks have.

    The agents of torchrun host a store themselves. The store has no password. If ``MASTER_ADDR`` is an IP address,
    rank 0 listens on that one only; a name may stand for another address on its own machine than elsewhere. Rank 0, and
    a rank of a machine that cannot reach it, print which ranks are missing.

    Returns:
        The store, with keys of this start alone.

    Raises:
        UserError: when rank 0 cannot listen at the port, or another process has this rank.
        MissingRanksError: when not all ranks join within ``timeout``.
    """
    host, size = os.environ["MASTER_ADDR"], launch.world_size
    waiting = f"{size} ranks at {host}:{launch.port}", time.monotonic() + timeout.total_seconds()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared = next(iter(rendezvous("env://", launch.rank, size, timeout=timeout)))[0]
    else:
        shared = _host_or_reach_store(launch, timeout, *waiting)
    current = _join_start(shared, launch.rank)

    def missing() -> list[int]:
        store = current()
        return [rank for rank in range(size) if not store.check([f"joined/{rank}"])]

    if launch.rank == 0:
        _wait_for_ranks(lambda: not missing(), missing, *waiting, reports=True)
        current().set("joined/all", "")
    _wait_for_ranks(lambda: current().check(["joined/all"]), missing, *waiting, reports=False)
    return current()


def _join_start(shared: dist.distributed_c10d.Store, rank: int) -> Callable[[], dist.distributed_c10d.Store]:
    """Return a function that joins the newest start, and returns its part of a store.

    The store of torchrun's agents outlives the ranks, and has keys of ended ones. Rank 0 counts the starts, because
    torchrun's count of restarts differs between machines. A start that was complete before this rank joined has ended.
    """

    def part(start: int) -> dist.distributed_c10d.Store:
        return dist.PrefixStore(f"start {start}", shared)  # type: ignore[attr-defined]

    joined = shared.add("starts", 1) if rank == 0 else 0
    part(joined).set(f"joined/{rank}", "")

    def current() -> dist.distributed_c10d.Store:
        nonlocal joined
        newest = shared.add("starts", 0)
        if newest > joined and not part(newest).check(["joined/all"]):
            joined = newest
            part(joined).set(f"joined/{rank}", "")
        return part(joined)

    return current


def _host_or_reach_store(launch: Launch, timeout: timedelta, place: str, end: float) -> dist.distributed_c10d.Store:
    """Host the store on rank 0, and connect to it elsewhere; see :func:`open_store`."""
    host = os.environ["MASTER_ADDR"]
    if launch.rank:
        reports = launch.local_rank == 0 or launch.rank == 1  # on the machine of rank 0
        _wait_for_ranks(lambda: _is_listening(host, launch.port), lambda: [0], place, end, reports)
    try:
        store: dist.distributed_c10d.Store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            launch.port,
            launch.world_size,
            launch.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(host, launch.port) if launch.rank == 0 else None,
        )
    except (dist.DistNetworkError, OSError) as error:
        if launch.rank:
            raise
        sentence = f"rank 0 cannot listen at port {launch.port}: {str(error).splitlines()[0]}"
        fix = f"MASTER_PORT={launch.port + 1}, the same for all ranks"
        raise UserError([Problem("E013", sentence, (fix,))]) from None
    if store.add(f"joined/{launch.rank}", 1) > 1:
        sentence = f"another process at {host}:{launch.port} is rank {launch.rank}, too"
        raise UserError([Problem("E013", sentence, ("a RANK of its own for each process",))])
    return store


def _listen(host: str, port: int) -> int | None:
    """Return a socket that listens on the address ``host``; None for a name, or if it is no address of this machine."""
    with suppress(ValueError, OSError):
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=4096).detach()
    return None


def _is_listening(host: str, port: int) -> bool:
    """Return True if a connection can be made within a second."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def write_flight_record() -> None:
    """Write NCCL's last collectives to the file that it writes itself when one times out; without NCCL do nothing."""
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if prefix is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        with suppress(Exception):  # the report of a stall is worth more than this
            record = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            Path(f"{prefix}{dist.get_rank()}").write_bytes(record)


def enable_flight_recorder(run_dir: str | None) -> None:
    """Let NCCL dump its last collectives to ``nccl_trace_rank_N`` in ``run_dir`` when one times out.

    Call before :func:`init_distributed`. Variables that are already set are not changed.
    """
    if run_dir is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(Path(run_dir).absolute() / "nccl_trace_rank_"))


def write_error_file(error: BaseException, text: str) -> None:
    """Write torchelastic's error file, if this rank has one, for torchrun's report, which shows ``text``."""
    with suppress(OSError, KeyError, ValueError):
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        get_error_handler().record_exception(error)
        found = json.loads(path.read_text())
        found["message"]["extraInfo"]["py_callstack"] = text
        path.write_text(json.dumps(redact_json(found)))


def is_distributed_initialized() -> bool:
    """Return True if torch.distributed is initialised."""
    return dist.is_initialized()


def destroy_distributed() -> None:
    """Destroy the process group. Not to be called after an error: NCCL would wait for ranks that are gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Pretend to be one rank of a world without peers, in which a :class:`Mesh` can be built.

    Collectives return at once and leave their results unset: good for shapes and sizes, not for values.
    """
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    dist.init_process_group(FAKE_BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def world_group(rank: int, world_size: int) -> Group:
    """Return the group of all ranks, for collectives before there is a mesh."""
    handle = dist.group.WORLD if world_size > 1 else None
    return Group(tuple(range(world_size)), rank, handle, row=PLACE.world_row)


def connect_places(world: Group, timeout: float, host: str, local_rank: int) -> Group:
    """Let the ranks of each machine read each other's place; collective.

    Args:
        world: all ranks.
        timeout: seconds after which a rank that waits has stalled.
        host: name of this machine.
        local_rank: number of this rank on its machine.

    Returns:
        ``world``, whose collectives are recorded from now on.
    """
    if world.has_peers:
        untracked = replace(world, row=UNTRACKED)
        PLACE.connect(lambda value: comm.all_gather_objects(value, untracked), world.rank, timeout, host, local_rank)
    return replace(world, row=PLACE.world_row)


Outcome = list[Any]
"""What a call has returned, and None; or None, and the class name and arguments of the error that it raised: JSON."""


def call_safely(act: Callable[[], object]) -> tuple[Outcome, Exception | None]:
    """Call ``act``, which returns JSON; return the outcome, to be sent to other ranks, and the error, if any."""
    try:
        return [act(), None], None
    except Exception as error:
        arguments: list[Any] = [*error.args]
        if isinstance(error, UserError):
            arguments = [[[p.code, p.sentence, [*p.fixes], [*p.choices]] for p in error.problems], [*error.notes]]
        elif isinstance(error, OSError) and error.filename is not None:
            arguments.append(str(error.filename))
        elif not all(isinstance(argument, str | int | None) for argument in arguments):
            arguments = [str(error)]
        return [None, [type(error).__name__, arguments]], error


def raise_first_error(outcomes: Sequence[Outcome], own: Exception | None = None, rank: int = 0) -> list[Any]:
    """Return the results of all ranks; raise the first error, if any: ``own`` if that is ``rank``'s, else a copy."""
    for number, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise own if own is not None and number == rank else _rebuild_error(*failure)
    return [result for result, _ in outcomes]


def _rebuild_error(name: str, arguments: Sequence[Any]) -> Exception:
    """Return another rank's error: of its class if that is Python's or this project's, else a RuntimeError."""
    kind = next((known for known in _subclasses(Exception) if known.__name__ == name), None)
    if kind is not None:
        with suppress(TypeError):  # a constructor may take other arguments than those it passes on
            if issubclass(kind, UserError):
                problems, notes = arguments
                return kind(
                    [Problem(code, text, tuple(fixes), tuple(others)) for code, text, fixes, others in problems], notes
                )
            return kind(*arguments)
    return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for child in kind.__subclasses__():
        if child.__module__.partition(".")[0] in ("builtins", "megatron"):
            yield child
        yield from _subclasses(child)


def gather_results(act: Callable[[], T], group: Group) -> list[T]:
    """Call ``act`` on all ranks and return their JSON results; raise the error of the first failed rank on every rank.

    Collective.
    """
    outcome, own = call_safely(act)
    return raise_first_error(comm.all_gather_objects(outcome, group), own, group.rank)


def run_on_rank0(act: Callable[[], T], world: Group) -> T:
    """Call ``act`` on rank 0 only, and return its JSON result, or raise its error, on every rank; collective."""
    outcome, own = call_safely(act) if world.rank == 0 else ([None, None], None)
    result: T = raise_first_error([comm.broadcast_object(outcome, world)], own)[0]
    return result


FAILED_KEY = "failed_ranks"
"""Store key that counts the calls of :func:`register_failure`."""

STORE_TIMEOUT_SECONDS = 3.0
"""Timeout of a request to the store."""

ELECTION_SECONDS = 0.5
"""Seconds in which ranks of a machine notice each other's failures when there is no store."""

_unanswered: list[threading.Thread] = []
"""Threads whose requests timed out."""


def register_failure() -> bool:
    """Register a failure of this rank; return True if it is the first.

    When the store is unreachable, because the process that hosts it is stopped or gone, it is the first if no other
    rank of this machine has failed before.
    """
    PLACE.slots[FAILED] = own = PLACE.slots[FAILED] or time.monotonic_ns()
    first = _query_store(lambda store: int(store.add(FAILED_KEY, 1)) == 1, default=None)
    if first is not None or not PLACE.peers:
        return first is not False
    time.sleep(ELECTION_SECONDS)
    failed = [(at, rank) for rank, peer in PLACE.peers.items() if (at := peer.slot(FAILED))]
    return (own, dist.get_rank()) <= min(failed, default=(own, dist.get_rank()))


def has_any_rank_failed() -> bool:
    """Return True if any rank has registered a failure. True also when the store is unreachable."""
    return _query_store(lambda store: bool(store.check([FAILED_KEY])), default=dist.is_initialized())


def publish_text(name: str, text: str) -> None:
    """Write a text to the store for other ranks, outside of any collective. Lost when the store is unreachable."""
    _query_store(lambda store: store.set(name, text), default=None)


def read_texts(names: Sequence[str]) -> dict[str, str]:
    """Return the texts stored under ``names``, as far as they exist; empty when the store is unreachable."""
    return _query_store(
        lambda store: {name: store.get(name).decode() for name in names if store.check([name])}, default={}
    )


def add_to_count(name: str, amount: int = 1) -> int:
    """Add to a number in the store, outside of any collective, and return it; 0 when the store is unreachable."""
    return _query_store(lambda store: int(store.add(name, amount)), default=0)


def _query_store(query: Callable[[dist.distributed_c10d.Store], T], default: T) -> T:
    """Return the store's answer, or ``default`` when its host (rank 0) does not answer in time.

    The store's client has no usable timeout, so a thread sends the request. After one timeout no more are sent.
    """
    if not dist.is_initialized() or any(thread.is_alive() for thread in _unanswered):
        return default
    answers: list[T] = []

    def fetch() -> None:
        with suppress(Exception):  # the process that hosts the store is gone
            answers.append(query(dist.distributed_c10d._get_default_store()))

    request = threading.Thread(target=fetch, name="store", daemon=True)
    request.start()
    request.join(STORE_TIMEOUT_SECONDS)
    if request.is_alive():
        _unanswered.append(request)
    return answers[0] if answers else default


GLOO_PEER_LOST = "gloo/transport", "timeout caused pair closure"
"""Fragments of gloo's messages about lost peers, which it raises as plain RuntimeErrors."""


def is_peer_lost(error: BaseException) -> bool:
    """Return True if torch.distributed raised ``error`` because a rank is gone or does not respond."""
    return isinstance(error, dist.DistError) or any(fragment in str(error) for fragment in GLOO_PEER_LOST)
