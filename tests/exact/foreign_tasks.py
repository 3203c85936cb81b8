"""Plans by others, run as others run them: torch's `parallelize_module`, transformers' own tensor parallelism.

Against the unsharded model in float64: what autotp says of a plan must be what happens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autotp.promotion import Promoted, widen, widen_model
from autotp.structures import map_tensors, named_tensors, weighted_sum
from tests.cases import modules_attention as attention
from tests.cases import modules_mlp as mlp
from tests.cases import modules_whole as whole
from tests.harness.tasks import mesh_of
from tests.models import families

QKVO = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PAIR = {"a": "colwise", "b": "rowwise"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module, its input, a plan for it; `says` are pieces of what is wrong with it (none: it is sound)."""

    build: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    plan: dict[str, str]
    says: tuple[str, ...] = ()
    tp: int = 2
    warns: bool = field(default=False)  # sound as far as rows can say, but the module's own code would have to change


def _tokens() -> Tensor:
    return torch.tensor([[0, 5, 11, 3], [7, 2, 9, 1]])


CASES = {
    "attention": Case(build=attention.Attention, x=attention.sequence, plan=QKVO),
    "grouped": Case(build=lambda: attention.GroupedAttention(4), x=lambda: attention.sequence(64), plan=QKVO),
    "mlp": Case(build=lambda: mlp.Reduced("view", 36), x=mlp.rows, plan={"a": "colwise_gather_output"}),
    "pair": Case(build=mlp.Residuals, x=mlp.rows, plan={"blocks.0.0": "colwise", "blocks.0.2": "rowwise"}),
    "split": Case(
        build=mlp.PackedGate, x=mlp.rows, plan={"gate_up": "colwise_gather_output", "down": "rowwise_split_input"}
    ),
    "embedding": Case(
        build=lambda: whole.UntiedLM(12),
        x=_tokens,
        plan={"emb": "rowwise_split_input", "head": "colwise_gather_output"},
    ),
    # what is torn
    "fused": Case(
        build=attention.FusedQKV,
        x=attention.sequence,
        plan={"qkv": "colwise", "o": "rowwise"},
        says=("qkv.weight: indices 16 and 48 of dim 0 are on ranks 0 and 1, but meet in scaled_dot_product_attention",),
    ),
    "packed": Case(
        build=mlp.PackedGate,
        x=mlp.rows,
        plan={"gate_up": "colwise", "down": "rowwise"},
        says=("gate_up.weight: indices 0 and 32 of dim 0 are on ranks 0 and 1, but meet in mul",),
    ),
    "key_heads": Case(
        build=lambda: attention.GroupedAttention(2),
        x=lambda: attention.sequence(64),
        plan=QKVO,
        tp=4,
        says=("k.weight: indices 0 and 4 of dim 0 are on ranks 0 and 1, but meet in",),
    ),
    "norm": Case(
        build=lambda: mlp.Reduced("module"), x=mlp.rows, plan=PAIR, says=("layer_norm", "its result would be wrong")
    ),
    "softmax": Case(build=lambda: mlp.Reduced("softmax"), x=mlp.rows, plan=PAIR, says=("a.weight: indices", "softmax")),
    "flip": Case(build=lambda: mlp.Reduced("flip"), x=mlp.rows, plan=PAIR, says=("meet in linear of b",)),
    # what is whole, and what is not
    "no_partner": Case(
        build=attention.Attention,
        x=attention.sequence,
        plan={"o": "rowwise"},
        says=("o.weight: its input is whole: 32 features meet a rank's 16; no row cuts what feeds it",),
    ),
    "no_closing": Case(
        build=attention.Attention,
        x=attention.sequence,
        plan={"q": "colwise", "k": "colwise", "v": "colwise"},
        says=("in linear of o, which is needed whole",),
    ),
    "whole_keys": Case(
        build=lambda: attention.GroupedAttention(4),
        x=lambda: attention.sequence(64),
        plan={"q": "colwise", "o": "rowwise"},
        says=("k.weight: the result", "is whole, but meets a rank's part in matmul"),
    ),
    "open_head": Case(
        build=lambda: whole.UntiedLM(12), x=_tokens, plan={"head": "colwise"}, says=("it is returned by the model",)
    ),
    "ids": Case(
        build=lambda: whole.UntiedLM(12), x=_tokens, plan={"emb": "rowwise"}, says=("write input_layouts=Replicate()",)
    ),
    "gathered_twice": Case(
        build=attention.Attention,
        x=attention.sequence,
        plan={**QKVO, "o": "rowwise_split_input"},
        says=("o.weight: its input is cut already",),
    ),
    # gradients
    "head_norms": Case(
        build=attention.NormedHeads,
        x=attention.sequence,
        plan=QKVO,
        says=("q_norm.weight: its gradient would be a rank's part only", "mul of q_norm"),
    ),
    "scalar": Case(build=mlp.ScaledMLP, x=mlp.rows, plan=PAIR, says=("g: its gradient would be a rank's part only",)),
    "router": Case(
        build=mlp.Experts,
        x=mlp.rows,
        plan={"up.*": "colwise", "down.*": "rowwise"},
        says=("router.weight: its gradient would be a rank's part only",),
    ),
    "latent": Case(
        build=lambda: attention.LatentAttention(norm=True),
        x=attention.sequence,
        plan={"q": "colwise", "kv_b": "colwise", "o": "rowwise"},
        says=("kv_a.weight: its gradient would be a rank's part only", "a whole value meets cut ones in cat"),
    ),
    "head_scales": Case(
        build=attention.PerHeadScale,
        x=attention.sequence,
        plan=QKVO,
        says=("t: the result [4, 1, 1]", "is whole, but meets a rank's part in mul"),
    ),
    # what rows cannot say
    "slopes": Case(build=lambda: attention.Alibi("buffer"), x=attention.sequence, plan=QKVO, warns=True),
    "fixed_heads": Case(build=attention.FixedHeads, x=attention.sequence, plan=QKVO, warns=True),
}


def built(name: str) -> tuple[nn.Module, Tensor, dict[str, str]]:
    """The module and input of a case, always the same."""
    torch.manual_seed(0)
    case = CASES[name]
    return case.build(), case.x(), case.plan


def stock(rows: dict[str, str]) -> dict[str, Any]:
    """The same plan in torch's own styles."""
    made = {
        "colwise": ColwiseParallel,
        "colwise_gather_output": functools.partial(ColwiseParallel, output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "rowwise_split_input": functools.partial(RowwiseParallel, input_layouts=Replicate()),
    }
    return {key: made[style]() for key, style in rows.items()}


def run_stock(name: str) -> dict[str, Any] | None:
    """A case under torch's `parallelize_module`."""
    mesh = mesh_of(CASES[name].tp)
    if dist.get_rank() >= CASES[name].tp:
        return None
    model, x, rows = built(name)
    return compared(model, (x,), {}, mesh, lambda m: parallelize_module(m, mesh, stock(rows), src_data_rank=None))


class SharedKey(attention.LatentAttention):
    """K05 with the number of heads read from what it gets, as transformers has it."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.config = SimpleNamespace(qk_rope_head_dim=4, get_text_config=lambda: SimpleNamespace(qk_rope_head_dim=4))

    def forward(self, x: Tensor) -> Tensor:
        """Attention with heads of 8 + 4."""
        q = self.q(x).unflatten(-1, (-1, 12)).transpose(1, 2)
        latent, rotary = self.kv_a(x).split([16, 4], dim=-1)
        k, v = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 16)).transpose(1, 2).split([8, 8], dim=-1)
        k = torch.cat([k, torch.sin(rotary)[:, None].expand(-1, q.shape[1], -1, -1)], -1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


LATENT = {"q": "colwise", "kv_a": "mla_kv_a_proj", "kv_b": "colwise", "o": "rowwise"}


def shared_key() -> tuple[nn.Module, Tensor]:
    """A latent attention and its input, always the same."""
    torch.manual_seed(0)
    return SharedKey(), attention.sequence()


def run_latent(rows: dict[str, str]) -> dict[str, Any] | None:
    """A latent attention under transformers' own tensor parallelism."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, x = shared_key()
    expanded = {name: style for key, style in rows.items() for name in (f"{key}.weight", key)}
    return compared(model, (x,), {}, mesh, lambda m: apply_tensor_parallelism(m, mesh, expanded))


def run_theirs(payload: tuple[str, dict[str, str] | None]) -> dict[str, Any] | None:
    """A family of plans/ under transformers' own tensor parallelism, with its own plan or another."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    name, rows = payload
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = families.build(name)

    def apply(m: Any) -> None:
        apply_tensor_parallelism(m, mesh, m._expand_parallel_plan(rows or dict(m.tp_plan)))

    return compared(model, args, kwargs, mesh, apply)


def compared(model: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh, apply: Callable[[Any], Any]) -> dict[str, Any]:
    """Relative errors of outputs and gradients, the largest over all ranks; or the error that running it raised."""
    model, (args, kwargs) = widen_model(model), map_tensors((args, kwargs), widen)
    alone = copy.deepcopy(model)
    with Promoted(torch.float64, dropout=False):
        expected = _run(alone, args, kwargs)
        try:
            apply(model)
            found = _run(model, args, kwargs)
            error = ""
        except Exception as e:
            found, error = {}, f"{type(e).__name__}: {e}"
    errors = {key: _error(expected, found, key) for key in ("out", "grad")} if not error else {}
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, (errors, error), group=mesh.get_group())
    raised = [text for _, text in everyone if text]
    if raised:
        return {"raised": raised[0]}
    return {"raised": "", **{key: max(e[key] for e, _ in everyone) for key in errors}}


def _run(model: nn.Module, args: Any, kwargs: Any) -> dict[str, dict[str, Tensor]]:
    output = model(*args, **kwargs)
    loss = weighted_sum(output)
    assert loss is not None
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return {"out": {n: t.detach() for n, t in named_tensors(output) if t.is_floating_point()}, "grad": full}


def _error(expected: Any, found: Any, key: str) -> float:
    if set(expected[key]) != set(found[key]):
        return float("inf")
    scale = max((float(t.abs().max()) for t in expected[key].values()), default=1.0) or 1.0
    pairs = [(t, found[key][name]) for name, t in expected[key].items()]
    return max(
        (float((a - b).abs().max()) / scale if a.shape == b.shape else float("inf") for a, b in pairs), default=0
    )
