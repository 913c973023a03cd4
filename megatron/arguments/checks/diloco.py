"""Checks of DiLoCo: the schedule of rounds, the server, the replica, and what it does not support."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.text import flag_fixes, multiples_as_fixes

NO_DILOCO = "drop --diloco-sync-interval"


def check_diloco_server(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there is a server to meet at, and that its address can be read."""
    options, fix = config.diloco, "--diloco-server 127.0.0.1:29400"
    if not options.diloco_sync_interval or config.training.skip_train:
        return
    if options.diloco_server is None:
        sentence = "--diloco-sync-interval needs the --diloco-server at which replicas meet (tools/diloco_server.py)"
        yield Problem("E950", sentence, (fix, NO_DILOCO))
        return
    host, _, port = options.diloco_server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        yield Problem("E950", f"--diloco-server {options.diloco_server} is not HOST:PORT", (fix,))


def check_diloco_rounds(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that rounds are equally far apart, synchronise something each, and do not overlap."""
    options, layers = config.diloco, config.model.num_layers
    interval, fragments = options.diloco_sync_interval, options.diloco_fragments
    if not interval:
        return
    if fragments > layers:
        sentence = f"--diloco-fragments {fragments}: a fragment has at least one of the model's {layers} layers"
        yield Problem("E951", sentence, (f"--diloco-fragments {layers}",))
    elif interval % fragments:
        sentence = f"--diloco-sync-interval {interval} is not a multiple of --diloco-fragments {fragments}"
        yield Problem("E951", sentence, multiples_as_fixes("--diloco-sync-interval", interval, fragments))
    elif options.diloco_delay > interval // fragments:
        apart = interval // fragments
        sentence = f"--diloco-delay {options.diloco_delay} is longer than the {apart} steps between two rounds"
        yield Problem("E951", sentence, flag_fixes("--diloco-delay", [apart]))


def check_diloco_replica(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the replica is one of those that the samples are divided among."""
    options = config.diloco
    index, count = options.diloco_replica, options.diloco_replicas
    if options.diloco_sync_interval and index is not None and index >= count:
        sentence = f"--diloco-replica {index}: the {count} replicas have the indices 0 to {count - 1}"
        yield Problem("E952", sentence, (f"--diloco-replica {count - 1}", f"--diloco-replicas {index + 1}"))


def diloco_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the steps during an exchange are lost."""
    options = config.diloco
    if options.diloco_sync_interval and options.diloco_delay and not options.diloco_mix:
        yield (
            f"--diloco-delay {options.diloco_delay} without --diloco-mix: rounds undo the steps of their exchange; "
            "--diloco-mix 0.5 keeps half of them"
        )
