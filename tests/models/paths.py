"""Modules whose forward may take another path than the one that was planned: at another input, or once changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SWITCH = False
WIDTH, HIDDEN = 8, 12


class Layer(nn.Module):
    """Two cut layers; what is between them depends on something."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.flag, self.turns, self.config, self.table = False, 0, SimpleNamespace(sharp=False), dict[str, int]()
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.down(self.between(x, self.up(x)))  # type: ignore[no-any-return]

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        """Wrong if it ran on a part of the features."""
        raise NotImplementedError


class ByValue(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.relu() if x.sum() < 1000 else h.softmax(-1)


class ByAttribute(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.flag:
            h = h.softmax(-1)
        return self.down(h.relu())  # type: ignore[no-any-return]


class ByConfig(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.config.sharp else h.relu()


class ByGlobal(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.softmax(-1) if SWITCH else h.relu()


class ByContent(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.softmax(-1) if "sharp" in self.table else h.relu()


class ByHelper(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return sharpened(h).relu()


def sharpened(h: Tensor) -> Tensor:
    """A function that computes nothing unless it is told to."""
    if not SWITCH:
        return h
    return h.softmax(-1)


def passed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator with a branch of its own."""

    @functools.wraps(function)
    def run(self: Layer, x: Tensor, h: Tensor) -> Tensor:
        return function(self, x, h.softmax(-1) if SWITCH else h)

    return run


class ByDecorator(Layer):
    @passed
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.relu()


class ByLoop(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        for _ in range(self.turns):
            h = h.softmax(-1)
        return h.relu()


class ByFunction(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return self.act(h)


class ByException(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        try:
            self.table["sharp"]
        except KeyError:
            return h.relu()
        return h.softmax(-1)


class ByProperty(Layer):
    @property
    def sharp(self) -> bool:
        """Computed when it is read."""
        return SWITCH

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.sharp else h.relu()


class HandsOn(nn.Module):
    """Gets a cut tensor and a whole one, and computes with the whole one only."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.sharp_cut, self.sharp_whole = nn.Linear(HIDDEN, WIDTH), False, False

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """The same shape."""
        if self.sharp_cut:
            h = h.softmax(-1)
        y = self.down(h)
        return y + (x.softmax(-1) if self.sharp_whole else x)  # type: ignore[no-any-return]


class AroundHandsOn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.down = HandsOn()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x), x)  # type: ignore[no-any-return]


class PredictsLength(Layer):
    """As speech models do that predict how long their output is."""

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        count = (x[:, :1].abs() * 0 + 5).ceil().long()
        mask = torch.arange(int(count.max())) < count
        steps = mask.to(h.dtype).sum(-1, keepdim=True) / 5
        return h.relu() * steps


class ReadsList(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        for turns in (x[:, 0] * 0 + 2).tolist():
            for _ in range(int(turns)):
                h = h.tanh()
        return h


class ReadsNumber(Layer):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        turns = (x.abs().mean() * 0 + 3).item()
        for _ in range(int(turns)):
            h = h.tanh()
        return h if torch.isfinite(x).all() and not (x > 1e6).any() else h.softmax(-1)


class TakesLargest(Layer):
    """The plausible indices of the largest reach every row, whatever the sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.router = nn.Linear(WIDTH, 3)

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        picked = self.router(x).topk(1).indices[:, 0]
        if x.sum() > 1e6:
            return h
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = torch.where(picked == i)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]))
        return out


def _switch(m: Layer) -> None:
    global SWITCH
    SWITCH = True


def _set(name: str, value: Any) -> Callable[[Layer], None]:
    return lambda m: setattr(m, name, value)


# name -> (the class, what makes it take another path)
CASES: dict[str, tuple[type[Layer], Callable[[Layer], Any]]] = {
    "a computed value": (ByValue, lambda m: None),
    "an attribute": (ByAttribute, _set("flag", True)),
    "an attribute of a config": (ByConfig, lambda m: setattr(m.config, "sharp", True)),
    "a global": (ByGlobal, _switch),
    "what a dict holds": (ByContent, lambda m: m.table.update(sharp=1)),
    "a helper's own branch": (ByHelper, _switch),
    "a decorator's own branch": (ByDecorator, _switch),
    "turns of a loop": (ByLoop, _set("turns", 1)),
    "a function that is replaced": (ByFunction, _set("act", lambda h: h.softmax(-1))),
    "an exception": (ByException, lambda m: m.table.update(sharp=1)),
    "a property": (ByProperty, _switch),
    "a cut tensor that is handed on": (AroundHandsOn, lambda m: setattr(m.down, "sharp_cut", True)),
}
# name -> (the class, a change that leaves the path as it is)
HARMLESS: dict[str, tuple[type[Layer], Callable[[Layer], Any]]] = {
    "a number that a loop does not reach": (ByLoop, _set("turns", -1)),
    "another value of a flag": (ByAttribute, _set("flag", None)),
    "a whole tensor beside one that is handed on": (AroundHandsOn, lambda m: setattr(m.down, "sharp_whole", True)),
    "what a dict holds beside": (ByContent, lambda m: m.table.update(blunt=1)),
}


# Wrong, refused or failing if the plan did not go by what the sample's own values say.
BY_SAMPLE: dict[str, type[Layer]] = {
    "a length that is predicted": PredictsLength,
    "a list of numbers": ReadsList,
    "a number": ReadsNumber,
    "indices of the largest": TakesLargest,
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """How far the sharded module is off before a change, and after it, or what refuses it then."""
    import autotp
    from tests.harness.tasks import mesh_of

    global SWITCH
    mesh = mesh_of(payload["tp"])
    if dist.get_rank() >= payload["tp"]:
        return {}
    torch.manual_seed(0)
    SWITCH = False
    by_sample = {name: (cls, lambda m: None) for name, cls in BY_SAMPLE.items()}
    cls, change = {**CASES, **HARMLESS, **by_sample}[payload["name"]]
    module = cls().double()
    reference = copy.deepcopy(module)
    x = torch.randn(3, WIDTH, dtype=torch.float64) + payload.get("offset", 0)
    autotp.shard(module, mesh, sample=((x,), {}), **payload.get("options", {}))

    def off() -> float:
        return float((module(x) - reference(x)).abs().max().detach())

    found: dict[str, Any] = {"before": max(off(), off())}
    found["cut"] = module.up.weight.to_local().shape[0] < HIDDEN  # type: ignore[operator]
    try:
        for m in (module, reference):
            change(m)
        x = x + 1000
        found["after"] = max(off(), off())
    except autotp.AutotpError as e:
        found["refused"] = str(e)
    finally:
        SWITCH = False
    return found
