"""Perplexity and LAMBADA by the tool, compared with plain loops over `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from torch.nn import functional

from tasks.evaluate.perplexity import detokenize_wikitext2, main
from tests.kit.checkpoints import save_model
from tests.kit.solo import Solo, tiny
from tests.parity.test_hf import precision
from tests.unit.tasks.models import LEARNT, POSITIONS, save_transformers_model

TEXT = "The café on 5th Street opens at 7.\n\nIt sells 1,200 cups a day; most of them are small. " * 3
WIKITEXT = (
    " = Valkyria = \n\n The game began in 2010 , carrying over work on Valkyria II . It sold 1 @,@ 000 @.@ 5 "
    "copies ( in well @-@ known shops ) ; \" fans \" of the series ' liked it ' , players ' and N of them 's .\n"
    " = = Plot = = \n [ 1 ] { x } : why ? Because ! 3 ° C \n = = = Sub = = = \n = = = = Deep = = = = \n"
)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and its model in fp64."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_transformers_model(request.param, folder)


def measure(folder: Path, data: Path, *flags: str) -> dict[str, float]:
    """The results of the tool."""
    output = data.with_name("results.json")
    where = ("--load", f"hf:{folder}", "--data", str(data), "--output", str(output), "--device", "cpu")
    assert main([*where, *flags]) == 0
    results: dict[str, float] = json.loads(output.read_text())
    return results


def sliding_loss(model: Any, ids: torch.Tensor, length: int, stride: int) -> tuple[float, int]:
    """Sum the loss as the guide of `transformers` does, and count the tokens."""
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        targets = ids[begin:end].clone()
        targets[: previous - begin] = -100
        with torch.no_grad(), precision(torch.float64):
            logits = model(ids[begin:end].unsqueeze(0)).logits[0, :-1]
        losses = functional.cross_entropy(logits, targets[1:], reduction="sum", ignore_index=-100)
        total, count, previous = total + losses.item(), count + int((targets[1:] != -100).sum()), end
        if end == len(ids):
            break
    return total, count


@pytest.mark.parametrize(("length", "stride"), [(POSITIONS, 7), (POSITIONS, POSITIONS - 1), (10, 5)])
def test_perplexity_matches_a_plain_loop(theirs: tuple[Path, Any], tmp_path: Path, length: int, stride: int) -> None:
    folder, model = theirs
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    ids = torch.tensor([*TEXT.encode()])
    loss, count = sliding_loss(model, ids, length, stride)
    assert count == len(ids) - 1
    flags = ("--seq-length", str(length), "--stride", str(stride), "--micro-batch-size", "3")
    for dtype, tolerance in (("fp64", 1e-10), ("fp32", 1e-5)):
        found = measure(folder, data, *flags, "--params-dtype", dtype)
        assert (found["tokens"], found["words"], found["bytes"]) == (count, len(TEXT.split()), len(TEXT.encode()))
        assert found["token perplexity"] == pytest.approx(math.exp(loss / count), rel=tolerance)
        assert found["word perplexity"] == pytest.approx(math.exp(loss / found["words"]), rel=tolerance * 1e2)
        assert found["byte perplexity"] == pytest.approx(math.exp(loss / found["bytes"]), rel=tolerance)
        assert found["bits per byte"] == pytest.approx(loss / found["bytes"] / math.log(2), rel=tolerance)


def test_documents_of_jsonl_are_scored_apart(theirs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = theirs
    texts = [TEXT[:50], "a\u2028b", TEXT[50:120]]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in texts))
    losses = [sliding_loss(model, torch.tensor([*text.encode()]), POSITIONS, POSITIONS // 2) for text in texts]
    found = measure(folder, data, "--params-dtype", "fp64")
    assert found["tokens"] == sum(count for _, count in losses)
    assert found["loss"] == pytest.approx(sum(loss for loss, _ in losses) / found["tokens"], rel=1e-10)


def test_wikitext_is_detokenised_and_counted_by_original_words(theirs: tuple[Path, Any], tmp_path: Path) -> None:
    assert detokenize_wikitext2(WIKITEXT) == wikitext_detokenizer({"page": WIKITEXT})
    folder, model = theirs
    data = tmp_path / "wiki.test.tokens"
    data.write_text(WIKITEXT)
    plain = wikitext_detokenizer({"page": WIKITEXT}).encode()
    loss, count = sliding_loss(model, torch.tensor([*plain]), POSITIONS, POSITIONS // 2)
    found = measure(folder, data, "--params-dtype", "fp64", "--detokenize", "wikitext2")
    assert found["tokens"] == count
    assert found["word perplexity"] == pytest.approx(math.exp(loss / len(WIKITEXT.split())), rel=1e-9)


def test_lambada_predicts_last_words(theirs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = theirs
    data = tmp_path / "lambada.jsonl"
    texts = [*LEARNT, "one word " * 6 + "end", 'She said " yes']
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    total, correct = 0.0, 0
    for text in texts:
        ids = torch.tensor([*text.encode()])[-POSITIONS:]
        count = len(text.rpartition(" ")[2].encode()) + 1
        with torch.no_grad(), precision(torch.float64):
            log_probs = functional.log_softmax(model(ids.unsqueeze(0)).logits[0, :-1], -1)[-count:]
        target = ids[-count:]
        total += log_probs.gather(1, target.unsqueeze(1)).sum().item()
        correct += bool((log_probs.argmax(-1) == target).all())
    found = measure(folder, data, "--params-dtype", "fp64", "--task", "lambada")
    assert 0 < correct < len(texts)
    assert found["passages"] == len(texts)
    assert found["accuracy"] == correct / len(texts)
    assert found["word perplexity"] == pytest.approx(math.exp(-total / len(texts)), rel=1e-10)


def test_wrong_requests_are_refused(
    theirs: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = theirs
    files = {
        "empty.txt": "\n \n",
        "short.txt": "a",
        "bad.jsonl": '{"text": "x"}\n{"txt": 1}\n',
        "word.jsonl": '{"text": "x"}',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    save_model(Solo.build(tiny(), torch.float32).chunk, tmp_path / "bare", files={})
    (tmp_path / "good.txt").write_text(TEXT)
    output = tmp_path / "out.json"
    good = f"--load hf:{folder} --data {tmp_path}/good.txt"
    for flags, sentence in (
        (f"--load hf:{folder} --data {tmp_path}/missing.txt", "missing.txt cannot be read"),
        (f"--load hf:{folder} --data {tmp_path}/empty.txt", "holds no text"),
        (f"--load hf:{folder} --data {tmp_path}/short.txt", "fewer than 2 tokens"),
        (f"--load hf:{folder} --data {tmp_path}/bad.jsonl", "bad.jsonl:2 has no key 'text'; its keys: txt"),
        (f"--load hf:{folder} --data {tmp_path}/word.jsonl --task lambada", "text 1 has no last word after others"),
        (f"--load {tmp_path}/bare --data {tmp_path}/good.txt", "no tokenizer, which texts need"),
        (f"{good} --stride 24", "--stride 24: must be at least 1 and below the 24 tokens"),
        (f"{good} --seq-length 25", "--seq-length 25: must be at least 2 and at most 24"),
        (f"{good} --micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        (f"{good} --tensor-model-parallel-size 2", "1 ranks are not a multiple of TP x PP x CP = 2"),
        (f"{good} --tensor-model-parallel-size 3", "4 heads do not divide over TP 3"),
    ):
        assert main([*flags.split(), "--device", "cpu", "--output", str(output)]) == 2, flags
        error = capsys.readouterr().err
        assert sentence in error
        assert not output.exists()


def test_results_are_written_to_a_new_folder_or_refused_before_the_model_is_loaded(
    theirs: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = theirs
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    flags = ["--data", str(data), "--device", "cpu", "--output"]
    assert main(["--load", f"hf:{folder}", *flags, f"{tmp_path}/new/folder/out.json"]) == 0
    assert json.loads((tmp_path / "new/folder/out.json").read_text())["tokens"] > 0
    for output in (data / "out.json", tmp_path / "new"):
        assert main(["--load", f"hf:{tmp_path}/missing", *flags, str(output)]) == 2
        assert f"perplexity: --output {output} " in capsys.readouterr().err
