"""Picture of a mixture: the shares of the sources over the tokens of the run, and the epochs of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from megatron.config.text import format_compact
from megatron.data.blend_usage import StageUse, whole_run
from megatron.training.loggers.plots import DASHES, INK_COLOR, MUTED_COLOR, RUN_COLORS, open_figure

MOST_SOURCES = len(RUN_COLORS) - 1
"""Sources with a colour of their own; the smallest share one."""


def draw_blend(stages: Sequence[StageUse], out: Path) -> None:
    """Draw both panels. Raises as :func:`open_figure`."""
    edges = [0, *accumulate(stage.tokens for stage in stages)]
    largest = sorted(whole_run(stages), key=lambda use: -use.tokens)
    named = [use.name for use in (largest if len(largest) <= len(RUN_COLORS) else largest[:MOST_SOURCES])]
    colors = dict(zip(named, RUN_COLORS))
    others = f"{len(largest) - len(named):,} others"
    with open_figure(out, 11.0, 6.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for stage, begin, end in zip(stages, edges, edges[1:]):
            shares = {use.name: use.share for use in stage.sources}
            heights = {name: shares.get(name, 0.0) for name in named}
            if len(named) < len(largest):
                heights[others] = max(0.0, 1.0 - sum(heights.values()))
            bottom = 0.0
            for name, height in heights.items():
                color = colors.get(name, RUN_COLORS[-1])
                above.bar(
                    begin, height, end - begin, bottom, align="edge", color=color, edgecolor="white", linewidth=0.5
                )
                if height > 0.05 and end - begin > 0.04 * edges[-1]:
                    above.text(
                        (begin + end) / 2, bottom + height / 2, f"{height:.0%}", ha="center", va="center", color="white"
                    )
                bottom += height
            title = f"{stage.name}\n{format_compact(stage.tokens, trim=True)} tokens"
            if len({each.seq_length for each in stages}) > 1:
                title += f",\nsamples of {format_compact(stage.seq_length, trim=True)}"
            above.text((begin + end) / 2, 1.02, title, ha="center", va="bottom", color=INK_COLOR, fontsize=9)
        for number, name in enumerate(named):
            begun = next(use for stage in stages for use in stage.sources if use.name == name)
            passes = [begun.begin / begun.once]
            for stage in stages:
                passes.append(next((use.epochs_at_end for use in stage.sources if use.name == name), passes[-1]))
            dashes = DASHES[number // len(RUN_COLORS) % len(DASHES)]
            below.plot(edges, passes, dashes, color=colors[name], label=name, linewidth=2)
        for number in range(1, 1 + int(max(use.epochs_at_end for use in largest))) if below.get_ylim()[1] < 12 else ():
            below.axhline(number, color=MUTED_COLOR, linewidth=0.8, linestyle=":")
        above.set(ylim=(0, 1), xlim=(0, edges[-1]), ylabel="share of the samples")
        above.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
        above.grid(visible=False)
        below.set(ylim=(0, None), ylabel="epochs read", xlabel="tokens of the run")
        below.xaxis.set_major_formatter(lambda value, _: format_compact(value, trim=True))
        handles = [*above.containers[: len(named) + (len(named) < len(largest))]]
        labels = [*named, *([others] if len(named) < len(largest) else [])]
        figure.legend([bars[0] for bars in handles], labels, loc="outside right upper")
