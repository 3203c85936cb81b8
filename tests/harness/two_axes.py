"""A model on a (dp, tp) mesh against the unsharded model on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.comparing import local
from tests.models import registry


def _loss(out: Any) -> Tensor:
    """A weighted sum per example, averaged over the batch: what two halves of a batch average to."""
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) else out
    weights = 1 + torch.cos(0.37 * torch.arange(out[0].numel(), dtype=out.dtype)).view(out[0].shape)
    return (out * weights).sum() / out.shape[0]


def _float64(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def train_step(payload: dict[str, Any]) -> dict[str, float | bool]:
    """Gradients, clipped norm and one AdamW step on 2 x 2 ranks; errors relative to the largest value."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=payload["names"])
    model, args, kwargs = registry.build(payload["model"])
    args, kwargs = tuple(map(_float64, args)), {k: _float64(v) for k, v in kwargs.items()}
    model = model.double()
    expected = copy.deepcopy(model)
    autotp.shard(model, mesh, sample=(args, kwargs))
    names = [n for n, _ in model.named_parameters()]
    kept = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    half = mesh[payload["names"][0]].get_local_rank()
    part = slice(half, half + 1)
    _loss(expected(*args, **kwargs)).backward()
    _loss(model(*(a[part] for a in args), **{k: v[part] for k, v in kwargs.items()})).backward()
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    largest = max(float(q.grad.abs().max()) for _, q in pairs if q.grad is not None)
    gradient = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs if q.grad is not None)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, expected)]
    for m in (model, expected):
        torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True).step()
    step = max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)
    norm = float(norms[0].full_tensor()), float(norms[1])  # type: ignore[operator]
    held = sum(local(p).numel() for p, _ in pairs) / sum(q.numel() for _, q in pairs)
    return {
        "kept": kept,
        "names": names == [n for n, _ in model.named_parameters()],
        "gradient": gradient / largest,
        "norm": abs(norm[0] - norm[1]) / norm[1],
        "step": step,
        "held": held,
    }
