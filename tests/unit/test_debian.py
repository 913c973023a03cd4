"""The two commands of the README, and the steps of the CPU image, in a bare root file system of Debian.

Nothing is there but what debootstrap makes and the packages that the README or the Dockerfile name; no container engine
is needed. Packages of Python come from where this machine's pip finds them.
"""

from __future__ import annotations

import ast
import faulthandler
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kit.users import needs_root
from tests.unit.test_dockerfile import DOCKERFILE, ignored_files, stages

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TOOLS = ("debootstrap", "unshare", "chroot")
SUITE = "bookworm"  # with the oldest Python that is supported, 3.11
STUDENT = 2000  # the user of the tree; 1000 is the one of the image

pytestmark = [
    pytest.mark.slow,  # two installations of everything
    needs_root,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]

ENTER = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
for folder in $1; do mkdir -p "$0$folder" && mount --bind -o ro "$folder" "$0$folder"; done
exec chroot "$0" "${@:2}"
"""


def pip_settings() -> tuple[str, list[Path]]:
    """Return the settings of this machine's pip as the text of a file, and the files and folders named in it."""
    done = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    settings = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in pairs}
    text = "".join(f"{name} = {value}\n" for name, value in settings.items())
    paths = {Path(path) for path in re.findall(r"(?:\s|file://)(/[\w./-]+)", text)}
    return f"[global]\n{text}", [path for path in paths if path.exists()]


def run(tree: Path, command: str, user: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """The output of a command in the tree, which must succeed; its processes end with it."""
    faulthandler.cancel_dump_traceback_later()
    folders = {str(Path(*path.parts[:3])) for path in pip_settings()[1] if path.is_dir()}  # with those beside them
    isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", ENTER, str(tree)]
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    variables = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(environ or {})}
    given = [f"{name}={value}" for name, value in variables.items()]
    words = [*isolate, " ".join(folders), "env", "-i", *given, *become, "bash", "-ec", command]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace")
    print(output)
    assert done.returncode == 0, output[-5000:]
    return output


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    faulthandler.cancel_dump_traceback_later()  # set up by pytest for each test; all this takes longer
    tree = tmp_path_factory.mktemp("debian") / "tree"
    isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]  # it mounts /proc there
    subprocess.run([*isolate, "debootstrap", "--variant=minbase", SUITE, str(tree)], check=True)
    settings, paths = pip_settings()
    for file in filter(Path.is_file, paths):  # certificates and the like, beside those that packages bring
        settings = settings.replace(str(file), f"/etc/pip-{file.name}")
        shutil.copy(file, tree / "etc" / f"pip-{file.name}")
    (tree / "etc" / "pip.conf").write_text(settings)
    tree.parent.chmod(0o755)
    yield tree
    shutil.rmtree(tree)


def test_the_two_commands_of_the_readme(bare: Path) -> None:
    """For an ordinary user: no `python`, no locale, a home with a space in its name, files closed to others."""
    (first, *_) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    main_job, tests = (shlex.split(line, comments=True) for line in first.splitlines())
    (packages,) = re.findall(r"`apt install ([\w -]+)`", README)
    environ = {"DEBIAN_FRONTEND": "noninteractive"}
    run(bare, f"apt-get update && apt-get install --yes --no-install-recommends {packages}", environ=environ)
    home = Path("/srv/a student")
    run(bare, f"useradd --create-home --uid {STUDENT} --home-dir '{home}' student; ! command -v python")
    clone = bare / str(home).lstrip("/") / "my clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    run(bare, f"chown -R student:student '{home}'")
    enter, environ = "umask 077; cd ~/'my clone'; ", {"HOME": str(home)}
    output = run(bare, f"{enter}{shlex.join(main_job)} --steps 20", STUDENT, environ)
    assert "1 not read: /usr/lib/python3.11/sitecustomize.py -> /etc/python3.11/sitecustomize.py" in output
    assert "== killed at step " in output
    assert "transformers computes the same: logits by " in output
    assert "Traceback" not in output
    made = clone / "runs" / "quickstart"
    assert (made / "loss.png").stat().st_size > 0
    assert made.stat().st_mode & 0o077 == 0
    some = "tests/unit/config tests/unit/test_quickstart.py -k 'privacy or files or half_way'"
    output = run(bare, f"{enter}{shlex.join(tests)} {some}", STUDENT, environ)
    assert re.search(r"= \d+ passed, .*deselected", output)
    again = run(bare, f"{enter}{shlex.join(tests)} tests/unit/config -k links_that_stay_inside", STUDENT, environ)
    assert "setup:" not in again


def test_the_steps_of_the_cpu_image(bare: Path, tmp_path: Path) -> None:
    """With Debian's Python in the place of the base image's."""
    tree = tmp_path / "tree"
    tmp_path.chmod(0o755)
    subprocess.run(["cp", "-a", str(bare), str(tree)], check=True)
    run(tree, "apt-get update && apt-get install --yes --no-install-recommends python3-venv")
    run(tree, "python3 -m venv /usr/local")
    work, user, environ = Path("/"), 0, {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
    found = stages(DOCKERFILE.read_text())
    for step in (step for stage in ("base", "packages", "code", "cpu") for step in found[stage]):
        kind, rest = step.split(" ", 1)
        if kind == "RUN":
            run(tree, f"cd {work}; {rest}", user, environ)
        elif kind == "ENV":
            environ |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif kind == "WORKDIR":
            work = Path(rest)
            (tree / rest.lstrip("/")).mkdir(parents=True)
        elif kind == "COPY":
            source, _ = rest.split()
            copy(source, tree / str(work).lstrip("/"))
        elif kind == "USER":
            user = int(rest)
        else:
            assert kind in ("FROM", "ARG")
    assert user == 1000
    environ = {name: value for name, value in environ.items() if name != "DEBIAN_FRONTEND"} | {
        "HOME": str(Path("/", "home", "megatron"))
    }
    flags = "--preset tiny-llama --mock-data --vocab-size 64 --train-iters 2 --seq-length 32 --device cpu"
    output = run(tree, f"cd {work}; python pretrain_gpt.py {flags} --save ~/checkpoints --run-dir ~/run", user, environ)
    assert "2/2" in output
    assert "megatron-pretrain" in run(tree, "megatron --version", user, environ)
    unnamed = f"mkdir -p /tmp/out; cd /tmp/out; python {work}/pretrain_gpt.py {flags} --run-dir run"
    assert "2/2" in run(tree, unnamed, 4321, {})  # as with docker run --user


def copy(source: str, folder: Path) -> None:
    """COPY of a file, or of all that `.dockerignore` does not name."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    names = [name for name in listed if name and source in (".", name)]
    for name in set(names) - ignored_files(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    assert os.listdir(folder)
