"""Random command lines against one process."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.random_runs import failures
from tests.kit.pool import Pool


@pytest.mark.slow
def test_random_command_lines_have_the_numbers_of_one_process(pool: Pool) -> None:
    assert [*failures(pool, range(100), Counter())] == []
