"""Generate docs/flags.md and the tables of metrics in docs/logs.md: ``python tools/generate_docs.py``."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.megatron_flags import ForeignFlags, foreign_flags, other_meanings
from megatron.arguments.presets import PAPER_TOKENS_PER_STEP, PRESETS
from megatron.arguments.sources import build_config
from megatron.config.option import Need
from megatron.config.settings import GROUPS, SETTINGS
from megatron.layers.parameters import num_parameters
from megatron.training.loggers.base import Metric
from megatron.training.loggers.console import CONSOLE_PREFIX, EVALUATION_METRICS, METRICS
from megatron.training.loggers.feature_metrics import (
    DILOCO_METRICS,
    ELASTIC_METRICS,
    EXPERT_METRICS,
    REPLAY_METRICS,
)

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ROOT / "docs" / "flags.md"
LOGS = ROOT / "docs" / "logs.md"
BEGIN, END = "<!-- written by tools/generate_docs.py -->\n", "<!-- end -->\n"
"""Lines around the generated part of docs/logs.md."""
INTRODUCTION = """# Flags

Written by `python tools/generate_docs.py` from the classes in `megatron/config/`; a test keeps it up to date.

Sources of options, from lowest to highest priority: the defaults below, the model of the checkpoint or of the
`hf:DIR` that the run starts from, `--preset NAME`, `--config FILE...` (YAML, by group or flat), flags,
`--set group.field=value`. Setting one of several exclusive options in a higher source clears the others
(`train_samples` replaces `train_iters`, `mock_data` replaces `data_path`).
`--check-config [--world-size N]` checks the configuration without a GPU and without importing torch. It prints a
summary of the run, the data it would read, and the checkpoint it would start from. `--help` shows the flags that most
runs use, `--help SECTION` those of a section below, `--help-all` all of them. `--fake-world --world-size N
[--fake-rank R]` also [builds one rank of it](layouts.md#a-large-run-tried-on-one-machine).
Booleans take `--x` and `--no-x`. Flags cannot be abbreviated.
"""


def flags_page() -> str:
    """Return the text of docs/flags.md."""
    return "\n".join([INTRODUCTION, *_presets(), *_groups(), *_megatron()])


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield "| preset | layers | hidden | heads | K/V heads | MLP | vocabulary | sequence | parameters | tokens a step |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, values in PRESETS.items():
        config = build_config(dict(values))
        m = config.model
        count = f"{num_parameters(m):,}" if m.vocab_size else "by the tokenizer"
        layers = m.num_layers if m.layer_pattern is None else m.residual_layers
        cells = (layers, m.hidden_size, m.num_attention_heads, m.kv_groups, m.ffn, m.vocab_size or "tokenizer's")
        batch = f"{PAPER_TOKENS_PER_STEP[name]:,}" if name in PAPER_TOKENS_PER_STEP else ""
        yield _row(f"`{name}`", *cells, config.training.seq_length, count, batch)
    yield "\nA preset also sets the optimizer settings of its paper and turns dropout off. It does not set layout,"
    yield "precision, batch size or run length. Tokens per step are those of the paper: a run far from them is noted."
    yield "Layers of hybrid models are those of their pattern, each with one mixer.\n"


def _groups() -> Iterator[str]:
    for group, cls in GROUPS.items():
        yield f"## {group}\n"
        yield inspect.cleandoc(cls.__doc__ or "").split("\n")[0] + "\n"
        yield "| flag | default | |"
        yield "|---|---|---|"
        for setting in (s for s in SETTINGS.values() if s.group == group):
            flag, default = f"{setting.flag} {setting.metavar}".rstrip(), setting.describe_value(setting.default)
            if default and setting.scalar is not bool:
                default = f"`{default}`"
            yield _row(f"`{flag}`", default, setting.describe("`"))
        yield ""


def _megatron() -> Iterator[str]:
    flags = foreign_flags()
    yield "## Flags of Megatron-LM\n"
    yield "`python tools/from_megatron.py SCRIPT.sh` translates a script, flag by flag.\n"
    yield "Flags that exist in both have the same meaning. These have another default:\n"
    yield "| flag | Megatron-LM | here |"
    yield "|---|---|---|"
    for each in SETTINGS.values():
        if (theirs := each.option.megatron).default:
            yield _row(f"`{each.flag}`", theirs.default, theirs.reason)
    yield "\nThese have another meaning in Megatron-LM 0.20, with a note at startup:\n"
    yield "| flag | if | note |"
    yield "|---|---|---|"
    for given, terms, note in other_meanings():
        yield _row(f"`{given}`", " and ".join(f"`{term}`" for term in terms), note)
    yield from _applied(flags)
    yield "\nThese are accepted and ignored, with a note at startup:\n"
    yield "| flag | reason |"
    yield "|---|---|"
    by_reason: dict[str, list[str]] = {}
    for spelling, flag in flags.handled.items():
        if flag.kind in ("ignored", "setting"):
            values = f" (`{'`, `'.join(flag.values)}`)" if flag.values else ""
            name = f"`{spelling}...`" if spelling.endswith("-") else f"`{spelling}`{values}"
            by_reason.setdefault(flag.reason, []).append(name)
    for reason, names in by_reason.items():
        yield _row(" ".join(names), reason)
    yield from _refused(flags)


def _refused(flags: ForeignFlags) -> Iterator[str]:
    yield "\nThese are refused, because they change the model, the data or the optimization, or promise a check that is"
    yield "not here. The values in the last column are ignored, and flags where they have no effect in Megatron-LM:\n"
    yield "| flag | reason | instead | ignored |"
    yield "|---|---|---|---|"
    for spelling, flag in flags.handled.items():
        if flag.kind == "refused":
            instead = " or ".join(f"`{fix}`" if fix.startswith("--") else fix for fix in flag.instead)
            ignored = [f"`{value}`" for value in flag.values or ()]
            ignored += [f"without {Need(flag.condition)}"] if flag.condition else []
            name = f"`{spelling}...`" if spelling.endswith("-") else f"`{spelling}`"
            yield _row(name, flag.reason, instead, ", ".join(ignored))
    yield "\nSo are these values:\n"
    yield "| flag | value | reason |"
    yield "|---|---|---|"
    for each in SETTINGS.values():
        for value, reason in each.option.megatron.missing.items():
            yield _row(f"`{each.flag}`", "several" if value == "several" else f"`{value}`", reason)
    yield ""


def _applied(flags: ForeignFlags) -> Iterator[str]:
    yield "\nThese stand for flags of this program. The same flag given itself overrides them.\n"
    yield "| flag | here |"
    yield "|---|---|"
    for spelling, flag in flags.handled.items():
        if flag.kind == "applied":
            yield _row(f"`{spelling}`", f"`{flag.words.replace('{}', 'VALUE')}`")
    for each in SETTINGS.values():
        for theirs, ours in each.option.megatron.values.items():
            yield _row(f"`{each.flag} {theirs}`", f"`{each.flag} {ours}`")


def logs_page(text: str) -> str:
    """Return the text of docs/logs.md with the tables of metrics and timers as in the code."""
    from megatron.distributed.timing import PHASES  # imports torch

    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    lines = ["Every `--log-interval` steps. *Step* is the last step, *window* all steps since the previous line:\n"]
    lines += _metrics(METRICS)
    lines += ["\nAt every evaluation, to the same three places; for test data, `test` replaces `validation`:\n"]
    lines += _metrics(EVALUATION_METRICS)
    lines += ['\nWith experts, in the same lines as the first ones; "layer" is a block, dense ones have none:\n']
    lines += _metrics(EXPERT_METRICS)
    lines += ["\nAfter every round of [DiLoCo](slow_networks.md#diloco):\n"]
    lines += _metrics(DILOCO_METRICS)
    lines += ["\nWith [elastic replicas](elastic.md):\n"]
    lines += _metrics(ELASTIC_METRICS)
    lines += ["\nWith [`--replay-check`](corruption.md):\n"]
    lines += _metrics(REPLAY_METRICS)
    lines += ["\nThe timers:\n", "| timer | level | what happens in it |", "|---|---|---|"]
    lines += [_row(f"`{name}`", phase.level, phase.meaning) for name, phase in PHASES.items()]
    return before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after


def _metrics(table: Mapping[str, Metric]) -> Iterator[str]:
    yield "| name | unit | meaning |"
    yield "|---|---|---|"
    for name, metric in table.items():
        if not name.startswith(CONSOLE_PREFIX):
            yield _row(f"`{name}`", metric.unit, metric.help)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main(argv: Sequence[str]) -> int:
    """Write the pages and return the exit status."""
    pages = "docs/flags.md and the tables of docs/logs.md"
    parser = argparse.ArgumentParser("generate_docs.py", description=f"Write {pages} from the code. No options.")
    parser.parse_args(argv)
    FLAGS.write_text(flags_page())
    LOGS.write_text(logs_page(LOGS.read_text()))
    print(FLAGS.relative_to(ROOT), LOGS.relative_to(ROOT), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
