"""Changed models: their tensors by hand, their logits, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest, whole_box
from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.convert.saved_model import SavedModel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Box
from megatron.layers.context import BuildContext
from megatron.layers.parameters import num_parameters
from megatron.model.gpt import GPTChunk, build_gpt
from tests.kit.checkpoints import save_model
from tests.kit.solo import one_rank_mesh, random_batch, tiny
from tests.unit.convert.folders import LLAMA
from tools.edit_checkpoint import main
from tools.lib.surgery import Changes


def build(model: ModelConfig, seed: int = 1) -> GPTChunk:
    """A model in fp32, for inference."""
    return build_gpt(model, TrainingConfig(), BuildContext(one_rank_mesh(), GradAccumulator(), seed=seed)).eval()


def make(folder: Path, seed: int = 1, **changes: Any) -> tuple[GPTChunk, Path]:
    """A model, and a checkpoint of it."""
    chunk = build(tiny(**(LLAMA | changes)), seed)
    return chunk, save_model(chunk, folder, step=5)


def edit(tmp_path: Path, *flags: object) -> tuple[Manifest, ModelConfig, dict[str, Tensor]]:
    """The checkpoint that the tool writes, its model, and its weights in their stored shapes."""
    assert main([*map(str, flags), "--save", str(tmp_path / "new")]) == 0
    manifest = Manifest.open(tmp_path / "new" / "iter_0000000")
    saved = SavedModel(manifest)
    weights = {n: saved.read(n, s.view, whole_box(s.view)).reshape(s.shape) for n, s in saved.specs.items()}
    return manifest, saved.model, weights


def logits(model: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    chunk = build(model)
    with torch.no_grad():
        for name, parameter in chunk.params.items():
            parameter[: len(weights[name])].copy_(weights[name])
    return chunk.logits(random_batch(tiny()).tokens)


def of_chunk(chunk: GPTChunk) -> dict[str, Tensor]:
    return {name: p.detach()[: chunk.specs[name].shape[0]] for name, p in chunk.params.items()}


def test_the_mean_of_three_models(tmp_path: Path) -> None:
    models = [make(tmp_path / f"{seed}", seed=seed) for seed in (1, 2, 3)]
    _, model, weights = edit(tmp_path, "--load", tmp_path / "1", "--average", models[1][1], tmp_path / "3")
    for name, value in weights.items():
        expected = torch.stack([of_chunk(chunk)[name].double() for chunk, _ in models]).mean(0)
        assert torch.equal(value, expected.float()), name
    assert (model.num_layers, model.vocab) == (2, 101)


def test_layers_are_dropped_with_their_patterns(tmp_path: Path) -> None:
    chunk, path = make(tmp_path / "a", num_layers=6, attention_pattern="local:4,local:5,global", no_rope_freq="3")
    manifest, model, weights = edit(tmp_path, "--load", path, "--drop-layers", "1, 3-4")
    assert (model.num_layers, model.attention_pattern) == (3, "local:4,global*2")
    assert [model.rotary_kind(layer) for layer in range(3)] == ["global", None, None]
    old = of_chunk(chunk)
    for name, value in weights.items():
        for new, former in ((0, 0), (1, 2), (2, 5)):
            if name.startswith(f"layers.{new}."):
                assert torch.equal(value, old[name.replace(f"layers.{new}.", f"layers.{former}.")])
        if not name.startswith("layers."):
            assert torch.equal(value, old[name])
    assert "tokenizer/tokenizer.json" in manifest.files
    assert sum(c.bytes for record in manifest.tensors.values() for c in record.chunks) == 4 * num_parameters(model)
    assert manifest.state["iteration"] == 0


def test_blocks_of_a_layer_pattern_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = {"hybrid_layer_pattern": "*-**--*E", "num_experts": 4, "window_size": 4, "window_attn_skip_freq": "4"}
    chunk, path = make(tmp_path / "a", **pattern)  # *-, *, *-, -, *E
    _, model, weights = edit(tmp_path, "--load", path, "--drop-layers", "0,3")
    assert (model.num_layers, model.hybrid_layer_pattern) == (3, "**-*E")
    kept = [1, 2, 4]
    assert [model.pattern(n) for n in range(3)] == [chunk.config.pattern(n) for n in kept]
    old = of_chunk(chunk)
    names = [name for name in weights if name.startswith("layers.")]
    assert len(names) == 16
    for name in names:
        _, number, rest = name.split(".", 2)
        assert torch.equal(weights[name], old[f"layers.{kept[int(number)]}.{rest}"])
    assert main(["--load", str(path), "--drop-layers", "2", "--save", f"{tmp_path}/joined"]) == 1
    assert "has other blocks than before" in capsys.readouterr().err  # * and - would be one


def test_the_mlps_of_a_layer_pattern_become_experts(tmp_path: Path) -> None:
    chunk, path = make(tmp_path / "a", hybrid_layer_pattern="*-*-**", add_bias_linear=False)
    _, model, weights = edit(tmp_path, "--load", path, "--num-experts", 4)
    assert model.hybrid_layer_pattern == "*E*E**"
    mlp = of_chunk(chunk)["layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(weights["layers.1.mlp.experts.linear_fc1.weight"], mlp.repeat(4, 1))


@pytest.mark.parametrize("entries", [60, 150])
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_shrinks_and_grows_by_mean_rows(tmp_path: Path, entries: int, tied: bool) -> None:
    chunk, path = make(tmp_path / "a", untie_embeddings_and_output_weights=not tied)
    _, model, weights = edit(tmp_path, "--load", path, "--resize-vocab", entries)
    assert model.vocab == entries
    old = of_chunk(chunk)
    for name, value in weights.items():
        if value.shape == old[name].shape:
            assert torch.equal(value, old[name])
            continue
        assert name in ("embedding.word_embeddings.weight", "output_layer.weight")
        kept = min(entries, 101)
        assert torch.equal(value[:kept], old[name][:kept])
        mean = old[name].double().mean(0).float().expand(entries - kept, -1)
        torch.testing.assert_close(value[kept:], mean, rtol=1e-6, atol=0.0)
    assert {name for name in weights if weights[name].shape != old[name].shape} == (
        {"embedding.word_embeddings.weight"} | (set() if tied else {"output_layer.weight"})
    )


@pytest.mark.parametrize(
    "changes", [{"moe_shared_expert_intermediate_size": 16}, {"activation": "gelu", "add_bias_linear": True}]
)
def test_a_model_computes_the_same_after_upcycling(tmp_path: Path, changes: dict[str, Any]) -> None:
    chunk, path = make(tmp_path / "a", **changes)
    _, model, weights = edit(tmp_path, "--load", path, "--num-experts", 5, "--moe-router-topk", 3, "--seed", 0)
    assert (model.num_experts, model.moe_router_topk, model.expert_ffn) == (5, 3, chunk.config.ffn)
    torch.testing.assert_close(logits(model, weights), logits(chunk.config, of_chunk(chunk)), rtol=1e-5, atol=1e-5)
    up, routers = weights["layers.1.mlp.experts.linear_fc1.weight"], weights["layers.1.mlp.router.weight"]
    assert torch.equal(up.view(5, -1, 32), of_chunk(chunk)["layers.1.mlp.linear_fc1.weight"].expand(5, -1, -1))
    assert 0.1 < routers.std() < 0.3
    assert not torch.equal(routers, weights["layers.0.mlp.router.weight"])
    of_another_seed = build(model, seed=1234).params["layers.1.mlp.router.weight"]
    assert not torch.equal(routers, of_another_seed)


def test_heads_are_added_and_removed(tmp_path: Path) -> None:
    """New ones are those that a fresh model has."""
    one, path = make(tmp_path / "a")
    _, model, weights = edit(tmp_path, "--load", path, "--mtp-num-layers", 2, "--seed", 7)
    assert model.mtp_num_layers == 2
    fresh, base = of_chunk(build(model, seed=7)), of_chunk(one)
    assert weights.keys() == fresh.keys()
    assert sum(name.startswith("mtp.layers.1.") for name in weights) == sum("layers.1." in name for name in base) + 4
    for name, values in weights.items():
        assert torch.equal(values, base[name] if name in base else fresh[name]), name
    with_heads = tmp_path / "new" / "iter_0000000"
    _, without, left = edit(tmp_path / "less", "--load", with_heads, "--mtp-num-layers", 0)
    assert without.mtp_num_layers is None
    assert left.keys() == base.keys()
    assert torch.equal(logits(without, left), logits(model, weights))


def test_cast_and_all_changes_together(tmp_path: Path) -> None:
    (one, path), (two, other) = (make(tmp_path / f"{seed}", seed=seed, num_layers=3) for seed in (1, 2))
    flags = ["--average", other, "--drop-layers", 0, "--resize-vocab", 64, "--num-experts", 4, "--cast", "bf16"]
    manifest, model, weights = edit(tmp_path, "--load", path, *flags)
    assert {record.dtype for record in manifest.tensors.values()} == {"BF16"}
    assert manifest.config["precision"]["params_dtype"] == "bf16"
    assert (model.num_layers, model.vocab, model.num_experts, model.moe_router_topk) == (2, 64, 4, 2)
    former = "layers.2.mlp.linear_fc2.weight"
    mean = (of_chunk(one)[former].double() + of_chunk(two)[former].double()) / 2
    down = weights["layers.1.mlp.experts.linear_fc2.weight"].view(4, 32, -1)
    assert torch.equal(down, mean.to(torch.bfloat16).expand(4, -1, -1))


def test_boxes_match_the_whole_tensor(tmp_path: Path) -> None:
    _, path = make(tmp_path / "a", num_layers=3)
    changed = Changes(drop_layers=[1], vocab_size=120, num_experts=3, heads=1).apply(SavedModel(Manifest.open(path)))
    generator = torch.Generator().manual_seed(0)
    for name, spec in changed.specs.items():
        whole = changed.read(name, spec.view, whole_box(spec.view))
        for _ in range(5):
            start = [int(torch.randint(n, (), generator=generator)) for n in spec.view]
            size = [1 + int(torch.randint(n - s, (), generator=generator)) for n, s in zip(spec.view, start)]
            box = Box(tuple(start), tuple(size))
            assert torch.equal(changed.read(name, spec.view, box), whole[box.slices]), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drop-layers", "1,7"], "the model has no layers 7: it has 2, numbered from 0"),
        (["--drop-layers", "0-1"], "all 2 layers would be dropped"),
        (["--num-experts", "1"], "2 of 1 experts per token"),
        (["--num-experts", "2", "--moe-router-topk", "3"], "3 of 2 experts per token"),
        (["--num-experts", "2", "--moe-router-topk", "1"], "1 of 2 experts per token"),
        (["--average", "{other}"], "are different models: num_query_groups 1 and 2"),
        (["--average", "{missing}"], "missing"),
        (
            ["--cast", "fp16", "--resize-vocab", "7"],
            "word_embeddings.weight has values above 65504, too large for fp16",
        ),
    ],
)
def test_a_refused_call_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    chunk = build(tiny(**LLAMA))
    with torch.no_grad():
        chunk.params["embedding.word_embeddings.weight"][3, 4] = 1e5
    save_model(chunk, tmp_path / "a")
    make(tmp_path / "other", num_query_groups=1)
    named = [f.format(other=tmp_path / "other", missing=tmp_path / "missing") for f in flags]
    assert main(["--load", str(tmp_path / "a"), "--save", str(tmp_path / "new"), *named]) == 1
    assert message in capsys.readouterr().err
    assert not [*tmp_path.glob("new/iter_*")]


def test_experts_and_other_models_are_refused_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "moe", num_experts=4)
    flags = ["--num-experts", "4", "--save", f"{tmp_path}/new"]
    assert main(["--load", f"{tmp_path}/moe", *flags]) == 1
    assert "the model has 4 experts already" in capsys.readouterr().err
    assert main(["--load", f"{tmp_path}/moe", "--cast", "bf16", "--save", f"{tmp_path}/moe"]) == 1
    assert "holds checkpoints already" in capsys.readouterr().err
    for wrong in (["--save", "x"], ["--save", "x", "--seed", "3", "--cast", "fp32"], ["--drop-layers", "3-2"]):
        with pytest.raises(SystemExit) as ended:
            main(["--load", f"{tmp_path}/moe", *wrong])
        assert ended.value.code == 2
