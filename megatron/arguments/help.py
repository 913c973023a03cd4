"""The flags and the help of the programs that take all options: those that most runs use, a section, or everything."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import from_mapping, read_yaml
from megatron.config.errors import Problem, UserError
from megatron.config.settings import GROUPS, NOUNS, SETTINGS, Setting
from megatron.config.text import did_you_mean, package_version


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS[int]}") from None


WORDS = {"nargs": "+", "action": "extend", "default": []}
RANKS_TO_CHECK = "Number of ranks to check for. Default: as many as launched."
IN_A_FAKE_WORLD = "Check, build one rank of --world-size without allocating memory or starting other ranks, and stop."
OWN_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--preset": {"metavar": "NAME", "help": f"Start from a known model: {', '.join(PRESETS)}."},
    "--config": WORDS | {"metavar": "FILE", "help": "YAML, by group or flat; later files override earlier ones."},
    "--set": WORDS | {"metavar": "GROUP.FIELD=VALUE", "help": "Set a field; null clears it."},
    "--check-config": {"action": "store_true", "help": "Check everything, print a summary and stop."},
    "--fake-world": {"action": "store_true", "help": IN_A_FAKE_WORLD},
    "--fake-rank": {"type": _int, "metavar": "R", "help": "The rank that --fake-world builds. [0]"},
    "--world-size": {"type": _int, "metavar": "N", "help": RANKS_TO_CHECK},
    "--help-all": {"action": "store_true", "help": "Show all options, as docs/flags.md does, and stop."},
    "--version": {"action": "store_true", "help": "Print the version and stop."},
}
"""The flags that are no config fields, besides ``--help [SECTION]``, with the arguments of ``add_argument``."""


EXAMPLES = """\
examples; for 8 GPUs, torchrun --nproc-per-node 8 takes the place of python:
  python pretrain_gpt.py --preset tiny-llama --mock-data --vocab-size 512 --train-iters 20
  python pretrain_gpt.py --preset gpt2-124m --bf16 --data-path PREFIX --train-iters 1000 --save runs/gpt2
      --micro-batch-size 8 --global-batch-size 512
  python pretrain_gpt.py --config examples/configs/llama3-8b.yaml --data-path PREFIX --save runs/8b
  python pretrain_gpt.py --load hf:Qwen/Qwen3-0.6B --data-path PREFIX --train-iters 1000 --save runs/mine
  python pretrain_gpt.py ... --check-config --world-size 1024
"""


COMMON: Mapping[str, str] = {
    "model": "num_layers hidden_size num_attention_heads num_query_groups vocab_size normalization activation "
    "position_embedding_type hidden_dropout attention_dropout num_experts lora_rank",
    "parallel": "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size use_distributed_optimizer data_parallel_sharding_strategy",
    "precision": "params_dtype fp8_format",
    "training": "seq_length micro_batch_size global_batch_size train_iters train_samples num_epochs eval_interval "
    "eval_iters exit_duration_in_mins seed device recompute_granularity",
    "compute": "kernels deterministic",
    "optimizer": "optimizer lr min_lr lr_decay_style lr_warmup_fraction weight_decay clip_grad",
    "data": "data_path split mock_data chat_data_path valid_chat_data_path tokenizer_type tokenizer_model",
    "checkpoint": "save save_interval load pretrained_checkpoint resume_mode",
    "logging": "log_interval run_dir tensorboard_dir wandb_project",
}
"""Options that most runs use, by group, shown by ``--help``."""


class _HelpFormatter(argparse.HelpFormatter):
    """Wrap lines only at spaces, so that every flag can be found in them; keep those of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n  " in text else super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def make_parser(
    of_settings: bool = True, short: bool = False, sections: Collection[str] = (), about: str = "", config: str = ""
) -> argparse.ArgumentParser:
    """Build the parser of the flags that are no config fields, and with ``of_settings`` the help of the others.

    Args:
        of_settings: include the flags of config fields.
        short: only those of ``COMMON`` and of the program's objective, in the first sentence of their help.
        sections: groups of fields to include; empty for all.
        about: docstring of the program; empty for pretrain_gpt.py.
        config: file with the program's defaults; empty for none.
    """
    summary, _, example = re.sub(r"\s+", " ", about.partition("\n\n")[0]).partition(": ``")
    defaults = from_mapping(_tree(config), config).values if config else {}
    program, example = f"{Path(config).stem}.py", f"python {example.rstrip('.` ')}"
    if sys.argv[0].startswith("megatron "):  # the package may be installed, without the files of a checkout
        program, example = sys.argv[0], f"{sys.argv[0]} {example.partition('.py ')[2]}"
    booleans = "Flags are spelled as Megatron-LM spells them. Booleans take --x and --no-x."
    what = (
        f"{summary}. The defaults are those of pretrain_gpt.py and {Path(config).name}." if about else "Pretrain a GPT."
    )
    parser = argparse.ArgumentParser(
        prog=program if about else "pretrain_gpt.py",
        usage="%(prog)s [--preset NAME] [--config FILE] [flags] [--set GROUP.FIELD=VALUE]",
        description=f"{what} {booleans}",
        epilog=f"example:\n  {example}\n" if about else EXAMPLES,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=40 if short else 34, width=110),
    )
    order = "Later ones override earlier ones: preset, config, flags, set."
    sources = parser.add_argument_group("sources", None if short else order)
    more = f"Show the options that most runs use, or all of a section: {', '.join(GROUPS)}."
    sources.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION", help=more)
    for flag, properties in OWN_FLAGS.items():
        hidden = {"help": argparse.SUPPRESS} if short and flag.startswith("--fake") else {}
        sources.add_argument(flag, **{**properties, **hidden})
    for group, cls in GROUPS.items() if of_settings else ():
        own = [each for each in SETTINGS.values() if each.group == group and group in (sections or GROUPS)]
        if short:
            named = {*COMMON.get(group, "").split(), *defaults}
            own = [each for each in own if each.name in named or _serves(each, defaults)]
        if own:
            doc = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
            _add_options(parser.add_argument_group(group, None if short else doc), own, defaults, short)
    return parser


def _add_options(group: Any, settings: Sequence[Setting], defaults: Mapping[str, Any], short: bool) -> None:
    for setting in settings:
        shape: dict[str, Any] = {"action": "store_true"} if setting.scalar is bool else {"metavar": setting.metavar}
        text = setting.describe()
        if short:  # the first clause
            names = f" ({', '.join(setting.option.aliases)})" if setting.option.aliases else ""
            text = re.split(r"[.;:] |\.$", setting.help)[0] + names
        default = setting.describe_value(defaults.get(setting.name, setting.default))
        group.add_argument(setting.flag, help=(text + (f" [{default}]" if default else "")).replace("%", "%%"), **shape)


def _tree(config: str) -> Mapping[str, Any]:
    tree = read_yaml(config)
    return {} if isinstance(tree, Problem) else tree


def _serves(setting: Setting, defaults: Mapping[str, Any]) -> bool:
    """Return True if an option has an effect only with a value that the program's defaults set."""
    conditions = [need.condition.partition("=") for need in setting.option.needs]
    return any(str(defaults.get(name)) in values.split("|") for name, equals, values in conditions if equals)


HELP = ("-h", "--help", "--help-all", "--version")


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return True if a command line asks for the help or the version."""
    return not set(HELP).isdisjoint(argv)


def help_text(argv: Sequence[str], about: str = "") -> str | None:
    """Return the help or the version that a command line asks for, if it does.

    Args:
        argv: of the program; a program with a docstring begins it with ``--config`` and the file of its defaults.
        about: docstring of the program; empty for pretrain_gpt.py.

    Raises:
        UserError: if there is no such section.
    """
    config = argv[1] if about else ""
    if not asks_for_help(argv):
        return None
    asked = next(n for n, word in enumerate(argv) if word in HELP)
    if argv[asked] == "--version":
        return f"{package_version()}\n"
    if argv[asked] == "--help-all":
        return make_parser(about=about, config=config).format_help()
    section = "".join(argv[asked + 1 : asked + 2])
    if not section or section.startswith("-"):
        return make_parser(short=True, about=about, config=config).format_help()
    if section not in GROUPS:
        fix = f"--help {did_you_mean(section, GROUPS) or ''}".strip()
        raise UserError([Problem("E002", f"--help {section}: the sections are {', '.join(GROUPS)}", (fix,))])
    return make_parser(sections=[section], about=about, config=config).format_help()
