"""Fused output projection and cross-entropy over a sharded vocabulary.

Logits exist for one chunk of tokens at a time, and their gradient is computed in the same pass. The full fp32 logits
and their gradient are never stored.

Shapes: T tokens, C tokens of a chunk, H hidden, V this rank's vocabulary rows, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.batch import loss_chunk_tokens
from megatron.config.model import ModelConfig
from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.kernels.cross_entropy import EAGER_CROSS_ENTROPY, CrossEntropyKernel
from megatron.kernels.registry import Kernels
from megatron.layers.context import BuildContext


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the output projection, and what computes with them."""

    # Token id of row 0.
    first: int
    # Number of rows that are tokens; the rest is padding.
    held: int
    # The ranks that hold the other rows.
    group: Group
    # Receives the gradient of the weight, under its name.
    grad_accumulator: GradAccumulator
    weight: str
    kernels: Kernels = Kernels()
    # Tokens whose logits exist at a time; None for the default of :func:`megatron.config.batch.loss_chunk_tokens`.
    chunk_tokens: int | None = None
    # Logits are ``softcap * tanh(x w / softcap)``; None leaves them as they are.
    softcap: float | None = None

    def tokens_per_chunk(self, x_TH: Tensor, rows: int) -> int:
        """Return the tokens whose logits, ``rows`` each, exist at a time."""
        # The eager kernel copies the logits to fp32, a compiled one leaves them as the matrix product made them.
        size = x_TH.element_size() if self.kernels.cross_entropy is not EAGER_CROSS_ENTROPY else torch.float32.itemsize
        return self.chunk_tokens or loss_chunk_tokens(x_TH.shape[0], rows * size, x_TH.is_cuda)

    def chunks(self, x_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
        """Yield the tokens whose logits exist at a time."""
        size = self.tokens_per_chunk(x_TH, weight_VH.shape[0])
        return (slice(start, start + size) for start in range(0, x_TH.shape[0], size))

    def logits(self, x_CH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's logits ``[C, V]``, and for :meth:`uncap` what they are before the cap."""
        logits_CV = self.kernels.linear.forward(x_CH, weight_VH, None)
        if self.softcap is None:
            return logits_CV, None
        uncapped_CV = logits_CV.div_(self.softcap)
        return uncapped_CV.tanh().mul_(self.softcap), uncapped_CV

    @staticmethod
    def uncap(dlogits_CV: Tensor, uncapped_CV: Tensor | None) -> None:
        """Turn the gradient of the logits in place into that of the logits before the cap; overwrites the latter."""
        if uncapped_CV is not None:  # cosh(x)^-2, the derivative of tanh, is exact where tanh rounds to 1
            dlogits_CV *= uncapped_CV.cosh_().pow_(-2)

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local rows of labels, 0 where another rank holds them, and where this rank does."""
        local = labels - self.first
        mine = (local >= 0) & (local < self.held)
        return local.where(mine, 0), mine


class OutputLayer(nn.Module):
    """Output projection, with the cross-entropy of tokens or as logits."""

    def __init__(self, config: ModelConfig, context: BuildContext, chunk_tokens: int | None) -> None:
        super().__init__()
        self.tied = not config.untie_embeddings_and_output_weights
        owner = context.root.submodule("embedding.word_embeddings") if self.tied else context
        spec, self.name = owner.spec("weight"), owner.name("weight")
        # Another stage of this rank adds to the gradient, too. Then all contributions are made in backward, whose order
        # is the same in all schedules of the stages; that of forward is not.
        self.shares_gradient = self.name in context.params and context.mesh.layout.sizes["pp"] > 1
        self.weight = owner.parameter("weight")
        self.sequence_parallel, self.entries = context.sequence_parallel, spec.shape[0]
        self.local_rows = spec.local_view[0]
        self.scaling = config.logits_scaling
        self.losses = nn.Identity()  # the loss of each token ``[T]`` passes it, for hooks of components
        first, held = context.tp.rank * spec.local_view[0], sum(piece.global_box.size[0] for piece in spec.pieces)
        self.vocabulary = VocabularyShard(
            first,
            held,
            context.tp,
            context.grad_accumulator,
            self.name,
            context.kernels,
            chunk_tokens,
            config.final_logit_softcapping,
        )

    def forward(
        self,
        x_SBH: Tensor,
        labels_BS: Tensor,
        mask_BS: Tensor,
        z_coeff: float = 0.0,
        loss_grad: Tensor | None = None,
        of_tokens: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None = None,
        trains_weight: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the summed cross-entropy of labels, with and without z-loss: see :func:`linear_cross_entropy`.

        Args:
            x_SBH: hidden states ``[S(/tp), B, H]``.
            labels_BS: int64 target ids.
            mask_BS: weight of each token.
            z_coeff: weight of the squared log-partition (z-loss).
            loss_grad: ``batch.loss_grad`` if the first result is the micro-batch's whole loss, unchanged. Its gradient
                is then known in advance, and the gradient of the weight is accumulated at once instead of kept until
                backward, unless the rank also has the stage with the embedding, and the weight is tied.
            of_tokens: computes values of tokens ``[T, ...]`` instead, from hidden states ``[T, H]``, labels and mask
                of the tokens. It runs here because a parameter store completes the weights around calls of the module.
            trains_weight: False for a loss that is none of the weight's.
        """
        gather = mappings.gather_rows if self.sequence_parallel else mappings.copy_to_region
        x_TH = gather(self._scaled(x_SBH), self.vocabulary.group).flatten(0, 1)
        labels, mask = (x.transpose(0, 1).flatten(0, 1) for x in (labels_BS, mask_BS))
        if of_tokens is not None:
            found = of_tokens(x_TH, labels, mask)
            return tuple(x.unflatten(0, (-1, labels_BS.shape[0])).transpose(0, 1) for x in found)
        if self.shares_gradient:
            loss_grad = None
        weight_VH = self.weight if trains_weight else self.weight.detach()
        loss, cross_entropy, losses_T = linear_cross_entropy(
            x_TH, weight_VH, labels, mask, self.vocabulary, z_coeff, loss_grad
        )
        self.losses(losses_T)
        return loss, cross_entropy

    def token_losses(self, x_SBH: Tensor, targets_BSK: Tensor, weights_BSK: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each token ``[B, S]`` with its targets: ``sum_k w_k (log Z - logit[target_k])``.

        For objectives that are not a sum over tokens. Backward computes the logits again, so none are kept.

        Args:
            x_SBH: hidden states ``[S(/tp), B, H]``.
            targets_BSK: int64 target ids, K different ones per token.
            weights_BSK: weight of each target, without gradient; None for 1.
        """
        weights_BSK = torch.ones_like(targets_BSK, dtype=torch.float32) if weights_BSK is None else weights_BSK

        def of_tokens(x_TH: Tensor, targets_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor]:
            return (token_losses(x_TH, self.weight, targets_TK, weights_TK, self.vocabulary),)

        losses_BS: Tensor = self(x_SBH, targets_BSK, weights_BSK, of_tokens=of_tokens)[0]
        return losses_BS

    @torch.no_grad()
    def token_scores(self, x_SBH: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return each label's log-probability ``[B, S]``, and True where no token is likelier, nor equals it before it.

        Args:
            x_SBH: hidden states ``[S(/tp), B, H]``.
            labels_BS: int64 ids.
        """
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32)
        log_probs_BS, greedy_BS = self(x_SBH, labels_BS, mask_BS, of_tokens=self._token_scores)
        return log_probs_BS, greedy_BS

    def _token_scores(self, x_TH: Tensor, labels_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        vocabulary, scores, none = self.vocabulary, [], torch.iinfo(torch.int64).max
        for tokens in vocabulary.chunks(x_TH, self.weight):
            logits_CV, _ = vocabulary.logits(x_TH[tokens], self.weight)
            top_C, row_C = logits_CV[:, : max(vocabulary.held, 1)].max(-1)
            chunk = _chunk_loss(logits_CV, labels_T[tokens], mask_T[tokens], vocabulary)
            here_C = (top_C == chunk.top) & (vocabulary.held > 0)
            first_C = -comm.all_reduce((-row_C - vocabulary.first).where(here_C, -none), vocabulary.group, op="max")
            scores.append((-chunk.loss, first_C == labels_T[tokens]))
        log_probs_T, greedy_T = map(torch.cat, zip(*scores))
        return log_probs_T, greedy_T

    @torch.no_grad()
    def top_logits(self, x_SBH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest logits of each token in at least fp32, and their ids, ``[B, S, k]`` each."""

        def of_tokens(x_TH: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
            chunks = [self._top_logits(x_TH[tokens], k) for tokens in self.vocabulary.chunks(x_TH, self.weight)]
            logits_TK, ids_TK = map(torch.cat, zip(*chunks))
            return logits_TK, ids_TK

        none_B1 = x_SBH.new_zeros(x_SBH.shape[1], 1)
        logits_BSK, ids_BSK = self(x_SBH, none_B1, none_B1, of_tokens=of_tokens)
        return logits_BSK, ids_BSK

    def _top_logits(self, x_CH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        vocabulary = self.vocabulary
        logits_CV = vocabulary.logits(x_CH, self.weight)[0][:, : vocabulary.held]
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        missing = max(0, k - vocabulary.held)  # a rank may hold fewer tokens, or none
        mine_CK, rows_CK = logits_CV.topk(k - missing)
        mine_CK = nn.functional.pad(mine_CK, (0, missing), value=-torch.inf)
        ids_CK = nn.functional.pad(rows_CK + vocabulary.first, (0, missing))
        every_CP, ids_CP = (
            comm.all_gather(part, vocabulary.group).unflatten(0, (-1, len(part))).transpose(0, 1).flatten(1)
            for part in (mine_CK, ids_CK)
        )
        top_CK, places_CK = every_CP.topk(k)
        return top_CK, ids_CP.gather(1, places_CK)

    @torch.no_grad()
    def logits(self, x_SBH: Tensor) -> Tensor:
        """Return logits ``[S, B, vocabulary]`` in at least fp32, equal on all TP ranks.

        Raises:
            ValueError: with sequence parallelism, where a rank has only some of the rows.
        """
        if self.sequence_parallel:
            raise ValueError("logits are for inference, which runs without sequence parallelism")
        dtype = torch.promote_types(x_SBH.dtype, torch.float32)
        local_SBV = self.vocabulary.logits(self._scaled(x_SBH), self.weight)[0].to(dtype)
        parts_PSBV = mappings.gather_rows(local_SBV.unsqueeze(0), self.vocabulary.group)
        return parts_PSBV.movedim(0, 2).flatten(2)[..., : self.entries]

    @torch.no_grad()
    def log_probs(self, logits_BV: Tensor, ids_B: Tensor) -> Tensor:
        """Return the log-probability of an id under each row of :meth:`logits`, ``[B]``, equal on all TP ranks.

        The sums are those of :meth:`token_scores`, in the same order.
        """
        vocabulary = self.vocabulary
        held_BV = logits_BV[:, vocabulary.first : vocabulary.first + vocabulary.held]
        local_BV = nn.functional.pad(held_BV, (0, self.local_rows - vocabulary.held)).clone()
        return -_chunk_loss(local_BV, ids_B, torch.ones_like(local_BV[:, 0]), vocabulary).loss

    def _scaled(self, x_SBH: Tensor) -> Tensor:
        """Divide the hidden states instead of the logits, which are larger."""
        return x_SBH if self.scaling == 1.0 else x_SBH / self.scaling


def linear_cross_entropy(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    mask_T: Tensor,
    vocabulary: VocabularyShard,
    z_coeff: float = 0.0,
    loss_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum ``mask * (log Z - logit[label] + z_coeff * (log Z)^2)`` over tokens, with ``Z = sum_v exp(logit_v)``.

    The gradient of ``x`` is partial: a sum over this rank's vocabulary rows, to be reduced over the group by the
    backward of the function that produced ``x``.

    Args:
        x_TH: hidden states.
        weight_VH: this rank's rows of the projection.
        labels_T: int64 target ids.
        mask_T: weight of each token.
        vocabulary: this rank's shard; the weight's gradient goes to its accumulator.
        z_coeff: weight of the squared log-partition (z-loss).
        loss_grad: the gradient that backward will start with, 0-d, if it is known already. Then the weight's gradient
            is accumulated during forward; otherwise an fp32 tensor of the weight's size is kept until backward.

    Returns:
        ``(objective, cross_entropy, losses_T)`` in at least fp32, equal on all ranks of the group. The second omits the
        z term, and the third are its summands. Both are for reporting and not differentiable.
    """
    objective, cross_entropy, losses_T = _LinearCrossEntropy.apply(
        x_TH, weight_VH, labels_T, mask_T, vocabulary, z_coeff, loss_grad, torch.is_grad_enabled()
    )
    return objective, cross_entropy, losses_T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        vocabulary: VocabularyShard,
        z_coeff: float,
        loss_grad: Tensor | None,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        linear, accumulator, name = vocabulary.kernels.linear, vocabulary.grad_accumulator, vocabulary.weight
        objective, cross_entropy = torch.zeros(2, dtype=dtype, device=x_TH.device).unbind()
        early, trains = differentiate and loss_grad is not None, differentiate and weight_VH.requires_grad
        losses_T = torch.empty(x_TH.shape[0], dtype=dtype, device=x_TH.device)
        dx_TH = torch.empty_like(x_TH) if differentiate else None
        dw_VH = torch.empty_like(weight_VH, dtype=dtype) if trains and not early else None
        with accumulator.accumulate_products(name) if trains and early else nullcontext() as accumulate_product:
            for tokens in vocabulary.chunks(x_TH, weight_VH):
                logits_CV, uncapped_CV = vocabulary.logits(x_TH[tokens], weight_VH)
                chunk = _chunk_loss(logits_CV, labels_T[tokens], mask_T[tokens].to(dtype), vocabulary)
                del logits_CV  # frees them where the kernel made an fp32 copy
                entropy = torch.mul(chunk.loss, chunk.mask, out=losses_T[tokens]).sum()
                cross_entropy = cross_entropy + entropy
                objective = objective + entropy + z_coeff * (chunk.log_z.square() * chunk.mask).sum()
                if dx_TH is not None:
                    dlogits_CV = chunk.gradient(z_coeff, x_TH.dtype, None if loss_grad is None else loss_grad.to(dtype))
                    vocabulary.uncap(dlogits_CV, uncapped_CV)
                    dx_TH[tokens] = linear.input_gradient(dlogits_CV, weight_VH)
                    if accumulate_product is not None:
                        accumulate_product(x_TH[tokens], dlogits_CV)
                    elif dw_VH is not None:
                        linear.weight_gradient(dw_VH, x_TH[tokens], dlogits_CV, beta=float(tokens.start > 0))
                    del dlogits_CV
                del chunk  # before the next chunk's logits are allocated
        ctx.save_for_backward(dx_TH, dw_VH)
        ctx.vocabulary, ctx.early = vocabulary, early
        ctx.mark_non_differentiable(cross_entropy, losses_T)
        return objective, cross_entropy, losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dw_VH = ctx.saved_tensors
        vocabulary: VocabularyShard = ctx.vocabulary
        if ctx.early:
            return dx_TH, *(None,) * 7
        dw = None
        if dw_VH is not None:
            dw = vocabulary.grad_accumulator.accumulate(vocabulary.weight, dw_VH.mul_(loss_grad.to(dw_VH.dtype)))
        # Without the cast, CUDA would round the loss gradient to the dtype of dx.
        scaled_dx_TH = dx_TH.to(loss_grad.dtype) * loss_grad
        return scaled_dx_TH.to(dx_TH.dtype), dw, *(None,) * 6


def token_losses(
    x_TH: Tensor, weight_VH: Tensor, targets_TK: Tensor, weights_TK: Tensor, vocabulary: VocabularyShard
) -> Tensor:
    """Return ``sum_k w_k (log Z - logit[target_k])`` of each token ``[T]``, in at least fp32, equal on all ranks.

    The arguments and the gradient of ``x`` are as in :func:`linear_cross_entropy`; there is none of ``weights_TK``.
    """
    losses_T: Tensor = _TokenLosses.apply(x_TH, weight_VH, targets_TK, weights_TK, vocabulary)
    return losses_T


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_VH: Tensor, targets_TK: Tensor, weights_TK: Tensor, vocabulary: VocabularyShard
    ) -> Tensor:
        dtype, kernel = torch.promote_types(x_TH.dtype, torch.float32), vocabulary.kernels.cross_entropy
        losses, tops, zs = [], [], []
        for tokens in vocabulary.chunks(x_TH, weight_VH):
            logits_CV, _ = vocabulary.logits(x_TH[tokens], weight_VH)
            rows_CK, mine_CK = vocabulary.rows(targets_TK[tokens])
            targets_KC = logits_CV.gather(1, rows_CK).to(dtype).t()
            work_CV, top_C = kernel.top(logits_CV, vocabulary.held)
            top_C = comm.all_reduce(top_C, vocabulary.group, op="max")
            z_C, _ = kernel.sums(work_CV, top_C, rows_CK[:, 0], mine_CK[:, 0], vocabulary.held)
            sums = torch.cat((z_C.unsqueeze(0), (targets_KC - top_C).where(mine_CK.t(), 0.0)))
            z_C, *targets = comm.all_reduce(sums, vocabulary.group).unbind()
            loss_KC = z_C.log() - torch.stack(targets)
            losses.append((loss_KC * weights_TK[tokens].t()).sum(0))
            tops.append(top_C)
            zs.append(z_C)
        ctx.save_for_backward(x_TH, weight_VH, targets_TK, weights_TK, torch.cat(tops), torch.cat(zs))
        ctx.vocabulary = vocabulary
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_VH, targets_TK, weights_TK, top_T, z_T = ctx.saved_tensors
        vocabulary: VocabularyShard = ctx.vocabulary
        kernel, linear = vocabulary.kernels.cross_entropy, vocabulary.kernels.linear
        accumulator, trained = vocabulary.grad_accumulator, ctx.needs_input_grad[1]
        dx_TH, grad_T = torch.empty_like(x_TH), grad_T.to(z_T.dtype)
        with accumulator.accumulate_products(vocabulary.weight) if trained else nullcontext() as accumulate_product:
            for tokens in vocabulary.chunks(x_TH, weight_VH):
                logits_CV, uncapped_CV = vocabulary.logits(x_TH[tokens], weight_VH)
                rows_CK, mine_CK = vocabulary.rows(targets_TK[tokens])
                grad_CK = weights_TK[tokens] * grad_T[tokens].unsqueeze(1)
                label = rows_CK[:, 0], mine_CK[:, 0]
                work_CV, _ = kernel.top(logits_CV, vocabulary.held)
                kernel.sums(work_CV, top_T[tokens], *label, vocabulary.held)
                scale_C = grad_CK.sum(1) / z_T[tokens]
                gradient = top_T[tokens], scale_C, grad_CK[:, 0], *label, vocabulary.held, x_TH.dtype
                dlogits_CV = kernel.gradient(work_CV, *gradient)
                others_CK = (-grad_CK).where(mine_CK, 0.0)[:, 1:].to(dlogits_CV.dtype)
                dlogits_CV.scatter_add_(1, rows_CK[:, 1:], others_CK)
                vocabulary.uncap(dlogits_CV, uncapped_CV)
                dx_TH[tokens] = linear.input_gradient(dlogits_CV, weight_VH)
                if accumulate_product is not None:
                    accumulate_product(x_TH[tokens], dlogits_CV)
        return dx_TH, *(None,) * 4


@dataclass(frozen=True)
class _ChunkLoss:
    """Token losses of a chunk, and what their gradient needs. Tensors are ``[C]`` except ``work``."""

    kernel: CrossEntropyKernel
    # Rows of the vocabulary shard that are tokens.
    held: int
    # [C, V]: what the kernel's last pass left in the place of the logits.
    work: Tensor
    # Largest logit, subtracted to avoid overflow.
    top: Tensor
    # Sum over the vocabulary of exp(logit - top).
    z: Tensor
    # log Z - logit[label]
    loss: Tensor
    mask: Tensor
    # Local row of the label, 0 where another rank holds it.
    row: Tensor
    # Whether this rank holds the label's row.
    mine: Tensor

    @property
    def log_z(self) -> Tensor:
        """Log of the sum over the vocabulary of ``exp(logit)``."""
        return self.z.log() + self.top

    def gradient(self, z_coeff: float, dtype: torch.dtype, loss_grad: Tensor | None) -> Tensor:
        """Return the gradient by the logits of ``loss_grad * mask * (loss + z_coeff * (log Z)^2)``.

        It may overwrite ``work``. ``loss_grad`` None is 1.
        """
        mask_C = self.mask if loss_grad is None else self.mask * loss_grad
        scale_C = mask_C * (1.0 + 2.0 * z_coeff * self.log_z) / self.z
        return self.kernel.gradient(self.work, self.top, scale_C, mask_C, self.row, self.mine, self.held, dtype)


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor, mask_C: Tensor, vocabulary: VocabularyShard) -> _ChunkLoss:
    """Reduce this rank's logits over the vocabulary group to token losses; overwrites the logits."""
    kernel = vocabulary.kernels.cross_entropy
    row_C, mine_C = vocabulary.rows(labels_C)
    work_CV, top_C = kernel.top(logits_CV, vocabulary.held)
    top_C = comm.all_reduce(top_C, vocabulary.group, op="max")
    sums_2C = kernel.sums(work_CV, top_C, row_C, mine_C, vocabulary.held)
    z_C, target_C = comm.all_reduce(sums_2C, vocabulary.group).unbind()
    return _ChunkLoss(kernel, vocabulary.held, work_CV, top_C, z_C, z_C.log() - target_C, mask_C, row_C, mine_C)
