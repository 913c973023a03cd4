"""Fill-in-the-middle: its options, which are those of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import MegatronOption, Need, Run, option

FILL_IN = Need("fim_data")
OF_DOCUMENTS = MegatronOption(default="<|endoftext|>", reason="the data end their documents with it")
MASKED = MegatronOption(default="<fim_pad>", reason="padding does not count in the loss")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class FimOptions:
    """Options of fill-in-the-middle (Bavarian et al., arXiv 2207.14255)."""

    fim_data: bool = option(
        False, role="data", needs=Need("not mock_data and not plugin_dataset and not chat_data_path", "files of tokens")
    )
    """Train on documents whose middle comes last: a prefix, a middle and a suffix, cut at random characters."""
    fim_rate: float = option(0.5, role="data", at_least=0, at_most=1, needs=FILL_IN)
    """Share of the documents that are changed; of a document that a sample cuts, each part counts by itself."""
    fim_spm_rate: float = option(0.5, role="data", at_least=0, at_most=1, needs=FILL_IN)
    """Share of changed documents in which the suffix is first (SPM); in the others the prefix is (PSM)."""
    fim_split_sample: str | None = option(None, role="data", needs=FILL_IN)
    """Token that divides a document into fragments, such as the files of a repository: each is changed by itself."""
    fim_fragment_rate: float | None = option(
        None, role="data", at_least=0, at_most=1, example=0.5, needs=Need("fim_split_sample")
    )
    """Share of the fragments that are changed, in the share fim_rate of the documents with fragments."""
    fim_no_prefix: str | None = option(None, role="data", needs=FILL_IN)
    """Documents and fragments that begin with this text are not changed."""
    fim_prefix_token: str = option("<fim_prefix>", role="data", needs=FILL_IN)
    """Token of the tokenizer before the prefix."""
    fim_middle_token: str = option("<fim_middle>", role="data", needs=FILL_IN)
    """Token before the middle."""
    fim_suffix_token: str = option("<fim_suffix>", role="data", needs=FILL_IN)
    """Token before the suffix."""
    fim_pad_token: str | None = option(None, role="data", needs=FILL_IN, megatron=MASKED)
    """Token at the end of samples that have become shorter. Default: the one that ends documents."""
    fim_eod_token: str | None = option(None, role="data", needs=FILL_IN, megatron=OF_DOCUMENTS)
    """Token that ends documents. Default: that of the tokenizer."""

    other_meanings: ClassVar = """
    --fim-data
      --fim-data: padding does not count in the loss, and changes depend on seed, epoch and document; in Megatron-LM it
      counts, and they depend on the order in which a worker reads samples
    """

    refused: ClassVar = """
    fim_data and fim_split_sample and not fim_fragment_rate
    E530 --fim-split-sample divides documents into fragments, and the share of them to change is not given
      fix: --fim-fragment-rate {fim_rate} | --set data.fim_split_sample=null

    fim_data and fim_split_sample and packing=best-fit
    E530 --packing best-fit has room in a sample for one change of a document, not for one of each fragment
      fix: --packing concat | --set data.fim_split_sample=null

    fim_data and packing=best-fit and not seq_length>8
    E531 --packing best-fit keeps room for 8 tokens of --fim-data in a sample, and --seq-length {seq_length} has no more
      fix: --seq-length 16 | --no-fim-data

    data_mixture and fim_data
    E530 --data-mixture reads documents as they are, without a change of --fim-data
      fix: --no-fim-data | --set data.data_mixture=null

    data_mixture and packing=best-fit
    E531 --data-mixture cuts concatenated documents into samples; it does not pack them
      fix: --packing concat | --set data.data_mixture=null
    """

    def row_fim(self, config: Run, world_size: int) -> str:
        """Return the share of documents that are changed."""
        if not self.fim_data:
            return ""
        each = "" if self.fim_fragment_rate is None else f" and {self.fim_fragment_rate:.0%} of their fragments"
        return f"the middle last in {self.fim_rate:.0%} of documents{each}, SPM in {self.fim_spm_rate:.0%} of these"
