"""Scripts that start runs: their content, their syntax, and the runs that they start."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.arguments.cli import parse
from tools import launch

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "--preset tiny-llama --mock-data --vocab-size 64 --seq-length 16 --train-iters 2 --device cpu --params-dtype fp32"
)
LARGE = "--preset llama3-70b --mock-data --train-iters 1000"
NAMED = f"{LARGE} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
"""With a layout, so that none is searched for."""


def written(capsys: pytest.CaptureFixture[str], cluster: Path, arguments: str) -> str:
    assert launch.main([*arguments.split(), "--cluster", str(cluster)]) == 0
    return capsys.readouterr().out


def run(script: str, folder: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.sh"
    path.write_text(script)
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    return subprocess.run(["bash", str(path), *arguments], env=environ, capture_output=True, text=True, cwd=folder)


def stand_in(folder: Path, name: str, body: str) -> dict[str, str]:
    """An environment in which the program ``name`` does something else."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def layout(script: str, ranks: int) -> tuple[int, int]:
    words = shlex.split(script.replace("\\\n", "").replace('"$@"', ""), comments=True)
    flags = [*words[words.index("--preset") :], "--save", "checkpoints"]
    parallel = parse([*flags, "--check-config", "--world-size", str(ranks)], {}).config.parallel
    return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size


def test_a_script_for_this_machine_is_for_its_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none").write_text('{"gpus_per_node": 4, "gpu_memory_gb": 80}')  # another machine's
    small = "--preset llama3-8b --mock-data --train-iters 1000"

    def words(gpus: int, gib: int, more: str = "") -> list[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=gib << 30))
        return shlex.split(written(capsys, tmp_path / "none", f"local {small} {more}"), comments=True)

    def value(words: list[str], flag: str) -> str:
        return words[words.index(flag) + 1]

    on_cpu, few, many = words(0, 0), words(2, 192), words(0, 0, "--gpus-per-node 8")
    assert value(on_cpu, "--nproc-per-node") == "1"
    assert not {"--bf16", "--tensor-model-parallel-size"} & {*on_cpu}
    assert (value(few, "--nproc-per-node"), "--bf16" in few) == ("2", True)
    assert "--tensor-model-parallel-size" not in few
    assert (value(many, "--nproc-per-node"), value(many, "--tensor-model-parallel-size")) == ("8", "2")


@pytest.mark.parametrize("where", ["slurm --nodes 8", "ssh --hosts a,b,c,d,e,f,g,h", "local"])
def test_shells_find_no_fault(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = NAMED if where != "local" else LARGE.replace("70b", "8b")
    script = written(capsys, tmp_path / "none", f"{where} {preset} --container it.sif")
    done = subprocess.run(
        ["shellcheck", "--exclude", "SC1091", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


def test_a_job_requests_the_resources_of_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--partition gpu --account lab --time 12:00:00 --network ethernet --gpus-per-node 4"
    script = written(capsys, tmp_path / "none", f"slurm --nodes 32 {flags} {NAMED}")
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    words = " ".join(asked).split()
    assert {"--partition=gpu", "--account=lab", "--nodes=32", "--gpus-per-node=4", "--requeue"} <= {*words}
    assert {"--exclusive", "--mem=0"} <= {*words}, "whole nodes: without --mem=0 Slurm grants its default"
    assert {"--time=12:00:00", "--signal=B:USR1@300", "--open-mode=append"} <= {*words}
    assert "export NETWORK=ethernet" in script


def test_a_job_states_where_its_run_is_in_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"slurm --nodes 32 {NAMED} --save elsewhere --cluster {tmp_path / 'none'}"
    assert launch.main(arguments.split()) == 2
    assert "RUN=FOLDER sbatch mine.sh" in capsys.readouterr().err


def test_a_job_is_a_recipe_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, tmp_path / "none", f"slurm --nodes 8 {NAMED}")
    done = run(script, tmp_path, {"DRY_RUN": "1"}, "--seed", "7")
    words = shlex.split(done.stdout)
    assert done.returncode == 0, done.stderr
    assert words[0] == "srun"
    assert words[words.index("--seed") + 1] == "7"
    assert {"--stop-file", "--run-dir", "--save"} <= {*words}


def test_the_chosen_layout_is_the_smallest_whose_state_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        memory: layout(written(capsys, tmp_path / "none", f"slurm --nodes 8 --gpu-memory-gb {memory} {LARGE}"), 64)
        for memory in (70, 80, 400)
    }
    assert sizes[80] == (8, 2)
    assert sizes[70][1] > 2
    assert sizes[400][1] == 1


def test_a_layout_that_is_named_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, tmp_path / "none", f"slurm --nodes 8 {NAMED}")
    assert script.count("--tensor-model-parallel-size") == 1
    assert layout(script, 64) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (f"slurm --nodes 1 {LARGE}", "E008"),
        (f"slurm --nodes 8 {LARGE} --no-such-flag 3", "E001"),
        ("slurm --nodes 8 --preset llama3-70b --mock-data", "E304"),
    ],
)
def test_scripts_with_invalid_flags_are_not_written(
    arguments: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*arguments.split(), "--cluster", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(code)


class Terminal(io.StringIO):
    """A person who types."""

    def isatty(self) -> bool:
        return True


def test_a_cluster_is_asked_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made" / "cluster.json"
    monkeypatch.setattr("sys.stdin", Terminal("lab\n\n\nib\nethernet\nmany\n4\n\n"))
    first = written(capsys, path, f"slurm --nodes 16 {NAMED} --partition gpu")
    kept = json.loads(path.read_text())
    assert (kept["partition"], kept["account"], kept["network"], kept["gpus_per_node"]) == ("gpu", "lab", "ethernet", 4)
    assert "--account=lab" in first
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert written(capsys, path, f"slurm --nodes 16 {NAMED}") == first
    assert "--partition=other" in written(capsys, path, f"slurm --nodes 16 {NAMED} --partition other")


def test_an_unknown_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["slurm", *LARGE.split(), "--network", "ib"])
    assert "choose from" in capsys.readouterr().err


def test_a_file_that_describes_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text('{"partitoin": "gpu"}')
    assert launch.main([*f"slurm {LARGE}".split(), "--cluster", str(tmp_path / "cluster.json")]) == 2
    assert capsys.readouterr().err.startswith("E006")


def test_every_host_gets_the_same_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, tmp_path / "none", f"ssh --hosts first,second --gpus-per-node 2 {TINY}")
    printed = stand_in(tmp_path, "ssh", 'echo "$3 : $(cat)"')
    done = run(script, tmp_path, printed, "--run-dir", "a b")
    hosts = dict(line.split(" : ") for line in done.stdout.splitlines())
    assert hosts.keys() == {"first", "second"}
    assert hosts["first"] == hosts["second"]
    words = shlex.split(hosts["first"])
    assert {"--nnodes", "a b"} <= {*words}
    rendezvous = [word for word in words if word.startswith("PET_RDZV_")]
    assert re.fullmatch(r"PET_RDZV_ENDPOINT=first:[12]\d{4} PET_RDZV_ID=[0-9a-f]{16}", " ".join(rendezvous))
    again = shlex.split(run(script, tmp_path, printed).stdout.splitlines()[0].split(" : ")[1])
    assert not {*rendezvous} & {*again}  # no later start of this one


def test_a_host_that_fails_fails_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, tmp_path / "none", f"ssh --hosts first,second --gpus-per-node 2 {TINY}")
    assert run(script, tmp_path, stand_in(tmp_path, "ssh", '[ "$3" = first ]')).returncode == 1


@pytest.mark.slow  # the quickstart starts ranks in CI
def test_a_run_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(
        capsys, tmp_path / "none", f"local --gpus-per-node 2 {TINY} --run-dir {tmp_path} --save {tmp_path}/c"
    )
    done = run(script, tmp_path, {"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stdout


@pytest.mark.parametrize(
    "hostile", ["x\ntouch made", "x --wrap=id", "$(touch made)", "'; touch made; '", "x\rtouch made"]
)
@pytest.mark.parametrize("name", ["partition", "account", "time", "container", "network"])
def test_no_setting_becomes_a_command_or_another_option(
    name: str, hostile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting is refused, or one word of the script, as bash and sbatch read it."""
    arguments = ["slurm", "--nodes", "8", *NAMED.split(), "--cluster", str(tmp_path / "cluster.json")]
    for more, content in (([f"--{name}={hostile}"], {}), ([], {name: hostile})):
        (tmp_path / "cluster.json").write_text(json.dumps(content))
        try:
            status = launch.main([*arguments, *more])
        except SystemExit as stop:  # argparse, for choices
            status = int(str(stop.code))
        out, err = capsys.readouterr()
        if status == 2:
            assert "E006" in err or "invalid choice" in err
            continue
        assert name == "container"
        run(out, tmp_path, {"DRY_RUN": "1"} | stand_in(tmp_path, "srun", "true"))
        assert not list(tmp_path.glob("**/made"))


@pytest.mark.parametrize(
    "content",
    ['{"gpus_per_node": "8"}', '{"gpus_per_node": 8.5}', '{"gpus_per_node": true}', '{"gpu_memory_gb": null}', "[1]",
     '{"time": 5}', '{"partition": ["a"]}', '{"account": {"a": 1}}', "[" * 100_000, '{"gpus_per_node": 0}', "\\x00",
     '{"network": "token ring"}', '{"gpus_per_node": 1e999}', '{"gpus_per_node": 99999999999}'],
)  # fmt: skip
def test_a_setting_of_another_type_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text(content)
    assert launch.main([*f"slurm {NAMED}".split(), "--cluster", str(tmp_path / "cluster.json")]) == 2
    assert "E006" in capsys.readouterr().err


@pytest.mark.parametrize(
    "hosts", ["-oProxyCommand=touch made", "a b", "a;touch made", "a,$(touch made)", "a\nb", "a,,b"]
)
def test_a_host_is_a_name(hosts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main([*f"ssh {NAMED} --cluster {tmp_path / 'none'}".split(), f"--hosts={hosts}"])
    assert "--hosts NAME" in capsys.readouterr().err


def test_flags_of_a_run_are_passed_by_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "x\n#SBATCH --wrap=id\ntouch made '$(touch made)' \x1b[2J"
    arguments = ["slurm", "--nodes", "8", *NAMED.split(), "--wandb-exp-name", hostile]
    assert launch.main([*arguments, "--cluster", str(tmp_path / "none")]) == 0
    done = run(capsys.readouterr().out, tmp_path, {"DRY_RUN": "1"})
    words = run(f"printf '%s\\0' {done.stdout}", tmp_path, {}).stdout.split("\0")
    assert words[words.index("--wandb-exp-name") + 1] == hostile
    assert not list(tmp_path.glob("**/made"))
