"""Settings of the tests of known bugs."""

from __future__ import annotations

from tests.kit.processes import PRELOAD

# Modules of jobs import their cases, which take a second to make: once in the server, not in each worker.
PRELOAD += ["tests.known_bugs.test_known_bugs"]
