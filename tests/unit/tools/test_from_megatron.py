"""tools/from_megatron.py: scripts, YAML files and flags of other trainers become command lines for here."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.arguments.cli import parse
from tests.unit.convert.megatron_lm import unpack
from tests.unit.data.pairs import write
from tools import from_megatron

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
RUN = "--micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 300"

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=4
set -e
source venv/bin/activate
module load cuda nccl
cd Megatron-LM
export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
OUT=$1
mkdir -p $OUT
touch left_here; rm -rf "$HOME"
ARGS=(
    MODEL
    RUN
    --log-params-norm   # logged here, too
    --use-mcore-models
    --split 949,50,1
)
LAUNCH
"""
TORCHRUN = "torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES pretrain_gpt.py ${ARGS[@]} --save $OUT | tee $OUT/log"
SRUN = 'srun -n 8 singularity exec image.sif bash -c "python -u /megatron/pretrain_gpt.py ${ARGS[*]} --save $OUT"'


def script(folder: Path, launch: str = TORCHRUN, more: str = "") -> str:
    """Write a script and return its path."""
    text = SCRIPT.replace("MODEL", MODEL).replace("RUN", f"{RUN} {more}", 1).replace("LAUNCH", launch)
    (folder / "train.sh").write_text(text)
    return str(folder / "train.sh")


def translated(output: str) -> tuple[dict[str, str], list[str]]:
    """Return the verdict by setting, and the flags of the command line that was printed."""
    table, _, rest = output.partition("\n\n")
    rows = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in table.splitlines()}
    (line,) = [line for line in rest.splitlines() if "pretrain_gpt.py" in line]
    return rows, shlex.split(line.partition("pretrain_gpt.py ")[2])


@pytest.mark.parametrize("launch", [TORCHRUN, SRUN])
def test_a_script_becomes_the_run_it_would_start(
    launch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert from_megatron.main([script(tmp_path, launch), "/results"]) == 0
    output = capsys.readouterr().out
    rows, flags = translated(output)
    assert "8 ranks" in output
    assert rows["--num-layers 4"] == "same"
    assert rows["--log-params-norm"] == "mapped      --log-health-interval 100"
    assert rows["--use-mcore-models"].startswith("not needed")
    expected = f"{MODEL} {RUN} --split 949,50,1 --log-health-interval 100 --save /results"
    here, wanted = (parse([*words, "--world-size", "8", "--check-config"], {}) for words in (flags, expected.split()))
    assert here.config == wanted.config
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"], "the script ran in a folder of its own"


def test_missing_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_megatron.main([script(tmp_path, more="--fp4-format e2m1 --lr 2 --min-lr x"), "/results"]) == 1
    output = capsys.readouterr().out
    rows, flags = translated(output)
    assert rows["--fp4-format e2m1"] == "missing     fp4 is not implemented"
    assert "--fp4-format" not in flags
    assert "E002 --min-lr: 'x' is not a number" in output
    assert output.rstrip().endswith("1 of 18 settings are missing, 1 to mend")


def test_a_script_that_launches_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_megatron.main([script(tmp_path, 'echo "no launcher" >&2; exit 3')]) == 2
    assert "no launcher" in capsys.readouterr().err
    assert from_megatron.main([str(tmp_path / "gone.sh")]) == 2


@pytest.mark.parametrize(
    "hostile",
    [
        "os.mkfifo('../record')",  # a pipe to which no program writes
        "os.symlink('/dev/zero', '../record')",
        "os.write(2, b'x' * 1_000_000)",
    ],
)
def test_output_of_a_script_is_read_within_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hostile: str
) -> None:
    assert from_megatron.main([script(tmp_path, f'python -c "import os; {hostile}"\n')]) == 2
    assert len(capsys.readouterr().err) < 3000


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert from_megatron.main(["--", *f"{MODEL} {RUN} --checkpoint-activations".split()]) == 0
    rows, flags = translated(capsys.readouterr().out)
    assert rows["--checkpoint-activations"].startswith("mapped")
    assert parse([*flags, "--check-config"], {}).config.training.recompute_granularity == "full"


def test_presets_and_settings_by_name_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "tiny-llama", "--set", "training.seed=7", "--mock-data", "--vocab-size", "512"]
    assert from_megatron.main(["--", *flags, "--train-iters", "20"]) == 0
    config = parse([*translated(capsys.readouterr().out)[1], "--check-config"], {}).config
    assert config == parse([*flags, "--train-iters", "20", "--check-config"], {}).config


def test_refusals_and_notes_match_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--learning-rate 1e-3 --position-embedding-type alibi --num-query-groups 2 --disable-bias-linear"
    assert from_megatron.main(["--", *f"{MODEL} {RUN} {flags}".split()]) == 1
    output = capsys.readouterr().out
    rows, translation = translated(output)
    assert rows["--learning-rate 1e-3"] == "missing     no such flag; did you mean --lr?; fix: --lr 1e-3"
    assert rows["--position-embedding-type alibi"].startswith("missing     ALiBi positions are not")
    assert rows["--num-query-groups 2"].startswith("not needed")
    assert "--num-query-groups" not in translation
    assert "\nnote: activation is gelu_tanh" in output


def test_background_processes_of_a_script_are_killed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    began = time.monotonic()
    from_megatron.main([script(tmp_path, f"(while sleep 0.1; do date >>{marker}; done) &\n{TORCHRUN}"), "/results"])
    assert time.monotonic() - began < 30
    written = marker.read_bytes() if marker.exists() else b""
    time.sleep(0.5)
    assert (marker.read_bytes() if marker.exists() else b"") == written


def test_a_configuration_of_functional_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {word.split()[0]: word.split()[1:] for word in f" {MODEL} {RUN}".split(" --")[1:]}
    lines = [f"  --{name}: {' '.join(values) or 'true'}" for name, values in arguments.items()]
    file = tmp_path / "model_config.yaml"
    file.write_text("\n".join(["ENV_VARS:", "  A: 1", "MODEL_ARGS:", *lines, "  --use-flash-attn: false"]))
    assert from_megatron.main(["--world-size", "8", str(file)]) == 0
    _, flags = translated(capsys.readouterr().out)
    words = [*flags, "--world-size", "8", "--check-config"]
    assert parse(words, {}).config == parse([*f"{MODEL} {RUN}".split(), *words[-3:]], {}).config


NEOX = """{
  "pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4,
  "seq-length": 128, "max-position-embeddings": 128, "pos-emb": "rotary", "rotary_pct": 0.25, "no-weight-tying": true,
  "norm": "layernorm", "gpt_j_residual": GPTJ,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "zero_optimization": {"stage": 1, "allgather_partitions": true},
  "train_micro_batch_size_per_gpu": 4, "train_batch_size": 32, "weight-decay": 0.1, "gradient_clipping": 0.5,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
           "initial_scale_power": 12},
  "train-iters": 320, "lr-decay-iters": 320, "lr-decay-style": "cosine", "data-path": "data/x",
  "vocab-file": "v.json", "merge-file": "m.txt"
}"""


def test_a_configuration_of_gpt_neox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "125M.yml"
    file.write_text(NEOX.replace("GPTJ", "false"))
    assert from_megatron.main(["--world-size", "16", str(file)]) == 0
    _, flags = translated(capsys.readouterr().out)
    words = [*flags, "--mock-data", "--set", "data.data_path=null", "--vocab-size", "300", "--world-size", "16"]
    config = parse([*words, "--check-config"], {}).config
    assert (config.model.rotary_percent, config.model.untie_embeddings_and_output_weights) == (0.25, True)
    assert (config.optimizer.lr, config.optimizer.adam_beta2, config.optimizer.clip_grad) == (0.0006, 0.95, 0.5)
    assert (config.training.global_batch_size, config.parallel.tensor_model_parallel_size) == (32, 2)
    assert (config.precision.params_dtype, config.precision.initial_loss_scale) == ("fp16", 2**12)
    assert (config.model.activation, config.optimizer.lr_warmup_fraction) == ("gelu", 0.01), "gpt-neox's defaults"
    file.write_text(NEOX.replace("GPTJ", 'false, "activation": "gelu", "bias_gelu_fusion": true'))
    assert from_megatron.main([str(file)]) == 0
    assert "--activation gelu_tanh" in capsys.readouterr().out
    file.write_text(NEOX.replace("GPTJ", 'false, "attention_config": [[["local", "global"], 2]]'))
    assert from_megatron.main([str(file)]) == 1
    assert "sparse and local attention are not implemented" in capsys.readouterr().out
    file.write_text(NEOX.replace("GPTJ", "true"))
    assert from_megatron.main([str(file)]) == 0
    rows, _ = translated(capsys.readouterr().out)
    assert rows["gpt_j_residual: True"] == "mapped      --parallel-attention"


def test_weighted_data_of_gpt_neox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, documents in {"a": 6, "b": 3, "c": 1}.items():
        write(tmp_path / name, [[1, 2]] * documents)

    def blends(**settings: object) -> dict[str, tuple[str, ...]]:
        text = (
            NEOX.replace("GPTJ", "false").rstrip().removesuffix("}") + f', "split": "9,1", {json.dumps(settings)[1:]}'
        )
        (tmp_path / "x.yml").write_text(text)
        assert from_megatron.main([str(tmp_path / "x.yml")]) == 0
        _, flags = translated(capsys.readouterr().out)
        data = parse([*flags, "--vocab-size", "300", "--world-size", "16", "--check-config"], {}).config.data
        assert (data.data_path, data.split) == ((), None)
        return {split: getattr(data, f"{split}_data_path") for split in ("train", "valid", "test")}

    given: dict[str, object] = {"train-data-paths": ["a", "b", "c"], "train-data-weights": [5, 1.5, 2]}
    others = {"valid-data-paths": ["c", "a"], "test-data-paths": ["b"]}
    expected = {"train": ("5", "a", "1.5", "b", "2", "c"), "valid": ("1.0", "c", "1.0", "a"), "test": ("1.0", "b")}
    assert blends(**given, **others) == expected
    found = blends(**given, **others, weight_by_num_documents=True, weighted_sampler_alpha=0.5)
    # p = .6, .3, .1: sqrt(p) / sum sqrt(p) * (1 - p), normalised
    roots = [math.sqrt(p) * (1 - p) for p in (0.6, 0.3, 0.1)]
    assert [float(w) for w in found["train"][::2]] == pytest.approx([root / sum(roots) for root in roots])
    assert found["test"] == ("1.0", "b")
    found = blends(**given, **others, weight_by_num_documents=True)
    products = [p * (1 - p) for p in (0.6, 0.3, 0.1)]
    assert [float(w) for w in found["train"][::2]] == pytest.approx([x / sum(products) for x in products])
    (tmp_path / "x.yml").write_text(
        NEOX.replace("GPTJ", 'false, "train_data_paths": ["a"], "train_data_weights": [1, 2]')
    )
    assert from_megatron.main([str(tmp_path / "x.yml")]) == 2
    assert "train_data_weights has 2 numbers for the 1 of train_data_paths" in capsys.readouterr().err


def test_another_yaml_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {web: {image: nginx, ports: 80}}\n")
    assert from_megatron.main([str(file)]) == 2
    assert "neither" in capsys.readouterr().err


OF_CHECKPOINT = (
    "--seq-length 32 --vocab-size 300 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0"
)
"""Flags of the run that wrote the checkpoint, without model flags."""


def test_a_folder_of_megatron_lm_gets_a_prefix_and_its_arguments_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpack(tmp_path) / "llama_torch_dist_tp2"
    of_checkpoint = OF_CHECKPOINT.split()
    assert from_megatron.main(["--", *of_checkpoint, "--load", str(folder)]) == 0
    rows, flags = translated(capsys.readouterr().out)
    assert flags[-2:] == ["--load", f"megatron:{folder}"]
    assert rows["--tensor-model-parallel-size"] == "differs     checkpoint 2 -> now 1"
    other = [word.replace("1e-3", "2e-3") for word in of_checkpoint]
    assert from_megatron.main(["--", *other, "--load", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "checkpoint 0.001 -> now 0.002" in output
    assert "E825" in output
    assert from_megatron.main(["--", *of_checkpoint, f"--load={folder}"]) == 0
    assert translated(capsys.readouterr().out)[1][-1].endswith(f"megatron:{folder}")
    elsewhere = [*of_checkpoint, "--data-path", "/absent/x", "--load", str(folder)]
    assert from_megatron.main(["--", *(word for word in elsewhere if word != "--mock-data")]) == 1
    assert "not compared with those stored in the checkpoint of --load" in capsys.readouterr().out
    assert from_megatron.main(["--", *MODEL.split(), *RUN.split(), "--load", str(tmp_path / "absent")]) == 0
    assert translated(capsys.readouterr().out)[1][-2:] == ["--load", str(tmp_path / "absent")]


def test_a_script_sees_no_secret_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no namespaces are allowed; there it sees other processes, but not this program's environment."""
    hostile = f"""
out={tmp_path}
/usr/bin/env >$out/variables
/bin/cat /proc/$PPID/environ >>$out/variables
/usr/bin/setsid /bin/bash -c 'while :; do echo >>'$out'/alive; /bin/sleep 0.05; done' &
(/usr/bin/setsid /bin/bash -c '(while :; do echo >>'$out'/alive; /bin/sleep 0.05; done) & exit' &)
while [ ! -s $out/alive ]; do /bin/sleep 0.05; done
{TORCHRUN}
"""
    path = script(tmp_path, hostile)
    monkeypatch.setenv("SECRET", "hunter2")
    for namespaces in (from_megatron.NAMESPACES, "--not-allowed"):
        (tmp_path / "alive").unlink(missing_ok=True)
        monkeypatch.setattr(from_megatron, "NAMESPACES", namespaces)
        assert from_megatron.main([path, "/results"]) == 0
        assert "hunter2" not in (tmp_path / "variables").read_text()
        size = (tmp_path / "alive").stat().st_size
        time.sleep(0.3)
        assert (tmp_path / "alive").stat().st_size == size
    path = script(tmp_path, f"/bin/cat /proc/[0-9]*/environ 2>/dev/null >{tmp_path}/all\n{TORCHRUN}")
    command = [sys.executable, "tools/from_megatron.py", path, "/results"]
    subprocess.run(command, env=os.environ | {"SECRET": "hunter3"}, capture_output=True, check=False)
    assert b"hunter3" not in (tmp_path / "all").read_bytes()
