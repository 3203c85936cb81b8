"""A model on a (dp, tp) mesh against the unsharded model on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

import autotp
from autotp.comparing import local
from tests.harness.tasks import find, grid_of
from tests.models import registry


def _loss(out: Any) -> Tensor:
    """A weighted sum per example, averaged over the batch: what two halves of a batch average to."""
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) else out
    weights = 1 + torch.cos(0.37 * torch.arange(out[0].numel(), dtype=out.dtype)).view(out[0].shape)
    return (out * weights).sum() / out.shape[0]


def _float64(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _varied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Token ids that differ from example to example."""
    ids = [t.ndim == 2 and t.dtype == torch.int64 and int(t.max()) > 1 for t in tensors]
    shifts = [torch.arange(len(t)).unsqueeze(1) for t in tensors]
    return tuple((t + s) % 100 if i else t for t, s, i in zip(tensors, shifts, ids, strict=True))


VARIANTS: tuple[tuple[bool | None, dict[str, bool]], ...] = (
    (None, {}),
    (False, {"foreach": False}),
    (True, {"foreach": True}),
    (None, {"fused": True}),
)  # foreach of clip_grad_norm_, options of AdamW


def train_step(payload: dict[str, Any]) -> dict[str, Any]:
    """Gradients, clipped norm and one AdamW step on 2 x 2 ranks; errors relative to the largest value."""
    names, options = payload["names"], payload.get("fsdp", {})
    if options.get("offload"):
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    mesh = grid_of((2,) * len(names), tuple(names))
    build = find(payload["builder"]) if "builder" in payload else registry.build
    model, args, kwargs = build(payload["model"])
    copies = 2 ** (len(names) - 2)  # as many examples as data-parallel ranks
    args = tuple(_float64(a).repeat(copies, *[1] * (a.ndim - 1)) for a in args)
    kwargs = {k: _float64(v).repeat(copies, *[1] * (v.ndim - 1)) for k, v in kwargs.items()}
    args, kwargs = _varied(args), dict(zip(kwargs, _varied(tuple(kwargs.values())), strict=True))
    model = model.double()
    expected = copy.deepcopy(model)
    autotp.shard(model, mesh, sample=(args, kwargs), fsdp=options or True)
    before = [n for n, _ in model.named_parameters()]
    kept = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = sum(c << i for i, c in enumerate(reversed(coordinate[:-1])))
    part = slice(place, place + 1)
    _loss(expected(*args, **kwargs)).backward()
    _loss(model(*(a[part] for a in args), **{k: v[part] for k, v in kwargs.items()})).backward()
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    largest = max(float(q.grad.abs().max()) for _, q in pairs if q.grad is not None)
    gradient = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs if q.grad is not None)
    held = sum(local(p).numel() for p, _ in pairs) / sum(q.numel() for _, q in pairs)
    return {
        "kept": kept,
        "names": before == [n for n, _ in model.named_parameters()],
        "gradient": gradient / largest,
        "held": held,
        **_clipped_steps(model, expected),
    }


def _clipped_steps(model: nn.Module, expected: nn.Module) -> dict[str, list[float]]:
    """Errors of the clipped norm, and of the parameters after a step; each variant from the same start."""
    tensors = [t for m in (model, expected) for p in m.parameters() for t in (p, p.grad) if t is not None]
    start = [local(t).clone() for t in tensors]
    norms, steps = [], []
    for foreach, options in VARIANTS:
        with torch.no_grad():
            for t, value in zip(tensors, start, strict=True):
                local(t).copy_(value)
        found = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=foreach) for m in (model, expected)]
        for m in (model, expected):
            torch.optim.AdamW(m.parameters(), lr=1e-2, **options).step()
        norm = float(found[0].full_tensor()), float(found[1])  # type: ignore[operator]
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        norms.append(abs(norm[0] - norm[1]) / norm[1])
        steps.append(max(float((p.full_tensor() - q).abs().max()) for p, q in pairs))  # type: ignore[attr-defined]
    return {"norms": norms, "steps": steps}


def with_policies(payload: object) -> dict[str, Any]:
    """Options of ``fully_shard``: gradients in bfloat16 computation, parameters kept on the CPU and not resharded."""
    mesh = grid_of((2, 2), ("dp", "tp"))
    model, args, kwargs = registry.build("hf:llama")
    expected = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "reshard_after_forward": False,
    }
    autotp.shard(model, mesh, sample=(args, kwargs), fsdp=options)
    half = mesh["dp"].get_local_rank()
    out = model(**{k: v[half : half + 1] for k, v in kwargs.items()}).logits
    out.float().square().mean().backward()
    want = expected.bfloat16()(**{k: v[half : half + 1] for k, v in kwargs.items()}).logits.float()
    try:
        autotp.shard(registry.build("hf:llama")[0], mesh, sample=(args, kwargs), fsdp={"mixed": policy})
        refused = ""
    except autotp.AutotpError as error:
        refused = str(error)
    return {
        "dtype": str(out.dtype),
        "error": float((out.float() - want).abs().max() / want.abs().max()),
        "gradients": {str(p.grad.dtype) for p in model.parameters() if p.grad is not None},
        "wrapped": sum(isinstance(m, FSDPModule) for m in model.modules()),
        "refused": refused,
    }
