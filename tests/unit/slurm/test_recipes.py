"""Test the recipes without a Slurm: a run takes their flags, and the arithmetic of their headers is true."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.config.batch import batch_size_stages
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.privacy import user_name
from megatron.layers.parameters import num_parameters
from tests.kit.solo import Allocations, Solo, random_batch
from tests.kit.users import NOBODY, needs_root
from tests.unit.slurm import recipes
from tests.unit.slurm.recipes import ROOT, TRAINING, Started

SMALL_NODES = {"train_175b": 3, "train_gpt2_124m": 1, "train_llama3_70b": 2, "train_llama3_8b": 2}
SMALL_NODES |= {"train_qwen3_30b_a3b": 2, "train_deepseek_v3": 2}
"""Nodes of each recipe with SMALL=1."""


@pytest.mark.parametrize("recipe", TRAINING)
def test_flags_match_a_run_through_every_stage_of_its_batch(recipe: str) -> None:
    started = Started.by(recipe)
    config = started.config()
    assert num_parameters(config.model) > 1e8
    assert config.data.mock_data
    assert batch_size_stages(config.training, config.parallel.data_parallel_size(started.world_size))


def test_examples_check_their_flags_before_they_start() -> None:
    """The flags of an example depend on its text, so it asks ``--check-config`` itself, and ends if they are bad."""
    for script in (ROOT / "examples").glob("quickstart.sh"):
        calls = [line for line in script.read_text().splitlines() if re.search(r"pretrain_gpt.py .*\"\$@\"", line)]
        lists = [re.findall(r'"\$\{?([\w@]+)', line.partition("pretrain_gpt.py")[2]) for line in calls]
        checked = [words for line, words in zip(calls, lists) if "--check-config" in line]
        assert checked
        assert [words for words in lists if words not in checked] == []


def test_a_stage_of_the_ramp_that_no_schedule_runs_is_found() -> None:
    started = Started.by("train_llama3_70b", "--rampup-batch-size", "512", "8", "4000000")
    with pytest.raises(UserError, match=r"E303 batches of the ramp .* 16: 520, 536"):
        started.config()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("recipe", TRAINING)
def test_small_is_the_same_with_a_tiny_model(recipe: str, launcher: str) -> None:
    large = Started.by(recipe).config()
    tiny = Started.by(recipe, SMALL="1", LAUNCHER=launcher)
    assert tiny.world_size == 4 * SMALL_NODES[recipe]
    config = tiny.config()
    assert num_parameters(config.model) < 1e6
    assert config.training.device == "cpu"
    same = ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert [getattr(config.parallel, name) for name in same] == [getattr(large.parallel, name) for name in same]
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        assert (getattr(config.parallel, name) > 1) == (getattr(large.parallel, name) > 1)
    assert (config.training.rampup_batch_size is None) == (large.training.rampup_batch_size is None)
    assert config.checkpoint.async_save == large.checkpoint.async_save


@pytest.mark.parametrize("recipe", [*TRAINING, "evaluate"])
def test_small_starts_as_many_nodes_as_its_documentation_gives(recipe: str) -> None:
    text = (ROOT / "slurm" / f"{recipe}.sh").read_text() + (ROOT / "docs" / "slurm.md").read_text()
    given = re.findall(rf"SMALL=1 (?:RUN=\S+ )?sbatch --nodes=(\d+) (?:slurm/{recipe}\.sh|\.\.\.)", text) or ["1"]
    expected = f"--nodes={given[0]}"
    assert expected in Started.by(recipe, SMALL="1").words
    assert "--nodes=5" in Started.by(recipe, SMALL="1", SLURM_JOB_NUM_NODES="5").words


def test_a_small_run_is_not_in_the_folder_of_the_large_one() -> None:
    """Else the large one, started next, would find the tiny model's checkpoints, and be refused."""
    for folder, environ in (("train_175b", {}), ("train_175b_small", {"SMALL": "1"})):
        assert f"--save runs/{folder}/checkpoints" in " ".join(Started.by("train_175b", **environ).words)


@pytest.mark.parametrize("recipe", TRAINING)
def test_the_header_is_true(recipe: str) -> None:
    started, mfu = Started.by(recipe), recipes.planned_mfu(recipe)
    expected = recipes.arithmetic(started.config(), started.world_size, mfu)
    if recipe in ("train_175b", "train_deepseek_v3"):
        expected += recipes.saving(started.config(), started.world_size, mfu)
    assert recipes.header(recipe) == expected


@pytest.mark.parametrize("recipe", ["train_175b", "train_llama3_8b"])
def test_activations_match_the_tensors_that_a_layer_keeps(recipe: str) -> None:
    """Of the recipe's model made smaller: what one layer more has alive after its forward pass."""
    large = Started.by(recipe).config().model
    heads, groups = 4, 4 * large.kv_groups // large.num_attention_heads
    ffn = large.ffn * 256 // large.hidden_size
    narrow = replace(large, hidden_size=256, ffn_hidden_size=ffn, kv_channels=None, num_attention_heads=heads)
    narrow = replace(narrow, num_query_groups=groups, max_position_embeddings=64, vocab_size=64)
    models = [replace(narrow, num_layers=layers) for layers in (1, 2)]
    one, two = (kept_bytes(model, samples=2, length=64) for model in models)
    assert two - one == pytest.approx(2 * 64 * recipes.layer_bytes(models[0]), rel=0.01)


def kept_bytes(model: ModelConfig, samples: int, length: int) -> int:
    """Return the bytes of the tensors that forward leaves alive for backward."""
    solo = Solo.build(model, torch.bfloat16)
    batch = random_batch(model, samples, length)
    solo.buckets.start_step(1)
    with Allocations() as made:
        kept = solo.chunk(None, batch)
        assert kept
        return made.alive


def test_the_save_interval_matches_the_best_one_of_the_header() -> None:
    best = int(re.findall(r"= (\d+) steps is best", "\n".join(recipes.header("train_175b")))[0])
    interval = Started.by("train_175b").config().checkpoint.save_interval
    assert interval is not None
    assert abs(interval - best) / best < 0.1


def test_figures_of_the_large_model_match_its_papers() -> None:
    """Literals, in case the formulas above and in the library are wrong together."""
    started = Started.by("train_175b")
    config = started.config()
    assert started.world_size == 1024 == 8 * 16 * 8
    layer = 32 * 2048 * 12288 / 8  # 34 s b h / t of Korthikanti et al., equation 4, less two masks of dropout
    assert recipes.activation_bytes(config, 192) == layer * 96 * (1 + 15 / (16 * 3))  # interleaved: their section 4.2.3
    linear = 6 * 1536 * 2048 * 174.6e9 / (1024 * 0.44 * 989.4e12)  # 6 N D, and scores of attention besides
    assert linear * 1.02 < recipes.step_seconds(config, 1024, 0.44) < linear * 1.04


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CONTAINER": "nvcr.io#x:1", "MOUNTS": "a:b"}, ["--container-image=nvcr.io#x:1", f"{ROOT}:{ROOT},a:b"]),
        ({"CONTAINER": "x.sif"}, ["apptainer", "exec", "--nv", "x.sif bash slurm/task.sh pretrain_gpt.py"]),
        ({"CONTAINER": "x.sif", "RUN": "/big/run"}, [f"--bind {ROOT}:{ROOT},/big/run:/big/run x.sif"]),
        ({"MIN_NODES": "112"}, ["--nodes=128", "--pad-global-batch"]),
        ({}, ["--ntasks=1024", "--ntasks-per-node=8", "slurm/task.sh pretrain_gpt.py"]),
        ({"LAUNCHER": "torchrun", "MAX_RESTARTS": "5"}, ["--ntasks=128", "--nproc-per-node=8 --max-restarts=5"]),
        ({"CPU_BIND": "node", "LAUNCHER": "torchrun"}, ["--numa-binding=node", "--cpu-bind=none"]),
        (
            {"CPU_BIND": "cores", "SLURM_CPUS_ON_NODE": "96"},
            ["--cpu-bind=cores", "--mem-bind=local", "--cpus-per-task=12", "--distribution=block:block"],
        ),
        (
            {"RANK_ORDER": "topology"},
            ["--nodelist=runs/train_175b/slurm/hosts", "--distribution=arbitrary"],
        ),
        ({"CONTAINER": "x.sif", "CACHE": "/c", "STAGE": "/s"}, [f"--bind {ROOT}:{ROOT},/c:/c,/s:/s x.sif"]),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "8"}, ["--ntasks-per-node=4"]),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "RANKS_PER_NODE": "2"}, ["--ntasks-per-node=2"]),
    ],
)
def test_other_ways_to_start(environ: dict[str, str], words: list[str]) -> None:
    command = " ".join(Started.by("train_175b", **environ).words)
    assert [word for word in words if word not in command] == []


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun: must be srun or torchrun"),
        ({"CPU_BIND": "node"}, "CPU_BIND=node is one of torchrun's\nslurm: fix: CPU_BIND=ldoms"),
        ({"NETWORK": "ib"}, "NETWORK=ib: must be infiniband, roce, ethernet, efa or slingshot"),
        ({"RANK_ORDER": "topology", "LAUNCHER": "torchrun"}, "fix: LAUNCHER=srun RANK_ORDER=topology"),
        ({"RANK_ORDER": "rack"}, "RANK_ORDER=rack: must be topology"),
        ({"SETUP": "absent"}, "SETUP=absent: there is no such file"),
        ({"SPARES": "128"}, "SPARES=128 leaves no node to run on"),
        ({"SPARES": "two"}, "SPARES=two: must be a number"),
        ({"MIN_NODES": "-1"}, "MIN_NODES=-1: must be a number"),
        ({"VENV": "absent"}, "VENV=absent: there is no absent/bin/activate"),
        (
            {"CONTAINER": "absent.sif", "DRY_RUN": "", "SLURM_JOB_ID": "7"},
            "CONTAINER=absent.sif: there is no such file",
        ),
        ({"DRY_RUN": ""}, "fix: sbatch slurm/train_175b.sh"),
    ],
)
def test_mistakes_are_reported(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        Started.by("train_175b", **environ)
    assert failed.value.returncode == 2
    assert sentence in failed.value.stderr


@pytest.mark.parametrize("recipe", ["evaluate", "convert_to_hf"])
def test_recipes_that_follow_a_run_require_its_folder(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        Started.by(recipe, DRY_RUN="", SLURM_JOB_ID="7", RUN=str(tmp_path))
    assert f"fix: RUN=runs/mine sbatch slurm/{recipe}.sh" in failed.value.stderr


def test_a_file_of_the_cluster_loads_modules_and_sets_settings(tmp_path: Path) -> None:
    """Under the rules of its own shell: functions of module systems read variables that are not set, and may fail."""
    setup = tmp_path / "setup.sh"
    setup.write_text('module() { false; echo "$UNSET" >/dev/null; export LOADED=$2; }\nmodule load cuda\nNETWORK=efa\n')
    shown = 'source slurm/lib.sh; echo "$LOADED $NETWORK $FI_PROVIDER $-"'
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "SETUP": str(setup)}
    done = subprocess.run(["bash", "-c", shown], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    *words, options = done.stdout.split()
    assert words == ["cuda", "efa", "efa"]
    assert {"e", "u"} <= {*options}


def test_staging_names_the_copies_of_the_last_data_path(tmp_path: Path) -> None:
    (tmp_path / "a.tokenizer").mkdir()
    of_tokenizer = [tmp_path / "a.tokens.json", tmp_path / "a.tokenizer" / "tokenizer.json"]
    for path in of_tokenizer:
        path.touch()
    blend = ["--data-path", "3e-1", f"{tmp_path}/a", "0.7", "b", "--seed", "7"]
    started = Started.by("train_175b", *blend, STAGE="/nvme")
    copies = f"/nvme/{user_name(os.getuid())}"
    staged = ["3e-1", f"{copies}{tmp_path}/a", "0.7", f"{copies}{ROOT}/b"]
    assert started.flags[started.flags.index("3e-1") : started.flags.index("--seed")] == staged
    single = Started.by("train_175b", f"--data-path={tmp_path}/a", STAGE="/nvme").flags
    assert single[-single[::-1].index("--data-path")] == f"{copies}{tmp_path}/a"
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "STAGE": "/nvme", "CHAIN": "1"}
    command = ["bash", "slurm/train_175b.sh", *blend]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    files = [f"{tmp_path}/a.idx", f"{tmp_path}/a.bin", *map(str, of_tokenizer), f"{ROOT}/b.idx", f"{ROOT}/b.bin"]
    assert f"bash slurm/stage.sh {copies} {' '.join(files)} \n" in done.stderr
    assert (
        f"--dependency=singleton --no-requeue --open-mode=append slurm/train_175b.sh {' '.join(blend)}" in done.stderr
    )


def test_files_are_staged_once_whole_and_only_if_there_is_room(tmp_path: Path) -> None:
    source, disk = tmp_path / "corpus.bin", tmp_path / "disk"
    source.write_bytes(b"tokens")
    copy = Path(f"{disk}{source}")

    def stage(**environ: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", ROOT / "slurm" / "stage.sh", disk, source]
        return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)

    assert stage().returncode == 0
    assert copy.read_bytes() == b"tokens"
    first = copy.stat().st_ino
    assert stage().returncode == 0
    assert copy.stat().st_ino == first, "reused"
    copy.write_bytes(b"changed"[:6])
    assert stage().returncode == 0
    assert copy.read_bytes() == b"tokens"
    (tmp_path / "df").write_text("#!/bin/sh\necho Avail\necho 1048577\n")
    (tmp_path / "df").chmod(0o755)
    with source.open("ab") as file:
        file.truncate(3 << 20)
    full = stage(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURMD_NODENAME="n7")
    assert full.returncode == 1
    assert f"n7: {disk} has 1 MiB free, the data need 3" in full.stderr
    assert not list(disk.rglob("*.part"))
    source.unlink()
    assert stage().returncode == 1


def test_only_the_first_ranks_output_is_not_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "$*"${PET_RDZV_ENDPOINT+ at $PET_RDZV_ENDPOINT}\necho error >&2\n'
    )
    (tmp_path / "python").chmod(0o755)
    shutil.copy(tmp_path / "python", tmp_path / "torchrun")
    logs = tmp_path / "logs"
    logs.mkdir()

    def output(*words: str, **environ: str) -> str:
        here = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HEAD": "n1", "SLURM_PROCID": "0", "LOGS": str(logs)} | environ
        here |= {"MASTER_PORT": "10007"}
        command = ["bash", "slurm/task.sh", *words]
        done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, check=True)
        return done.stdout

    assert output("torchrun", "x", SLURMD_NODENAME="n1") == "x at n1:10007\n"
    assert output("torchrun", "x", SLURMD_NODENAME="n2") == ""
    assert output("train.py", SLURMD_NODENAME="n1", RANK="0") == "-u train.py\n"
    assert output("train.py", SLURMD_NODENAME="n1", RANK="1") == ""
    assert output("train.py", SLURMD_NODENAME="n2", SLURM_PROCID="9") == ""
    assert {path.name: path.read_text() for path in logs.iterdir()} == {
        "n2.log": "x at n1:10007\nerror\n",
        "n1-rank1.log": "-u train.py\nerror\n",
        "n2-rank9.log": "-u train.py\nerror\n",
    }
    assert output("train.py", SLURMD_NODENAME="n2", RANK="3", LOGS="") == "-u train.py\n"


def test_a_submission_from_another_folder_names_the_folder_to_use(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "train_175b.sh"
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "submit it from the root of the repository" in done.stderr


def test_shellcheck() -> None:
    """Recipes follow ``source slurm/lib.sh``, whose flow is analysed once, by itself."""
    scripts = {path for folder in ("slurm", "tests/slurm") for path in (ROOT / folder).glob("*.sh")}
    recipes = {path for path in scripts if "source slurm/lib.sh" in path.read_text()}
    for flags, checked in ((["--extended-analysis=false"], recipes), ([], scripts - recipes)):
        done = subprocess.run(["shellcheck", "-x", *flags, *checked], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == ""


def text_of(name: str) -> str:
    return (ROOT / "slurm" / name).read_text()


@needs_root
@pytest.mark.parametrize(("owner", "mode", "status"), [(0, 0o700, 0), (0, 0o755, 0), (0, 0o777, 1), (NOBODY, 0o755, 1)])
def test_a_copy_that_another_user_could_have_made_is_not_read(
    tmp_path: Path, owner: int, mode: int, status: int
) -> None:
    """Of the same size, the only mark of a copy."""
    source, disk = tmp_path / "corpus.bin", tmp_path / "disk"
    source.write_bytes(b"tokens")
    copy = Path(f"{disk}{source}")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"poison")
    os.chown(disk, owner, owner)
    disk.chmod(mode)
    command = ["bash", ROOT / "slurm" / "stage.sh", disk, source]
    done = subprocess.run(command, env=os.environ | {"SLURMD_NODENAME": "n7"}, capture_output=True, text=True)
    assert done.returncode == status
    if status:
        assert f"slurm: n7: other users can write to {disk}, or it belongs to one" in done.stderr
        assert f"fix: chmod go-w {disk} there, STAGE=OTHER_FOLDER" in done.stderr


@needs_root
def test_a_disk_that_shows_one_owner_for_all_is_used(tmp_path: Path) -> None:
    """Such as an export of NFS that maps all users to one."""
    disk, programs = tmp_path / "disk", tmp_path / "programs"
    disk.mkdir()
    programs.mkdir()
    os.chown(disk, NOBODY, NOBODY)
    (tmp_path / "corpus.bin").write_bytes(b"tokens")
    real = shutil.which("stat")
    (programs / "stat").write_text(f'#!/usr/bin/env bash\n[[ $* == *%u* ]] && echo {NOBODY} || exec {real} "$@"\n')
    (programs / "stat").chmod(0o755)
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", ROOT / "slurm" / "stage.sh", disk, tmp_path / "corpus.bin"], env=environ, check=True)
    assert [path.name for path in disk.iterdir()] == [tmp_path.parts[1]]


def test_a_folder_of_copies_is_made_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_bytes(b"tokens")
    command = ["bash", ROOT / "slurm" / "stage.sh", tmp_path / "disk" / "me", tmp_path / "corpus.bin"]
    subprocess.run(command, check=True)
    assert (tmp_path / "disk" / "me").stat().st_mode & 0o777 == 0o700


def test_compiled_code_is_left_where_the_program_makes_it_private() -> None:
    shown = 'source slurm/lib.sh; echo "${TRITON_CACHE_DIR:-}${TORCHINDUCTOR_CACHE_DIR:-}"'
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "CACHE": "/c"}
    done = subprocess.run(["bash", "-c", shown], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
