"""Measure a cluster's network before a run is planned for it, and compare the planner's communication with a run's.

    srun --ntasks-per-node=8 python tools/cluster_check --out cluster.yaml                      # on the nodes of a job
    srun --ntasks-per-node=8 python tools/cluster_check --preset llama3-70b --tensor-model-parallel-size 8 ...
    torchrun --nproc-per-node 2 tools/cluster_check                                             # on one machine
    python tools/cluster_check --run runs/mine --gpu cluster.yaml                               # after a run

Every rank takes part. Latency and bandwidth of pairs of ranks are printed, and the times of collectives within a node,
between nodes and over all ranks become a file that --gpu of `megatron plan` and --plan-gpu read. With the flags of a
training run, the groups of its layout are measured, too, and the share of a step that communication will take is
printed, from data sheets and as measured. With --run it is compared with what a run has measured. `tools/acceptance.py`
checks that a cluster computes correctly.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if this checkout is not installed

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.run import RunConfig
from megatron.config.text import counted, echo
from megatron.data.errors import DataError
from megatron.planner.communication import AXES
from megatron.planner.hardware import Accelerator, Cluster, driver_accelerator, find_accelerator
from megatron.planner.step_time import StepTime, step_time
from megatron.training.measured_run import read_measured_run
from tools.memory import parse_run


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Measure, or compare; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.yaml"), metavar="FILE", help="to write (cluster.yaml)")
    add("--gpu", metavar="NAME|FILE", help="accelerator of the planner's table, or such a file (that of the driver)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the buffers are (auto)")
    add("--run", type=Path, metavar="DIR", help="folder of a run to compare with; measures nothing")
    options, flags = parser.parse_known_args(argv)
    try:
        if options.run is not None:
            run = read_measured_run(options.run)
            cluster = Cluster.of(_accelerator(options.gpu, run.device), world_size=run.world_size)
            measured = {axis: waits / run.seconds for axis, waits in run.waits.items()}
            echo("\n".join(shares({"predicted": step_time(run.config, run.world_size, cluster)}, measured)))
            return 0
        return _measure(options, flags, Launch.read(environ))
    except (UserError, DataError) as error:
        echo(error, file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace, flags: Sequence[str], launch: Launch) -> int:
    import torch
    import yaml

    from megatron.distributed import comm
    from megatron.distributed.launch import destroy_distributed, init_distributed, world_group
    from megatron.training.build_model import choose_device
    from megatron.training.failure_report import host_name
    from megatron.training.metrics import device_name
    from tools.cluster_check.network import TIMEOUT, accelerator_row, measure_network, pair_lines

    if launch.world_size == 1:
        fixes = ("torchrun --nproc-per-node 2 tools/cluster_check",)
        raise UserError([Problem("E202", "a network needs at least two ranks", fixes)])
    config, device = _config(flags, launch.world_size), choose_device(options.device)
    accelerator = _accelerator(options.gpu, device_name(device))
    init_distributed(None, TIMEOUT, device)
    world = world_group(launch.rank, launch.world_size)
    hosts = comm.all_gather_objects(host_name(os.environ), world)
    size = min(Counter(hosts).values())
    if any(len({*hosts[first : first + size]}) > 1 for first in range(0, world.size, size)):
        raise UserError([Problem("E202", "the ranks of a node are not neighbours, or nodes have different numbers")])
    figures = measure_network(world, size, config, device)
    destroy_distributed()
    if launch.rank != 0:
        return 0
    nodes = counted(world.size // size, "node")
    source = f"tools/cluster_check on {nodes} with {counted(size, 'rank')} each, {time.strftime('%Y-%m-%d')}"
    name = f"{accelerator.name}-measured"
    options.out.write_text(yaml.safe_dump({name: accelerator_row(figures, accelerator, source)}, sort_keys=False))
    lines = [f"{accelerator.name}, {source}, torch {torch.__version__}", *pair_lines(figures)]
    if config is not None:
        clusters = {
            "data sheet": Cluster.of(accelerator, size),
            "measured": Cluster.of(find_accelerator(str(options.out))),
        }
        times = {of: step_time(config, world.size, cluster) for of, cluster in clusters.items()}
        lines += ["", "share of a step that waits for communication", *shares(times)]
    echo("\n".join([*lines, "", f"written to {options.out}: python tools/plan.py --gpu {options.out} ..."]))
    return 0


def shares(predicted: Mapping[str, StepTime], measured: Mapping[str, float] | None = None) -> Iterator[str]:
    """Yield a table of the shares of a step that wait for communication, by axis.

    Args:
        predicted: steps, by what they were predicted from.
        measured: shares by axis; None if there is no run.
    """
    columns = {of: {axis: step.parts[axis] / step.seconds for axis in AXES} for of, step in predicted.items()}
    columns |= {} if measured is None else {"measured in training": {axis: measured.get(axis, 0.0) for axis in AXES}}
    yield f"{'':<10}" + "".join(f"{of:>22}" for of in columns)
    for axis in AXES:
        if any(column[axis] for column in columns.values()):
            yield f"{axis:<10}" + "".join(f"{column[axis]:>22.1%}" for column in columns.values())
    yield f"{'all':<10}" + "".join(f"{sum(column.values()):>22.1%}" for column in columns.values())


def _accelerator(named: str | None, driver_name: str) -> Accelerator:
    """Return the accelerator of ``--gpu``, or of what the driver calls it; ``cpu`` without a GPU."""
    if named is not None or driver_name == "cpu":
        return find_accelerator(named or driver_name)
    found = driver_accelerator(driver_name)
    if found is None:
        raise UserError(
            [Problem("E961", f"the planner's table has no {driver_name}", ("--gpu h100-80g", "--gpu FILE.yaml"))]
        )
    return found


def _config(flags: Sequence[str], world_size: int) -> RunConfig | None:
    """Return the configuration of the flags of a run; None without any."""
    return parse_run(flags, {"RANK": "0", "WORLD_SIZE": str(world_size)})[0] if flags else None


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
