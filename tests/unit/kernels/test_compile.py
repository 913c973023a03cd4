"""Compiled regions match eager ones, and are compiled once. Compiling takes seconds, so the rest is slow."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from megatron.config.compute import KERNEL_CANDIDATES
from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.kernels.activation import ACTIVATIONS
from megatron.kernels.compile import compiled, compiler_missing, use_private_cache
from megatron.kernels.cross_entropy import EAGER_CROSS_ENTROPY, CrossEntropyKernel
from megatron.kernels.dropout import dropout
from megatron.kernels.operation import check_kernel
from megatron.kernels.registry import OPERATIONS, Kernels
from megatron.layers.recompute import recompute_producer
from tests.kit.solo import Solo, random_batch, tiny
from tests.kit.users import NOBODY, needs_root

CPU = torch.device("cpu")
COMPILED = [name for name in OPERATIONS if "compiled" in KERNEL_CANDIDATES[name]]


@cache
def compiled_kernels() -> Kernels:
    return Kernels(**{name: OPERATIONS[name].candidates["compiled"].make() for name in COMPILED})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def train(
    kernels: Kernels, config: ModelConfig, training: TrainingConfig
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of steps on other data, samples and step numbers."""
    solo = Solo.build(config, torch.float32, training, kernels=kernels)
    for step in range(3):
        batches = [random_batch(config, samples=3, seed=2 * step + i) for i in range(2)]
        yield solo.step(batches)[0], solo.snapshot()


def check_training(kernels: Kernels, config: ModelConfig, training: TrainingConfig) -> None:
    """Compiled against eager, and no graph is added after the first step."""
    at_work = []
    steps = zip(train(kernels, config, training), train(Kernels(), config, training), strict=True)
    for (loss, grads), (eager_loss, eager_grads) in steps:
        at_work.append(graphs())
        assert loss.item() == pytest.approx(eager_loss.item(), rel=1e-6)
        whole = torch.cat([grad.flatten() for grad in eager_grads.values()]).norm()
        for name, grad in eager_grads.items():
            assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-6 * whole, name
    assert at_work[0] > 0
    assert at_work == at_work[:1] * 3, "a shape or a number was compiled again"


@pytest.mark.slow
def test_a_compiled_model_trains_like_an_eager_one() -> None:
    """Sum and norm, activation and loss; 48 tokens in chunks of 16."""
    kernels = replace(compiled_kernels(), norm=Kernels().norm)  # the same once more, and slow
    check_training(kernels, tiny(num_layers=1), TrainingConfig(cross_entropy_chunk_size=16))


LLAMA = tiny(
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    num_query_groups=2,
    qk_layernorm=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    z_loss_coeff=1e-3,
)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["nothing", "selective", "full"])
def test_every_region_and_recomputation(recompute: str) -> None:
    """With a last chunk of the loss that is shorter, and parts that backward computes again."""
    modules = ("layernorm", "activation", "core_attn")
    training = {
        "nothing": TrainingConfig(cross_entropy_chunk_size=20),
        "selective": TrainingConfig(recompute_granularity="selective", recompute_modules=modules),
        "full": TrainingConfig(recompute_granularity="full"),
    }[recompute]
    check_training(compiled_kernels(), LLAMA, training)


@pytest.mark.slow
def test_recomputed_activations_are_freed() -> None:
    """A compiled activation keeps nothing between it and what it feeds."""
    made = []

    def consume(y: Tensor) -> Tensor:
        made.append(StorageWeakRef(y.untyped_storage()))
        return y.matmul(weight)

    x, weight = torch.randn(48, 64, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    out = recompute_producer(lambda t: compiled_kernels().activation(t, None, "swiglu"), consume, x)
    assert made[0].expired()
    out.sum().backward()
    expected = Kernels().activation(x, None, "swiglu").t() @ torch.ones(48, 8)
    torch.testing.assert_close(weight.grad, expected.detach())


DTYPES = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", COMPILED)
def test_compiled_operations_equal_torch(monkeypatch: pytest.MonkeyPatch, operation: str, dtype: torch.dtype) -> None:
    """As one graph, which is then run eagerly: quick."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    made, before = OPERATIONS[operation].candidates["compiled"].make(), graphs()
    assert check_kernel(OPERATIONS[operation], made, CPU, dtype) is None
    assert graphs() > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", COMPILED)
def test_compiled_proves_to_be_torch(operation: str, dtype: torch.dtype) -> None:
    assert check_kernel(OPERATIONS[operation], getattr(compiled_kernels(), operation), CPU, dtype) is None


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_dropout_drops_the_same(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """To the bit, for every key with one graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    ours = compiled(dropout)()
    x, samples, positions = torch.ones(7, 2, 33), torch.tensor([5, 2**40 + 1]), torch.tensor([3, 4, 5, 9, 10, 2, 0])
    seen, before = [], graphs()
    for key in (0, 1, 2**62 + 12345, 2**63 - 1):
        out = ours(x, 0.3, torch.tensor(key), samples, positions)
        assert torch.equal(out, dropout(x, 0.3, torch.tensor(key), samples, positions))
        seen.append(out)
    assert graphs() == before + 1
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


def peak(kernel: CrossEntropyKernel) -> float:
    """Most bytes per logit that the passes over bf16 logits hold at a time, the logits themselves apart."""
    tokens, rows = 64, 8192
    kept = torch.randn(tokens, rows, generator=torch.Generator().manual_seed(0)).bfloat16()
    row, mine = torch.arange(tokens), torch.ones(tokens, dtype=torch.bool)

    def run(logits: Tensor) -> None:
        work, top = kernel.top(logits, rows - 5)
        kernel.sums(work, top, row, mine, rows - 5)
        kernel.gradient(work, top, top, top, row, mine, rows - 5, torch.bfloat16)

    run(kept.clone())  # compiles
    logits = kept.clone()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run(logits)
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / (tokens * rows)


@pytest.mark.slow  # a cold compilation takes 20 s
def test_the_compiled_loss_stores_logits_once_and_in_the_format_of_the_product() -> None:
    """Eager holds them in fp32 beside that, and then the gradient."""
    assert peak(EAGER_CROSS_ENTROPY) >= 6.0
    assert peak(compiled_kernels().cross_entropy) <= 0.1


def test_no_thread_runs_out_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, which may compute a region again, has a thread of its own on GPUs; torch would stop after 8 shapes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    double = compiled(lambda x: 2 * x)()

    def call() -> list[int]:
        return [len(double(torch.zeros(n))) for n in range(2, 20)]

    before = graphs()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result() == list(range(2, 20))
    assert graphs() == before + 18
    assert call() == list(range(2, 20))
    assert graphs() == before + 18


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str) -> None:
    x = torch.randn(6, 2, 32, requires_grad=True)
    ours, eager = (f.activation(x, None, name) for f in (compiled_kernels(), Kernels()))
    torch.testing.assert_close(ours, eager)
    seed = torch.randn_like(eager)
    torch.testing.assert_close(torch.autograd.grad(ours, x, seed), torch.autograd.grad(eager, x, seed))


def test_each_run_of_a_process_has_its_own_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that follows a run that was not."""
    import torch._inductor.config as inductor

    seen: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda: seen.append(inductor.deterministic))
    run = compiled(lambda: None)()
    try:
        for wanted in (False, True, False):
            torch.use_deterministic_algorithms(wanted)
            run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True, False]


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_missing(CPU, torch.float32) == "torch.compile needs a C++ compiler; there is no no-such-compiler"
    assert "triton" in str(compiler_missing(torch.device("cuda"), torch.float32))


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "is_used"), [(None, 0, True), (0, 0o755, True), (0, 0o775, False), (NOBODY, 0o755, False)]
)
def test_compiled_code_is_cached_in_a_folder_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int | None, mode: int, is_used: bool
) -> None:
    """PyTorch's default folder has a predictable name, in a folder where any user can create it."""
    (tmp_path / "tmp").mkdir(mode=0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = Path(default_cache_dir())
    assert default.parent == tmp_path / "tmp"
    if owner is not None:
        default.mkdir()
        default.chmod(mode)
        os.chown(default, owner, owner)
    for environ in ({}, {"TORCHINDUCTOR_CACHE_DIR": str(default)}):  # set by torch or by the user
        with (
            nullcontext() if is_used else pytest.warns(UserWarning, match=r"torch.compile uses .*, not .*torchinductor")
        ):
            use_private_cache(environ)
        folder = Path(environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder == (default if is_used else tmp_path / "home/.cache/megatron-pretrain/torchinductor")
        found = folder.stat()
        assert (found.st_uid, found.st_mode & 0o777) == (0, 0o700 if owner is None or not is_used else mode)


@needs_root
@pytest.mark.parametrize("call", ["", pytest.param("(torch.ones(3))", marks=pytest.mark.slow)])
def test_a_process_does_not_use_the_folder_that_another_user_has_made(tmp_path: Path, call: str) -> None:
    """Importing torch's compiler sets the variable, so a new process is needed. Headers have a folder of their own."""
    planted = tmp_path / f"torchinductor_{getpass.getuser()}"
    planted.mkdir()
    planted.chmod(0o777)
    code = f"import os; import torch; from megatron.kernels.compile import compiled; compiled(torch.cos)(){call};"
    code += "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "home/.cache/megatron-pretrain/torchinductor")
    assert f"not {planted}: other users can write to it" in done.stderr
    assert list(planted.iterdir()) == []


def test_the_cache_is_chosen_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    compiled(lambda: None)()
    assert seen == [default_cache_dir()]
    assert Path(seen[0]).stat().st_mode & 0o777 == 0o700


def test_one_graph_serves_any_number_of_rows() -> None:
    """A graph for each would take seconds, and torch refuses to make more than a limit."""
    made, before = compiled(lambda x: 2 * x, any_rows=True)(), graphs()
    for rows in (3, 5, 4):
        x = torch.arange(2.0 * rows).view(rows, 2)
        assert torch.equal(made(x), 2 * x)
    assert graphs() - before == 1
