"""The model ``megatron`` on lm-eval's command line: ``--model_args load=RUN,tensor_model_parallel_size=2``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import Any, Self

from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import load_plugins
from megatron.convert.sources import SourceOptions
from megatron.evaluation.load import open_pretrained
from megatron.inference.harness import HarnessModel, SharedModel, as_language_model
from megatron.inference.text import InferenceError

TIMEOUT = timedelta(hours=1)
"""Of a collective: the time that rank 0 may take to load the data of tasks, or to compute metrics."""

RUNNING: list[SharedModel] = []
"""Models that lm-eval has created on rank 0, whose service has to be ended."""


@dataclass(frozen=True)
class ModelArgs:
    """Values of ``--model_args``, and those that lm-eval adds; named like the flags of the other programs."""

    load: str
    ckpt_step: int | None = None
    ema: bool = False
    dtype: str | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    device: str = "auto"
    batch_size: int | str = 1
    max_length: int | None = None
    tokenizer: str | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    follow_links: bool = False
    pretrained_checkpoint: str | None = None
    plugin: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Return the arguments; InferenceError for unknown ones, and without a model."""
        unknown = [name for name in given if name not in {field.name for field in fields(cls)}]
        if unknown or "load" not in given:
            seen = f"--model_args {unknown[0]}: there is no such argument" if unknown else "--model_args names no model"
            raise InferenceError(seen, "--model_args load=CHECKPOINTS,tensor_model_parallel_size=2")
        args = cls(**given)
        if not str(args.batch_size).isdecimal() or int(args.batch_size) < 1:
            raise InferenceError(f"--batch_size {args.batch_size}: must be a number of at least 1", "--batch_size 8")
        return args

    def open(self) -> SharedModel:
        """Load the model. Collective over all processes of the launch."""
        load_plugins([self.plugin] if self.plugin else [])
        options = SourceOptions(self.ckpt_step, self.ema, self.pretrained_checkpoint, self.follow_links)
        pretrained = open_pretrained(str(self.load), options)
        tokenizer = pretrained.load_tokenizer(self.tokenizer)
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
        )
        model = pretrained.build_frozen(parallel, self.dtype, self.device, TIMEOUT)
        ends = pretrained.stop_ids | ({tokenizer.eos_token_id} - {None})
        return SharedModel(model, tokenizer, ends, int(self.batch_size))


class LoadedModel(HarnessModel):
    """A checkpoint or Hugging Face folder as a model of lm-eval."""

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any]) -> Self:
        """Load the model that ``--model_args`` names; on other ranks than 0, serve until rank 0 has ended, and exit."""
        given = {**arg_dict, **{k: v for k, v in additional_config.items() if v is not None}}
        given.pop("max_batch_size", None)  # for automatic sizes
        args = ModelArgs.parse(given)
        shared = args.open()
        if shared.world.rank > 0:
            shared.serve()
            raise SystemExit(0)
        RUNNING.append(shared)
        return cls(shared, args.max_length, str(args.load), args.add_bos_token, args.prefix_token_id)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any]) -> Self:
        """Load the model of ``key=value,key=value``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


@cache
def language_model_class() -> type[Any]:
    """Register :class:`LoadedModel` in lm-eval as the model ``megatron``; return the class.

    Raises:
        UserError: if lm-eval is not installed.
    """
    model = as_language_model(LoadedModel)
    from lm_eval.api import registry

    registry.register_model("megatron")(model)
    return model
