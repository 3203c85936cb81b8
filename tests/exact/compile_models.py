"""Small modules for torch.compile, each with something that a compiler sees otherwise than Python runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.models.common import Built, floats

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Sizes in the code, so that calls must be edited; `break_at` says where a graph breaks."""

    def __init__(self, break_at: str = "", dropout: float = 0.0, how: str = "view") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.break_at, self.dropout, self.how = break_at, dropout, how

    def heads(self, x: Tensor) -> Tensor:
        """(batch, heads, length, size)."""
        batch, length, _ = x.shape
        if self.break_at == "helper":
            torch._dynamo.graph_break()
        return x.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention."""
        batch, length, _ = x.shape
        q, k, v = map(self.heads, self.qkv(x).split(WIDTH, dim=2))
        if self.break_at == "middle":
            torch._dynamo.graph_break()
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        y = y.transpose(1, 2).reshape(batch, length, WIDTH)
        return self.out(y)


class Feed(nn.Module):
    """An MLP with dropout inside of the cut region and after it; called by name."""

    def __init__(self, dropout: float = 0.0, act: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.after = nn.Dropout(dropout), nn.Dropout(dropout)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Up, act, down."""
        return self.after(self.down(input=self.inside(self.act(self.up(x)))))


class Block(nn.Module):
    """Attention and MLP, each with a residual; `break_at` may be between them."""

    def __init__(self, break_at: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.feed = Attention(break_at, dropout), Feed(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.break_at = break_at

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.norm(x))
        if self.break_at == "between":
            torch._dynamo.graph_break()
        return x + self.feed(x)


class Stack(nn.Module):
    """Blocks, and a head by hand on the model's own matrix."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        for block in self.blocks:
            x = block(x)
        a, b, c = (x @ self.head).view(*x.shape[:2], 3, WIDTH).unbind(2)
        return a * b.sigmoid() + c


class Branching(nn.Module):
    """Takes another way when compiled."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers either way."""
        h = self.up(x)
        if torch.compiler.is_compiling():
            h = h.view(x.shape[0], x.shape[1], 2, WIDTH).transpose(2, 3)
            if self.norm:  # mixes what is cut
                return self.down(h.transpose(2, 3).flatten(2).softmax(-1))
            return self.down(h.transpose(2, 3).reshape(x.shape[0], x.shape[1], 2 * WIDTH))
        return self.down(h.softmax(-1) if self.norm else h)


class Raw(nn.Module):
    """Two matrices by hand; what the first one reads is made here, so it is entered at the call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.b = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """An MLP."""
        return x + torch.relu((x * 2) @ self.a) @ self.b


def stack(*, checkpointed: bool = False, **options: object) -> Callable[[], Built]:
    """Three blocks."""

    def build() -> Built:
        blocks: list[nn.Module] = [Block(**options) for _ in range(3)]  # type: ignore[arg-type]
        return Stack([checkpoint_wrapper(b) if checkpointed else b for b in blocks]), (floats(2, 6, WIDTH),), {}

    return build


def alone(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    """One module."""
    return lambda: (make(), (floats(2, 6, WIDTH),), {})


MODELS: dict[str, Callable[[], Built]] = {
    "plain": stack(),
    "break_helper": stack(break_at="helper"),
    "break_middle": stack(break_at="middle"),
    "break_between": stack(break_at="between"),
    "dropout": stack(dropout=0.3),
    "dropout_feed": lambda: (Feed(dropout=0.5), (floats(1, 1, WIDTH),), {}),
    "dropout_checkpointed": stack(dropout=0.3, checkpointed=True),
    "checkpointed": stack(checkpointed=True),
    "branching": alone(lambda: Branching(norm=False)),
    "branching_norm": alone(lambda: Branching(norm=True)),
    "raw": lambda: (nn.Sequential(Raw(), Raw()), (floats(2, 6, WIDTH),), {}),
    "many": lambda: (
        nn.Sequential(nn.LayerNorm(WIDTH), *(Raw() for _ in range(10)), nn.LayerNorm(WIDTH)),
        (floats(2, 6, WIDTH),),
        {},
    ),
    "alpha_dropout": alone(lambda: Feed(act=lambda x: F.alpha_dropout(x, 0.5, training=True))),
}
