"""The router of a mixture of experts: its options, which are those of the model, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MAX_SIZE, MegatronOption, Need, Run, option
from megatron.config.text import divisors, flag_fixes, nearest

EXPERTS = Need("num_experts")
SOFTMAX = Need("moe_router_score_function=softmax")
EXPERT_BIAS = Need("moe_router_enable_expert_bias")
GROUPS = Need("moe_router_num_groups")
CAPACITY = Need("moe_expert_capacity_factor")
BALANCING_LOSS = Need("moe_router_load_balancing_type=seq_aux_loss|aux_loss|global_aux_loss")

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kinds of balancing losses -> Megatron-LM's names of them in logs."""

PADDING = "padding"
"""Name in ``MicroBatch.extra`` of bool ``[b, s]``, True for tokens that pad their sample; absent if none do."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RouterOptions:
    """Options of the router: scores, choice, weights, balance and capacity of experts."""

    moe_router_topk: int = option(2, role="function", at_least=1, at_most=MAX_SIZE, needs="num_experts")
    """Number of experts per token."""
    moe_router_score_function: str = option(
        "softmax", role="function", choices=("softmax", "sigmoid", "sqrtsoftplus"), needs=EXPERTS
    )
    """Scores of the experts, from the router's logits. The weights of sigmoid and sqrtsoftplus are the scores of the
    chosen experts, divided by their sum if there are several."""
    moe_router_pre_softmax: bool = option(False, role="function", needs=(EXPERTS, SOFTMAX))
    """Apply the softmax over all experts before the top-k, instead of over the chosen experts."""
    moe_router_enable_expert_bias: bool = option(False, role="shape", needs=EXPERTS)
    """Balance experts by a bias, which is added to the scores for the choice, not for the weights: after every step it
    rises for experts with less than the mean load of the global batch, and falls for the others (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = option(1e-3, role="schedule", at_least=0, needs=(EXPERTS, EXPERT_BIAS))
    """Change of the expert bias in a step."""
    moe_router_num_groups: int | None = option(None, role="function", at_least=1, at_most=MAX_SIZE, needs=EXPERTS)
    """Divide the experts into this many equal groups, of which a token chooses some, and then experts in these only
    (DeepSeek-V3). Default: no groups."""
    moe_router_group_topk: int | None = option(
        None, role="function", at_least=1, at_most=MAX_SIZE, needs=(EXPERTS, GROUPS)
    )
    """Number of groups per token."""
    moe_router_group_score_topk: int | None = option(
        None, role="function", at_least=1, at_most=MAX_SIZE, needs=(EXPERTS, GROUPS)
    )
    """Number of experts of a group whose best scores, added up, are the score of the group: 1 in DeepSeek-V2, 2 in
    DeepSeek-V3. Default: moe_router_topk / moe_router_group_topk, as in Megatron-LM."""
    moe_router_topk_scaling_factor: float | None = option(None, role="function", above=0, needs=EXPERTS)
    """Factor of the weights of the chosen experts. Default: 1."""
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("seq_aux_loss",),
        role="schedule",
        choices=("seq_aux_loss", "aux_loss", "global_aux_loss", "sinkhorn", "none"),
        needs="num_experts",
        megatron=MegatronOption(
            "aux_loss",
            "the loss does not depend on the layout; with --moe-aux-loss-coeff the default is aux_loss here, too",
            missing={"quantile_balancing": "quantile balancing is not implemented"},
        ),
    )
    """Balance of the experts. Losses, of which there may be several: over each sequence (seq_aux_loss); as in the
    Switch Transformer over each micro-batch of a rank (aux_loss), which depends on the layout; or with the loads of the
    global batch (global_aux_loss), those of the step before, while Megatron-LM uses the micro-batches so far. sinkhorn
    has no loss: in training, experts are chosen after Sinkhorn's normalisation over each sequence (in Megatron-LM over
    a rank's micro-batch). none balances nothing."""
    moe_aux_loss_coeff: tuple[float, ...] = option((0.0,), role="schedule", at_least=0, needs=(EXPERTS, BALANCING_LOSS))
    """Weight of each balancing loss, in the same order. With this flag and without the types, the type is aux_loss, as
    in Megatron-LM."""
    moe_z_loss_coeff: float | None = option(None, role="schedule", at_least=0, needs=EXPERTS)
    """Weight of ST-MoE's z-loss, the squared log-partition of the router's logits. Default: 0."""
    moe_router_dtype: str = option(
        "fp32",
        role="free",
        choices=("fp32", "fp64"),
        needs=EXPERTS,
        megatron=MegatronOption("the type of the activations", "choices between close scores are not left to rounding"),
    )
    """Data type of the router's product and scores, if it is wider than that of the activations."""
    moe_router_force_load_balancing: bool = option(False, role="function", needs=EXPERTS)
    """Choose experts at random, for benchmarks only: the router is not used."""
    moe_expert_capacity_factor: float | None = option(
        None,
        role="function",
        above=0,
        example=1.25,
        needs=EXPERTS,
        megatron=MegatronOption(values={"-1": "null", "-1.0": "null"}),
    )
    """Drop choices of an expert beyond its capacity: this factor times the mean number of choices, of the tokens of a
    rank's micro-batch, so that it depends on the layout. Default: no choice is dropped."""
    moe_token_drop_policy: str = option(
        "probs", role="function", choices=("probs", "position"), needs=(EXPERTS, CAPACITY)
    )
    """Choices that stay within the capacity: those with the largest weights (probs), or the first ones (position)."""

    refused: ClassVar = """
    num_experts and moe_router_topk>num_experts
    E214 --moe-router-topk {moe_router_topk} exceeds the {num_experts} experts
      fix: --moe-router-topk {num_experts}

    num_experts and moe_router_enable_expert_bias and moe_router_load_balancing_type=sinkhorn
    E214 sinkhorn does not use the scores to which an expert bias is added
      fix: --moe-router-load-balancing-type none | --no-moe-router-enable-expert-bias

    num_experts and moe_router_num_groups and moe_router_load_balancing_type=sinkhorn
    E214 sinkhorn does not choose groups of experts
      fix: --moe-router-load-balancing-type none | --set model.moe_router_num_groups=null

    num_experts and moe_router_load_balancing_type=sinkhorn and moe_router_score_function!=softmax
    E214 sinkhorn has weights of its own, not those of {moe_router_score_function}
      fix: --moe-router-score-function softmax | --moe-router-load-balancing-type none

    num_experts and moe_router_load_balancing_type=sinkhorn and seq_length=1
    E214 sinkhorn balances the tokens of a sequence, which is one: all experts are equal, and rounding chooses
      fix: --moe-router-load-balancing-type none

    num_experts and moe_router_enable_expert_bias and diloco_sync_interval
    E214 an expert bias moves by the loads of all replicas, which --diloco-sync-interval does not count together
      fix: --no-moe-router-enable-expert-bias | drop --diloco-sync-interval

    num_experts and moe_router_num_groups and not moe_router_group_topk
    E214 --moe-router-num-groups {moe_router_num_groups} needs the number of groups of a token
      fix: --moe-router-group-topk 1

    num_experts and moe_router_group_topk>moe_router_num_groups
    E214 --moe-router-group-topk {moe_router_group_topk} exceeds the {moe_router_num_groups} groups
      fix: --moe-router-group-topk {moe_router_num_groups}

    num_experts and moe_router_num_groups and moe_router_group_topk>moe_router_topk
    E214 a token with {moe_router_topk} experts cannot have them in {moe_router_group_topk} groups
      fix: --moe-router-group-topk {moe_router_topk} | --moe-router-topk {moe_router_group_topk}
    """

    @property
    def group_score_topk(self) -> int | None:
        """Number of best scores that are the score of a group; None without groups."""
        if self.moe_router_num_groups is None or self.moe_router_group_topk is None:
            return None
        return self.moe_router_group_score_topk or max(1, self.moe_router_topk // self.moe_router_group_topk)

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Kinds of balancing losses, and their coefficients."""
        given = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return {kind: coefficient for kind, coefficient in given if kind in LOSS_NAMES}

    @property
    def router_losses(self) -> dict[str, float]:
        """Coefficients of the losses of routers that are not 0, by Megatron-LM's names."""
        coefficients = {LOSS_NAMES[kind]: coefficient for kind, coefficient in self.balancing_losses.items()}
        coefficients["z_loss"] = self.moe_z_loss_coeff or 0.0
        return {name: coefficient for name, coefficient in coefficients.items() if coefficient}

    @property
    def has_global_loss(self) -> bool:
        """True if a balancing loss uses the loads of the global batch."""
        return bool(self.balancing_losses.get("global_aux_loss"))

    def check_balancing(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that kinds of balance can be combined, and have a coefficient each."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if config.model.num_experts is None:
            return
        losses = [*dict.fromkeys(kind for kind in kinds if kind in LOSS_NAMES)]
        flag = "--moe-router-load-balancing-type"
        if not kinds:
            yield Problem("E214", f"{flag} is empty", (f"{flag} seq_aux_loss", f"{flag} none"))
        elif len(kinds) > 1 and len(losses) < len(kinds):
            sentence = f"{flag} {' '.join(kinds)}: only different losses can be combined"
            kept = [kinds.index(loss) for loss in losses] or [0]
            values = " ".join(f"{coefficients[i]:g}" for i in kept if i < len(coefficients)) or "0.01"
            fix = f"{flag} {' '.join(losses or ['none'])} --moe-aux-loss-coeff {values}"
            yield Problem("E214", sentence, (fix,))
        elif len(kinds) != len(coefficients):
            sentence = f"{flag} has {len(kinds)} values and --moe-aux-loss-coeff {len(coefficients)}: one for each"
            given = [f"{coefficient:g}" for coefficient in coefficients] or ["0.01"]
            filled = " ".join([*given, *given[-1:] * len(kinds)][: len(kinds)])
            yield Problem("E214", sentence, (f"--moe-aux-loss-coeff {filled}",))

    def check_groups(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that groups divide the experts, and that those of a token have enough of them."""
        experts, groups, chosen = config.model.num_experts, self.moe_router_num_groups, self.moe_router_group_topk
        if experts is None or groups is None:
            return
        if experts % groups:
            fixes = flag_fixes("--moe-router-num-groups", nearest(groups, divisors(experts)))
            yield Problem("E214", f"{experts} experts do not divide into {groups} groups", fixes)
        elif chosen is not None and chosen <= groups and self.moe_router_topk > (held := chosen * experts // groups):
            sentence = f"--moe-router-topk {self.moe_router_topk} exceeds the {held} experts of {chosen} of the groups"
            more = -(-self.moe_router_topk * groups // experts)
            fixes = (f"--moe-router-topk {held}", *((f"--moe-router-group-topk {more}",) if more <= groups else ()))
            yield Problem("E214", sentence, fixes)
        elif (best := self.moe_router_group_score_topk) is not None and best > experts // groups:
            sentence = f"--moe-router-group-score-topk {best} exceeds the {experts // groups} experts of a group"
            yield Problem("E214", sentence, (f"--moe-router-group-score-topk {experts // groups}",))

    def note_router(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield notes about what depends on the layout, unbalanced experts, and routers without a gradient."""
        model = config.model
        if model.num_experts is None:
            return
        if model.moe_router_force_load_balancing:
            yield "--moe-router-force-load-balancing: experts are chosen at random, for benchmarks only"
            return
        sinkhorn = "sinkhorn" in self.moe_router_load_balancing_type
        over_chosen = self.moe_router_score_function == "softmax" and not (self.moe_router_pre_softmax or sinkhorn)
        if self.moe_router_topk == 1 and over_chosen:
            other = "every weight is 1, so the router gets no gradient (use --moe-router-pre-softmax)"
            yield f"--moe-router-topk 1: {other}"
        if not (any(self.balancing_losses.values()) or sinkhorn or self.moe_router_enable_expert_bias):
            kind = next(iter(self.balancing_losses), "seq_aux_loss")
            missing = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.01"
            yield f"no balancing loss ({missing}): a few experts may get all tokens"
        elif self.balancing_losses.get("aux_loss"):
            what = "the loss depends on the micro-batches, and so on the layout"
            yield f"--moe-router-load-balancing-type aux_loss: {what}"
        factor = self.moe_expert_capacity_factor
        if factor is not None and factor * self.moe_router_topk >= model.num_experts:
            yield f"--moe-expert-capacity-factor {factor:g} drops nothing: an expert has room for all tokens"
        elif factor is not None:
            what = "which choices are dropped depends on the micro-batches, and so on the layout"
            yield f"--moe-expert-capacity-factor {factor:g}: {what}"
