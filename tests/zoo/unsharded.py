"""The unsharded run of an entry: made once, and read by all ranks from a file that they map.

So that memory holds a model, its gradients and its activations once beside the ranks, not once per rank.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from autotp.measuring import Inputs, Run, Settings, quieten, run
from autotp.promotion import widen_model
from autotp.ranks import RankPool

Known = tuple[nn.Module, Run]


def prepare(model: nn.Module) -> nn.Module:
    """The model in float64 and without the dropout that no mode sees, in place."""
    widen_model(model, Settings().dtype)
    quieten(model)
    return model


def write(model: nn.Module, inputs: Inputs, folder: Path, seconds: float) -> str:
    """Run the model in a fork, keep what it gives in `folder`, and its weights there too; why not, if it does not run.

    From then on the weights are those of the file, which memory may drop and read again.
    """
    with RankPool(1, timeout=seconds) as pool:
        why = pool.run_forked(_run, (model, inputs, folder))[0]
    if why:
        return str(why)
    torch.save({name: p.data for name, p in model.named_parameters()}, folder / "weights.pt")
    saved = torch.load(folder / "weights.pt", mmap=True)
    for name, p in model.named_parameters():
        p.data = saved[name]
    return ""


def read(model: nn.Module, folder: Path) -> Known:
    """A model of the same weights with their gradients, and the unsharded run."""
    tensors = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    reference = copy.deepcopy(model, {**tensors, **{id(b): b.clone() for b in model.buffers()}})
    saved = torch.load(folder / "unsharded.pt", mmap=True)
    for name, parameter in reference.named_parameters():
        parameter.grad = saved["gradients"].get(name)
    for name, buffer in reference.named_buffers():
        buffer.copy_(saved["buffers"][name])
    leaves = {}
    for name, (leaf, gradient) in saved["leaves"].items():
        leaves[name] = leaf.requires_grad_()
        leaf.grad = gradient
    kind = torch.load(folder / "kind.pt", weights_only=False)
    return reference, Run(outputs=saved["outputs"], kind=kind, leaves=leaves)


def _run(payload: tuple[nn.Module, Inputs, Path]) -> str:
    model, inputs, folder = payload
    try:
        found = run(model, inputs, Settings())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    values = {
        "outputs": {name: t.detach() for name, t in found.outputs.items()},
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "buffers": dict(model.named_buffers()),
        "leaves": {name: (leaf.detach(), leaf.grad) for name, leaf in found.leaves.items()},
    }
    torch.save(values, folder / "unsharded.pt")
    torch.save(found.kind, folder / "kind.pt")
    return ""
