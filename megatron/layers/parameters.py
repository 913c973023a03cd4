"""The parameters of a model, declared once: names, global shapes, shards and initial values, without torch.

Each mixer declares its own (:mod:`megatron.layers.mixers`); here are the blocks of them, the embeddings and the output
layer. The layers allocate what is declared (:meth:`megatron.layers.context.BuildContext.parameter`), and the planner
sums it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import UNSHARDED, Init, Sharding, ShardSpec, Specs
from megatron.layers.adapter_parameters import with_adapters
from megatron.layers.mixers.base import active_numel, hidden_norm, under
from megatron.layers.mixers.registry import find_mixer
from megatron.layers.multi_token_parameters import head_names, head_parameters

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Global name of the word embeddings; with tied embeddings also the weight of the output layer."""


def gpt(
    config: ModelConfig,
    sharding: Sharding = UNSHARDED,
    layers: Iterable[int] | None = None,
    first: bool = True,
    last: bool = True,
) -> Specs:
    """Declare the model, or the stages of a pipeline rank, by global name.

    Args:
        config: of the whole model.
        sharding: the rank.
        layers: global indices of the rank's blocks, ascending; None for all.
        first: with the embeddings.
        last: with the final norm and the output layer.

    Raises:
        ValueError: when a dimension does not divide, or the vocabulary size is not known.
    """
    specs: Specs = {}
    tied, heads = not config.untie_embeddings_and_output_weights, len(config.head_layers)
    trained_by = 0 if config.mtp_detach_heads else heads
    if first or last:
        init, multiple = Init(config.init_method_std), config.make_vocab_size_divisible_by
        output = sharding.dense.vocabulary(config.vocab, config.hidden_size, multiple, init)
        output = replace(output, contributions=1 + trained_by)  # each head uses it, too
        # The last stage looks up the tokens of all heads at once.
        uses = first + last * (output.contributions * tied + (trained_by > 0))
        words = replace(output, contributions=uses)
        if tied or heads:
            words = replace(words, tied=True, counted_elsewhere=not first)
    if first:
        specs[WORD_EMBEDDINGS] = words
        if config.position_embedding_type == "learned_absolute":
            shape = config.max_position_embeddings or 0, config.hidden_size
            positions = sharding.dense.replicate(shape, init, partial=sharding.sequence_parallel)
            specs["embedding.position_embeddings.weight"] = positions
    blocks: dict[tuple[str, ...], Specs] = {}
    for layer in range(config.num_layers) if layers is None else layers:
        mixers = config.mixers(layer)
        if mixers not in blocks:
            blocks[mixers] = block(config, mixers, sharding)
        specs |= {f"layers.{layer}.{name}": spec for name, spec in blocks[mixers].items()}
    if last:
        specs |= under(final_layernorm=hidden_norm(config, sharding))
        if not tied:
            specs["output_layer.weight"] = output
        if tied or heads:
            specs[WORD_EMBEDDINGS] = words
        specs |= under(**heads_of(config, sharding))
    return specs if config.lora_rank is None else with_adapters(config, config.lora_rank, sharding, specs)


def heads_of(config: ModelConfig, sharding: Sharding = UNSHARDED) -> dict[str, Specs]:
    """Declare the heads of the last stage, which predict further tokens, each by its global name."""
    heads = dict(zip(head_names(config), config.head_layers))
    return {
        name: head_parameters(config, sharding, block(config, config.mixers(layer), sharding))
        for name, layer in heads.items()
    }


def trainable(specs: Mapping[str, ShardSpec]) -> Specs:
    """Return those of the parameters that the optimizer trains."""
    return {name: spec for name, spec in specs.items() if spec.has_gradient}


def in_checkpoints(specs: Mapping[str, ShardSpec]) -> Specs:
    """Return those of the parameters that checkpoints hold: the trained ones and the buffers."""
    return {name: spec for name, spec in specs.items() if not spec.frozen}


def num_parameters(config: ModelConfig, active: bool = False) -> int:
    """Return the number of parameters without vocabulary padding, frozen ones and adapters included.

    Args:
        config: of the model.
        active: count only the experts that one token uses.
    """
    ends = sum(active_numel(config, s) if active else s.numel for s in gpt(config.base, layers=()).values())
    adapters = num_trainable(config) if config.lora_rank is not None else 0
    return ends + sum(layer_sizes(config, active)) + adapters


def num_trainable(config: ModelConfig) -> int:
    """Return the number of parameters that a run trains, without vocabulary padding."""
    return sum(spec.numel for spec in trainable(gpt(config)).values())


def layer_sizes(config: ModelConfig, active: bool = False) -> list[int]:
    """Return the number of parameters of each block; ``active`` as in :func:`num_parameters`."""
    sizes = {
        mixers: sum(active_numel(config, s) if active else s.numel for s in block(config, mixers).values())
        for mixers in config.kinds_of_layers
    }
    return [sizes[config.mixers(layer)] for layer in range(config.num_layers)]


def head_sizes(config: ModelConfig, active: bool = False) -> list[int]:
    """Return the number of parameters of each different head; ``active`` as in :func:`num_parameters`."""
    heads = (each.values() for each in heads_of(config).values())
    return [sum(active_numel(config, s) if active else s.numel for s in specs) for specs in heads]


def block(config: ModelConfig, mixers: Iterable[str], sharding: Sharding = UNSHARDED) -> Specs:
    """Declare a block: residual layers of a norm and a mixer, which are given by name."""
    of_hidden, specs = hidden_norm(config, sharding), Specs()
    before = {} if config.layernorm_placement == "post" else of_hidden
    after = {} if config.layernorm_placement == "pre" else of_hidden
    for mixer in map(find_mixer, mixers):
        inside = mixer.parameters(config, sharding)
        specs |= under(**{mixer.norm: before, mixer.module: inside, mixer.post_norm: after})
    return specs


def block_of_any_kind(config: ModelConfig, sharding: Sharding = UNSHARDED) -> Specs:
    """Return the parameters that occur in some block, by local name."""
    return {n: spec for mixers in config.kinds_of_layers for n, spec in block(config, mixers, sharding).items()}
