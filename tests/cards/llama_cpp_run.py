"""Log-probabilities of the next token by llama.cpp: ``QUESTION.json ANSWER.json``, in the environment that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp


def server(question: dict[str, Any]) -> Any:
    """Load the file on one CPU thread, with keys and values in fp32."""
    options = xllamacpp.CommonParams()
    options.model.path = question["model"]
    options.n_ctx, options.n_parallel, options.n_gpu_layers = question["n_ctx"], 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.port, options.warmup, options.fit_params, options.verbosity = 0, False, False, 1
    return xllamacpp.Server(options)


def main(question_file: str, answer_file: str) -> None:
    """Answer with one row of the whole vocabulary for each prompt."""
    question = json.loads(Path(question_file).read_text())
    size, rows = question["vocab_size"], []
    loaded = server(question)
    for ids in question["prompts"]:
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": size, "samplers": []}
        answer = loaded.handle_completions(asked | {"cache_prompt": False})
        if "error" in answer:
            raise ValueError(answer["error"]["message"])
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        rows.append([value for _, value in sorted((token["id"], token["logprob"]) for token in top)])
    Path(answer_file).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
