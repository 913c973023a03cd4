"""Tasks of the Language Model Evaluation Harness (lm-eval) on a model in this process, in any layout.

Rank 0 runs the harness; the other ranks serve: they take part in every pass that rank 0 starts. Texts become tokens as
with the harness's own model of Hugging Face folders (``hf``), so the answers to all requests are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from megatron.config.errors import Problem, UserError
from megatron.distributed import comm
from megatron.distributed.launch import call_safely, raise_first_error
from megatron.inference.generate import PipelinedModel, SamplingParams, generate
from megatron.inference.scoring import ComputingModel, log_likelihoods
from megatron.inference.text import InferenceError

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
        return log_likelihoods(self.model, requests, self.batch_size)

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
    """The methods of a model of lm-eval; :func:`as_language_model` makes it one."""

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


@cache
def as_language_model(methods: type[HarnessModel]) -> type[Any]:
    """Return a class of lm-eval with these methods.

    Raises:
        UserError: if lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UserError([Problem("E709", "lm-eval is not installed", ("pip install 'megatron-pretrain[evaluate]'",))])
    from lm_eval.api.model import TemplateLM

    return type("MegatronLM", (methods, TemplateLM), {"__doc__": methods.__doc__})
