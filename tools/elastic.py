"""Start elastic replicas on this machine, and those that are lost again.

    python tools/elastic.py --replicas 3 --run-dir runs/a -- pretrain_gpt.py --save runs/a/checkpoints FLAGS

hosts the server, and starts three replicas, each a program with FLAGS, --elastic-replicas, --elastic-server,
--elastic-replica and a --run-dir of its own in runs/a. A replica of several ranks is started by torchrun. The output of
replica 0 appears here, that of the others in runs/a/replica-N.log.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import echo
from megatron.training.replicas.store import serve

REFUSED = 2
"""Exit status of a start whose flags are refused: another start would be, too."""

POLL_SECONDS = 0.1
RESTART_SECONDS = 1.0
"""Between the end of a replica and its next start."""

GRACE_SECONDS = 60.0
"""For replicas to end after a signal."""


class LocalReplicas:
    """The processes of the replicas on this machine."""

    def __init__(self, options: argparse.Namespace, port: int, secret_file: Path) -> None:
        """Start nothing yet; ``port`` is that of the server."""
        self.options = options
        self.flags = ["--elastic-replicas", str(options.replicas), "--elastic-server", f"127.0.0.1:{port}"]
        self.flags += ["--elastic-secret-file", str(secret_file)]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.signalled = 0

    def start(self, index: int) -> None:
        """Start a replica in a session of its own."""
        options, folder = self.options, Path(self.options.run_dir)
        program = [sys.executable]
        if options.ranks > 1:
            program += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        own = [*self.flags, "--elastic-replica", str(index), "--run-dir", str(folder / f"replica-{index}")]
        environment: dict[str, str] = {**os.environ, **devices_of(index, options)}
        command = [*program, *options.command, *own]
        with nullcontext() if index == 0 else (folder / f"replica-{index}.log").open("ab") as log:
            self.running[index] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; the replicas save and end."""
        self.signalled = number
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def run(self) -> int:
        """Keep the replicas running until the run has ended; return the exit status."""
        restarts, ended, due = 0, 0, dict.fromkeys(range(self.options.replicas), 0.0)
        until = float("inf")
        while self.running or due:
            if self.signalled:
                until = min(until, time.monotonic() + GRACE_SECONDS)
                due.clear()
            for index in [index for index, at in due.items() if time.monotonic() >= at]:
                del due[index]
                self.start(index)
            time.sleep(POLL_SECONDS)
            if time.monotonic() > until:
                return 128 + self.signalled
            for index, process in [*self.running.items()]:
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                del self.running[index]
                kill_session(process.pid)  # ranks that torchrun has left; no other session has its number before `wait`
                status = process.wait()
                ended += status == 0
                if status == REFUSED:
                    return REFUSED
                if status and not ended and not self.signalled:
                    restarts += 1
                    if restarts > self.options.max_restarts:
                        echo(f"elastic: --max-restarts {self.options.max_restarts} are used up", file=sys.stderr)
                        return 1
                    echo(f"elastic: replica {index} ended with status {status}, and starts again", flush=True)
                    due[index] = time.monotonic() + RESTART_SECONDS
        return 128 + self.signalled if self.signalled else int(not ended)

    def close(self) -> None:
        """End everything that was started."""
        for process in self.running.values():
            kill_session(process.pid)
            process.wait()


def kill_session(leader: int) -> None:
    """Kill what is left of the processes that a replica has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def devices_of(index: int, options: argparse.Namespace) -> Mapping[str, str]:
    """Return the variable that gives a replica its share of ``--devices``."""
    if options.devices is None:
        return {}
    devices = options.devices.split(",")
    mine = devices[index * options.ranks : (index + 1) * options.ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def main(argv: Sequence[str]) -> int:
    """Run the replicas; return 0 at the end of the run, 2 if its flags are refused, 1 after too many restarts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, required=True, help="replicas on this machine")
    parser.add_argument("--ranks", type=int, default=1, help="of each replica (default 1)")
    parser.add_argument("--devices", help="GPUs, such as 0,1,2,3: the first replica gets the first --ranks of them")
    parser.add_argument("--run-dir", required=True, help="folder for logs, and the --run-dir of each replica")
    parser.add_argument("--max-restarts", type=int, default=1000, help="of all replicas together")
    parser.add_argument("command", nargs="+", help="after --: the program and its flags")
    options = parser.parse_args(argv)
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    secret_file, secret = folder / "secret", secrets.token_hex(32)
    secret_file.unlink(missing_ok=True)
    with os.fdopen(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
    server, port = serve("127.0.0.1", 0, secret.encode())
    replicas = LocalReplicas(options, port, secret_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, replicas.handle)
    try:
        return replicas.run()
    finally:
        replicas.close()
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
