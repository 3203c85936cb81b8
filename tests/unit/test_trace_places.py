"""Where calls are found in the user's code, and what must not change it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp import caches, torch_frames


def _places(n: int) -> list[object]:
    def inner(sites: list[object]) -> tuple[object, ...]:
        sites.append(torch_frames.call_site(1)[:2])
        return ()

    sites: list[object] = []
    for _ in range(n):
        tuple(inner(sites) for _ in range(1))
    return sites


def test_the_place_of_a_call_stays_when_python_warms_up() -> None:
    assert len(set(_places(200))) == 1


def _site() -> tuple[object, ...]:
    return torch_frames.call_site(1)[:2]


class _Called:
    """Calls of it are made by C code, of a plain function by Python itself."""

    def __call__(self) -> tuple[object, ...]:
        return torch_frames.call_site(1)[:2]


def test_the_place_of_a_call_is_the_same_whatever_is_called() -> None:
    def call(f: Callable[[], tuple[object, ...]]) -> object:
        return f()[1]

    assert call(_site) == call(_Called()) == call(functools.partial(_site))


@functools.lru_cache(maxsize=2)
def _remembered(n: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(n)}


@functools.lru_cache
def _number(n: int) -> int:
    return n


@functools.lru_cache
def _mesh(n: int) -> DeviceMesh:
    mesh = DeviceMesh.__new__(DeviceMesh)  # as one that was made, which needs a process group
    mesh.ranks = torch.arange(n)
    return mesh


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) + _remembered(_number(16))["x"]).relu())


def test_functions_that_remember_tensors_are_emptied_and_others_kept() -> None:
    _remembered(3), _number(3), _mesh(2)
    caches.find_cached_functions()
    caches.forget_tensors()
    assert _mesh.cache_info().currsize == 1, "a mesh made again by some ranks leaves the others waiting"
    assert _remembered.cache_info().currsize == 0
    assert _number.cache_info().currsize > 0


def test_planning_leaves_no_empty_tensors_in_functions_that_remember() -> None:
    plan = autotp.plan(_Remembers(), tp=2, sample=torch.zeros(2, 8))
    assert plan.cut_share == 1.0
    assert _remembered(16)["x"].device.type == "cpu"


class _RemembersByItself(nn.Module):
    """Each object remembers for itself, as a cell of a notebook does that is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.places = functools.lru_cache(lambda n: torch.linspace(0.0, 1.0, n) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.places(16))


def test_functions_made_after_an_earlier_plan_are_found() -> None:
    for _ in range(2):
        model = _RemembersByItself()
        assert autotp.plan(model, tp=2, sample=torch.zeros(2, 8)).cut_share == 1.0
        assert model.places(16).device.type == "cpu"


class _Rebuilds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        old, self.layer = self.layer, nn.Linear(8, 8)
        return self.layer(old(x))


def test_a_forward_that_replaces_modules_is_refused() -> None:
    with pytest.raises(autotp.AutotpError, match=r"layer: the forward puts another module"):
        autotp.plan(_Rebuilds(), tp=2, sample=torch.zeros(2, 8))
