"""Sources of samples, documents and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.data_store import TOKEN_FILES, DataStoreOptions
from megatron.config.fim import FimOptions
from megatron.config.mixture import MixtureOptions
from megatron.config.option import MegatronOption, Need, Run, WithPluginOptions, option
from megatron.config.skipping import SkippingOptions

CHAT_DATA = Need("chat_data_path")

DOCUMENT_BOUNDARY_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Data options that take effect at the end of a document."""

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
"""Supported tokenizers, by their names in Megatron-LM."""

UNSUPPORTED_TOKENIZER_TYPES = {
    "BertWordPieceLowerCase": "serves BERT",
    "BertWordPieceCase": "serves BERT",
    "MultimodalTokenizer": "serves models of text and images",
    "NullMultimodalTokenizer": "serves models of text and images",
    "SFTTokenizer": "reads conversations, as --chat-data-path does here",
}
"""Other tokenizers of Megatron-LM, with the reason why they are not supported."""

DATA_FILES = Need("not mock_data and not plugin_dataset", "data in files")
DOCUMENTS = Need(
    "not mock_data and not plugin_dataset and not chat_data_path",
    "documents (generated tokens have none, and conversations are always separate)",
)
DOCUMENT_OPTIONS = Need(
    " or ".join(DOCUMENT_BOUNDARY_OPTIONS), "--reset-position-ids, --reset-attention-mask or --eod-mask-loss"
)
LAYER_PATTERNS = Need("attention_pattern")
GPT2_BPE = Need("tokenizer_type=GPT2BPETokenizer")
TIKTOKEN = Need("tokenizer_type=TikTokenizer")
TOKENIZER_WITH_MODEL = Need(
    "tokenizer_type=HuggingFaceTokenizer|SentencePieceTokenizer|GPTSentencePieceTokenizer|Llama2Tokenizer|TikTokenizer",
    "a --tokenizer-type that reads it",
)


def _check_tokenizer_type(text: str) -> None:
    if text in UNSUPPORTED_TOKENIZER_TYPES:
        raise ValueError(f"{text} of Megatron-LM is not supported: it {UNSUPPORTED_TOKENIZER_TYPES[text]}")


@dataclass(frozen=True)
class DataConfig(MixtureOptions, SkippingOptions, FimOptions, DataStoreOptions, WithPluginOptions):
    """Token files, how documents are packed into samples, and the tokenizer."""

    data_path: tuple[str, ...] = option((), role="free")
    """PREFIX of .bin/.idx files, or several to blend: WEIGHT PREFIX pairs, or prefixes weighted by their size."""
    split: str | None = option(None, role="data", needs=Need("data_path or data_args_path", "--data-path"))
    """Weights of the train, validation and test splits of every prefix in data_path. Default: 969, 30, 1."""
    train_data_path: tuple[str, ...] = option((), role="free")
    """Files used for training only, in the form of data_path."""
    valid_data_path: tuple[str, ...] = option((), role="free")
    """Files used for validation only."""
    test_data_path: tuple[str, ...] = option((), role="free")
    """Files used for testing only, after training."""
    data_args_path: str | None = option(None, role="free")
    """Text file with the value of data_path."""
    per_split_data_args_path: str | None = option(None, role="free")
    """JSON file with the data paths of train, valid and test, as strings or lists of strings."""
    mock_data: bool = option(False, role="data")
    """Train on synthetic tokens."""
    plugin_dataset: str | None = option(None, role="data", kind="dataset")
    """Train on the dataset that a plugin registers under this name."""
    chat_data_path: tuple[str, ...] = option((), role="free")
    """JSON-lines files to fine-tune on: conversations under messages, or texts under prompt and completion. The loss
    is that of the answers; conversations share samples, but not attention."""
    valid_chat_data_path: tuple[str, ...] = option((), role="free", needs=CHAT_DATA)
    """Conversations used for validation only. With eval_iters 0 an evaluation reads all of them."""
    chat_template: str | None = option(None, role="free", needs=CHAT_DATA)
    """Jinja file with the chat template. Default: that of the tokenizer."""
    bad_samples: str = option("error", role="free", choices=("error", "skip"), needs=CHAT_DATA)
    """Action for lines of chat_data_path that cannot be used or do not fit into a sample: refuse the run, or skip and
    count them. No conversation is truncated."""
    multiple_validation_sets: bool = option(False, role="free", needs=TOKEN_FILES)
    """Evaluate on each validation prefix separately, instead of on their blend."""
    validation_set_names: tuple[str, ...] = option((), role="free", needs=Need("multiple_validation_sets"))
    """multiple_validation_sets: their names. Default: the last part of each prefix."""
    data_cache_path: str | None = option(None, role="start", needs=DATA_FILES)
    """Folder that caches sample indices and the ids of conversations between starts. Default: build them in memory at
    every start."""
    packing: str = option("concat", role="data", choices=("concat", "best-fit"), needs=TOKEN_FILES)
    """How documents become samples: concatenated and cut, in Megatron-LM's order; or packed by best-fit decreasing
    (arXiv 2404.10830), which cuts only documents longer than a sample and pads the rest of each."""
    reset_position_ids: bool = option(False, role="data", needs=DOCUMENTS)
    """Restart position ids at every document of a sample."""
    reset_attention_mask: bool = option(False, role="data", needs=DOCUMENTS)
    """Restrict attention to tokens of the same document."""
    reset_attention_pattern: bool = option(False, role="data", needs=("reset_attention_mask", LAYER_PATTERNS))
    """Count the chunks, first tokens and prefix of attention_pattern from the start of each document, not of the
    sample. Conversations always do."""
    eod_mask_loss: bool = option(False, role="data", needs=(DOCUMENTS, Need("packing=concat")))
    """Exclude the prediction after the end of a document from the loss."""
    tokenizer_type: str | None = option(
        None,
        role="free",
        choices=TOKENIZER_TYPES,
        check=_check_tokenizer_type,
        megatron=MegatronOption(values={"PretrainedFromHF": "HuggingFaceTokenizer"}),
    )
    """Tokenizer of the data. Default: the one recorded with the data."""
    tokenizer_model: str | None = option(
        None, role="free", needs=TOKENIZER_WITH_MODEL, spellings=("--tokenizer-name-or-path", "--tokenizer-file")
    )
    """Tokenizer to load: a file, a folder, or a name on the Hugging Face hub."""
    vocab_file: str | None = option(None, role="free", needs=GPT2_BPE)
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = option(None, role="free", needs=GPT2_BPE)
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: str | None = option(None, role="free", choices=("v1", "v2"), needs=TIKTOKEN)
    """TikTokenizer: regular expression that splits text into words."""
    tiktoken_num_special_tokens: int = option(1000, role="free", at_least=0, at_most=10**6, needs=TIKTOKEN)
    """TikTokenizer: ids reserved for special tokens."""
    follow_links: bool = option(False, role="start")
    """Also read files to which links lead out of the folder of a tokenizer or of a Hugging Face model."""
    eod_id: int | None = option(
        None, role="data", at_least=0, needs=DOCUMENT_OPTIONS, spellings=("--null-tokenizer-eod-id",)
    )
    """Id of the end-of-document token. Default: as recorded with the data, or that of the tokenizer."""

    other_meanings: ClassVar = """
    --reset-position-ids and position_embedding_type=rope|yarn and not reset_attention_mask
      --reset-position-ids restarts rotary positions in every document; Megatron-LM restarts learned positions only

    --reset-attention-mask and --no-create-attention-mask-in-dataloader
      attention is restricted to documents; Megatron-LM would not restrict it without masks

    --eod-mask-loss and not --calculate-per-token-loss
      --eod-mask-loss: the loss is the mean over the unmasked tokens of the global batch; Megatron-LM averages each
      micro-batch, then the micro-batches, without --calculate-per-token-loss
    """

    refused: ClassVar = """
    eod_id>=vocab_size
    E508 --eod-id {eod_id} is not in the vocabulary: ids are 0 to {vocab_size-1}
      fix: --eod-id {vocab_size-1} | --vocab-size {eod_id+1}

    chat_data_path and eval_iters>0 and not valid_chat_data_path
    E505 there are no conversations to evaluate on
      fix: --valid-chat-data-path FILE | --eval-iters 0

    cuda_graph=step and reset_attention_mask
    E910 --cuda-graph step cannot capture attention to documents, which end at other tokens in every step
      fix: --cuda-graph optimizer | --cuda-graph none
    """

    def note_packing(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if attention crosses the documents of a packed sample."""
        if self.packing == "best-fit" and not self.reset_attention_mask:
            yield (
                "--packing best-fit puts unrelated documents into a sample, and attention crosses them: "
                "--reset-attention-mask --reset-position-ids keeps them apart"
            )

    @property
    def generated(self) -> bool:
        """True if code makes the samples: there are no files, and no documents but those of the samples."""
        return self.mock_data or self.plugin_dataset is not None
