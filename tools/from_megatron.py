"""Translate a Megatron-LM run to a command line of pretrain_gpt.py, flag by flag.

    python tools/from_megatron.py examples/gpt3/train_gpt3_175b_distributed.sh /ckpts /tb vocab.json merges.txt data
    python tools/from_megatron.py model_config.yaml               # a configuration of Megatron-LM's functional tests
    python tools/from_megatron.py configs/125M.yml                # a configuration of gpt-neox
    python tools/from_megatron.py --world-size 8 ds_config.json --preset llama3-8b --data-path PREFIX    # of DeepSpeed
    python tools/from_megatron.py -- --num-layers 12 --hidden-size 768 ...

A script runs in an empty folder, with stand-ins that record what its launcher (torchrun, srun, mpirun, deepspeed,
python) would start, and few other programs in PATH. It gets no variables of your environment, and is ended after 60
seconds, with its children. Where unshare is allowed, it has no network and sees no other processes. Elsewhere it can
read the variables of your other processes, and end this program before its children. That is no sandbox: it runs with
your rights, and absolute paths in it are not redirected. Read a script of others before you run it here.

Prints what becomes of each flag: `same`, `mapped`, `not needed`, or `missing` where it asks for something that
pretrain_gpt.py does not have; then the command line. Exit status: 0 if that line has nothing missing and would start, 1
if not, 2 for input that cannot be read. If the folder of `--load` exists, rows `differs` compare the flags with those
stored in Megatron-LM's checkpoint. Other files that the command line names are not looked for.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import ParsedArguments, flags_config, parse, parse_flags, with_our_words
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.megatron_flags import (
    apply_foreign_flags,
    foreign_flags,
    ignore_reason,
    meaning_notes,
)
from megatron.checkpoint.format import MEGATRON_LM_NEWEST, is_megatron_lm
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_yaml, read_small
from megatron.config.schemes import MEGATRON_PREFIX
from megatron.config.text import echo, shell_word
from megatron.training.resume_source import stored_config
from tools.lib.deepspeed_config import deepspeed_settings, flattened, table
from tools.lib.neox_data import with_blends

LAUNCHERS = "torchrun srun mpirun mpiexec deepspeed python python3 python2 singularity apptainer docker enroot numactl"
HARMLESS = "awk basename cat cut date dirname expr grep head hostname id printf pwd readlink realpath sed seq sort"
HARMLESS += " sleep tail tr uname uniq wc whoami"
ENTRY = re.compile(r"(^|/)pretrain\w*\.py$")
SECONDS = 60
"""Of a script, at most."""

NEOX_DEFAULTS = {"activation": "gelu", "warmup": 0.01, "rms_norm_epsilon": 1e-8, "lr_decay_style": "linear"}
"""Settings of gpt-neox with other defaults here."""

FILES_ARE_ELSEWHERE = {"E503", "E507", "E850"}
"""Codes of problems that a missing file may cause."""

PRELUDE = """
cd() { builtin cd "$@" 2>/dev/null || true; }
source() { [ ! -e "$1" ] || builtin source "$@"; }
module() { :; }
command_not_found_handle() { :; }
"""
"""For every bash of the script: a folder, file or program that only the cluster has does not end it."""

STAND_IN = """#!{bash}
for word in "$@"; do
    case "$word" in *pretrain*.py*) found=1 ;; esac
done
if [ -n "$found" ]; then
    {{ printf '%s\\0' "${{0##*/}}" "$@"; printf '\\0'; }} >>{record}
elif [ "$1" = -c ] && [ "${{0##*/}}" != srun ]; then
    exec {python} -I "$@"
fi
"""


RUNNER = """
import ctypes, os, resource, signal, subprocess, sys
try:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
except (AttributeError, OSError):
    pass  # not Linux
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
script = subprocess.Popen(sys.argv[2:], start_new_session=True)
try:
    script.wait(float(sys.argv[1]))
except subprocess.TimeoutExpired:
    code = 124
else:
    code = 0
try:
    os.killpg(script.pid, signal.SIGKILL)
except OSError:
    pass
script.wait()
while True:  # what has left the group, and its children once they are orphans
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = file.read().split()
        for child in left:
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)
    except OSError:
        break
    if not left:
        break
sys.exit(code)
"""
"""Run a command for so many seconds, and end all its descendants. Its own environment is as empty as theirs."""

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH")
"""What this program needs of its environment."""

CLEANED = "FROM_MEGATRON_CLEANED"
"""Set in the environment of which only these variables are left."""

LAST_BYTES = 2000
"""Of a script's output that are shown if it launches nothing."""

TIMED_OUT, GRACE_SECONDS = 124, 10

NAMESPACES = "--pid --net --mount-proc --fork --kill-child"
"""Of util-linux's unshare: the script sees no other processes, and has no network."""


def isolation() -> list[str]:
    """Return words before a command that separate it from this machine; none where that is not allowed."""
    unshare = shutil.which("unshare") or "/usr/bin/unshare"
    for more in ([], ["--user", "--map-current-user"]):
        words = [unshare, *more, *NAMESPACES.split()]
        with suppress(OSError, subprocess.TimeoutExpired):
            if not subprocess.run([*words, "true"], capture_output=True, timeout=GRACE_SECONDS, check=False).returncode:
                return words
    return []


@dataclass
class Run:
    """What is to be translated.

    Attributes:
        flags: after the name of the entry script.
        world_size: number of ranks, where it is known.
        rows: what became of settings that were no flags: the setting, the verdict, and an explanation.
    """

    flags: list[str]
    world_size: int | None = None
    rows: list[tuple[str, str, str]] = field(default_factory=list)


def read_script(script: Path, arguments: Sequence[str]) -> Run:
    """Run a script in an empty folder, and return the first command of the entry script that it would launch.

    Raises:
        ValueError: when it launches none.
    """
    bash = shutil.which("bash") or "/bin/bash"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        programs, work, record = Path(folder, "bin"), Path(folder, "work"), Path(folder, "record")
        programs.mkdir()
        work.mkdir()
        for name in LAUNCHERS.split():
            stand_in = programs / name
            stand_in.write_text(STAND_IN.format(bash=bash, record=record, python=sys.executable))
            stand_in.chmod(0o755)
        for name in HARMLESS.split():
            if (path := shutil.which(name)) is not None:
                (programs / name).symlink_to(path)
        (programs / "bash").symlink_to(bash)
        prelude = Path(folder, "prelude.sh")
        prelude.write_text(PRELUDE)
        environ = {"PATH": str(programs), "HOME": str(work), "USER": "user", "BASH_ENV": str(prelude)}
        text = read_small(script).decode(errors="replace")
        environ |= _slurm_variables(text)
        with open(Path(folder, "errors"), "w+", errors="replace") as errors:
            words = [*isolation(), sys.executable, "-I", "-c", RUNNER, str(SECONDS), bash, str(script.resolve())]
            started = subprocess.Popen(
                [*words, *arguments],
                cwd=work,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                timed_out = started.wait(SECONDS + GRACE_SECONDS) == TIMED_OUT
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()
            if timed_out:
                echo(f"from_megatron: {script} did not end within {SECONDS} s", file=sys.stderr)
            errors.seek(max(0, os.fstat(errors.fileno()).st_size - LAST_BYTES))
            output = errors.read()
        recorded = read_small(record).decode(errors="replace") if os.path.lexists(record) else ""
    for line in filter(None, recorded.split("\0\0")):
        words = line.split("\0")
        # A launcher may be given a whole command line as one word, for a shell.
        words = [part for word in words for part in (shlex.split(word) if " " in word and ".py" in word else [word])]
        entry = next((number for number, word in enumerate(words) if ENTRY.search(word)), None)
        if entry is not None:
            return Run(words[entry + 1 :], _world_size(words[:entry], environ))
    last = "\n".join(output.strip().splitlines()[-5:])
    raise ValueError(f"{script} launches no pretrain_*.py; the end of its output:\n{last}")


def _slurm_variables(script: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a job, from a script's ``#SBATCH`` lines."""
    words = [word for line in re.findall(r"^#SBATCH\s+(.*)", script, re.MULTILINE) for word in shlex.split(line, True)]
    given = {
        "nodes" if name == "N" else name: value for name, value in re.findall(r"-?-([\w-]+)[= ](\S+)", " ".join(words))
    }
    if not given:
        return {}
    nodes = re.split(r"\D", given.get("nodes", "1"))[0] or "1"
    per_node = re.sub(r".*?(\d*)$", r"\1", given.get("ntasks-per-node", "1")) or "1"
    gpus = re.sub(r".*?(\d*)$", r"\1", given.get("gpus-per-node", given.get("gres", "8"))) or "8"
    tasks = given.get("ntasks", str(int(nodes) * int(per_node)))
    names = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "NPROCS": tasks, "NTASKS_PER_NODE": per_node}
    names |= {"GPUS_PER_NODE": gpus, "GPUS_ON_NODE": gpus, "JOB_ID": "1", "JOBID": "1", "PROCID": "0", "LOCALID": "0"}
    names |= {"NODEID": "0", "JOB_NAME": "run", "JOB_NODELIST": "node1", "NODELIST": "node1"}
    return {f"SLURM_{name}": value for name, value in names.items()}


def _world_size(launcher: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks that a launcher's words ask for."""
    words = " ".join(launcher)
    per_node = re.search(r"--nproc[_-]per[_-]node[= ](\d+)", words)
    nodes = re.search(r"--nnodes[= ](\d+)", words)
    if per_node:
        return int(per_node[1]) * (int(nodes[1]) if nodes else 1)
    number = re.search(r"(?:^|\s)(?:-np?|--ntasks)[= ](\d+)", words)
    return int(number[1]) if number else int(environ.get("SLURM_NTASKS", 0)) or None


def read_yaml(file: Path) -> Run:
    """Read a configuration of Megatron-LM's functional tests (``MODEL_ARGS``) or of gpt-neox.

    Raises:
        ValueError: for another file.
    """
    tree = parse_yaml(read_small(file))
    if not isinstance(tree, dict):
        raise ValueError(f"{file} holds no settings")
    if isinstance(arguments := tree.get("MODEL_ARGS"), dict):
        return Run([word for name, value in arguments.items() for word in _flag(name, value)])
    settings = foreign_flags().gpt_neox
    if not {name for name, _ in flattened(tree)} & settings.keys():
        raise ValueError(f"{file} is neither a model_config.yaml of Megatron-LM nor a configuration of gpt-neox")
    return of_settings(_neox_settings(tree), settings)


def of_settings(settings: Mapping[str, Any], entries: Mapping[str, str | Mapping[str, str]]) -> Run:
    """Translate settings with a table: flags, or a verdict with a reason, for all values or by value."""
    run = Run([])
    for name, value in settings.items():
        section, _, last = name.partition(".")
        patterns = (name, f"{section}.*", f"*.{last}")
        entry: Any = next(filter(None, map(entries.get, patterns)), "missing: it is not a known setting")
        text = _text(value)
        if isinstance(entry, dict):
            match = [pattern for pattern in entry if re.fullmatch(pattern, text.lower())]
            entry = entry[match[0]] if match else entry.get("else", "missing: this value has no counterpart")
        if entry.startswith("--"):
            words = entry.replace("{}", text)
            for number, item in enumerate(value if isinstance(value, list) else ()):
                words = words.replace(f"{{{number}}}", str(item))
            run.flags += shlex.split(words)
            run.rows.append((f"{name}: {text}", "mapped", words))
        else:
            verdict, _, reason = entry.partition(": ")
            run.rows.append((f"{name}: {text}", verdict, reason))
    return run


def _flag(name: str, value: Any) -> list[str]:
    if value is False or value is None:
        return []
    return [name] if value is True else [name, *shlex.split(_text(value))]


def _text(value: Any) -> str:
    return " ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _neox_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of gpt-neox by name, as they take effect together."""
    settings: dict[str, Any] = NEOX_DEFAULTS | dict(flattened(tree))
    if settings["activation"] == "gelu" and settings.get("bias_gelu_fusion"):
        settings["activation"] = "gelu_tanh"
    if "fp16.initial_scale_power" in settings:
        settings["fp16.initial_scale_power"] = 2 ** int(settings["fp16.initial_scale_power"])
    if settings.get("tokenizer_type", "GPT2BPETokenizer") != "GPT2BPETokenizer" and "vocab_file" in settings:
        settings["tokenizer_model"] = settings.pop("vocab_file")
    settings.pop("rms_norm_epsilon" if settings.get("norm", "layernorm") == "layernorm" else "layernorm_epsilon", None)
    return with_blends(settings)


def start_point(folder: str) -> str:
    """Return the value of ``--load`` for a folder: with a prefix if Megatron-LM's checkpoints are in it."""
    path = Path(folder)
    return MEGATRON_PREFIX + folder if (path / MEGATRON_LM_NEWEST).is_file() or is_megatron_lm(path) else folder


def with_start_point(flags: Sequence[str]) -> list[str]:
    """Return flags with the value of ``--load`` that counts here."""
    words = [
        f"--load={start_point(word.removeprefix('--load='))}" if word.startswith("--load=") else word for word in flags
    ]
    return [start_point(word) if before == "--load" else word for before, word in zip(["", *words], words)]


def stored_by_megatron_lm(options: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the configuration in the checkpoint of Megatron-LM that a run starts from; None without one."""
    return stored_config(options) if (options.load or "").startswith(MEGATRON_PREFIX) else None


def compare_with_stored(parsed: ParsedArguments) -> tuple[list[tuple[str, str, str]], list[Problem]]:
    """Return rows of what differs from the arguments in Megatron-LM's checkpoint, and the changes that are refused."""
    stored = stored_by_megatron_lm(parsed.config.checkpoint)
    if stored is None:
        return [], []
    changes = compare_configs(stored, parsed.config, parsed.config.checkpoint.resume_mode)
    rows = [(flag, "differs", text) for flag, _, text in (line.partition(": ") for line in changes.lines)]
    return rows, list(changes.problems)


def preset_and_files(known: argparse.Namespace) -> list[str]:
    """Return the preset, configuration files and fields of a command line, as flags."""
    flags = ["--preset", known.preset] if known.preset else []
    flags += ["--config", *known.config] if known.config else []
    return flags + (["--set", *known.set] if known.set else [])


def translate(run: Run, problems: Sequence[Problem]) -> tuple[list[tuple[str, str, str]], list[str], Sequence[Problem]]:
    """Return what becomes of each setting (the setting, the verdict, an explanation), and the flags for here.

    Args:
        run: to translate.
        problems: of its flags, as they are.

    Returns:
        The rows, the flags, and the problems that belong to no row.
    """
    command_line = parse_flags(run.flags)
    config = flags_config(command_line)
    spellings = {word.partition("=")[0] for word in run.flags}
    dropped = {flag: note for flag, note in meaning_notes(spellings, config) if "would ignore it" in note}
    rows, flags, reported = list(run.rows), preset_and_files(command_line.known), set[Problem]()

    def add(words: Sequence[str], verdict: str, text: str, here: Sequence[str]) -> None:
        spelling = words[0].partition("=")[0]
        begins = re.compile(rf"{re.escape(spelling)}(?![\w-])")
        for problem in filter(lambda problem: begins.match(problem.sentence), problems):
            if problem.code in ("E001", "E004") or "is not one of" in problem.sentence:
                fixes = [f"fix: {fix}" for fix in problem.fixes]
                verdict, text, here = "missing", "; ".join([problem.sentence.partition(": ")[2], *fixes]), ()
                reported.add(problem)
        flags.extend(here)
        row = " ".join(words), verdict, text
        if row not in rows and (not run.rows or verdict == "missing"):
            rows.append(row)

    for given in command_line.given:
        old = [given.spelling, *given.words]
        words = list(with_our_words(given).words)
        words = with_start_point([given.spelling, *words])[1:]
        new = [given.spelling, *words]
        if given.spelling in dropped:
            add(old, "not needed", dropped[given.spelling].rpartition("; ")[2], ())
        else:
            add(old, *(("same", "") if new == old else ("mapped", " ".join(new))), new)
    set_by_flags = {given.setting.name for given in command_line.given}
    added: list[list[str]] = []
    for words in command_line.foreign:
        applied, others, _ = apply_foreign_flags([words], set_by_flags)
        here = [word for each in applied for word in each]
        if others:
            spelling, equals, value = words[0].partition("=")
            add(words, "not needed", ignore_reason(spelling, [*[value] * bool(equals), *words[1:]], config) or "", ())
        elif here:
            add(words, "mapped", " ".join(here), () if here in added else here)
            added.append(here)
        else:
            add(words, "not needed", "another flag sets the same", ())
    return rows, flags, [problem for problem in problems if problem not in reported]


def check(run: Run, world_size: int | None) -> tuple[Sequence[str], Sequence[Problem], Sequence[tuple[str, str, str]]]:
    """Return the notes on a run, its problems, and rows of what differs from the checkpoint that it starts from."""
    ranks = ["--world-size", str(world_size)] if world_size else []
    flags = with_start_point(run.flags)
    try:
        parsed = parse([*flags, "--check-config", *ranks], {}, stored_by_megatron_lm)
        different, problems = compare_with_stored(parsed)
        return parsed.notes, problems, different
    except UserError as error:
        problems = [problem for problem in error.problems if problem.code not in FILES_ARE_ELSEWHERE]
        if not problems and any(MEGATRON_PREFIX in word for word in flags):
            missing = "; ".join(str(problem.sentence) for problem in error.problems)
            sentence = f"the flags are not compared with those stored in the checkpoint of --load: {missing}"
            problems = [Problem("E850", sentence, ("run it where these files are",))]
        return error.notes, problems, ()


def main(argv: Sequence[str]) -> int:
    """Print the table and the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        "from_megatron.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (as the script launches)")
    parser.add_argument(
        "source", nargs=argparse.REMAINDER, metavar="SCRIPT.sh ... | CONFIG.yaml | DEEPSPEED.json FLAG... | -- FLAG..."
    )
    args = parser.parse_args(argv)
    source = [word for number, word in enumerate(args.source) if number or word != "--"]
    if not source:
        parser.error("nothing to translate: give a script, a YAML file, or -- and flags")
    try:
        if source[0].startswith("-"):
            run = Run(source)
        elif source[0].endswith((".yaml", ".yml")):
            run = read_yaml(Path(source[0]))
        elif source[0].endswith(".json"):
            run = of_settings(deepspeed_settings(Path(source[0]), args.world_size, source[1:]), table())
            run.flags += source[1:]
        else:
            run = read_script(Path(source[0]), source[1:])
    except (OSError, ValueError) as error:
        echo(f"from_megatron: {error}", file=sys.stderr)
        return 2
    world_size = args.world_size or run.world_size
    notes, problems, different = check(run, world_size)
    rows, flags, problems = translate(run, problems)
    rows += different
    width = min(60, max(len(setting) for setting, _, _ in rows))
    for setting, verdict, text in rows:
        echo(f"{setting:{width}}  {verdict:10}  {text}".rstrip())
    echo(f"\n{f'{world_size} ranks: ' if world_size else ''}pretrain_gpt.py {' '.join(map(shell_word, flags))}\n")
    for note in notes:
        if not note.startswith(("applied: ", "ignored")):  # as in the table
            echo(f"note: {note}")
    for problem in problems:
        echo(problem)
    missing = sum(verdict == "missing" for _, verdict, _ in rows)
    counts = f"{missing} of {len(rows)} settings are missing, {len(problems)} to mend"
    echo("would start" if not missing and not problems else f"would not start as it is: {counts}")
    return 1 if missing or problems else 0


if __name__ == "__main__":
    if CLEANED not in os.environ and sys.executable:  # a script can read the environment of this process, too
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], kept | {CLEANED: "1"})
    sys.exit(main(sys.argv[1:]))
