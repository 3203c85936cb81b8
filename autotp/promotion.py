"""Run a model in float64 throughout, so that rounding cannot hide a wrong value.

Models cast parts of themselves to float32 (`x.float()`, `softmax(..., dtype=torch.float32)`). Inside `Promoted`
such casts give float64 instead. `Promoted` can also take dropout out, wherever it is called from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_CASTS = {Tensor.float: torch.float64, Tensor.half: torch.float64, Tensor.bfloat16: torch.float64}
_CASTS[Tensor.cfloat] = torch.complex128  # type: ignore[attr-defined]
_CASTS[Tensor.chalf] = torch.complex128
_TYPES = {"FloatTensor": "DoubleTensor", "HalfTensor": "DoubleTensor", "BFloat16Tensor": "DoubleTensor"}
# `view(dtype)` reads the same bits as another type: it must keep its argument.
_BITWISE = {Tensor.view, torch.frombuffer}
# What these make may have the type of a numpy array.
_FROM_OUTSIDE = {torch.tensor, torch.as_tensor}
_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
# Where these take their dropout probability, if not by keyword.
_DROPOUT_PLACES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
# By name: the function that arrives here is not the object that `functional` holds.
_GROUPED = {"grouped_mm", "_grouped_mm"}


class Promoted(TorchFunctionMode):
    """A mode in which casts to a lower float type give float64, and `dropout=False` makes dropout the identity.

    `dtype=None` leaves the types alone.
    """

    def __init__(self, dtype: torch.dtype | None = torch.float64, *, dropout: bool = True) -> None:
        super().__init__()
        self._promote = dtype is torch.float64
        self._dropout = dropout
        self._default: torch.dtype | None = None

    def __enter__(self) -> Promoted:
        if self._promote and self._default is None:
            self._default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._default is not None:
            torch.set_default_dtype(self._default)
            self._default = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._dropout:
            if func in _DROPOUTS:
                return args[0] if args else kwargs["input"]
            if kwargs.get("dropout_p"):
                kwargs["dropout_p"] = 0.0
            elif len(args) > (place := _DROPOUT_PLACES.get(func, len(args))):
                args = (*args[:place], 0.0, *args[place + 1 :])
        if not self._promote or func in _BITWISE:
            return func(*args, **kwargs)
        if func in _CASTS:
            return args[0].to(_CASTS[func], **kwargs)
        if getattr(func, "__name__", "") in _GROUPED:
            return _grouped(*args, **kwargs)
        args = tuple(_widened(value) for value in args)
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        return widen(result) if func in _FROM_OUTSIDE else result


def _grouped(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """`grouped_mm`, whose kernels know no float64: product by product; in bfloat16 where there are no values."""
    if type(a) not in (Tensor, nn.Parameter) or a.is_meta:
        narrow = functional.grouped_mm(a.bfloat16(), b.bfloat16(), offs=offs, **kwargs)
        return narrow.to(a.dtype)
    if offs is None:
        return a @ b
    stops = offs.tolist()
    groups = list(enumerate(zip([0, *stops], stops, strict=False)))
    if a.dim() == b.dim():
        return torch.stack([a[:, start:stop] @ b[start:stop] for _, (start, stop) in groups])
    if a.dim() == 3:
        return torch.cat([a[i] @ b[:, start:stop] for i, (start, stop) in groups], -1)
    rest = a.new_zeros(a.shape[0] - stops[-1], b.shape[-1])
    return torch.cat([*(a[start:stop] @ b[i] for i, (start, stop) in groups), rest])


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, str) and value.startswith("torch.") and value.endswith("Tensor"):
        prefix, _, name = value.rpartition(".")
        return f"{prefix}.{_TYPES.get(name, name)}"
    return value


def widen(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The tensor in `dtype`; complex ones in the complex type that goes with it, others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype is torch.float64 else tensor.dtype)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@torch.no_grad()
def widen_model(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Parameters, buffers and plain tensor attributes to `dtype`, in place; what was shared stays shared."""
    for parameter in model.parameters():
        parameter.data = widen(parameter.data, dtype)
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; keeps the originals alive, so that no id comes again

    def once(tensor: Tensor) -> Tensor:
        return seen.setdefault(id(tensor), (tensor, widen(tensor, dtype)))[1]

    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            module._buffers[name] = once(buffer)
        for name, value in list(vars(module).items()):
            if type(value) is Tensor:
                object.__setattr__(module, name, once(value))
    return model
