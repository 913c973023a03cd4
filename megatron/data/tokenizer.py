"""Text to ids and back, and the record beside a dataset of which tokenizer wrote it: all names in one place."""

from __future__ import annotations

from megatron.data.choice import TOKENIZER_TYPES, TokenizerChoice, add_tokenizer_flags, build_tokenizer
from megatron.data.encoded import Encoded, Tokenizer
from megatron.data.gpt2 import GPT2BPETokenizer
from megatron.data.huggingface import END_OF_DOCUMENT, HuggingFaceTokenizer
from megatron.data.plain import ByteTokenizer, NullTokenizer
from megatron.data.record import (
    FOLDER,
    RECORD,
    TokenizerRecord,
    read_record,
    recorded_tokenizer,
    tokenizer_files,
)
from megatron.data.sentencepiece_model import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megatron.data.tiktoken_file import TikTokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "FOLDER",
    "RECORD",
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "Encoded",
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "TokenizerChoice",
    "TokenizerRecord",
    "add_tokenizer_flags",
    "build_tokenizer",
    "read_record",
    "recorded_tokenizer",
    "tokenizer_files",
]
