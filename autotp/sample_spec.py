"""Example inputs as text: ``input_ids=int64[2,7]<128, x=float32[2,3,224,224]``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autotp.errors import SpecError

_ITEM = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<value>\S.*)", re.S)
_TENSOR = re.compile(r"(?P<dtype>[A-Za-z_]\w*)\s*\[(?P<size>[^\]]*)\]\s*(?:<\s*(?P<bound>\S+))?")
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)} | {"int": torch.int64}
_WORDS = {"true": True, "false": False, "none": None}
_HELP = "Write [NAME=]DTYPE[SIZE,...], as in input_ids=int64[2,7]<128 or float32[2,3,224,224]; separate by commas."
_SMALL = 8  # bound of integers without one: below the rows of nearly any embedding


def parse_sample(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read (args, kwargs) from text. Integers are random below ``<N`` (default 8), floats normal, booleans true.

    Plain numbers, ``true``, ``false`` and ``none`` are passed as they are.

    Raises:
        SpecError: with the part that cannot be read.
    """
    generator = torch.Generator().manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for item in re.split(r"[,;](?![^\[]*\])", text):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise SpecError(f"sample {text!r}: an input is empty. {_HELP}")
        value = _value(match["value"].strip(), text, generator)
        if match["name"] is None:
            if kwargs:
                raise SpecError(f"sample {text!r}: {item.strip()!r} has no name but follows an input that has one.")
            args.append(value)
        elif match["name"] in kwargs:
            raise SpecError(f"sample {text!r}: {match['name']!r} is given twice.")
        else:
            kwargs[match["name"]] = value
    return tuple(args), kwargs


def format_sample(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The same notation for given inputs, without the content of integers."""
    return ", ".join([*map(_show, args), *(f"{name}={_show(value)}" for name, value in kwargs.items())])


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_show, value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_show(part)}" for key, part in value.items()) + "}"
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def _value(item: str, text: str, generator: torch.Generator) -> Any:
    match = _TENSOR.fullmatch(item)
    if match is None:
        return _literal(item, text)
    name = match["dtype"]
    if name not in _DTYPES:
        near = difflib.get_close_matches(name, _DTYPES, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else " Known: float32, bfloat16, int64, bool, ..."
        raise SpecError(f"sample {text!r}: {name!r} is no dtype.{hint}")
    sizes = [part.strip() for part in match["size"].split(",") if part.strip()]
    if bad := [part for part in sizes if not part.isdigit() or int(part) < 1]:
        raise SpecError(f"sample {text!r}: the size {bad[0]!r} in {item!r} is not a positive whole number.")
    return _random(item, text, _DTYPES[name], [int(part) for part in sizes], match["bound"], generator)


def _random(
    item: str, text: str, dtype: torch.dtype, sizes: list[int], bound: str | None, generator: torch.Generator
) -> Tensor:
    number = dtype.is_floating_point or dtype.is_complex or dtype is torch.bool
    if bound is not None and (number or not bound.isdigit() or int(bound) < 1):
        kind = "only integers have a bound" if number else f"the bound {bound!r} is not a positive whole number"
        raise SpecError(f"sample {text!r}: in {item!r}, {kind}.")
    if dtype is torch.bool:
        return torch.ones(sizes, dtype=dtype)
    if number:
        return torch.randn(sizes, generator=generator).to(dtype)
    return torch.randint(int(bound or _SMALL), sizes, generator=generator).to(dtype)


def _literal(item: str, text: str) -> Any:
    if item.lower() in _WORDS:
        return _WORDS[item.lower()]
    for kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            continue
    raise SpecError(f"sample {text!r}: cannot read {item!r}. {_HELP}")
