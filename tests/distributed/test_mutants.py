"""Every place where the library communicates is broken in turn, and the checks must notice.

A mutant that survives means that a fault of this kind could live in the library unseen. Those that compute the same
by mathematics are listed, with the reason; a listed mutant that is noticed after all fails too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron.layers.parameters import trainable
from megatron.training.build import build_trainer
from tests.distributed import detect, faults, faults_of_contexts, faults_of_recurrences, faults_of_shares
from tests.distributed.detect import Detector
from tests.distributed.detect_experts import EXPERTS
from tests.distributed.detect_records import RECORDS
from tests.distributed.detect_saves import SAVES
from tests.distributed.detect_streams import STREAMS
from tests.distributed.grid import RECOMPUTE, STATES
from tests.distributed.sites import Call, Site, broken, calls, mutations, strays, watching
from tests.kit.cases import Case, run_case
from tests.kit.pool import PATIENCE, Pool, RankError
from tests.known_bugs.bugs import BUGS
from tools.lib.verify_parallel import RankTrace, join_traces

DETECTORS = detect.DETECTORS | EXPERTS | SAVES | RECORDS | STREAMS

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("megatron/training/callbacks/health.py", "report", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/training/callbacks/health.py", "counted_samples", "sum", "doubled"): "it is only compared with 0",
    ("megatron/training/callbacks/health.py", "counted_samples", "sum", "mis-scaled"): "it is only compared with 0",
    ("megatron/layers/fp8.py", "quantize", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/layers/fp8_experts.py", "quantize", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/layers/router.py", "sinkhorn", "sum", "doubled"): "a factor of all experts changes no choice",
    ("megatron/layers/router.py", "sinkhorn", "sum", "mis-scaled"): "a factor of all experts changes no choice",
    ("megatron/layers/loss.py", "_chunk_loss", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/layers/loss.py", "forward", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/layers/loss.py", "_token_scores", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/training/stop.py", "poll", "max", "doubled"): "the maximum of equal numbers is theirs",
    ("megatron/training/components/times.py", "on_step_end", "max", "doubled"): "equal numbers",
    ("megatron/training/components/exchange_overflow.py", "on_log", "max", "doubled"): "it is only compared with 0",
    ("megatron/training/components/exchange_overflow.py", "on_log", "max", "mis-scaled"): "it is only compared with 0",
    (
        "megatron/training/components/head_weights.py",
        "on_batches",
        "sum",
        "doubled",
    ): "a factor of both parts",
    ("megatron/training/components/head_weights.py", "on_batches", "sum", "mis-scaled"): "a factor of both parts",
    ("megatron/training/replay_check/component.py", "_is_any_set", "max", "doubled"): "the maximum of equal numbers",
    ("megatron/training/replay_check/component.py", "_is_any_set", "max", "mis-scaled"): "it is only compared with 0",
    ("megatron/training/metrics.py", "_barrier", "sum", "doubled"): "ranks that meet twice have met",
    ("megatron/training/metrics.py", "_barrier", "sum", "mis-scaled"): "the number is not used",
}
"""By file, function, reduction and mutation."""

GPU_ONLY = {
    ("megatron/pipeline/recorder.py", "__init__"): "the barrier from which events on a GPU are measured",
    ("megatron/distributed/mappings.py", "_fused_gather_matmul"): "symmetric memory",
    ("megatron/distributed/mappings.py", "_fused_matmul_scatter"): "symmetric memory",
    ("megatron/training/build_model.py", "choose_tp_overlap"): "whether all ranks have symmetric memory",
    ("megatron/training/cuda_graphs.py", "_capture"): "whether all ranks have captured a graph",
}
"""By file and function: what no run on CPUs gets to."""

BETWEEN_REPLICAS = (
    "megatron/training/diloco/component.py",
    "megatron/training/elastic.py",
    "megatron/training/replicas/transfer.py",
)
"""Replicas are runs of their own: test_diloco.py compares them with simulations, test_elastic_replicas.py with one
process."""

CALLS = [
    call
    for call in calls()
    if (call.site.file, call.function) not in GPU_ONLY and call.site.file not in BETWEEN_REPLICAS
]


def run_watched(rank: int, world_size: int, detector: str) -> tuple[set[Site], Any]:
    with watching() as seen:
        result = DETECTORS[detector].function(rank, world_size, *DETECTORS[detector].args)
    return seen, result


def run_broken(rank: int, world_size: int, detector: str, site: Site, how: str) -> Any:
    with broken(site, how):
        return DETECTORS[detector].function(rank, world_size, *DETECTORS[detector].args)


@pytest.fixture(scope="module")
def exercised(pool: Pool) -> dict[str, set[Site]]:
    """The sites each detector reaches, the fastest detector first; unbroken, every detector is content."""
    reached, seconds = {}, {}
    for name, detector in DETECTORS.items():
        began = time.monotonic()
        ranks = pool.run(detector.world_size, run_watched, name)
        seconds[name] = time.monotonic() - began
        assert detector.right([result for _, result in ranks]), f"{name} complains about the library as it is"
        reached[name] = set().union(*(seen for seen, _ in ranks))
    return {name: reached[name] for name in sorted(reached, key=seconds.__getitem__)}


HANG_SECONDS = 40.0
"""Limit for a mutant, which may hang. Jobs that compute what the library does have the pool's own limit."""


def verdict(pool: Pool, detector: Detector, *job: Any, timeout: float = PATIENCE) -> str:
    """Return the outcome of a job on the detector's ranks: ``right``, ``wrong``, or the message it failed with."""
    try:
        ranks = pool.run(detector.world_size, *job, timeout=timeout)
    except RankError as error:
        return str(error)
    return "right" if detector.right(ranks) else "wrong"


MUTANTS = [
    pytest.param(call, how, marks=pytest.mark.slow if number else (), id=f"{call}-{how}")
    for call in CALLS
    for number, how in enumerate(mutations(call.site.op))
]
"""Every way to break every call; the first of each is in the default set."""


@pytest.mark.parametrize(("call", "how"), MUTANTS)
def test_a_broken_collective_is_noticed(pool: Pool, exercised: dict[str, set[Site]], call: Call, how: str) -> None:
    reached = [name for name, sites in exercised.items() if call.site in sites]
    assert reached, f"no detector reaches {call}: add one"
    equivalent = (call.site.file, call.function, call.reduction, how) in EQUIVALENT
    timeout = PATIENCE if equivalent else HANG_SECONDS
    jobs = ((DETECTORS[name], run_broken, name, call.site, how) for name in reached)
    verdicts = (verdict(pool, *job, timeout=timeout) for job in jobs)
    if equivalent:
        assert set(verdicts) == {"right"}
    else:
        assert "wrong" in verdicts, "a run that merely fails or hangs does not count: its numbers must differ"


def test_every_site_that_runs_was_found_by_reading(exercised: dict[str, set[Site]]) -> None:
    assert set().union(*exercised.values()) == {call.site for call in CALLS}


def test_gpu_only_call_sites_still_exist() -> None:
    assert {(call.site.file, call.function) for call in calls()} >= set(GPU_ONLY)


def test_collectives_are_called_in_one_way_only() -> None:
    assert strays() == []


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "bias added tp times": ("tp2", faults.bias_added_by_every_rank),
    "bias added tp times, sequence parallel": ("tp2-sp", faults.bias_added_by_every_rank),
    "replicated weight counted twice in the norm": ("tp2", faults.replicas_counted_in_the_norm),
    "local token count": ("dp2", faults.tokens_counted_locally),
    "parts of a product in another order": ("tp2-overlap", faults.parts_in_another_order),
    "a part of a product lost": ("tp2-overlap", faults.part_lost),
    "rows of the part before": ("tp2-overlap", faults.rows_of_the_part_before),
    "local row in dropout": ("tp2-sp", faults.dropout_by_local_row),
    "local head in dropout": ("tp2", faults.dropout_by_local_head),
    "local sample in dropout": ("dp2", faults.dropout_by_local_sample),
    "padded rows unmasked": ("tp2", faults.padding_in_the_partition_function),
    "largest logit of each rank": ("large-logits", faults.largest_logit_not_shared),
    "largest logit not subtracted": ("large-logits", faults.largest_logit_not_subtracted),
    "W of one micro-batch dropped": ("tp2-sp", faults.weight_gradient_empty),
    "one kv copy drifts": ("tp2", faults.kv_copy_drifts),
    "kv copies not summed": ("tp2", faults.kv_copies_not_summed),
    "kv copies not summed, two pairs of ranks": ("tp4-gqa", faults.kv_copies_not_summed),
    "one kv copy drifts, two pairs of ranks": ("tp4-gqa", faults.kv_copy_drifts),
    "RMS of a rank's own queries": ("tp4-norms", faults.queries_normalized_locally),
    "gradient of the RMS kept local": ("tp4-norms", faults.gradient_of_the_rms_kept_local),
    "norms of kv copies not summed": ("tp4-norms", faults.norms_of_kv_copies_not_summed),
    "a rank skips alone": ("overflow", faults.skips_decided_alone),
    "norms not summed, sequence parallel": ("tp2-sp", faults.replicas_not_summed),
    "W of one micro-batch dropped, on a stage": ("pp2", faults.weight_gradient_empty),
    "tied weight counted twice in the norm": ("pp2", faults.tied_weight_counted_twice_in_the_norm),
    "tied weight not summed": ("pp2", faults.tied_weight_not_summed),
    "seed applied twice": ("pp2", faults.seed_applied_twice),
    "seed applied twice, interleaved": ("pp2-tp2", faults.seed_applied_twice),
    "activation of another micro-batch": ("pp2", faults.activation_of_another_microbatch),
    "activation of another micro-batch, in a V": ("pp2-v", faults.activation_of_another_microbatch),
    "gradient of another micro-batch": ("pp2", faults.gradient_of_another_microbatch),
    "labels of another micro-batch": ("pp2", faults.labels_of_another_microbatch),
    "loss of every stage": ("pp2", faults.loss_of_every_stage),
    "norms not summed, on stages": ("pp2-tp2", faults.replicas_not_summed),
    "local row in dropout, on stages": ("pp2-tp2", faults.dropout_by_local_row),
    "adapters of another part": ("dora-tp2-sp", faults.adapters_of_another_part),
    "adapters scaled once more": ("dora-tp2", faults.adapters_scaled_by_the_rank),
    "shard off by one": ("zero1", faults_of_shares.shard_off_by_one),
    "shard off by one, gradients cut": ("zero2", faults_of_shares.shard_off_by_one),
    "share counted by all its copies": ("dp2", faults_of_shares.shares_counted_by_all_copies),
    "share counted by both instances": ("hsdp", faults_of_shares.shares_counted_by_all_copies),
    "gather of one bucket forgotten": ("zero1", faults_of_shares.gather_of_one_bucket_forgotten),
    "experts summed over all replicas": ("moe-ep2", faults_of_shares.experts_summed_over_all_replicas),
    "loads of experts not summed over replicas": ("balance-dp2", faults_of_shares.loads_of_experts_local),
    "loads of experts not summed over TP": ("balance-tp2", faults_of_shares.loads_of_experts_local),
    "loads of the last micro-batch": ("balance-tp2", faults_of_shares.loads_of_the_last_microbatch),
    "loads counted in recomputation": ("balance-tp2", faults_of_shares.loads_counted_in_recomputation),
    "gradient of a router not summed over TP": (
        "moe-tp2",
        partial(faults.partial_flipped, "layers.0.mlp.router.weight"),
    ),
    "gradient of a latent projection not summed over TP": (
        "hybrid-tp2-sp",
        partial(faults.partial_flipped, "layers.1.self_attention.linear_kv_down_proj.weight"),
    ),
    "gradient of a further prediction not summed over TP": (
        "hybrid-tp2-sp",
        partial(faults.partial_flipped, "mtp.layers.0.eh_proj.weight"),
    ),
    "choices of experts counted locally": ("moe-tp2", faults_of_shares.choices_counted_locally),
    "padding in the norm": ("dp2", faults_of_shares.padding_in_the_norm),
    "padding in the norm, state cut": ("zero1", faults_of_shares.padding_in_the_norm),
    "a micro-batch dropped where gradients are cut": ("zero2", faults_of_shares.one_microbatch_dropped),
    "gradients of the last step added to": ("dp2", faults_of_shares.stale_gradients_added_to),
    "gradients of another micro-batch added to": ("zero2", faults_of_shares.stale_gradients_added_to),
    "shards of the last step added to": ("zero2", faults_of_shares.shards_of_the_last_step_added_to),
    "gradients reduced twice": ("zero2", faults_of_shares.gradients_reduced_twice),
    "gradients reduced twice, weights cut": ("zero3", faults_of_shares.gradients_reduced_twice),
    "weights of the last step gathered": ("zero3", faults_of_shares.weights_of_the_last_step_gathered),
    "weights of the next rank gathered": ("zero3", faults_of_shares.weights_of_the_next_rank_gathered),
    "weights not gathered for backward": ("zero3", faults_of_shares.weights_not_gathered_for_backward),
    "weights freed too early": ("zero3", faults_of_shares.weights_freed_before_the_end_of_backward),
    "prefetched weights overwritten": ("zero3", faults_of_shares.prefetched_weights_overwritten),
    "tied weight not gathered": ("zero3", faults_of_shares.tied_weight_not_gathered_for_the_output),
    "a tile skipped": ("cp3", faults_of_contexts.tile_skipped),
    "a tile counted twice": ("cp3", faults_of_contexts.tile_counted_twice),
    "a tile counted twice, weights dropped": ("cp4", faults_of_contexts.tile_counted_twice),
    "results of keys averaged": ("cp3", faults_of_contexts.results_averaged),
    "sinks of every rank": ("cp3", faults_of_contexts.sinks_of_every_rank),
    "chunks of the next rank": ("cp3", faults_of_contexts.chunks_of_the_next_rank),
    "halves swapped": ("cp3", faults_of_contexts.halves_swapped),
    "gradients of keys not returned": ("cp3", faults_of_contexts.gradients_not_returned),
    "gradients of keys not returned, among groups": ("cp4", faults_of_contexts.gradients_not_returned),
    "gradient of a chunk doubled": ("cp3", faults_of_contexts.gradient_of_a_chunk_doubled),
    "heads in another order": ("cp2-heads", faults_of_contexts.heads_in_another_order),
    "rows in another order": ("cp4", faults_of_contexts.rows_in_another_order),
    "documents of local rows": ("cp2-gathered", faults_of_contexts.documents_of_local_rows),
    "dropout by exchanged head": ("cp2-heads", faults_of_contexts.dropout_by_exchanged_head),
    "dropout by exchanged head, among groups": ("cp4", faults_of_contexts.dropout_by_exchanged_head),
    "local row in dropout, chunks": ("cp2-gathered", faults.dropout_by_local_row),
    "positions of local rows": ("cp2-gathered", faults_of_contexts.positions_of_local_rows),
    "choices of experts counted locally, chunks": ("moe-cp2", faults_of_shares.choices_counted_locally),
    "local token count, chunks": ("cp2-gathered", faults.tokens_counted_locally),
    "later tokens of the next document": ("heads-cp2", faults_of_contexts.later_tokens_of_the_next_document),
    "later tokens of a rank's own rows": ("heads-cp2", faults_of_contexts.later_tokens_of_own_rows),
    "samples counted by every rank": ("digest-cp2", faults_of_contexts.samples_counted_by_every_rank),
}
"""The detector that must notice it, and the fault."""

OF_STATES = (
    faults_of_recurrences.state_not_reset_in_a_chunk,
    faults_of_recurrences.state_not_reset_between_chunks,
    faults_of_recurrences.convolution_of_other_documents,
    faults_of_recurrences.rows_before_a_chunk_lost,
    faults_of_recurrences.gradient_of_the_rows_before_lost,
    faults_of_recurrences.chunks_in_the_order_of_ranks,
    faults_of_recurrences.chunks_of_the_next_rank,
    faults_of_recurrences.halves_swapped,
    faults_of_recurrences.gradient_of_passed_states_lost,
    faults_of_recurrences.decay_applied_twice,
    faults_of_recurrences.decay_without_gradient,
)
OF_EXCHANGED_HEADS = (faults_of_recurrences.parameters_of_other_heads, faults_of_contexts.heads_in_another_order)
OF_NORMS = (
    faults_of_recurrences.sum_of_squares_kept_local,
    faults_of_recurrences.gradient_of_the_sum_of_squares_kept_local,
)
RECURRENT = [
    *(("mamba2-cp2", fault) for fault in OF_STATES),
    *(("gated-delta-net-cp2-heads", fault) for fault in OF_EXCHANGED_HEADS),
    *(("mamba2-tp2", fault) for fault in OF_NORMS),
]
SLOWLY = [
    *(("gated-delta-net-cp2", fault) for fault in OF_STATES),
    *((f"{name}-cp4", fault) for name in STATES for fault in (*OF_STATES, *OF_EXCHANGED_HEADS)),
    *(("mamba2-cp2-heads", fault) for fault in OF_EXCHANGED_HEADS),
]
RECURRENT_FAULTS = {f"{fault.__name__}, {detector}": (detector, fault) for detector, fault in RECURRENT}
SLOW_FAULTS = {f"{fault.__name__}, {detector}": (detector, fault) for detector, fault in SLOWLY}
FIRST = {fault: name for name, (_, fault) in reversed(FAULTS.items())}
AGAIN = FAULTS.keys() - FIRST.values()
"""Faults that are made in a layout before."""
FAULTS |= RECURRENT_FAULTS | SLOW_FAULTS
NOTICING = DETECTORS | detect.OF_RECURRENCES
REPORTED = [(bug.detector, bug.plant) for bug in BUGS.values()]
KNOWN = {name for name, (detector, fault) in FAULTS.items() if (NOTICING[detector], fault) in REPORTED}
"""Faults that tests/known_bugs plants in the same job."""


def run_faulty(rank: int, world_size: int, name: str) -> Any:
    detector, fault = FAULTS[name]
    with fault():
        return NOTICING[detector].function(rank, world_size, *NOTICING[detector].args)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in AGAIN | KNOWN | SLOW_FAULTS.keys() else ()) for n in FAULTS]
)
def test_a_known_fault_is_noticed(pool: Pool, name: str) -> None:
    assert verdict(pool, NOTICING[FAULTS[name][0]], run_faulty, name) == "wrong"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "cp2" in n else pytest.mark.slow) for n in detect.OF_RECURRENCES]
)
def test_recurrences_without_faults_are_right(pool: Pool, name: str) -> None:
    detector = NOTICING[name]
    assert verdict(pool, detector, detector.function, *detector.args) == "right"


def run_with_dirty_padding(rank: int, world_size: int, case: Case) -> list[RankTrace]:
    with faults_of_shares.dirty_padding():
        return run_case(rank, world_size, case)


@pytest.mark.parametrize("name", ["dp2", "zero1", "hsdp"])
def test_padding_between_gradients_changes_no_result(pool: Pool, name: str) -> None:
    detector = DETECTORS[name]
    assert verdict(pool, detector, run_with_dirty_padding, *detector.args) == "right"


def test_a_forgotten_weight_gradient_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"misses \d+ contributions"):
        pool.run(2, run_forgetful)


def run_forgetful(rank: int, world_size: int) -> None:
    with faults.weight_gradient_dropped():
        run_case(rank, world_size, DETECTORS["tp2-sp"].args[0])


def shared_parameters(rank: int, world_size: int, case: Case) -> list[str]:
    """Those of which several tensor-parallel ranks hold a copy, the last layer's standing for all layers."""
    specs = build_trainer(case.config(), rank, world_size).specs
    trained = trainable(specs).items()
    shared = [n for n, spec in trained if any(len(piece.tp_ranks) > 1 for piece in spec.pieces)]
    return [name for name in shared if not name.startswith("layers.0.")]


def run_flipped(rank: int, world_size: int, case: Case, parameter: str) -> list[RankTrace]:
    with faults.partial_flipped(parameter):
        return run_case(rank, world_size, case)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("tp2", 14, marks=pytest.mark.slow),
        ("tp2-sp", 14),
        ("dora-tp2-sp", 6),
        pytest.param("hybrid-tp2-sp", 20, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_word_about_copies_is_noticed(pool: Pool, name: str, count: int) -> None:
    case = DETECTORS[name].args[0]
    shared = pool.run(2, shared_parameters, case)[0]
    assert len(shared) >= count
    verdicts = {p: verdict(pool, DETECTORS[name], run_flipped, case, p) for p in shared}
    assert [p for p, v in verdicts.items() if v != "wrong"] == []


def run_deferred(rank: int, world_size: int, case: Case) -> list[RankTrace]:
    with faults.deferred():
        return run_case(rank, world_size, case)


@pytest.mark.parametrize("recompute", ["nothing", "layernorm", "activation", "uniform 2"])
@pytest.mark.parametrize("detector", [pytest.param("tp2", marks=pytest.mark.slow), "tp2-sp"])
def test_deferred_weight_gradients_are_the_same(pool: Pool, detector: str, recompute: str) -> None:
    case = DETECTORS[detector].args[0]
    recomputing = replace(case, training=replace(case.training, **RECOMPUTE[recompute]))
    assert DETECTORS[detector].right(pool.run(2, run_deferred, recomputing))


def test_a_kv_copy_that_drifts_is_named(pool: Pool) -> None:
    ranks = pool.run(2, run_faulty, "one kv copy drifts")
    assert "weight layers.0.self_attention.linear_qkv.weight" in join_traces([rank[0] for rank in ranks]).drifted
