"""The cell in which llama.cpp reads an export, beside a file of the same weights that `transformers` wrote."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from tests.cards.card import Card
from tests.cards.cell import CardError, Cell, Measures
from tests.cards.readers import logits_of
from tests.cards.twin import MODEL, Twins, relative
from tests.kit.pool import Pool
from tests.parity.families import everything_in_double
from tests.parity.test_hf import OF_KINDS, PLAIN, UNGROUPED, YARN
from tests.unit.convert.folders import ignore

VARIABLE = "LLAMA_CPP"
HERE = Path(__file__).parent
BOUNDS = {"logits": 5e-5, "logits, GELU in fp16": 1e-3}
"""Rounding: of fp32, and of fp16 (2^-11 for its input and its output), in which llama.cpp has a table of GELU."""

ANY_STEP = (0.0, float("inf"))
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    **{case: {"sliding_window": None} for case in ("mistral-window", "phi3", "starcoder2")},
    "gemma2": {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "gemma3": {
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": OF_KINDS | {"sliding_attention": PLAIN},
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "qwen2-moe-layers": {"norm_topk_prob": False, "mlp_only_layers": [], "use_sliding_window": False},
    "olmoe": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "dots1": {"num_key_value_heads": 4, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    "ernie-moe": {"moe_layer_interval": 1},
    "deepseek-v2-groups": UNGROUPED | {"topk_method": "greedy"},
    "deepseek-v3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "mamba2": {"use_bias": False, "n_groups": 1, "time_step_limit": ANY_STEP},
    "granite-4-experts": {"mamba_n_groups": 1, "position_embedding_type": "nope"},
    "bamba": {"mamba_n_groups": 1, "time_step_limit": ANY_STEP},
    "qwen3-next": {"mlp_only_layers": [], "linear_value_head_dim": 6, "rms_norm_eps": 1e-6},
    "qwen3-5": {"linear_value_head_dim": 6, "rms_norm_eps": 1e-6},
    "qwen3-5-moe": {"linear_value_head_dim": 6, "rms_norm_eps": 1e-6},
    "nemotron-h": {"mamba_num_heads": 2, "mamba_head_dim": 64, "time_step_min": 0.001},
    "nemotron-3": {"mamba_num_heads": 2, "mamba_head_dim": 64, "hybrid_override_pattern": "MEM*EE"},
}
"""Cases -> their options for which llama.cpp's files have no place, with the values of published models."""


def run(environment: Path, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program beside this file in the environment of llama.cpp."""
    command = [str(environment / "bin" / "python"), str(HERE / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "No module named" in done.stderr:  # of the environment, not of the model
        raise CardError(done.stderr.strip().splitlines()[-1])
    return done


def reason(words: str, model: Path) -> str:
    """The reason in what a program of llama.cpp printed: its first error, or its last line."""
    errors = [line.partition(" E ")[2].partition(": ")[2] for line in words.splitlines() if " E " in line]
    errors += [line[line.index("GGML_ASSERT") :] for line in words.splitlines() if "GGML_ASSERT" in line]
    last = errors[0] if errors else " ".join(words.strip().splitlines()[-1:])
    if last == "AssertionError":
        last = " ".join(words.strip().splitlines()[-3].split())
    return last.removeprefix("ERROR:hf-to-gguf:").replace(str(model), "MODEL")


def read_by_llama_cpp(models: Sequence[Path], prompts: list[list[int]], vocab_size: int) -> list[Tensor | str]:
    """Log-probabilities of the token after each prompt, ``[prompt, V]``, of each model, or why it is refused."""
    environment = Path(os.environ[VARIABLE])
    files = {model: model.with_name(f"{model.name}.gguf") for model in models}
    pairs = chain.from_iterable(files.items())
    vocab = {f"token{i}": i for i in range(vocab_size)}
    for model in models:  # the converter counts the tokens of some families
        (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    run(environment, "llama_cpp_convert.py", environment / "vendor" / "llama.cpp", *pairs).check_returncode()
    found: list[Tensor | str] = []
    for model, file in files.items():
        if not file.exists():
            found.append(reason(Path(f"{file}.words").read_text(), model))
            continue
        question, answer = (model.with_name(f"{model.name}.{end}") for end in ("question", "answer"))
        asked = {"model": str(file), "prompts": prompts, "vocab_size": vocab_size, "n_ctx": max(map(len, prompts)) + 8}
        question.write_text(json.dumps(asked))
        done = run(environment, "llama_cpp_run.py", question, answer)
        if done.returncode:
            found.append(reason(done.stderr, model) or f"ended with status {done.returncode}")
        else:
            found.append(torch.tensor(json.loads(answer.read_text()), dtype=torch.float64))
    return found


def compared(ours: Tensor | str, theirs: Tensor | str, expected: Tensor, bound: str) -> Measures:
    """What llama.cpp made of our file and of that of `transformers`, whose logits are ``expected``.

    Raises:
        CardError: it treats ours otherwise than theirs, and not as expected.
    """
    if isinstance(ours, str):
        if ours != theirs:
            raise CardError(f"only our file is refused: {ours}")
        return {"words": f"refused: `{ours}`"}
    # the log-probabilities and the logits of a token differ by what all tokens have in common
    found, expected = (rows - rows.mean(-1, keepdim=True) for rows in (ours, expected))
    difference = relative(found, expected)
    for name in ("logits", bound):
        if difference <= BOUNDS[name]:
            return {name: difference}
    if isinstance(theirs, str):
        raise CardError(f"of our file it computes otherwise, by {difference:.2g}; theirs is refused: {theirs}")
    between = relative(ours, theirs)
    return {"otherwise": difference, "two files": between, "words": f"computes otherwise: {difference:.2g}"}


def llama_cpp(card: Card, folder: Path, pool: Pool) -> Measures:
    """Logits after prompts of several lengths, by llama.cpp in fp32 from both files, and by us in fp64."""
    options = AS_PUBLISHED.get(card.case, {})
    card = replace(card, options=options)
    twins = Twins.build(card, folder)
    saved = SavedModel(open_checkpoint(folder / "ours")[0])
    export = folder / "export"
    convert_to_huggingface(saved, export, ignore, shard_bytes=10**9, checked=False, model_type=card.model_type)
    tokens_BS = twins.batch(seed=3).tokens
    logits_BSV = logits_of(twins, tokens_BS)
    with everything_in_double(), torch.no_grad():
        parity = relative(logits_BSV, twins.theirs(input_ids=tokens_BS, use_cache=False).logits)
    ends = [(sample, end) for sample in range(len(tokens_BS)) for end in (5, 11, card.length // 2, card.length - 1)]
    prompts = [tokens_BS[sample, :end].tolist() for sample, end in ends]
    expected = torch.stack([logits_BSV[sample, end - 1] for sample, end in ends])
    ours, theirs = read_by_llama_cpp((export, folder / "theirs"), prompts, logits_BSV.shape[-1])
    bound = "logits, GELU in fp16" if card.config.activation.startswith(("gelu", "geglu")) else "logits"
    model: Measures = {"model": json.dumps(options)} if options else {}
    return model | {"ours": parity} | compared(ours, theirs, expected, bound)


def missing() -> str:
    """Why llama.cpp cannot run here."""
    return "" if os.environ.get(VARIABLE) else f"set {VARIABLE}: bash tests/cards/llama_cpp_setup.sh FOLDER"


CELLS = {
    "llama.cpp": Cell(
        llama_cpp,
        "an export and a file of the same weights that `transformers` saved, both converted by llama.cpp's converter "
        "and run by llama.cpp in fp32: relative difference of our logits in fp64 after prompts of several lengths. "
        "It refuses, or computes otherwise, only if it does so with both files: with the same words, or with logits "
        "equal to the bit (and `transformers` agrees with us). A family with options that its files have no place "
        "for has those of published models (`AS_PUBLISHED`)",
        {"ours": 1e-11, **BOUNDS, "two files": 0},
        (*MODEL, *(f"tests/cards/{name}" for name in ("llama_cpp.py", "llama_cpp_convert.py", "llama_cpp_run.py"))),
        missing,
    ),
}
