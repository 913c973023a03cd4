"""Jobs with the plugin of docs/mixers.md, whose module each worker of the pool imports."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.config import plugins
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from tests.distributed.test_perturbation import Changes, perturbed
from tests.kit.cases import GLOBAL_BATCH

PAGE = Path(__file__).parents[2] / "docs" / "mixers.md"
NAME = "gated_linear_attention"


def module_of_the_page() -> str:
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    return text


@contextmanager
def plugin(folder: Path, chunk: int = 64) -> Iterator[None]:
    """The plugin of the page, written to a folder, within this process."""
    sys.path.insert(0, str(folder))
    try:
        (folder / f"{NAME}.py").write_text(module_of_the_page().replace("CHUNK = 64", f"CHUNK = {chunk}"))
        plugins.load_plugins([NAME])
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(NAME, None)
        for kind in ("mixer", "model_family"):
            plugins._registered[kind].clear()


def with_plugin(rank: int, ranks: int, folder: Path, function: Callable[..., Any], argument: Any) -> Any:
    """The function on a rank, which splits its rows into chunks of 5."""
    (folder / str(rank)).mkdir(exist_ok=True)
    with plugin(folder / str(rank), 5):
        return function(rank, ranks, argument)


def changes_in(rank: int, ranks: int, parallel: ParallelConfig) -> Changes:
    training = TrainingConfig(micro_batch_size=GLOBAL_BATCH)
    return perturbed(rank, ranks, parallel, training, {"global": {"token_mixers": ("gated-linear",)}})
