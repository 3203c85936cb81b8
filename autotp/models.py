"""Turn a model spec of the command line into a model whose parameters are on meta.

::

    torchvision:NAME | timm:NAME | hf:DIR_OR_CONFIG_JSON | package.module:factory | file.py:factory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp import meta_build
from autotp.errors import AutotpError, SpecError
from autotp.model_sources import factory, guarded, hf, timm, torchvision

NOISE = 0.02  # standard deviation of the noise on constant parameters

_FORMS = "torchvision:NAME, timm:NAME, hf:DIR_OR_CONFIG_JSON, package.module:factory or file.py:factory"
_LIBRARIES: dict[str, Callable[[str], Callable[[], Any]]] = {"torchvision": torchvision, "timm": timm, "hf": hf}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model built from `spec`: parameters on meta, buffers real; `sample` is what its factory gave, if anything."""

    model: nn.Module
    sample: Any
    name: str
    spec: str


def load_spec(spec: str) -> LoadedModel:
    """Build the model that `spec` names, without weights and without memory for its parameters.

    Raises:
        SpecError: for every mistake in the spec, the config file or the user's factory.
    """
    name, constructor = _constructor(spec)
    model, sample = _split(guarded(spec, lambda: meta_build.build(constructor)), spec)
    return LoadedModel(model=model, sample=sample, name=name, spec=spec)


def materialize(loaded: LoadedModel, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the same model for real on CPU, with weights seeded by `seed`.

    Parameters whose values are all equal (biases, norm weights) get a little seeded noise: with a bias of zero, one
    that is added twice would not show.
    """
    _, constructor = _constructor(loaded.spec)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        try:
            model, _ = _split(guarded(loaded.spec, constructor), loaded.spec)
        except MemoryError:
            raise AutotpError(
                f"{loaded.name}: its parameters do not fit into the memory of this machine. "
                "Verify a smaller config of the same family: the plan does not depend on depth or width."
            ) from None
    if dtype is not None:
        model.to(dtype)
    _add_noise(model, seed)
    return model


def _constructor(spec: str) -> tuple[str, Callable[[], Any]]:
    """The short name of the model, and the function that builds it under whatever device is current."""
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in _LIBRARIES:
        if not rest:
            raise SpecError(f"{spec!r} names no model. Write one of: {_FORMS}.")
        return _short_name(prefix, rest), _LIBRARIES[prefix](rest)
    # The last colon, because a path may hold one before ("C:\model.py:make").
    target, colon, attribute = spec.rpartition(":")
    if not colon and not spec.endswith(".py"):
        raise SpecError(f"{spec!r} is not a model. Write one of: {_FORMS}.{_meant(spec)}")
    target, attribute = (target, attribute) if colon else (spec, "")
    return attribute, factory(target, attribute)


def _short_name(prefix: str, rest: str) -> str:
    """The name in a registry; of a config the folder or file it lies in."""
    if prefix != "hf":
        return rest
    path = Path(rest).expanduser().resolve()
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def _meant(spec: str) -> str:
    """A hint for a bare name or path."""
    if spec.endswith(".json") or Path(spec, "config.json").is_file():
        return f" Did you mean hf:{spec}?"
    for prefix, source in (("torchvision", torchvision), ("timm", timm)):
        try:
            source(spec)
        except AutotpError:
            continue
        return f" Did you mean {prefix}:{spec}?"
    return ""


def _split(built: Any, spec: str) -> tuple[nn.Module, Any]:
    """`built` as (model, sample), or an error that says what came instead."""
    if isinstance(built, nn.Module):
        return built, None
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        return built[0], built[1]
    got = type(built).__name__
    if isinstance(built, tuple):
        got = f"a tuple of ({', '.join(type(part).__name__ for part in built)})"
    raise SpecError(f"{spec}: returned {got}, not a torch.nn.Module or a pair (module, sample).")


def _add_noise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.min() == parameter.max():
                noise = torch.randn(parameter.shape, generator=generator) * NOISE
                parameter.add_(noise.to(parameter.dtype))
