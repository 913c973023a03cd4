"""Host the store through which the replicas of a run meet: ``python tools/diloco_server.py --port 29400``.

Start it once per run, on a machine that all ranks of all replicas can reach. It holds no weights, only who is alive and
who takes part, so it may be any small machine. If it ends, the replicas end; start it and them again.

Without --secret-file, whoever reaches the port can change what the replicas agree on. With it, the server and the
replicas (--diloco-secret-file) refuse who does not have the secret. Nothing is encrypted, and replicas send each other
gradients without a secret: listen on a private network in both cases. The store holds at most 256 MiB.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.errors import UserError
from megatron.config.text import echo
from megatron.training.replicas.store import read_secret, serve


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--secret-file", help="file with the secret of the run: openssl rand -hex 32 > FILE")
    options = parser.parse_args(argv)
    try:
        store, port = serve(options.host, options.port, read_secret(options.secret_file))
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    except OSError as error:
        echo(f"error: cannot listen at {options.host}:{options.port}: {error}", file=sys.stderr)
        return 2
    if not options.secret_file and options.host != "127.0.0.1":
        echo("note: without --secret-file, whoever reaches this address can change what is stored", file=sys.stderr)
    echo(f"replica server at {options.host}:{port}", flush=True)
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
