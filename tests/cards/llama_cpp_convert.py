"""Convert folders of Hugging Face with llama.cpp's own converter: ``SOURCES (FOLDER FILE.gguf)...``.

It runs in the environment of llama.cpp. Models of cards have no tokenizer: the file gets one of bytes. All else is the
converter's.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from typing import Any

BYTE, NORMAL = 6, 1
"""Types of tokens in a file of GGUF."""


def set_vocab(self: Any) -> None:
    """Write a vocabulary of bytes and numbered tokens."""
    writer, size = self.gguf_writer, self.hparams["vocab_size"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"token{i}" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([BYTE if i < 256 else NORMAL for i in range(size)])
    writer.add_add_bos_token(False)


def convert(sources: str, folder: str, file: str) -> None:
    """Convert one folder in fp32; what the converter prints goes to ``FILE.words``."""
    os.dup2(os.open(f"{file}.words", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    sys.argv = [f"{sources}/convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", file]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(sources: str, *pairs: str) -> None:
    """Convert each folder in a process of its own, which the imports, nearly all of the time, do not repeat."""
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import conversion
    import transformers.models.auto.modeling_auto  # noqa: F401

    original = conversion.get_model_class

    def get_model_class(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        found.set_vocab = set_vocab
        found.no_mtp = found.supports_mtp_export  # as with --no-mtp, which other families refuse
        return found

    conversion.get_model_class = get_model_class
    for folder, file in zip(pairs[::2], pairs[1::2], strict=True):
        process = multiprocessing.get_context("fork").Process(target=convert, args=(sources, folder, file))
        process.start()
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
