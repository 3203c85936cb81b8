"""Private corners of torch, one of three: torch functions, and switches of dispatch, autograd and modules.

With torch_ops.py and torch_frames.py what recording and running a model stand on; nothing else in autotp touches it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

P = ParamSpec("P")
T = TypeVar("T")

_aten = torch.ops.aten


_METADATA_NAMES = {
    "size", "dim", "ndimension", "stride", "numel", "nelement", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "element_size", "get_device", "is_conj", "is_neg", "is_inference",
    "requires_grad_", "__len__", "__hash__", "__repr__", "has_names", "is_same_size", "is_coalesced",
    "_is_view", "is_shared", "is_pinned", "is_tensor", "result_type", "can_cast", "is_set_to", "__dlpack_device__",
    "retain_grad", "untyped_storage", "storage", "data_ptr", "__deepcopy__", "__reduce_ex__",
}  # fmt: skip
_GRADIENTS = {
    torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip
_KEPT_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag", "data"}


def unwatched(function: Callable[P, T]) -> Callable[P, T]:
    """Code of ours that computes with tensors of its own: modes of the caller need not see each of its calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


@functools.cache
def is_metadata(func: Any) -> bool:
    """Whether a torch function only reads a tensor's shape, dtype and the like."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner not in _KEPT_PROPERTIES or name != "__get__"
    return name in _METADATA_NAMES


def reads_gradients(func: Any) -> bool:
    """Whether a torch function computes gradients, or will be given them: on a rank they may be a part, or a term."""
    return func in _GRADIENTS


def asks_for_gradients(func: Any) -> bool:
    """Whether it is ``tensor.requires_grad``."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func, "__self__", None) is Tensor.requires_grad


def is_wrapped(args: Iterable[Any]) -> bool:
    """Whether a call is made under ``torch.vmap`` and the like, on tensors that stand for slices of others."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(
        is_wrapped(x) if isinstance(x, (tuple, list)) else isinstance(x, Tensor) and wrapped(x)  # an index is a tuple
        for x in args
    )


@functools.cache
def opened(func: Any) -> Any | None:
    """A torch function whose Python body is to be seen through: the same body, without its own dispatch check.

    ``F.multi_head_attention_forward`` holds views with absolute sizes, which a rank must be able to change.
    """
    if func is not F.multi_head_attention_forward:
        return None
    never = {n: (lambda *a, **k: False) for n in func.__globals__ if n.startswith("has_torch_function")}
    scope = {**func.__globals__, **never}
    clone = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    clone.__kwdefaults__ = func.__kwdefaults__
    return clone


# ---------------------------------------------------------------- switches


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its matrix products, and torch's fused inference path for encoder layers off."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Inside, code that asks whether it is being compiled is told so."""
    kept = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = kept


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what torch.compile has wrapped runs as it is written."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever is drawn inside leaves the CPU generator as it was."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


_RANDOM_NAMES = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "scaled_dot_product_attention", "rrelu", "rrelu_", "dropout_", "bernoulli", "bernoulli_", "gumbel_softmax",
    "fractional_max_pool2d", "fractional_max_pool3d",
}  # fmt: skip


def may_be_random(func: Any) -> bool:
    """Whether a torch function draws numbers under some of its arguments (dropout in training)."""
    return getattr(func, "__name__", "") in _RANDOM_NAMES


_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a function that may draw does so: dropout with p = 0, or when not training, does not."""
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name in _DROPOUTS:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return bool(p) and bool(args[2] if len(args) > 2 else kwargs.get("training", True))
    return True


NOISE = {torch.randn_like, torch.rand_like, torch.randint_like}
CONTENT_FREE = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, Tensor.new_zeros, Tensor.new_ones}


class Hook:
    """What holds the hooks of a sharded module: copies of the module share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self


_KEY = -1  # torch's own keys count up from 0


def hook_forward(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Run one function first of all, and another after the forward, also when that raised.

    Like ``register_forward_pre_hook`` and ``register_forward_hook``, but with the same key in every module: torch's
    count how many hooks were made, the compiler takes them for constants, and would compile alike modules apart.
    """
    module._forward_pre_hooks[_KEY] = before
    module._forward_pre_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]
    module._forward_pre_hooks_with_kwargs[_KEY] = True
    module._forward_hooks[_KEY] = after
    module._forward_hooks_with_kwargs[_KEY] = True
    module._forward_hooks_always_called[_KEY] = True


def drop_hooks(module: nn.Module) -> None:
    """Take the hooks of sharding off a (copied) module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [k for k, f in hooks.items() if isinstance(getattr(f, "__self__", None), Hook)]:
            del hooks[key]


@contextmanager
def no_modes() -> Iterator[None]:
    """Run plain tensors without the recording modes seeing them, nor inference mode, which would forbid gradients."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes(), outside_inference():
        yield


def outside_inference(tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Inference mode off, so that new tensors may be trained later; left on for tensors that were made in it."""
    off = torch.is_inference_mode_enabled() and not any(t.is_inference() for t in tensors)
    return torch.inference_mode(False) if off else nullcontext()


def in_backward() -> bool:
    """Whether a backward is running (where checkpointing calls modules again)."""
    return torch._C._current_graph_task_id() != -1


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether something is a DTensor."""
    return isinstance(x, DTensor)


def is_packed(x: Any) -> bool:
    """Whether a tensor consists of others behind a class of its own, as quantised ones do. A DTensor does not count."""
    return is_traceable_wrapper_subclass(x) and not isinstance(x, DTensor)


def embedding_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an embedding look-up by name, whichever of torch's two spellings was called."""
    names = ["ids", "weight", "padding_idx"] if func is F.embedding else ["weight", "ids", "padding_idx"]
    given = dict(zip(names, args, strict=False))
    for theirs, ours in (("input", "ids"), ("indices", "ids"), ("weight", "weight"), ("padding_idx", "padding_idx")):
        if theirs in kwargs:
            given[ours] = kwargs[theirs]
    padding = given.get("padding_idx")
    given["padding_idx"] = None if padding is None or padding < 0 else padding
    return given


def move_attachments(old: Tensor, new: Tensor) -> None:
    """Carry what users attach to a parameter (attributes, gradient hooks) over to its replacement."""
    for k, v in vars(old).items():
        setattr(new, k, v)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def with_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], out: Any) -> Any:
    """What a metadata function would say of a tensor of another shape."""
    name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
    if name == "shape":
        return torch.Size(shape)
    if name == "size":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(shape) if dim is None else shape[dim]
    if name in ("numel", "nelement"):
        return torch.Size(shape).numel()
    return shape[0] if name == "__len__" else out


def recomputes(function: Any) -> bool:
    """Whether a custom function is reentrant activation checkpointing."""
    return function is torch.utils.checkpoint.CheckpointFunction


@contextmanager
def custom_functions(note: Any) -> Iterator[None]:
    """Inside, ``note(cls, apply, args, kwargs)`` runs the user's ``torch.autograd.Function``s (not torch's own).

    Once for a call that looks ``apply`` up, as it is made; and once more for its forward, which is all that shows of a
    call by an ``apply`` that was kept from before (``act = MyFunction.apply``). Classes made inside show the former.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, cls)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return note(cls, run, args, kwargs)
        if cls.__module__.startswith("torch."):
            return run(*args, **kwargs)
        return note(cls, run, args, kwargs)

    with ExitStack() as stack:
        for cls in _functions(torch.autograd.Function):
            stack.enter_context(_replaced(cls, "forward", staticmethod(_noted(cls, note))))
        stack.enter_context(_replaced(torch.autograd.Function, "apply", classmethod(apply)))
        yield


def _functions(of: type) -> set[type]:
    """The user's functions: all classes that are made from one."""
    below: set[type] = set(of.__subclasses__())
    below |= {c for sub in below for c in _functions(sub)}
    return {c for c in below if not c.__module__.startswith("torch.")}


def _noted(cls: Any, note: Any) -> Any:
    forward, context = cls.forward, 0 if has_own_context(cls) else 1

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[:context]
        return note(cls, lambda *a, **k: forward(*given, *a, **k), args[context:], kwargs)

    return run


def has_own_context(cls: Any) -> bool:
    """Whether the forward of a function is without a context, which another method of it fills."""
    return cls.setup_context is not torch.autograd.Function.setup_context


@contextmanager
def _replaced(cls: type, name: str, value: Any) -> Iterator[None]:
    kept, missing = vars(cls).get(name), name not in vars(cls)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if missing:
            delattr(cls, name)
        else:
            setattr(cls, name, kept)
