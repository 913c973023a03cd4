"""Ten losses of two small models in two number formats.

``python -m tests.golden.losses`` writes them anew: only in a commit that explains why the numbers change.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron.config.precision import PrecisionConfig
from tests.kit import cases
from tests.kit.cases import Case, run_case
from tests.kit.pool import Pool

FILE = Path(__file__).with_name("losses.json")

MODEL = replace(cases.MODEL, max_position_embeddings=16)
GPT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = replace(
    MODEL,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
CASES = {
    f"{name} {dtype}": Case(model, precision=PrecisionConfig(params_dtype=dtype), steps=10, length=12)
    for name, model in (("gpt", GPT), ("llama", LLAMA))
    for dtype in ("fp64", "fp32")
}


def losses(rank: int, world_size: int) -> dict[str, list[float]]:
    """The losses of all cases on one process with one thread."""
    return {name: [trace.loss for trace in run_case(rank, world_size, case)] for name, case in CASES.items()}


def read() -> dict[str, list[float]]:
    """The recorded losses."""
    return {name: [float.fromhex(x) for x in values] for name, values in json.loads(FILE.read_text()).items()}


def main() -> None:
    """Write the file."""
    with Pool() as pool:
        found = pool.run(1, losses)[0]
    FILE.write_text(json.dumps({name: [x.hex() for x in values] for name, values in found.items()}, indent=1) + "\n")
    print(FILE)


if __name__ == "__main__":
    main()
