"""Norms over features that are cut: their statistics are shared, nothing is gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.operations import Case, conv, linear, noisy, weight


def _mlp(m: Any, x: Tensor) -> Tensor:
    return m.b(m.n(torch.relu(m.a(x)) * 3 + 2))


def _plain(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(m.a(x))
    h = F.gelu(m.c(m.b(F.layer_norm(h, h.shape[-1:], eps=0.1))))
    return m.d(F.rms_norm(h, (h.shape[-1],)))


def _stream(m: Any, x: Tensor) -> Tensor:
    h = m.n(m.a(x))
    return h + m.b(torch.relu(m.c(h)))


def _two_dims(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(F.layer_norm(h, (6, 32), m.w, m.v))


TWO = {"a": linear(16, 32), "b": linear(32, 16)}
ODD = {"a": linear(16, 35), "b": linear(35, 16)}
IMAGE = {"a": conv(4, 12, 3), "b": conv(12, 4, 3)}
ROW = {"a.weight": "colwise", "b.weight": "rowwise"}
CUT = ("a.weight", "b.weight", "n.weight")

NORM = {
    "layer norm": Case(
        forward=_mlp, parts={**TWO, "n": noisy(lambda: nn.LayerNorm(32))}, cut=CUT, gathers=1, styles=ROW, tp=(2, 4)
    ),
    "layer norm without bias, uneven": Case(
        forward=_mlp, parts={**ODD, "n": noisy(lambda: nn.LayerNorm(35, bias=False))}, cut=CUT, gathers=1, styles=ROW
    ),
    "rms norm": Case(forward=_mlp, parts={**TWO, "n": noisy(lambda: nn.RMSNorm(32))}, cut=CUT, styles=ROW, tp=(2, 4)),
    "rms norm, uneven": Case(forward=_mlp, parts={**ODD, "n": noisy(lambda: nn.RMSNorm(35))}, cut=CUT, styles=ROW),
    "norms without weights": Case(
        forward=_plain, parts={**TWO, "c": linear(16, 32), "d": linear(32, 16)}, gathers=1,
        styles={**ROW, "c.weight": "colwise", "d.weight": "rowwise"},
    ),
    "layer norm before a residual stream": Case(
        forward=_stream, parts={**TWO, "c": linear(32, 48), "b": linear(48, 32), "n": lambda: nn.LayerNorm(32)},
        gathers=1, styles={"a.weight": "colwise_gather_output", "c.weight": "colwise", "b.weight": "rowwise"},
    ),
    "layer norm before a wider layer": Case(
        forward=lambda m, x: m.b(torch.relu(m.c(m.n(m.a(x))))),
        parts={**TWO, "c": linear(32, 48), "b": linear(48, 32), "n": lambda: nn.LayerNorm(32)},
        gathers=1, styles={"a.weight": "colwise_gather_output", "c.weight": "colwise", "b.weight": "rowwise"},
    ),
    "layer norm over two dims": Case(
        forward=_two_dims, parts={**TWO, "w": weight(6, 32), "v": weight(6, 32)}, cut=("a.weight", "w", "v"),
        gathers=1, styles=ROW,
    ),
    "group norm, one group": Case(
        forward=_mlp, parts={**IMAGE, "n": noisy(lambda: nn.GroupNorm(1, 12))}, x=(2, 4, 5, 5), cut=CUT, gathers=1,
        styles=ROW, tp=(2, 4),
    ),
    "group norm, groups on two ranks": Case(
        forward=_mlp, parts={**IMAGE, "n": noisy(lambda: nn.GroupNorm(3, 12))}, x=(2, 4, 5, 5), cut=CUT, gathers=1,
        styles=ROW, tp=(4,),
    ),
    "group norm, whole groups": Case(
        forward=_mlp, parts={**IMAGE, "n": noisy(lambda: nn.GroupNorm(4, 12))}, x=(2, 4, 5, 5), cut=CUT, styles=ROW,
        tp=(2, 4),
    ),
}  # fmt: skip


def low_precision(payload: dict[str, Any]) -> dict[str, Any]:
    """Per norm: dtypes of the outputs and the largest error, in bfloat16 and under autocast."""
    import copy

    import torch.distributed as dist

    import autotp
    from tests.harness.tasks import mesh_of

    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return {}
    found: dict[str, Any] = {}
    for name, norm in {"layer": nn.LayerNorm(32), "rms": nn.RMSNorm(32), "small": nn.RMSNorm(32)}.items():
        for autocast in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), copy.deepcopy(norm), nn.ReLU(), nn.Linear(32, 16))
            x = torch.randn(4, 16) * (1e-4 if name == "small" else 1)
            if name == "small":  # what the norm is given is about as large as the root of its eps
                nn.init.zeros_(model[0].bias)
            if not autocast:
                model, x = model.bfloat16(), x.bfloat16()
            cut = autotp.shard(copy.deepcopy(model), mesh, sample=x)
            outs: list[Tensor] = []
            cut[1].register_forward_hook(lambda m, a, out, outs=outs: outs.append(out))
            model[1].register_forward_hook(lambda m, a, out, outs=outs: outs.append(out))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                got, want = cut(x), model(x)
            assert outs[0].shape[-1] == 16, "nothing was cut, so nothing was tested"
            error = float((got - want).abs().max() / want.abs().max())
            found[f"{name} {autocast}"] = (str(outs[0].dtype), str(outs[1].dtype), error)
    return found
