"""The table of accelerators against what drivers call them, and against each other; groups of ranks on nodes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import yaml

from megatron.config.errors import UserError
from megatron.planner.hardware import TABLE, Cluster, accelerators, driver_accelerator, find_accelerator

DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40g",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80g",
    "NVIDIA A800-SXM4-80GB": "a800-80g",
    "NVIDIA H100 80GB HBM3": "h100-80g",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H800": "h800-80g",
    "NVIDIA H800 PCIe": "h800-pcie",
    "NVIDIA H200": "h200-141g",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA GH200 480GB": "gh200-96g",
    "NVIDIA B200": "b200-180g",
    "NVIDIA GB200": "gb200-186g",
    "NVIDIA B300 SXM6 AC": "b300-288g",
    "NVIDIA GB300": "gb300-288g",
    "NVIDIA L40S": "l40s-48g",
    "NVIDIA L4": "l4-24g",
    "NVIDIA A40": "a40-48g",
    "NVIDIA A30": "a30-24g",
    "NVIDIA A10": "a10-24g",
    "NVIDIA GeForce RTX 4090": "rtx4090-24g",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "AMD Instinct MI300X": "mi300x-192g",
    "AMD Instinct MI250X": "mi250x-gcd",
}

UNKNOWN = (
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "AMD Instinct MI250X / MI250",
    "cpu",
)


def test_drivers_names_find_their_row_and_every_row_with_names_is_found() -> None:
    found = {name: driver_accelerator(name) for name in DRIVER_NAMES}
    assert {name: row and row.name for name, row in found.items()} == DRIVER_NAMES
    assert {name for name, row in accelerators().items() if row.names} == set(DRIVER_NAMES.values())
    assert [driver_accelerator(name) for name in UNKNOWN] == [None] * len(UNKNOWN)


# Of NVIDIA's, AMD's, Google's and Amazon's data sheets: dense TFLOP/s in bf16, GB sold, GB/s.
DATA_SHEETS = {
    "a100-40g": (312, 40, 1555),
    "a100-80g": (312, 80, 2039),
    "h100-80g": (989.4, 80, 3350),
    "h100-pcie": (756, 80, 2000),
    "h200-141g": (989.4, 141, 4800),
    "b200-180g": (2250, 180, 8000),
    "gb200-186g": (2500, 186, 8000),
    "gb300-288g": (2500, 288, 8000),
    "mi300x-192g": (1307.4, 192, 5300),
    "l40s-48g": (362, 48, 864),
    "rtx4090-24g": (165.2, 24, 1008),
    "tpu-v5p": (459, 95, 2765),
    "trainium2": (667, 96, 2900),
}


def test_rows_are_those_of_the_data_sheets() -> None:
    for name, (bf16, sold, bandwidth) in DATA_SHEETS.items():
        row = accelerators()[name]
        assert (row.flops["bf16"] / 1e12, row.bandwidth / 1e9) == pytest.approx((bf16, bandwidth), rel=0.02), name
        # Sold by decimal or binary GB, less what the driver and error correction take.
        assert 0.9 * sold * 1e9 < row.memory <= 1.001 * sold * 2**30, name


def test_rows_agree_with_physics() -> None:
    for name, row in accelerators().items():
        assert row.source, name
        assert row.node_size >= 1, name
        assert row.network.bandwidth <= row.link.bandwidth <= row.bandwidth, name
        assert row.link.latency <= row.network.latency, name
        assert row.flops.get("fp8", 1e18) >= row.flops["bf16"], name
        assert row.flops.get("fp4", 1e18) >= row.flops.get("fp8", 0), name


MEASURED = {"operation": "all-gather", "ranks": 8, "per_node": 8, "bytes": [1024], "us": [12]}


def test_a_file_of_the_same_form_describes_another_accelerator(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    row = yaml.safe_load(TABLE.read_text())["h100-80g"]
    file.write_text("my-gpu: {like: h100-80g, memory: 40, efficiency: {matmul: 0.5}}")
    mine = find_accelerator(str(file))
    assert (mine.name, mine.memory, mine.efficiency.matmul) == ("my-gpu", 40 * 2**30, 0.5)
    assert mine.flops == find_accelerator("h100-80g").flops
    two, none = {"a": {}, "b": {}}, {"a": {key: row[key] for key in row if key != "memory"}}
    for rows, sentence in (
        (two, "it has 2 rows; expected is one row NAME: .*flops: .*memory: "),
        ([row], "it has no row; expected"),
        ({"a": [1]}, "a has no values with names; expected"),
        ({"a": row | {"flops": 3}}, "a value has another form than in hardware.yaml; expected"),
        ({"a": {"like": "h100"}}, "hardware.yaml has no h100; expected"),
        ({"a": row | {"efficiency": {"speed": 1}}}, "there is no speed; expected"),
        (none, "has no memory"),
        ({"a": row | {"speed": 1}}, "there is no speed; expected"),
        ({"a": row | {"flops": {"fp8": 1}}}, "has no flops of bf16"),
        ({"a": row | {"node_size": 0}}, "node_size is 0, which is no number above 0"),
        ({"a": row | {"node_size": 1.5}}, "node_size is 1.5, which is no whole number"),
        ({"a": row | {"bandwidth": -3350}}, "bandwidth is -3350, which is no number above 0"),
        ({"a": row | {"memory": math.nan}}, "memory is nan"),
        ({"a": row | {"efficiency": {"matmul": "high"}}}, "matmul is 'high'"),
        ({"a": row | {"measured": [MEASURED | {"bytes": [], "us": []}]}}, "no number of bytes"),
        ({"a": row | {"measured": [MEASURED | {"us": [0]}]}}, "us is 0"),
    ):
        file.write_text(yaml.safe_dump(rows))
        with pytest.raises(UserError, match=sentence):
            find_accelerator(str(file))
    file.write_text("a: {flops: [")
    with pytest.raises(UserError, match=r"it is no YAML at line 1; expected is one row"):
        find_accelerator(str(file))
    with pytest.raises(UserError, match="No such file"):
        find_accelerator(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("H100", ["h100-80g", "h100-96g", "h100-nvl", "h100-pcie"]),
        ("b200", ["b200-180g"]),
        ("h100-80", ["h100-80g"]),
        ("4090", ["rtx4090-24g"]),
        ("trainum", ["trainium2"]),
    ],
)
def test_a_name_that_is_cut_short_or_misspelt_has_the_names_that_may_be_meant(text: str, names: list[str]) -> None:
    with pytest.raises(UserError, match="no such accelerator") as caught:
        find_accelerator(text)
    assert list(caught.value.problems[0].fixes) == [f"--gpu {name}" for name in (*names, "FILE.yaml")]


def fewest_on_a_node(world: int, node: int, size: int, stride: int) -> int:
    """Count for every group of the ranks on each of its nodes; return the least."""
    block = size * stride
    groups = ([b + i + j * stride for j in range(size)] for b in range(0, world, block) for i in range(stride))
    return min(min(Counter(rank // node for rank in ranks).values()) for ranks in groups)


def test_groups_on_nodes_are_those_of_all_ranks() -> None:
    for node, size, stride in product((1, 2, 4, 8, 64), (1, 2, 3, 4, 6, 8, 16, 24), (1, 2, 4, 8, 16)):
        if node % stride and stride % node:
            continue
        world = 3 * node * size * stride
        group = Cluster.of(accelerators()["h100-80g"], node).group(size, stride)
        assert group.per_node == fewest_on_a_node(world, node, size, stride), (node, size, stride)


def test_a_cluster_of_fewer_ranks_than_a_node_is_one_node() -> None:
    cluster = Cluster.of(accelerators()["h100-80g"], world_size=6)
    assert cluster.group(6, 1) == (6, 6)
