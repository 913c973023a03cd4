"""Host the store through which the replicas of a DiLoCo run meet: ``python tools/diloco_server.py --port 29400``.

Start it once per run, on a machine that all ranks of all replicas can reach. It holds no weights, only who is alive and
who takes part, so it may be any small machine. If it ends, the replicas end; start it and them again.

The store has no password: whoever reaches the port can disturb the run. Listen on a private network.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import echo


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    options = parser.parse_args(argv)
    from megatron.distributed.replicas import serve  # torch takes seconds to import

    try:
        store, port = serve(options.host, options.port)
    except OSError as error:
        echo(f"error: cannot listen at {options.host}:{options.port}: {error}", file=sys.stderr)
        return 2
    echo(f"DiLoCo server at {options.host}:{port}", flush=True)
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
