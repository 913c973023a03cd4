"""DiLoCo against data parallelism and a simulation in one process; replicas that come and go."""

from __future__ import annotations

import math
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.config.diloco import DilocoConfig
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.optimizer.main_params import MainParams
from megatron.training.build import build_trainer
from megatron.training.diloco.component import left_out, source_of
from megatron.training.diloco.outer_optimizer import OuterOptimizer
from megatron.training.failure_report import NonFiniteError
from megatron.training.replicas import store as replica_store
from megatron.training.replicas import transfer
from megatron.training.replicas.members import Member, ReplicaError, Replicas, ServerLostError, connect
from megatron.training.replicas.store import GREETING, AuthenticatedChannel, read_secret, serve
from megatron.training.replicas.transfer import copy_to_peers
from tests.distributed.diloco_runs import (
    FP64,
    Killed,
    Mortality,
    Replica,
    largest_difference,
    replica_config,
    run_rank,
    run_replicas,
    take_step,
    together,
    weights,
)
from tests.kit.pool import Pool, RankError
from tests.kit.runs import Outcome, checkpoint, column, differences, records, saved_steps, tiny_run


def test_a_round_every_step_is_data_parallelism() -> None:
    sgd = f"{FP64} --optimizer sgd --sgd-momentum 0 --lr 0.5 --weight-decay 0.1"
    flags = f"{sgd} --diloco-sync-interval 1 --diloco-outer-lr 1 --diloco-outer-momentum 0"
    replicas = run_replicas(flags)
    one = build_trainer(tiny_run(Path("unused"), sgd.replace("--lr", "--global-batch-size 8 --lr")), 0, 1)
    for step in range(6):
        take_step(one)
        for replica in replicas:
            assert largest_difference(replica.history[step], weights(one)) < 1e-12


class Simulation:
    """Replicas in one process, by the algorithms of the papers, with torch's SGD as the outer optimizer."""

    def __init__(self, flags: str, replicas: int, options: dict[str, Any]) -> None:
        self.interval, self.fragments = options["interval"], options.get("fragments", 1)
        self.delay, self.mix = options.get("delay", 0), options.get("mix", 0.0)
        config = replica_config(f"{flags} --diloco-sync-interval 1", replicas)
        self.trainers = [build_trainer(config, 0, 1) for _ in range(replicas)]
        for index, trainer in enumerate(self.trainers):
            trainer.reader.use_stream(index)
        self.outer = {name: torch.nn.Parameter(value) for name, value in weights(self.trainers[0]).items()}
        lr, momentum = options.get("lr", 0.7), options.get("momentum", 0.9)
        self.optimizers = {n: torch.optim.SGD([v], lr, momentum, nesterov=True) for n, v in self.outer.items()}

    def fragment(self, number: int) -> list[str]:
        first, last = number % self.fragments == 0, number % self.fragments == self.fragments - 1
        blocks = [f"layers.{layer}." for layer in range(number % self.fragments, 2, self.fragments)]
        named = {"layers": False, "embedding": first, "final_layernorm": last}
        return [n for n in self.outer if n.startswith(tuple(blocks)) or named[n.split(".")[0]]]

    def merge(self, gradients: dict[str, Tensor], share: float) -> None:
        for name, gradient in gradients.items():
            self.outer[name].grad = gradient
            self.optimizers[name].step()
            for trainer in self.trainers:
                own = trainer.optimizer.main_params[name]
                own.copy_(share * own + (1 - share) * self.outer[name].detach())

    def run(self) -> list[list[dict[str, Tensor]]]:
        """The weights after every step, of every replica."""
        history, pending, rounds = [], (0, dict[str, Tensor]()), 0
        last = self.trainers[0].total_steps
        for step in range(1, last + 1):
            for trainer in self.trainers:
                take_step(trainer)
            with torch.no_grad():
                if step == last or step == pending[0]:
                    self.merge(pending[1], self.mix)
                    pending = 0, {}
                if step == last or step % (self.interval // self.fragments) == 0:
                    names = [*self.outer] if step == last else self.fragment(rounds)
                    own = [{n: self.outer[n] - t.optimizer.main_params[n] for n in names} for t in self.trainers]
                    pending = step + self.delay, {n: sum(each[n] for each in own) / len(own) for n in names}
                    rounds += 1
                    if step == last or self.delay == 0:
                        self.merge(pending[1], 0.0 if step == last else self.mix)
                        pending = 0, {}
            history.append([weights(trainer) for trainer in self.trainers])
        return history


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two, AdamW": (2, {"interval": 3}),
    "three": (3, {"interval": 2, "lr": 0.4, "momentum": 0.5}),
    "fragments": (2, {"interval": 4, "fragments": 2}),
    "fragments, overlapped": (3, {"interval": 4, "fragments": 2, "delay": 1, "mix": 0.5}),
    "overlapped": (2, {"interval": 3, "delay": 2, "mix": 0.25}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.slow if n in ("fragments", "overlapped") else ()) for n in CASES]
)
def test_replicas_follow_the_papers(case: str) -> None:
    count, options = CASES[case]
    flags = f"{FP64} --train-iters 9 --weight-decay 0.1"
    names = {"interval": "sync-interval", "lr": "outer-lr", "momentum": "outer-momentum"}
    own = " ".join(f"--diloco-{names.get(name, name)} {value}" for name, value in options.items())
    replicas = run_replicas(f"{flags} {own}", count)
    expected = Simulation(flags, count, options).run()
    assert [len(replica.history) for replica in replicas] == [9] * count
    for step, theirs in enumerate(expected):
        for replica, each in zip(replicas, theirs):
            assert largest_difference(replica.history[step], each) < 1e-10, step  # Adam amplifies rounding
    first, *others = (replica.history[-1] for replica in replicas)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_joining_replica_receives_outer_weights_and_position() -> None:
    flags = f"{FP64} --train-iters 12 --diloco-sync-interval 3"
    store = dist.HashStore()
    first, second, third = (Replica(replica_config(flags, 3, timeout=1.0), store, index) for index in range(3))
    together([first.start, second.start])  # the third is waited for, and then not any more
    together([partial(each.train, 5) for each in (first, second)])
    assert not any("joined" in note for note in first.log.notes)
    joining = ThreadPoolExecutor(1).submit(third.start)
    while not hasattr(getattr(third, "diloco", None), "replicas"):
        time.sleep(0.01)
    while not store.check([f"ready/{third.diloco.replicas.id}"]):
        time.sleep(0.01)
    together([partial(each.train, 6) for each in (first, second)])
    notes = joining.result()
    assert any("received the outer weights of step 6" in note for note in notes)
    assert (third.trainer.iteration, third.trainer.consumed_samples) == (6, 24)
    assert all(torch.equal(a, b) for a, b in zip(weights(first.trainer).values(), weights(third.trainer).values()))
    assert [n for n in first.log.notes if "replica 2 joined" in n]
    together([each.train for each in (first, second, third)])
    for other in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first.history[-1].values(), other.history[-1].values()))
        assert all(torch.equal(a, b) for a, b in zip(*(r.diloco.outer.momentum.values() for r in (first, other))))


def test_streams_divide_the_samples_and_no_two_replicas_read_one() -> None:
    flags = "--diloco-sync-interval 1 --pad-global-batch --micro-batch-size 3 --train-iters 4"
    read = []
    for index in range(3):
        trainer = build_trainer(replica_config(flags, 3), 0, 1)
        trainer.reader.use_stream(index)
        mine = []
        for _ in range(4):
            places = trainer.data.rank_places("train", trainer.consumed_samples, 4, 0, 1)
            for batch, of_batch in zip(trainer.next_batches(), places):
                assert batch.sample_ids.tolist()[: len(of_batch)] == [*of_batch]
                assert batch.loss_mask[len(of_batch) :].sum() == 0
                mine += of_batch
            trainer.progress.consumed_samples += 4
        read.append(mine)
        digest = trainer.data.digest_places("train", [range(index, 48, 3)])
        assert trainer.reader.digest_read % 2**64 == trainer.reader.samples_digest() == digest
    assert sorted(place for mine in read for place in mine) == [*range(48)]


def test_int8_averages_have_the_same_bits_everywhere_and_are_near() -> None:
    flags = "--train-iters 4 --diloco-sync-interval 2"
    exact, rounded = run_replicas(flags), run_replicas(f"{flags} --diloco-int8")
    for a, b in zip(rounded[0].history[-1].values(), rounded[1].history[-1].values()):
        assert torch.equal(a, b)
    differences = [
        (a - b).abs().max().item() for a, b in zip(exact[0].history[1].values(), rounded[0].history[1].values())
    ]
    steps = [(a - b).abs().max().item() for a, b in zip(exact[0].history[1].values(), exact[0].history[0].values())]
    assert 0 < max(differences) < 0.1 * max(steps)
    sent = [replica.log.metrics[0]["diloco-sent-bytes"] for replica in (exact[0], rounded[0])]
    assert sent[1] < 0.3 * sent[0]


def broken(kind: str, at: int, trainer: Any) -> None:
    """Make the weights of a replica unusable before a step."""
    if trainer.iteration == at:
        for value in trainer.optimizer.main_params.values():
            value.view(-1)[0] = float(kind)


OTHERS = "--diloco-fragments 2 --diloco-delay 1 --diloco-mix 0.5 --diloco-int8"


@pytest.mark.parametrize(
    ("kind", "count", "flags"),
    [
        pytest.param("nan", 2, "", marks=pytest.mark.slow),
        ("-inf", 3, ""),
        ("1e30", 2, ""),
        pytest.param("1e30", 3, OTHERS, marks=pytest.mark.slow),
        ("nan", 3, OTHERS),
    ],
)
def test_a_replica_with_absurd_weights_is_left_out_by_all(kind: str, count: int, flags: str) -> None:
    """The others go on as if it had left before: with the mean of their own progress."""
    config = replica_config(f"--train-iters 8 --diloco-sync-interval 2 {flags}", count, timeout=5)
    store = dist.HashStore()
    replicas = [Replica(config, store, index) for index in range(count)]
    together([replica.start for replica in replicas])
    *whole, last = replicas

    def breaks() -> None:
        with pytest.raises(NonFiniteError, match="leaves out this replica"):
            last.train(before=partial(broken, kind, 3))
        last.diloco.on_stop(None)

    mortality = Mortality(0)
    mortality.random.random = lambda: 1.0  # type: ignore[method-assign]  # no connection is lost
    with mortality.observing():
        together([*(each.train for each in whole), breaks])
    first = whole[0]
    (note,) = [note for note in first.log.notes if "left out" in note]
    assert f"replica {count - 1} is left out: its outer gradient" in note
    for other in whole[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first.history[-1].values(), other.history[-1].values()))
        assert other.log.notes == first.log.notes
    number = int(note.split()[2].rstrip(":"))
    taken = [average for _, average in mortality.rounds[number]]
    assert len(taken) == len(whole)
    mean = torch.stack([mortality.gradients[number][index] for index in range(len(whole))]).mean(0)
    assert all(torch.equal(taken[0], other) for other in taken)
    tolerance = 0.02 if "int8" in flags else 1e-6
    assert (taken[0] - mean).abs().max() <= tolerance * mean.abs().max()


def test_outlying_replicas_are_excluded_from_the_mean() -> None:
    def excluded(*norms: float | None) -> set[int]:
        facts = [{"starting": norm is None} | ({} if norm is None else {"norm": norm}) for norm in norms]
        return {*left_out([Member(index, str(index), each) for index, each in enumerate(facts)])}

    assert excluded(1.0, 900.0) == set()
    assert excluded(1.0, 1100.0) == {1}
    assert excluded(1.0, 0.0, 5.0) == set(), "a replica that has skipped all updates"
    assert excluded(0.0, 1.0) == set()
    assert excluded(0.0, 0.0, 1e9) == set(), "nothing to compare with"
    assert excluded(1.0, math.nan, 2.0, math.inf) == {1, 3}
    assert excluded(1.0, 1e9, 1e9, 1.0, 1.0) == {1, 2}
    assert excluded(None, 3.0) == excluded(3.0) == excluded(None, None) == set()
    assert excluded(math.nan) == {0}


def test_a_run_of_which_no_replica_is_left_ends() -> None:
    store = dist.HashStore()
    run_pair = [Replica(replica_config(STEPS, timeout=5), store, index) for index in range(2)]
    together([each.start for each in run_pair])

    def breaks(replica: Replica) -> None:
        with pytest.raises(NonFiniteError, match="leaves out all replicas"):
            replica.train(before=partial(broken, "nan", 1))

    together([partial(breaks, each) for each in run_pair])


STEPS = "--train-iters 4 --diloco-sync-interval 2"

MALFORMED = (
    b"", b"{", b"[]", b"null", b'"x"', b"[" * 5000, b"\xff\xfe", b"1" * 5000, b"-5", b"true", b"1e3", b'[[0,"x",{}]]',
    b'[[99,"x",{"starting":true,"rounds":0,"position":[0,0],"whole":false}]]',
    b'[[0,"x",{"starting":1,"rounds":0,"position":[0,0],"whole":false}]]',
    b'[[0,"x",{"starting":true,"rounds":1e400,"position":[0,0],"whole":false}]]',
    b'[[0,"x",{"starting":true,"rounds":0,"position":"ab","whole":false,"norm":"a"}]]',
    b'[[0,"x",{"starting":true,"rounds":0,"position":[0,0],"whole":false,"norm":[[]]}]]',
)  # fmt: skip


@pytest.mark.parametrize("key", ["options", "latest", "0/members", "0/arrived", "0/decision", "holder/0", "holder/1"])
def test_malformed_values_in_the_store_end_in_sentences(key: str) -> None:
    """Or are passed over; nothing waits for them without end."""
    for value in MALFORMED:
        store = dist.HashStore()
        replicas = Replicas(store, 0, 1, 2, timeout=0.05, poll=0.001)
        if key == "0/arrived":
            store.set("holder/1", "other")
            store.set("0/arrived/other", value)
        else:
            store.set(key, value)
        facts = {"starting": True, "rounds": 0, "position": [0, 0], "whole": False}
        reason = ""
        try:
            replicas.index = replicas.claim(0, False, {"a": 1})
            members = replicas.agree(facts)
            replicas.vote(members)
            replicas.decide(members)
        except UserError as error:
            reason = str(error)
            assert re.match("E95[56]", reason)
        except ReplicaError as error:
            reason = str(error)
            assert "is not one that replicas write" in reason
        finally:
            replicas.leave()


def test_a_mean_that_is_not_finite_ends_all_members() -> None:
    """Replicas that report other norms than the ones of their updates."""
    store = dist.HashStore()

    def lie(index: int) -> None:
        replica = Replica(replica_config("--train-iters 2 --diloco-sync-interval 2", timeout=5), store, index)
        replica.start()
        facts = {"starting": False, "rounds": 0, "position": [2, 8], "whole": True, "norm": 1.0}
        outer = replica.diloco.outer
        delta = torch.full_like(outer.gradients([*outer.params]), math.nan)
        with pytest.raises(ReplicaError, match="the mean of the replicas is not finite"):
            replica.diloco._synchronise(facts, delta, None)

    together([partial(lie, 0), partial(lie, 1)])


SECRET = b"0123456789abcdef"


def test_the_store_changes_only_with_the_secret(tmp_path: Path) -> None:
    _, port = serve("127.0.0.1", 0, SECRET)
    store = connect(f"127.0.0.1:{port}", 5, SECRET)
    store.set("key", b"\x00\xff")
    for other in (b"", SECRET[::-1]):
        with pytest.raises(UserError, match=r"E954.*does not have the secret"):
            connect(f"127.0.0.1:{port}", 5, other)
    with pytest.raises(UserError, match=r"E954.*does not have the secret"):  # a server without it is not believed
        connect(f"127.0.0.1:{serve('127.0.0.1', 0)[1]}", 5, SECRET)
    replayed = b""
    framed = bytes(36) + b"\0\0\0\x50" + bytes(80)
    for junk in (b"", bytes(100), b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n" * 9, framed):
        with socket.create_connection(("127.0.0.1", port)) as outsider:
            replayed = outsider.recv(1000)
            outsider.sendall(junk)
    assert SECRET not in replayed
    assert store.get("key") == b"\x00\xff"
    (tmp_path / "short").write_text("abc")
    for name in ("short", "missing"):
        with pytest.raises(UserError, match="E957"):
            read_secret(str(tmp_path / name))
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert read_secret(str(tmp_path / "secret")) == SECRET


def test_a_message_that_was_changed_or_repeated_is_not_read() -> None:
    nonces = bytes(64)
    client, server = (AuthenticatedChannel(SECRET, nonces, server=server) for server in (False, True))
    body = client.seal([b"set", b"key", b"value"])[4:]
    for changed in (body[:-1] + b"x", body[:-1], body + b"x", bytes(len(body)), b""):
        with pytest.raises(ValueError, match="secret"):
            server.open(changed)
    assert server.open(body) == [b"set", b"key", b"value"]
    for sender in (client, server):  # again, and back to where it came from
        with pytest.raises(ValueError, match="secret"):
            sender.open(body)
    with pytest.raises(ValueError, match="secret"):
        AuthenticatedChannel(SECRET, bytes(63) + b"1", server=True).open(body)


def test_the_memory_of_the_server_is_bounded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_store, "STORE_BYTES", 1 << 20)
    _, port = serve("127.0.0.1", 0)
    store = connect(f"127.0.0.1:{port}", 5)
    with pytest.raises(ReplicaError, match=r"from 127.0.0.1: the limits are"):
        store.set("large", "x" * (replica_store.VALUE_BYTES + 1))
    for number in range(20):
        store.set(f"{number}/x", "x" * 50_000)
    with pytest.raises(ReplicaError, match=r"the store has its limit of 1.00 MiB, .* from 127.0.0.1"):
        store.set("20/x", "x" * 50_000)
    store.set("0/x", "y")  # in place of a larger value
    assert store.get("0/x") == b"y"
    store.set("latest", "115")  # attempts that are long over are forgotten
    assert not store.check(["14/x"])
    assert store.check(["15/x"])
    assert "refused a request" in capfd.readouterr().out
    with pytest.raises(ReplicaError, match="is gone"):
        Replicas(store, 0, 1, 2, timeout=1)._ask(store.set, "too large", "x" * (8 << 20))


def test_unknown_clients_do_not_take_the_place_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "CONNECTIONS", 3)
    port = serve("127.0.0.1", 0, SECRET)[1]
    with ExitStack() as outsiders:
        idle = [outsiders.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        for outsider in idle:
            outsider.settimeout(20)
        stores = [connect(f"127.0.0.1:{port}", 20, SECRET) for _ in range(3)]
        for outsider in idle:  # all had to leave
            with suppress(ConnectionResetError):
                assert outsider.recv(1000).startswith(GREETING)
                assert outsider.recv(1000) == b""
    for number, store in enumerate(stores):
        store.set("key", str(number))
    with pytest.raises(UserError, match=r"E954.*as many as it accepts"):
        connect(f"127.0.0.1:{port}", 0.1, SECRET)
    assert stores[0].get("key") == b"2"


def test_messages_that_never_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "STORE_BYTES", 1 << 20)
    address = ("127.0.0.1", serve("127.0.0.1", 0)[1])
    refused = 0
    with ExitStack() as halves:
        for _ in range(4):
            half = halves.enter_context(socket.create_connection(address))
            half.settimeout(1)
            nonces = half.recv(1000)[len(GREETING) :] + bytes(32)
            hello = AuthenticatedChannel(b"", nonces, server=False).seal([b"hello"])
            half.sendall(bytes(32) + hello + struct.pack("!I", 400_000) + bytes(1000))
            half.recv(len(hello) + 100)
            with suppress(TimeoutError):
                refused += half.recv(1) == b""
    assert refused == 2


ANSWERS = [[], [b""], [b"refused"], [b"ok", b"1", b"2"], [b"none", b"x"], [b"none"], [b"refused", b"\xff", b""]]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("before", [[], [[b"ok"]]], ids=["greeting", "request"])
def test_malformed_answers_of_a_server_end_in_sentences(answer: list[bytes], before: list[list[bytes]]) -> None:
    def serve_one() -> None:
        with listener, listener.accept()[0] as client:
            client.sendall(GREETING + bytes(32))
            channel = AuthenticatedChannel(b"", bytes(32) + client.recv(32), server=True)
            for fields in (*before, answer):
                client.recv(1000)
                client.sendall(channel.seal(fields))

    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(serve_one)
        if not before:
            with pytest.raises(UserError, match="E954"):
                connect(address, 5)
            return
        replicas = Replicas(connect(address, 5), 0, 1, 2, timeout=1)
        with pytest.raises(ReplicaError, match="replica server"):
            replicas._replace("key", "", "value")


def test_a_server_that_ends_while_a_vote_is_awaited_is_lost() -> None:
    """Not an unknown error: the replica saves the last complete step."""
    server, port = serve("127.0.0.1", 0)
    replicas = Replicas(connect(f"127.0.0.1:{port}", 5), 0, 1, 2, timeout=20)
    other = Member(1, "other", {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replicas.settle, 1, [other, Member(0, replicas.id, {})], True)
        time.sleep(0.3)
        assert not waiting.done()
        server.stop()
        with pytest.raises(ServerLostError, match="the replica server is gone"):
            waiting.result(10)


def test_a_member_that_is_gone_costs_no_wait_for_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo alone would try to connect to it until the timeout."""
    server, port = serve("127.0.0.1", 0)
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *arguments: time.sleep(20))
    facts = {"starting": True, "position": [0, 0], "whole": True}

    def take_part(index: int) -> float:
        replicas = Replicas(connect(f"127.0.0.1:{port}", 20), 0, 1, 2, timeout=20)
        replicas.index = replicas.claim(index, True, {})
        members = replicas.agree(facts)
        began = time.monotonic()
        if index == 0:
            with pytest.raises(dist.DistError):
                replicas.group(members)
        replicas.leave()
        return time.monotonic() - began

    assert max(together([partial(take_part, 0), partial(take_part, 1)])) < 5
    server.stop()


def test_state_is_copied_to_those_that_are_behind_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several types and shapes, one in another order of memory, one larger than a chunk."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 10_000)

    def tensors(index: int) -> list[Tensor]:
        types = (torch.float32, torch.bfloat16, torch.float64)
        made = [torch.full((3, number + 1), 100.0 * index + number, dtype=types[number // 20]) for number in range(60)]
        made[5] = torch.arange(6.0).reshape(2, 3).T + index
        return [*made, torch.arange(3000.0) + index]

    def copy(index: int) -> list[Tensor]:
        replicas = Replicas(store, 0, 1, 3, timeout=20)
        replicas.index = replicas.claim(index, True, {})
        members = replicas.agree({"starting": True, "position": [0, 0], "whole": True})
        group, found = replicas.group(members), tensors(index)
        copy_to_peers(found, group, 1, [0, 2])
        waits.append(replicas.meter.pop_bytes_sent()["replica", "all-reduce"] / (4 * 4 / 3))
        replicas.leave()
        return found

    store, waits = dist.HashStore(), list[float]()
    for found in together([partial(copy, index) for index in range(3)]):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, tensors(1), strict=True))
    assert max(waits) < 9, "of 61 tensors"


def test_an_abandoned_replica_ends_and_an_index_has_one_replica() -> None:
    flags = f"{FP64} --train-iters 6 --diloco-sync-interval 2"
    store = dist.HashStore()
    first, second = (Replica(replica_config(flags, timeout=0.8), store, index) for index in range(2))
    together([first.start, second.start])
    with pytest.raises(UserError, match="E956"):
        Replica(replica_config(f"{flags} --diloco-replica 1", timeout=0.8), store).start()
    with pytest.raises(UserError, match=r"E955.*diloco_outer_lr: 0.7 there, 0.5 here"):
        Replica(replica_config(f"{flags} --diloco-outer-lr 0.5", timeout=0.8), store).start()
    second.diloco.replicas._stopped.set()  # suspended: no heartbeat
    first.train(2)
    assert first.log.metrics[0]["diloco-members"] == 1
    with pytest.raises(ReplicaError, match="went on without this one"):
        second.train(2)


def test_others_receive_the_state_of_the_most_advanced_replica() -> None:
    def member(index: int, starting: bool, rounds: int, iteration: int) -> Member:
        return Member(
            index, str(index), {"starting": starting, "rounds": rounds, "position": [iteration, 4 * iteration]}
        )

    assert source_of([member(0, True, 0, 0), member(1, True, 0, 100)]).index == 1
    assert source_of([member(0, True, 3, 100), member(1, True, 4, 90)]).index == 1
    assert source_of([member(0, False, 3, 100), member(1, True, 4, 120)]).index == 0


def test_an_index_beyond_the_replicas_of_a_resumed_run_is_replaced() -> None:
    replicas = Replicas(dist.HashStore(), 0, 1, 2, timeout=0.5)
    assert replicas.claim(2, False, {}) == 0
    replicas.leave()


def test_a_round_is_pending_on_ranks_without_a_part_of_it() -> None:
    """Ranks take part in the collectives of its merge, also after a resume."""
    main_params = MainParams({"layers.0.w": torch.ones(3)}, as_remainders=False)
    outer = OuterOptimizer(main_params, DilocoConfig(diloco_sync_interval=2, diloco_fragments=2))
    outer.receive([], torch.zeros(0))
    resumed = OuterOptimizer(main_params, outer.config)
    resumed.load_state_dict(outer.state_dict())
    assert resumed.pending
    assert not resumed.grads
    resumed.step(0.0)
    assert not resumed.pending
    assert torch.equal(main_params["layers.0.w"], torch.ones(3))


def live_and_die(
    config: RunConfig, base: Any, index: int, mortality: Mortality, lives: list[tuple[int, int]]
) -> Replica:
    """One replica after the other with the same index: each makes so many requests and sums, and the last lives on."""
    for requests, sums in [*lives, (1 << 30, 1 << 30)]:
        replica = Replica(config, dist.PrefixStore("run", base), index)
        mortality.left[id(replica.store)], mortality.exchanges[id(replica.store)] = requests, sums
        try:
            replica.run()
            break
        except Killed:
            replica.close()
    return replica


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_every_round_is_the_mean_of_its_members_despite_crashes_at_any_moment(seed: int) -> None:
    random = np.random.default_rng(seed)
    options = random.choice(["", "--diloco-fragments 2", "--diloco-fragments 2 --diloco-delay 1 --diloco-mix 0.5"])
    flags = f"{FP64} --train-iters 16 --diloco-sync-interval 2 {options}"
    config, base, mortality = replica_config(flags, 3, timeout=0.7), dist.HashStore(), Mortality(seed)
    lives = [[(int(random.integers(20, 400)), int(random.integers(1, 16))) for _ in range(i)] for i in range(3)]
    with mortality.observing():
        acts = [partial(live_and_die, config, base, index, mortality, lives[index]) for index in range(3)]
        replicas = together(acts)
    check_rounds(mortality)
    finished = [weights(replica.trainer) for replica in replicas if replica.trainer.iteration == 16]
    assert len(finished) == 3
    for other in finished[1:]:
        assert all(torch.equal(finished[0][name], other[name]) for name in other)


def check_rounds(mortality: Mortality) -> None:
    """All replicas took the same from a round: the mean of the progress of those that were in it."""
    assert sorted(mortality.rounds) == [*range(1, max(mortality.rounds) + 1)]
    for number, taken in mortality.rounds.items():
        members, average = taken[0]
        for others, theirs in taken[1:]:
            assert members == others, number
            assert torch.equal(average, theirs), number
        mean = sum(mortality.gradients[number][index] for index in members) / len(members)
        assert torch.allclose(average, torch.as_tensor(mean), rtol=0, atol=1e-13), number


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool]]:
    """Processes for three replicas."""
    with Pool(2) as first, Pool(2) as second, Pool(2) as third:
        yield [first, second, third]


@pytest.fixture
def server() -> Iterator[str]:
    store, port = serve("127.0.0.1", 0)
    yield f"--diloco-server 127.0.0.1:{port}"
    del store


def run_of(folder: Path, flags: str, world_size: int = 2) -> RunConfig:
    """A replica of 8 steps with rounds at steps 2, 4, 6 and 8, merged a step later."""
    rounds = "--diloco-sync-interval 4 --diloco-fragments 2 --diloco-delay 1 --diloco-mix 0.5 --diloco-timeout 20"
    return tiny_run(folder, f"--save {folder}/saved --train-iters 8 {rounds} {flags}", world_size)


LAYOUTS = {
    "tp2-sp, int8": "--tensor-model-parallel-size 2 --sequence-parallel --diloco-int8",
    "dp2, zero-1, bf16": "--bf16 --use-distributed-optimizer --store-param-remainders",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.mark.parametrize(
    "layout", [name if "tp2" in name else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_stopped_set_of_replicas_ends_as_if_nothing_had_happened(
    pools: list[Pool], server: str, tmp_path: Path, layout: str
) -> None:
    def all_of(name: str, flags: str = "") -> list[Outcome]:
        configs = [run_of(tmp_path / f"{name}{index}", f"{LAYOUTS[layout]} {server} {flags}") for index in range(2)]
        acts = [partial(pool.run, 2, run_rank, each) for pool, each in zip(pools, configs)]
        return [outcome for outcomes in together(acts) for outcome in outcomes]

    assert [outcome.status for outcome in all_of("whole")] == [0] * 4
    for _ in range(2):  # a round is in progress after step 4, and nothing is after step 8
        assert [outcome.status for outcome in all_of("parts", "--exit-interval 4")] == [0] * 4
    middle = Manifest.open(tmp_path / "parts0/saved/iter_0000004")
    assert any(name.startswith("optim.outer_grad.") for name in middle.tensors)
    ends = {name: by_stream(tmp_path.glob(f"{name}*/saved/iter_0000008")) for name in ("whole", "parts")}
    assert sorted(ends["whole"]) == sorted(ends["parts"]) == [0, 1]
    for index, end in ends["whole"].items():
        assert differences(end, ends["parts"][index]) == []
    first, second = (checkpoint(end)[0] for end in ends["whole"].values())
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("optim.exp"))


def by_stream(paths: Iterable[Path]) -> dict[int, Path]:
    """Checkpoints of replicas by the stream of samples that they read."""
    return {Manifest.open(path).state["data"]["stream"][0]: path for path in paths}


def test_a_lost_server_ends_replicas_with_a_checkpoint_from_which_they_go_on(pools: list[Pool], tmp_path: Path) -> None:
    def start_server() -> tuple[subprocess.Popen[str], str]:
        tool = [sys.executable, "tools/diloco_server.py", "--port", "0"]
        process = subprocess.Popen(tool, stdout=subprocess.PIPE, text=True)
        return process, f"--diloco-server {process.stdout.readline().split()[-1]}"

    def all_of(server: str, *changes: Any) -> list[Outcome]:
        flags = f"--save {tmp_path}/NAME/saved --train-iters 8 --diloco-sync-interval 2 --diloco-timeout 20 {server}"
        configs = [tiny_run(tmp_path / name, flags.replace("NAME", name)) for name in "ab"]
        acts = [partial(pool.run, 1, run_rank, each, *changes) for pool, each in zip(pools, configs)]
        return [outcome for outcomes in together(acts) for outcome in outcomes]

    process, server = start_server()
    try:
        for outcome in all_of(server, 4, process.pid, 0.3):
            assert outcome.status == 1
            assert "the replica server is gone" in outcome.err
        assert [saved_steps(tmp_path / name / "saved") for name in "ab"] == [[4], [4]]
    finally:
        process.kill()
        process.wait()
    process, server = start_server()
    try:
        assert [outcome.status for outcome in all_of(server)] == [0, 0]
    finally:
        process.terminate()
    assert process.wait() == 0
    a, b = (checkpoint(tmp_path / name / "saved/iter_0000008")[0] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a if not name.startswith("optim.exp"))


def test_diloco_is_turned_on_and_off_at_a_checkpoint(pools: list[Pool], server: str, tmp_path: Path) -> None:
    def run(flags: str) -> Outcome:
        schedule = "--lr-decay-style constant --resume-mode new-schedule"
        (outcome,) = pools[0].run(
            1, run_rank, tiny_run(tmp_path / "run", f"--save {tmp_path}/saved {schedule} {flags}")
        )
        return outcome

    own = f"--diloco-sync-interval 2 --diloco-replicas 1 --diloco-timeout 5 {server}"
    assert run("--train-iters 3").status == 0
    assert "the checkpoint has no outer weights: DiLoCo starts from the weights" in run(f"--train-iters 7 {own}").out
    tensors, state = checkpoint(tmp_path / "saved/iter_0000007")
    assert state["outer"] == {"rounds": 3, "pending": False, "iteration": 7, "consumed_samples": 28}
    assert all(torch.equal(tensors[f"optim.outer_param.{n}"], tensors[n]) for n in tensors if "optim." not in n)
    assert "continues from this replica's weights, alone" in run("--train-iters 9").out
    assert saved_steps(tmp_path / "saved") == [3, 7, 9]


@pytest.mark.slow
def test_the_loss_of_a_run_in_which_a_replica_dies_and_another_joins(
    pools: list[Pool], server: str, tmp_path: Path
) -> None:
    """The killed one starts again from nothing; a third comes late."""

    def run(name: str, pool: Pool, flags: str, *strike: Any) -> float:
        folder = tmp_path / name
        options = "--diloco-sync-interval 10 --diloco-timeout 3 --lr-decay-style constant --train-iters 80"
        evaluation = "--eval-iters 8 --eval-interval 80"
        pool.run(1, run_rank, tiny_run(folder, f"{options} {evaluation} {flags}"), *strike)
        return float(column(folder, "lm loss validation", "lm loss validation")[-1])

    def with_deaths() -> float:
        flags = f"--diloco-replicas 3 {server}"

        def killed_and_again() -> float:
            with pytest.raises(RankError, match="SIGKILL"):
                run("killed", pools[1], flags, 37, None, 0.02)
            return run("again", pools[1], flags, None, None, 0.02)

        def late() -> float:
            time.sleep(2)
            return run("late", pools[2], flags, None, None, 0.02)

        losses = together([partial(run, "first", pools[0], flags, None, None, 0.02), killed_and_again, late])
        assert losses == [losses[0]] * 3  # all end with the outer weights
        notes = [record["text"] for record in records(tmp_path / "first", "text")]
        assert any("replica 1 left" in note for note in notes)
        assert sum("joined" in note for note in notes) >= 1
        return losses[0]

    store, port = serve("127.0.0.1", 0)
    flags = f"--diloco-replicas 3 --diloco-server 127.0.0.1:{port}"
    calm = together([partial(run, f"calm {index}", pool, flags) for index, pool in enumerate(pools)])[0]
    del store
    disturbed = with_deaths()
    print(f"loss after 80 steps, from {math.log(31):.2f}: {disturbed:.4f}; undisturbed {calm:.4f}")
    assert abs(disturbed - calm) < 0.1
