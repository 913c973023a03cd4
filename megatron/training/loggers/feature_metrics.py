"""Metrics of features in log lines, and their columns on the console."""

from __future__ import annotations

from megatron.config.text import format_loss, format_three_digits
from megatron.training.loggers.base import BY_LAYER, Column, Metric, Metrics, metrics_under


def _heads(metrics: Metrics) -> str:
    """Format the losses of further tokens as ``mtp 1: 4.12 2: 4.25``."""
    losses = metrics_under("mtp loss ", metrics).items()
    return " ".join(["mtp", *(f"{depth}: {format_loss(x)}" for depth, x in losses)])


def _experts(load: float, metrics: Metrics) -> str:
    """Format as ``load 1.8 L7``, with dead experts and dropped choices if there are any."""
    dead, dropped = metrics["experts-dead"], metrics.get("dropped-choices", 0.0)
    more = f" dead {dead}" * (dead > 0) + f" dropped {dropped:.1%}" * (dropped > 0)
    layer = layer_names(metrics, "L")[metrics["expert-load-max-layer"]]
    return f"load {format_three_digits(load)} {layer}{more}"


def layer_names(metrics: Metrics, prefix: str = "") -> list[str]:
    """Return the names of the layers of a model with experts: their numbers, and ``MTP1`` and so on for the heads."""
    heads = metrics.get("expert-mtp-layers", 0)
    layers = len(metrics[f"expert-load-max{BY_LAYER}"]) - heads
    return [f"{prefix}{n}" for n in range(layers)] + [f"MTP{n}" for n in range(1, heads + 1)]


FEATURE_COLUMNS = (
    Column("mtp loss 1", 1, 6, lambda _, m: _heads(m), "mtp k: loss of the token k after the next one"),
    *(
        Column(
            f"{of}load_balancing_loss", 1, 7, lambda x, _: f"balance {format_loss(x)}", "balance: of experts, 1 is best"
        )
        for of in ("seq_", "", "global_")
    ),
    Column("z_loss", 1, 7, lambda x, _: f"router z {format_loss(x)}", "router z: z-loss"),
    Column(
        "expert-load-max",
        1,
        7,
        _experts,
        "load: of the busiest expert over the mean, and its layer; dead: experts without tokens; dropped: choices",
    ),
)
"""Columns of log lines that have the metrics."""

FURTHER_LOSSES = {"mtp loss ": "mtp ", "source loss ": ""}
"""Beginnings of the names of further losses per token, and of their names in pictures of the loss."""

LOSS_METRICS = {
    "mtp loss N": Metric(
        "nats per token",
        "window: of the token N after the next one, with `--mtp-num-layers`; mean over its predictions",
    ),
    "source loss NAME": Metric(
        "nats per token",
        "window: of the samples of the source NAME, with `--log-loss-per-source`; mean over its labels",
    ),
    "seq_load_balancing_loss": Metric(
        "",
        "window: balance of experts per sequence, without coefficient, mean over layers; "
        "from 1 (balanced) to the number of experts",
    ),
    "load_balancing_loss": Metric("", "window: the same per micro-batch"),
    "global_load_balancing_loss": Metric("", "window: the same of the global batch"),
    "z_loss": Metric("", "window: squared log-partition of the routers, without coefficient, mean over layers"),
}
"""Losses beside that of the next token."""

EXPERT_METRICS = {
    "expert-load-max": Metric(
        "", "window: tokens of the busiest expert over the mean, in the layer where it is largest"
    ),
    "expert-load-max-layer": Metric("layer", "that layer, from 0; heads of further tokens follow the last one"),
    "expert-load-min": Metric(
        "", "window: tokens of the idlest expert over the mean, in the layer where it is smallest"
    ),
    "expert-load-entropy": Metric(
        "0 to 1", "window: entropy of the choices over that of equal ones, in the layer where it is smallest"
    ),
    "experts-dead": Metric("experts", "window: without a token, of all layers together"),
    "dropped-choices": Metric("0 to 1", "window: share of the choices beyond `--moe-expert-capacity-factor`"),
    "expert-bias-range": Metric("", "largest less smallest bias of a layer's experts, where the difference is largest"),
    "METRIC-by-layer": Metric("list", "each of these by layer, null without experts; `metrics.jsonl` only"),
    "expert-mtp-layers": Metric(
        "layers", "the last ones of these lists that are heads of multi-token prediction, if any"
    ),
    "moe/METRIC_layer_N": Metric("", "each of these, and the losses above, with `--moe-per-layer-logging`"),
    "expert-loads": Metric(
        "list of lists",
        "tokens of every expert in percent of the mean of its layer, since the last such record, every "
        "`--save-tokens-per-expert-interval` steps; `metrics.jsonl` only",
    ),
}
"""Metrics of experts in log lines of models that have some."""

DILOCO_METRICS = {
    "diloco-round": Metric("", "rounds so far"),
    "diloco-members": Metric("replicas", "that took part"),
    "diloco-attempts": Metric("", "exchanges until one was committed; above 1 after the loss of a member"),
    "diloco-seconds": Metric("seconds", "from the arrival of this replica to the end of the exchange"),
    "diloco-blocked-seconds": Metric("seconds", "of these in which no step was taken"),
    "diloco-sent-bytes": Metric("bytes", "sent by rank 0"),
    "diloco-outer-grad-norm": Metric("", "norm of the averaged progress"),
}
"""Metrics of a round of DiLoCo."""

ELASTIC_METRICS = {
    "elastic-replicas": Metric("replicas", "that took the last step"),
    "elastic-seconds": Metric("seconds", "window: of a step, from the gradients of this replica to those of all"),
    "elastic-aborted": Metric("", "window: exchanges that were repeated after the loss of a replica"),
    "elastic-left-out-samples": Metric(
        "samples", "of lost replicas, that this start left out; with `--elastic-batch shrink`"
    ),
}
"""Metrics of elastic replicas in log lines."""

HEALTH_MAXIMA = {
    "activation-rms": "activations",
    "attention-logit": "attention logit",
    "expert-load": "busiest expert",
}
"""Quantities of a health report whose largest values the console shows, and their names there."""

POWER_METRICS = {
    "energy-joules": Metric(
        "joules",
        "window: pauses included, of all GPUs, or of the processors of all nodes with what else runs on them; with "
        "`--run-dir`, where NVML or powercap can be read",
    ),
    "power-watts": Metric("watts", "window: the same, by the time since the last line"),
}
"""Metrics of energy."""

REPLAY_METRICS = {
    "replay-checks": Metric("steps", "of this start, computed again and compared, with `--replay-check`"),
    "replay-clean-step": Metric("", "the last step that was found clean, or with which the run began"),
}
"""Metrics of steps that are computed again."""

UPDATE_METRICS = {
    "spikes-skipped": Metric("steps", "window: those of them with a finite gradient that was an outlier"),
    "rewinds": Metric("", "times that the run has gone back, with `rewind:N`"),
}
"""Metrics of updates that are left out."""

VALIDATION_METRICS = {
    "lm loss validation ema": Metric("nats per token", "loss with the average of the weights, with `--ema-decay`"),
}
"""Further losses of an evaluation."""
