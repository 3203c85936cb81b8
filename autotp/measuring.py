"""Sharded against unsharded, on real numbers: what one rank of a process group does for `verify`.

Every rank runs the unsharded copy by itself and the sharded model together with the others. All values are gathered
and compared on every rank, so that a wrong value on any of them shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from autotp import comparing, structures
from autotp.errors import VerifyError
from autotp.mesh import resolve_mesh
from autotp.promotion import Promoted, widen, widen_model

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Apply = Callable[[nn.Module, DeviceMesh, Inputs], nn.Module]
SEED = 20240


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure: `promote` keeps float64 all the way, `dropout=False` takes dropout out.

    `step` compares parameters and outputs after one step of AdamW too.

    `obstacle` is what came in the way of promotion, if it was asked for and could not be had.
    """

    dtype: torch.dtype = torch.float64
    promote: bool = True
    backward: bool = True
    step: bool = True
    dropout: bool = False
    obstacle: str = ""

    def mode(self) -> AbstractContextManager[Any]:
        """The mode that both runs and the planning happen in; none if there is nothing for it to do."""
        if not self.promote and self.dropout:
            return nullcontext()
        return Promoted(torch.float64 if self.promote else None, dropout=self.dropout)

    @property
    def forward_limit(self) -> float:
        """Largest error of an output that is still rounding."""
        return 1e-10 if self.promote else 1e-5

    @property
    def gradient_limit(self) -> float:
        """Largest error of a gradient that is still rounding."""
        return 1e-9 if self.promote else 1e-4


@dataclass(kw_only=True)
class Figures:
    """What was measured; errors are relative, infinite where something cannot be compared."""

    settings: Settings
    outputs: dict[str, float] = field(default_factory=dict)
    input_gradients: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    optimizer_error: float = 0.0
    spread: float = 0.0
    cut_share: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_bad: str = ""

    @property
    def forward_error(self) -> float:
        """The largest error of any output."""
        return max(self.outputs.values(), default=0.0)

    @property
    def gradient_error(self) -> float:
        """The largest error of any gradient."""
        return max([*self.gradients.values(), *self.input_gradients.values()], default=0.0)

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks have the same outputs and the same values of what is not cut."""
        return self.spread <= self.settings.gradient_limit

    @property
    def ok(self) -> bool:
        """Whether all differences are rounding."""
        right = (
            self.forward_error <= self.settings.forward_limit and self.gradient_error <= self.settings.gradient_limit
        )
        return right and self.optimizer_error <= self.settings.gradient_limit and self.ranks_agree and not self.problems


@dataclass(kw_only=True)
class Run:
    """One forward and backward."""

    outputs: dict[str, Tensor]
    kind: type
    leaves: dict[str, Tensor]

    def input_gradients(self) -> dict[str, Tensor | None]:
        """Gradients of the float inputs."""
        return {name: leaf.grad for name, leaf in self.leaves.items()}


def run(model: nn.Module, inputs: Inputs, settings: Settings, *, backward: bool = True) -> Run:
    """Run the model on its own copies of the inputs."""
    leaves: dict[str, Tensor] = {}
    backward = backward and settings.backward
    inputs = _copied(inputs)
    named = [*structures.named_tensors(inputs[0], "args"), *structures.named_tensors(inputs[1])]
    names = {id(tensor): name for name, tensor in named}

    def own(original: Tensor) -> Tensor:
        tensor = widen(original, settings.dtype).clone()
        if not (backward and structures.differentiable(tensor)):
            return tensor
        leaves[names[id(original)]] = tensor.requires_grad_()
        return tensor.clone()  # not a leaf, so that the model may write into it

    with settings.mode(), torch.set_grad_enabled(backward), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        args, kwargs = structures.map_tensors(inputs, own)
        output = model(*args, **kwargs)
        loss = structures.weighted_sum(output) if backward else None
        if loss is not None and loss.requires_grad:
            # By the edge, because `loss.backward()` would switch the mode off, also for what checkpoints recompute.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
    return Run(outputs=dict(structures.named_tensors(output)), kind=type(output), leaves=leaves)


def _copied(inputs: Inputs) -> Inputs:
    """Nothing a model writes into, caches included, may reach the next run."""
    return copy.deepcopy(structures.map_tensors(inputs, Tensor.detach))


def reference_run(model: nn.Module, inputs: Inputs, settings: Settings) -> tuple[nn.Module, Run, Settings]:
    """The unsharded copy and what it gives; without promotion, in float32, if the model does not run with it."""
    try:
        twin = widen_model(copy.deepcopy(model), settings.dtype)
        return twin, run(twin, inputs, settings), settings
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not settings.promote:
            raise VerifyError(f"the unsharded model does not run on this sample: {text}") from error
    lower = replace(settings, dtype=torch.float32, promote=False, obstacle=text.splitlines()[0])
    return reference_run(model, inputs, lower)


def measure(
    model: nn.Module,
    inputs: Inputs,
    mesh: DeviceMesh,
    apply: Apply,
    settings: Settings,
    group: dist.ProcessGroup | None = None,
    known: tuple[nn.Module, Run] | None = None,
) -> Figures:
    """Shard `model` in place with `apply` and compare; the same call on every rank of `mesh`.

    With ``known``, an unsharded model with what its run left in it, and that run, with these settings: for models that
    memory does not hold several times. No copies are made, and no optimizer step is compared.
    """
    group = group or mesh.get_group((resolve_mesh(mesh).tp_name or "tp") if mesh.ndim > 1 else None)
    if other := comparing.first_other((tensor for _, tensor in structures.named_tensors(inputs)), group):
        raise VerifyError(
            f"inputs differ between TP ranks 0 and {other}: all ranks of a tensor-parallel group need the same inputs"
        )
    if other := comparing.first_other(comparing.state(model).values(), group):
        raise VerifyError(
            f"weights differ between TP ranks 0 and {other} before sharding: seed all ranks alike, "
            "or load the same checkpoint on all, to have something to compare with"
        )
    if not settings.dropout:
        quieten(model)
    if known is None:
        reference, expected, settings = reference_run(model, inputs, settings)
        widen_model(model, settings.dtype)
    else:
        reference, expected = known
    before, names = (
        comparing.snapshot(model) if known is None else _as_built(reference, model),
        comparing.identity(model),
    )
    with settings.mode():
        sharded = apply(model, mesh, structures.map_tensors(inputs, lambda t: widen(t.detach(), settings.dtype)))
    pair = _Pair(reference, sharded, inputs, settings, group, Figures(settings=settings))
    pair.compare_state(before, names)
    actual = run(sharded, inputs, settings)
    pair.compare_outputs(expected, actual)
    pair.compare_gradients(expected, actual)
    pair.compare_buffers()
    pair.compare_ranks(actual)
    pair.locate()
    pair.figures.problems = comparing.shared_problems(pair.figures.problems, group)
    if known is not None:
        pair.figures.notes.append("no optimizer step was compared: the unsharded run was made beforehand")
    elif settings.backward and settings.step and not pair.figures.problems:
        pair.take_step()
    return pair.figures


def _as_built(reference: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a reference that was run already, which are the model's, and the model's buffers."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}
    return {name: buffers.get(name, value) for name, value in comparing.state(reference).items()}


def quieten(model: nn.Module) -> None:
    """Recurrent layers hand their dropout to a kernel, where no mode sees it."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


@dataclass
class _Pair:
    """The unsharded and the sharded model, and what is found by comparing them."""

    reference: nn.Module
    sharded: nn.Module
    inputs: Inputs
    settings: Settings
    group: dist.ProcessGroup
    figures: Figures

    def compare_state(self, before: dict[str, Tensor], names: dict[str, tuple[str, bool, str]]) -> None:
        """Class, names, sharing and values must be the original ones."""
        self.figures.cut_share = comparing.cut_share(self.sharded)
        old, new = type(self.reference).__name__, type(self.sharded).__name__
        problems = [] if type(self.sharded) is type(self.reference) else [f"the class was {old}, is {new}"]
        now = comparing.identity(self.sharded)
        for name in dict.fromkeys([*names, *now]):
            if names.get(name) != now.get(name):
                was, became = names.get(name, "absent"), now.get(name, "absent")
                problems.append(f"{name}: (first name, requires_grad, dtype) was {was}, is {became} after sharding")
        self.figures.problems += problems + comparing.state_problems(before, self.sharded, self.group)

    def compare_outputs(self, expected: Run, actual: Run) -> None:
        """Values and types."""
        self.figures.outputs = self._errors(expected.outputs, actual.outputs)
        if expected.kind is not actual.kind:
            was, became = expected.kind.__name__, actual.kind.__name__
            self.figures.problems.append(f"the output was of type {was}, is {became} after sharding")
        for name, tensor in actual.outputs.items():
            if type(tensor) is not type(expected.outputs.get(name)):
                self.figures.problems.append(f"output {name} is a {type(tensor).__name__}")

    def compare_gradients(self, expected: Run, actual: Run) -> None:
        """Gradients of all parameters and of the inputs."""
        if not self.settings.backward:
            return
        wanted, found = _gradients(self.reference), _gradients(self.sharded)
        self.figures.gradients = self._errors(wanted, found)
        self.figures.input_gradients = self._errors(expected.input_gradients(), actual.input_gradients())
        if not any(gradient is not None for gradient in wanted.values()):
            self.figures.notes.append("no parameter of the model gets a gradient on this sample")

    def compare_buffers(self) -> None:
        """What the forward left in buffers, as running statistics."""
        errors = self._errors(dict(self.reference.named_buffers()), dict(self.sharded.named_buffers()))
        wrong = {name: error for name, error in errors.items() if error > self.settings.gradient_limit}
        self.figures.problems += [
            f"buffer {name} is {error:.2g} off after the forward" for name, error in wrong.items()
        ]

    def compare_ranks(self, actual: Run) -> None:
        """What every rank has whole must be the same on all."""
        parts: list[comparing.Values] = [actual.outputs, dict(self.sharded.named_parameters())]
        parts += [dict(self.sharded.named_buffers()), _gradients(self.sharded)]
        self.figures.spread = comparing.spread(parts, self.group)

    def locate(self) -> None:
        """Name the first wrong module, or where gradients begin to be wrong."""
        figures, limit = self.figures, self.settings.gradient_limit
        if figures.forward_error > self.settings.forward_limit:
            name = comparing.first_bad_module(
                self.reference, self.sharded, self._again, self.settings.forward_limit, self.group
            )
            figures.first_bad = f"{name}: its output differs" if name else ""
        elif figures.gradient_error > limit:
            wrong = {name: error for name, error in figures.gradients.items() if error > limit}
            wrong = wrong or {name: error for name, error in figures.input_gradients.items() if error > limit}
            name = comparing.last_reached(self.reference, self._again, list(wrong))
            figures.first_bad = f"{name}: its gradient differs, all outputs are right"

    def take_step(self) -> None:
        """Parameters, outputs and buffers after a step of AdamW; its large eps keeps rounding of gradients small."""
        both = (self.reference, self.sharded)
        for model in both:
            torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3).step()
        errors = self._errors(dict(both[0].named_parameters()), dict(both[1].named_parameters()))
        outputs = self._errors(self._again(both[0]).outputs, self._again(both[1]).outputs)
        buffers = self._errors(dict(both[0].named_buffers()), dict(both[1].named_buffers()))
        self.figures.optimizer_error = max([*errors.values(), *outputs.values(), *buffers.values()], default=0.0)

    def _again(self, model: nn.Module) -> Run:
        return run(model, self.inputs, self.settings, backward=False)

    def _errors(self, expected: comparing.Values, actual: comparing.Values) -> dict[str, float]:
        found, problems = comparing.errors(expected, actual, self.group)
        self.figures.problems += problems
        return found


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}
