"""Tasks of the Language Model Evaluation Harness (lm-eval) on a model in this process, in any layout.

Rank 0 runs the harness; the other ranks serve: they take part in every pass that rank 0 starts. Texts become tokens as
with the harness's own model of Hugging Face folders (``hf``), so the answers to all requests are the same.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Self

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import load_plugins
from megatron.convert.saved_model import by_huggingface_names, find_tokenizer_files
from megatron.distributed import comm
from megatron.distributed.launch import call_safely, init_distributed, raise_first_error, run_on_rank0
from megatron.inference.generate import PipelinedModel, SamplingParams, generate
from megatron.inference.load import load_tokenizer, open_pretrained, stop_ids
from megatron.inference.text import InferenceError, open_codec
from megatron.training.build_model import choose_device
from megatron.training.callbacks.base import Callback
from megatron.training.metrics import StepMetrics
from megatron.training.scoring import ComputingModel, score_tokens
from megatron.training.trainer import Trainer

TIMEOUT = timedelta(hours=1)
"""Of a collective: the time that rank 0 may take to load the data of tasks, or to compute metrics."""

MAX_LENGTH = 2048
"""Tokens of a context where the model has no limit, as in the harness."""

MAX_NEW_TOKENS = 256
"""Tokens to generate where a task gives no number, as in the harness."""

END = "end"
"""Message after which rank 0 starts no more passes."""


class SharedModel:
    """A model whose passes rank 0 starts, and in which all ranks take part."""

    def __init__(self, model: ComputingModel, tokenizer: Any, end_ids: Collection[int], batch_size: int) -> None:
        """Wrap a model.

        Args:
            model: of any layout.
            tokenizer: of transformers.
            end_ids: tokens that end a text.
            batch_size: sequences computed together.
        """
        self.model, self.tokenizer, self.end_ids, self.batch_size = model, tokenizer, end_ids, batch_size
        self.world = model.mesh.world

    def run(self, act: Callable[[], None]) -> None:
        """Call ``act`` on rank 0, which calls the other methods through :meth:`call`. Raise its error on all ranks."""
        if self.world.rank == 0:
            outcome, own = call_safely(act)
            self.end(outcome)
            raise_first_error([outcome], own)
        else:
            self.serve()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method with JSON arguments on all ranks; return the result."""
        self._share([name, [*arguments]])
        return getattr(self, name)(*arguments)

    def serve(self) -> None:
        """Take part in the passes of rank 0 until it calls :meth:`end`; raise the error that it has passed."""
        while True:
            name, arguments = self._share([])
            if name == END:
                raise_first_error(arguments)
                return
            with suppress(InferenceError):  # raised by rank 0, too, which ends the service
                getattr(self, name)(*arguments)

    def end(self, outcome: Sequence[Any] = (None, None)) -> None:
        """Let the serving ranks go on, with an error if there is one in ``outcome``."""
        self._share([END, [[*outcome]]])

    def _share(self, message: list[Any]) -> list[Any]:
        """Return rank 0's message on all ranks."""
        shared: list[Any] = comm.broadcast_object(message, self.world)
        return shared

    def score(self, requests: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the log-probability of the last tokens of sequences, and whether all are the most likely."""
        scores = score_tokens(self.model, requests, self.batch_size)
        return [(math.fsum(log_probs), all(greedy)) for log_probs, greedy in scores]

    def continue_texts(
        self, prompts: Sequence[list[int]], max_new_tokens: int, until: Sequence[str], sampling: Mapping[str, Any]
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, up to one that ends it or completes a text in ``until``.

        Prompts are divided over data-parallel ranks, unless experts are: then all have to compute the same.
        """
        readers = self.model.mesh.dp_cp
        divided = self.model.mesh.layout.sizes["ep"] == 1
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        mine = order[readers.rank :: readers.size] if divided else order

        # a token holds at least a byte; the first ones may be a part of a character
        reach = 4 + max((len(stop.encode()) for stop in until), default=0)

        def is_complete(tokens: Sequence[int]) -> bool:
            text = self.tokenizer.decode(tokens[-reach:], skip_special_tokens=True)
            return any(stop in text for stop in until)

        found = generate(
            PipelinedModel(self.model),
            [prompts[index] for index in mine],
            max_new_tokens,
            SamplingParams(**sampling),
            self.end_ids,
            batch_size=self.batch_size,
            indices=mine,
            is_complete=is_complete if until else None,
        )
        if not divided:
            return [tokens for _, tokens in sorted(zip(mine, found))]
        own: list[Any] = [[index, tokens] for index, tokens in zip(mine, found)]
        parts = comm.all_gather_objects(own, readers)
        return [tokens for _, tokens in sorted(pair for part in parts for pair in part)]


class HarnessModel:
    """The methods of a model of lm-eval; :func:`language_model_class` makes it one."""

    backend = "causal"
    cache_hook: Any  # of lm-eval, set by its constructor
    eot_token_id: int | None = None  # ends a text
    prefix_token_id: int | None = None  # comes before a text without context

    def __init__(
        self,
        shared: SharedModel,
        max_length: int | None = None,
        name: str = "megatron",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        """Wrap a shared model on rank 0.

        Args:
            shared: the model.
            max_length: most tokens of a sequence; None for the model's positions.
            name: of the tokenizer, which distinguishes cached requests.
            add_bos_token: begin texts with the tokenizer's special tokens; None for its own default.
            prefix_token_id: token before a text without context; None for the begin or else the end of texts.

        Raises:
            InferenceError: if the tokenizer has no token for the start of a text, or the model has fewer positions.
        """
        super().__init__()
        self.shared, self.tokenizer, self._name = shared, shared.tokenizer, name
        config = shared.model.config.model
        positions = config.max_position_embeddings
        if max_length is not None and not 0 < max_length <= (positions or max_length):
            most = "" if positions is None else f" and at most {positions}, the model's positions"
            raise InferenceError(f"max_length={max_length}: must be at least 1{most}", "drop max_length")
        self.max_length = max_length or positions or MAX_LENGTH
        self.add_bos_token = add_bos_token
        ends = next(iter(sorted(shared.end_ids)), None)
        self.eot_token_id = ends if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        begins = (prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id)
        self.prefix_token_id = next((token for token in begins if token is not None), None)
        if self.prefix_token_id is None:
            raise InferenceError("the tokenizer has no token that begins or ends a text", "prefix_token_id=0")

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any]) -> Self:
        """Load the model that ``--model_args`` names; on other ranks than 0, serve until rank 0 has ended, and exit."""
        given = {**arg_dict, **{k: v for k, v in additional_config.items() if v is not None}}
        given.pop("max_batch_size", None)  # for automatic sizes
        unknown = [name for name in given if name not in signature(load_shared).parameters]
        if unknown or "load" not in given:
            seen = f"--model_args {unknown[0]}: there is no such argument" if unknown else "--model_args names no model"
            raise InferenceError(seen, "--model_args load=CHECKPOINTS,tensor_model_parallel_size=2")
        shared, options = load_shared(**given)
        if shared.world.rank > 0:
            shared.serve()
            raise SystemExit(0)
        RUNNING.append(shared)
        return cls(shared, name=str(given["load"]), **options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any]) -> Self:
        """Load the model of ``key=value,key=value``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def batch_size(self) -> int:
        """Sequences computed together."""
        return self.shared.batch_size

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; special ones are added unless it begins with that of a begin already."""
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add = False
        ids: list[int] = self.tokenizer.encode(string, **({} if add is None else {"add_special_tokens": add}))
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations, given as tokens after those of their contexts."""
        for _, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                length = len(continuation)
                seen = f"a task asks for the log-likelihood of {length} tokens; the model takes 1 to {self.max_length}"
                raise InferenceError(seen)
        sequences = [[(ctx + cont)[-self.max_length - 1 :], len(cont)] for _, ctx, cont in requests]
        answers: list[tuple[float, bool]] = self.shared.call("score", sequences)
        for (texts, *_), answer in zip(requests, answers):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows that do not overlap."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts = [request.args[0] for request in requests]
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            of_text = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(window)) for window in of_text]
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(texts)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows)):
            totals[owner] += score
        for text, total in zip(texts, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts up to a text that ends them, requests with the same settings together."""
        from lm_eval.models.utils import postprocess_generated_text

        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(request.args[1])].append(index)
        texts = [""] * len(requests)
        for indices in groups.values():
            settings = requests[indices[0]].args[1]
            until, new_tokens, sampling = self._generation_settings(settings)
            prompts = [self._prompt(requests[index].args[0], self.max_length - new_tokens) for index in indices]
            found = self.shared.call("continue_texts", prompts, new_tokens, until, sampling)
            for index, tokens in zip(indices, found):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                texts[index] = postprocess_generated_text(text, until, None)
                self.cache_hook.add_partial("generate_until", (requests[index].args[0], settings), texts[index])
        return texts

    def _prompt(self, context: str, most: int) -> list[int]:
        begins = self.tokenizer.bos_token is not None and context.startswith(self.tokenizer.bos_token)
        tokens = self.tok_encode(context, add_special_tokens=False) if begins else self.tok_encode(context)
        return (tokens or [int(self.prefix_token_id or 0)])[-most:]

    def _generation_settings(self, settings: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
        """Return the texts that end a continuation, the most new tokens, and the arguments of `SamplingParams`."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given = normalize_gen_kwargs({**settings}, MAX_NEW_TOKENS)
        end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(given.pop("until", None), end)
        new_tokens = given.pop("max_gen_toks")
        if new_tokens >= self.max_length:
            seen = f"a task generates up to {new_tokens} tokens, and the model has {self.max_length} positions"
            raise InferenceError(seen, f"--gen_kwargs max_gen_toks={max(1, self.max_length // 2)}")
        temperature = given.pop("temperature", 0.0) if given.pop("do_sample") else 0.0
        sampling = {"temperature": float(temperature)}
        for name in ("top_k", "top_p"):
            value = given.pop(name, None)
            if temperature and value:
                sampling[name] = value
        others = [name for name, value in given.items() if value not in (None, 1, 1.0, False)]
        if others:
            seen = f"a task sets {others[0]}: texts are generated with temperature, top_k and top_p only"
            raise InferenceError(seen, "--gen_kwargs do_sample=False")
        return [stop for stop in until if stop], new_tokens, sampling

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation; without system messages if the template refuses them."""
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        others = [message for message in chat_history if message["role"] != "system"]
        try:
            return str(render([*chat_history]))
        except Exception:  # of the template
            if len(others) == len(chat_history):
                raise
            return str(render(others))


RUNNING: list[SharedModel] = []
"""Models that lm-eval has created on rank 0, whose service has to be ended."""


@cache
def language_model_class() -> type[Any]:
    """Return :class:`HarnessModel` as a class of lm-eval, registered there as the model ``megatron``.

    Raises:
        UserError: if lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UserError([Problem("E709", "lm-eval is not installed", ("pip install 'megatron-pretrain[evaluate]'",))])
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    @register_model("megatron")
    class MegatronLM(HarnessModel, TemplateLM):
        """A checkpoint or Hugging Face folder, or a model in training."""

    return MegatronLM


def load_shared(
    load: str,
    ckpt_step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    device: str = "auto",
    batch_size: int | str = 1,
    max_length: int | None = None,
    tokenizer: str | None = None,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    follow_links: bool = False,
    pretrained_checkpoint: str | None = None,
    plugin: str | None = None,
) -> tuple[SharedModel, dict[str, Any]]:
    """Load the model of ``--model_args``, and return it with the arguments of :class:`HarnessModel`.

    Collective over all processes of the launch.
    """
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise InferenceError(f"--batch_size {batch_size}: must be a number of at least 1", "--batch_size 8")
    load_plugins([plugin] if plugin else [])
    launch = Launch.read(os.environ)
    pretrained = open_pretrained(str(load), ckpt_step, ema, follow_links, pretrained_checkpoint)
    files = pretrained.files
    if tokenizer is not None:
        files = by_huggingface_names(find_tokenizer_files(Path(tokenizer)))
    loaded = load_tokenizer(files, pretrained.model)
    chosen = choose_device(device)
    init_distributed(None, TIMEOUT, chosen)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
    )
    model = pretrained.build_frozen(parallel, launch, dtype, chosen)
    ends = pretrained.stop_ids | ({loaded.eos_token_id} - {None})
    shared = SharedModel(model, loaded, ends, int(batch_size))
    return shared, {"max_length": max_length, "add_bos_token": add_bos_token, "prefix_token_id": prefix_token_id}


class EvaluateTasks(Callback):
    """Runs tasks of lm-eval on the model in training, every ``--evaluate-tasks-interval`` steps."""

    def __init__(self, trainer: Trainer) -> None:
        """Load the tokenizer and the tasks.

        Raises:
            UserError: if lm-eval is not installed, a task does not exist or cannot be loaded, the run has no tokenizer,
                or a task generates text, which sequence parallelism excludes.
        """
        super().__init__(trainer)
        config = trainer.config
        self.interval = config.training.evaluate_tasks_interval
        self._limit = config.training.evaluate_tasks_limit
        language_model = language_model_class()
        try:
            files = by_huggingface_names(trainer.files)
            tokenizer = load_tokenizer(files, config.model)
            ends = stop_ids(files, open_codec(files)) | ({tokenizer.eos_token_id} - {None})
            self._shared = SharedModel(trainer, tokenizer, ends, config.training.micro_batch_size)
            self._model = language_model(self._shared)
        except InferenceError as error:
            raise UserError([Problem("E709", f"--evaluate-tasks: {error}")]) from error
        self._tasks: Any = None  # of rank 0
        self._generates = run_on_rank0(self._load_tasks, trainer.mesh.world)
        if self._generates and config.parallel.sequence_parallel:
            sentence = f"--evaluate-tasks {self._generates} generates text, without --sequence-parallel only"
            raise UserError([Problem("E709", sentence, ("--no-sequence-parallel",))])

    def _load_tasks(self) -> str:
        """Load the tasks; return the name of one that generates text, or an empty string."""
        from lm_eval.tasks import TaskManager

        training = self.trainer.config.training
        names = [*training.evaluate_tasks]
        for defaults in (False, True):  # to list lm-eval's own tasks takes seconds
            manager = TaskManager(include_path=training.evaluate_tasks_path, include_defaults=defaults)
            missing = [name for name in names if not manager.match_tasks([name])]
            if not missing:
                break
        if missing:
            sentence = f"--evaluate-tasks {missing[0]}: lm-eval has no such task"
            raise UserError([Problem("E709", sentence, ("lm-eval ls tasks", "--evaluate-tasks-path FOLDER"))])
        try:
            self._tasks = manager.load(names)
        except Exception as error:  # whatever the code of a task and the library of its data raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            sentence = f"--evaluate-tasks {' '.join(names)}: the tasks cannot be loaded: {reason}"
            raise UserError([Problem("E709", sentence)]) from error
        for task in self._tasks["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=training.seed)
        generating = (n for n, task in self._tasks["tasks"].items() if task.OUTPUT_TYPE == "generate_until")
        return next(generating, "")

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Evaluate, and log the results as ``TASK/METRIC``."""
        found: dict[str, float] = {}

        def act() -> None:
            from lm_eval import evaluate

            results = evaluate(
                self._model, self._tasks, limit=self._limit, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
            )
            found.update(scalar_results(results["results"]))

        parts = [part for chunk in self.trainer.chunks.values() for part in chunk.parts]
        if self._generates:  # the weights are used once for every token
            with self.trainer.optimizer.weights.gathered(parts):
                self._shared.run(act)
        else:
            self._shared.run(act)
        self.log.log(found)
        self.log.note(f"tasks at {self.trainer.iteration}: " + " ".join(f"{n} {x:.4g}" for n, x in found.items()))


def scalar_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all tasks as ``TASK/METRIC``, or ``TASK/METRIC/FILTER`` if answers are filtered."""
    found = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, int | float) and chosen and not metric.endswith("_stderr"):
                found[f"{task}/{metric}" + (f"/{chosen}" if chosen != "none" else "")] = float(value)
    return found
