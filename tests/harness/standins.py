"""Hand-made ways to shard a small MLP, right and wrong ones, to test the comparison itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    """Two linear layers with a scale of the hidden features, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.down = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)
        self.tied = nn.Linear(16, 5, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("offset", torch.linspace(0, 1, 5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits, by name."""
        hidden = torch.tanh(self.up(x)).float() * self.scale
        y = self.norm(x + self.down(hidden))
        return {"logits": self.head(y) + self.offset, "tied": self.tied(y)}


def build() -> tuple[MLP, Tensor]:
    """The model with fixed weights, and an input."""
    torch.manual_seed(0)
    model = MLP()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model, torch.randn(3, 16)


def right(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """Column and row cut; the gradient of the scale inside the region is summed."""
    group = mesh.get_group()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.scale.register_hook(lambda grad: _summed(grad, group))
    return model


def _summed(grad: Tensor, group: Any) -> Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def scale_gradient_partial(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """Forgets that each rank has only a part of the gradient of the scale."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def norm_off(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """The norm gives something else."""
    right(model, mesh, inputs)
    model.norm.register_forward_hook(lambda module, args, output: output * (1 + 1e-7))
    return model


def weights_changed(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """One weight is not what it was, by a rounding of float32."""
    with torch.no_grad():
        model.head.bias[0] += 1e-12
    return right(model, mesh, inputs)


def ranks_differ(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """A bias that has another value on rank 1."""
    right(model, mesh, inputs)
    with torch.no_grad():
        model.head.bias += mesh.get_local_rank() * 1e-3
    return model


def raises_on_one(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """Rank 1 gives up."""
    if mesh.get_local_rank() == 1:
        raise RuntimeError("rank 1 gives up")
    return right(model, mesh, inputs)


def output_is_dtensor(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """The output is left as a DTensor."""
    right(model, mesh, inputs)

    def wrap(module: nn.Module, args: Any, output: dict[str, Tensor]) -> dict[str, Any]:
        return {**output, "logits": DTensor.from_local(output["logits"], mesh, [Replicate()])}

    model.register_forward_hook(wrap)
    return model


def frozen(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """A parameter has lost its requires_grad."""
    right(model, mesh, inputs)
    model.norm.weight.requires_grad_(False)
    return model


def gradient_on_one_rank(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """Only rank 0 has a gradient of the norm: gathering it naively would wait for ever."""
    right(model, mesh, inputs)
    if mesh.get_local_rank() == 1:
        model.norm.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def untied(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """Two modules no longer share their weight."""
    right(model, mesh, inputs)
    model.tied.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def renamed(model: MLP, mesh: DeviceMesh, inputs: Any) -> MLP:
    """A parameter is found under another name."""
    right(model, mesh, inputs)
    model.gain = model.scale
    del model.scale
    model.__class__ = _Renamed
    return model


class _Renamed(MLP):
    @property
    def scale(self) -> Tensor:
        """The parameter under its old name."""
        return self.gain
