"""Record the checkpoints of Megatron-LM in every form, and the arguments that it reads from a run.

``python -m tests.megatron_core.record [FORM...]`` writes ``tests/golden/megatron_exports.json``, or only some forms of
it; see `tests.megatron_core.forms`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.megatron_core.forms import (
    FLAGS,
    FORMS,
    GROUPED,
    THEIRS,
    TRANSFORMER_ENGINE_ALONE,
    missing,
    run_theirs,
    write_data,
)
from tests.unit.convert.megatron_lm import common_state, entries

FILE = Path(__file__).parents[1] / "golden" / "megatron_exports.json"
READ = re.compile(r"(?:_compare|_set_arg)\(\s*'(\w+)'")
"""Names in its loader of the arguments that it compares with the run or takes over."""


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    return json.loads(json.dumps(value, default=str))


def record(path: Path, names: set[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint, with those arguments that have ``names``."""
    common = common_state(path)
    optimizer = common["optimizer"]
    for group in optimizer["optimizer"]["param_groups"]:
        for name in [name for name in group if name not in GROUP.split()]:
            del group[name]
    return {
        "entries": plain(entries(path)),
        "args": plain({name: value for name, value in common["args"].items() if name in names}),
        "optimizer": plain(optimizer),
        "opt_param_scheduler": plain(common["opt_param_scheduler"]),
        "content_metadata": plain(common["content_metadata"]),
    }


GROUP = """wd_mult lr_mult is_expert_parallel is_decoupled_lr default_config max_lr min_lr betas eps weight_decay step
lr"""
"""The entries that a group of parameters has with every optimizer of Megatron-LM."""


def write_and_record(form: str, layers: str, names: set[str]) -> dict[str, Any]:
    """Let Megatron-LM take one step with some layers and save; return what it has saved."""
    grouped = GROUPED if layers != "local" and ("shared" in form or "--hybrid-layer-pattern" in FORMS[form]) else ""
    flags = f"{FLAGS} {FORMS[form]} {THEIRS} {grouped} --save out --exit-interval 1"
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        run_theirs(Path(folder), flags.split(), layers=layers)
        return record(Path(folder) / "out" / "iter_0000001", names)


def main() -> None:
    """Write the file."""
    if why := missing():
        sys.exit(why)
    loader = Path(os.environ["MEGATRON_LM"]) / "megatron" / "training" / "checkpointing.py"
    names = set(READ.findall(loader.read_text()))
    chosen = sys.argv[1:] or [*FORMS]
    found = {} if chosen == [*FORMS] else json.loads(FILE.read_text())
    for form in chosen:
        alone = form in TRANSFORMER_ENGINE_ALONE
        theirs = write_and_record(form, "transformer_engine", names)
        found[form] = theirs if alone else write_and_record(form, "local", names)
        more = theirs["entries"].items()
        found[form]["transformer_engine"] = {key: x for key, x in more if found[form]["entries"].get(key) != x}
        print(form, len(found[form]["entries"]), len(found[form]["transformer_engine"]))
    write(found)


def write(found: dict[str, Any]) -> None:
    """Write the file."""
    FILE.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True).replace('},"', '},\n"') + "\n")
    print(FILE)


if __name__ == "__main__":
    main()
