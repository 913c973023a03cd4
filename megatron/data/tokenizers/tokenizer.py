"""Public names of the tokenizers and of the tokenizer record beside a dataset."""

from __future__ import annotations

from megatron.data.tokenizers.choice import TOKENIZER_TYPES, TokenizerChoice, add_tokenizer_flags, build_tokenizer
from megatron.data.tokenizers.encoded import Encoded, Tokenizer
from megatron.data.tokenizers.gpt2 import GPT2BPETokenizer
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, HuggingFaceTokenizer
from megatron.data.tokenizers.plain import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.record import (
    FOLDER,
    RECORD,
    TokenizerRecord,
    read_record,
    recorded_tokenizer,
    same_ids,
    tokenizer_files,
    wrote,
)
from megatron.data.tokenizers.sentencepiece_model import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.data.tokenizers.tiktoken_file import TikTokenizer

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
    "same_ids",
    "tokenizer_files",
    "wrote",
]
