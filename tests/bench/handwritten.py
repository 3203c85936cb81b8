"""Tensor parallelism written by hand, as in Megatron-LM: the yardstick for what autotp does by itself.

Everything here works on plain local tensors. The code of the models is the same as in the unsharded ones; only layers
are other ones and each attention and each MLP enters its input once (*f* in arXiv 1909.08053, its conjugate is *g*).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Enter(torch.autograd.Function):
    """f: identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """g: the sum over the ranks; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherLast(torch.autograd.Function):
    """The last dim of all ranks; backward keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None


def my_part(whole: Tensor, dim: int, group: Any) -> nn.Parameter:
    """This rank's part of a weight."""
    part = whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(part.clone())


class ColumnLinear(nn.Module):
    """Cut along the output features; whoever calls it has entered the input."""

    def __init__(self, linear: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight = my_part(linear.weight, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's output features."""
        return F.linear(x, self.weight)


class RowLinear(nn.Module):
    """Cut along the input features; the sum of all ranks' products."""

    def __init__(self, linear: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight, self.group = my_part(linear.weight, 1, group), group

    def forward(self, x: Tensor) -> Tensor:
        """The whole output."""
        return Leave.apply(F.linear(x, self.weight), self.group)


class Head(nn.Module):
    """Cut along the vocabulary, then gathered."""

    def __init__(self, linear: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight, self.group = my_part(linear.weight, 0, group), group

    def forward(self, x: Tensor) -> Tensor:
        """All logits."""
        return GatherLast.apply(F.linear(Enter.apply(x, self.group), self.weight), self.group)


class VocabularyEmbedding(nn.Module):
    """Cut along the vocabulary: rows of other ranks count as zero, then the sum."""

    def __init__(self, embedding: nn.Embedding, group: Any) -> None:
        super().__init__()
        self.weight, self.group = my_part(embedding.weight, 0, group), group
        self.rows = self.weight.shape[0]
        self.first = dist.get_rank(group) * self.rows

    def forward(self, ids: Tensor) -> Tensor:
        """The whole rows."""
        local = ids - self.first
        missing = (local < 0) | (local >= self.rows)
        out = F.embedding(local.masked_fill(missing, 0), self.weight)
        return Leave.apply(out.masked_fill(missing.unsqueeze(-1), 0), self.group)


def entering(module: nn.Module, group: Any) -> None:
    """From now on the module enters its hidden states, once for all that read them: a subclass of its own class."""
    cls = type(module)

    class Entering(cls):  # type: ignore[misc, valid-type]
        def forward(
            self, x: Tensor | None = None, *args: Any, hidden_states: Tensor | None = None, **kwargs: Any
        ) -> Any:
            x = hidden_states if x is None else x
            return super().forward(Enter.apply(x, group), *args, **kwargs)

    module.__class__ = Entering


_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3")
_ROW = ("o_proj", "down_proj", "wo", "w2")
_ENTERING = ("self_attn", "mlp", "attention", "feed_forward")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_COLUMN, ColumnLinear),
    **dict.fromkeys(_ROW, RowLinear),
    **dict.fromkeys(("lm_head", "output"), Head),
    **dict.fromkeys(("embed_tokens", "tok_embeddings"), VocabularyEmbedding),
}


def by_hand(model: nn.Module, group: Any) -> nn.Module:
    """Make a Llama tensor-parallel, in place: the one of transformers, or the one with torchtitan's names."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in _ENTERING:
                entering(child, group)
            if name in _KINDS:
                setattr(module, name, _KINDS[name](child, group))
    return model
