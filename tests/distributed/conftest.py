"""Settings of the tests on several ranks."""

from __future__ import annotations

from tests.kit.processes import PRELOAD

# Modules of jobs import their cases, which take a second to make: once in the server, not in each worker.
PRELOAD += ["tests.distributed.test_layout_matrix", "tests.distributed.test_mutants", "tests.distributed.resharding"]
