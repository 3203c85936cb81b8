"""Private corners of torch that recording and running a model stand on. Nothing else in autotp touches them."""

from __future__ import annotations

import functools
import opcode
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
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

# ---------------------------------------------------------------- aten operations


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an aten operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


_PURE = {
    *("mm", "bmm", "addmm", "baddbmm", "convolution", "embedding", "cat", "clone", "_to_copy", "native_layer_norm"),
    *("sum", "mean", "amax", "var", "cumsum", "_softmax", "_log_softmax", "_safe_softmax"),
}


@functools.cache
def is_pure(func: Any) -> bool:
    """Whether an aten operation makes new tensors, of shapes that follow from the shapes it gets."""
    if func.namespace != "aten" or is_random(func) or any(a.alias_info is not None for a in func._schema.arguments):
        return False
    return is_pointwise(func) or func.overloadpacket.__name__ in _PURE


@functools.cache
def functional(func: Any) -> Any:
    """The out-of-place form of an in-place aten operation (``relu_`` -> ``relu``); others as they are."""
    name = func.overloadpacket.__name__
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    return func if overload is None else overload


@functools.cache
def is_functional(func: Any) -> bool:
    """Whether an operation makes new tensors and nothing else: no writes, no views, no draws."""
    values = (*func._schema.arguments, *func._schema.returns)
    return not is_random(func) and all(a.alias_info is None for a in values)


def operation(name: str) -> Any:
    """An operation by its full name, ``aten::add.Tensor``."""
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), short), overload or "default")


def schema_of(func: Any) -> Any | None:
    """The schema of an operation, however it was reached (``torch.ops.x.y`` with one overload, or one overload)."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0]) if len(func.overloads()) == 1 else None
    return func._schema if isinstance(func, torch._ops.OpOverload) else None


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether torch tags an aten operation as elementwise (with broadcasting)."""
    return torch.Tag.pointwise in getattr(func, "tags", ())


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    schema = func._schema
    out = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            out.append((i, a.name))
    return tuple(out)


def written_args(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an aten operation writes in place."""
    out: list[Tensor] = []
    for i, name in _written(func):
        x = args[i] if i < len(args) else kwargs.get(name)
        out += [y for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, Tensor)]
    return out


def without_device(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Everything recorded lives on one pretended CPU, so device arguments are turned into it."""
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    return kwargs


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real: dict[int, Tensor]) -> Any:
    """Run an aten operation on meta tensors; ``real`` maps a meta stand-in's id to the tensor with content."""
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor):
        args = (args[0], _mask_to_index(args[1], real), *args[2:])
        if func in (_aten.index_put_.default, _aten.index_put.default):
            return func(*args, **kwargs)
    if func is _aten.masked_select.default:
        index = _mask_to_index([args[1]], real)
        return _aten.index.Tensor(args[0], index)
    if func is _aten.repeat_interleave.Tensor:
        n = int(real[id(args[0])].sum()) if id(args[0]) in real else args[0].shape[0]
        return torch.empty(n, dtype=torch.int64, device="meta")
    if func is _aten.nonzero.default:
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device="meta")
    if func is _aten.index_add_.default or func is _aten.index_add.default:
        return args[0] if func is _aten.index_add_.default else torch.empty_like(args[0])
    if func.overloadpacket.__name__ == "_grouped_mm":
        half = tuple(a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*half, **{k: v for k, v in kwargs.items() if k != "out_dtype"}).to(args[0].dtype)
    if func is _aten.view.default:
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # the strides of a stand-in may differ from those of the real thing
            return args[0].reshape(args[1])
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as e:
        if "meta" not in str(e).lower() and "Meta" not in str(e):
            raise
        return _run_on_zeros(func, args, kwargs)


def _mask_to_index(index: list[Tensor | None], real: dict[int, Tensor]) -> list[Tensor | None]:
    out: list[Tensor | None] = []
    for x in index:
        if x is not None and x.dtype in (torch.bool, torch.uint8):
            content = real.get(id(x))
            if content is None:
                content = torch.ones(x.shape, dtype=torch.bool)
            out += [torch.empty_like(i, device="meta") for i in content.nonzero().unbind(1)]
        else:
            out.append(x)
    return out


def _run_on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For operations without a meta kernel: the samples are tiny, so run them on zeros and keep the shapes."""

    def real(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.zeros(x.shape, dtype=x.dtype)
        if isinstance(x, (list, tuple)):
            return type(x)(real(y) for y in x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to("meta")
        return type(x)(meta(y) for y in x) if isinstance(x, (list, tuple)) else x

    with kept_rng():
        return meta(func(*real(args), **{k: real(v) for k, v in kwargs.items()}))


# ---------------------------------------------------------------- torch functions

_METADATA_NAMES = {
    "size", "dim", "ndimension", "stride", "numel", "nelement", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "element_size", "get_device", "is_conj", "is_neg", "is_inference",
    "requires_grad_", "__len__", "__hash__", "__repr__", "has_names", "is_same_size", "is_coalesced",
    "_is_view", "is_shared", "is_pinned", "is_tensor", "result_type", "can_cast", "is_set_to", "__dlpack_device__",
    "register_hook", "retain_grad", "untyped_storage", "storage", "data_ptr", "__deepcopy__", "__reduce_ex__",
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


# ---------------------------------------------------------------- places in the user's code

_MODULE_FILE = nn.modules.module.__file__
_HOOKED, _UNHOOKED = "inner", "_call_impl"  # the frames that call a forward: of a module with hooks, and of one without
_BOUNDARY = {_HOOKED, _UNHOOKED, "_wrapped_call_impl"}
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MACHINERY = tuple(
    _HERE + name for name in ("trace.py", "proof.py", "repeats.py", "torch_hooks.py", "promotion.py", "styles")
)
_TORCH_OVERRIDES = torch.overrides.__file__
_TRACE = _HERE + "trace.py"


def is_boundary(code: types.CodeType) -> bool:
    """Whether a frame is where ``nn.Module.__call__`` runs a forward."""
    return code.co_name in _BOUNDARY and code.co_filename == _MODULE_FILE


def is_machinery(code: types.CodeType) -> bool:
    """Whether a frame is of what records, proves or edits calls."""
    return code.co_filename.startswith(_MACHINERY) or code.co_filename == _TORCH_OVERRIDES


def call_site(
    depth: int = 2,
    base: types.FrameType | None = None,
    known: Mapping[Any, Any] | None = None,
    through: Collection[types.CodeType] = (),
) -> tuple[Any, ...]:
    """Where in the running module's code a torch function was called: (code, instruction) from the inside out.

    With ``base``, the frame that runs the forward in question, empty for calls that another module's forward makes.
    While recording every module of the model has hooks; one without is made by the forward (``CrossEntropyLoss()``
    in transformers), and its code is part of the running module's. At run time, when modules of the model may be
    without hooks too, it is told by the places that are ``known``, and the forwards that these lead ``through``.
    """
    frame: types.FrameType | None = sys._getframe(depth)
    chain: list[tuple[types.CodeType, int]] = []
    passed = False
    while frame is not None:
        code = frame.f_code
        if is_boundary(code):
            if frame is base or (base is None and code.co_name == _HOOKED):
                break
            if code.co_name == _UNHOOKED and (base is None or (chain and chain[-1][0] in through)):
                chain.append((code, 0))
                passed = True
            elif not passed or code.co_name == _HOOKED:
                return ()
        elif code.co_name == "run" and code.co_filename == _TRACE:
            break  # whoever calls the model: the same place however it was reached
        elif not is_machinery(code):
            chain.append((code, _instruction(code, frame.f_lasti)))
        frame = frame.f_back
    site = tuple(chain)
    return () if passed and known is not None and site not in known else site


def led_through(sites: Iterable[tuple[Any, ...]]) -> frozenset[types.CodeType]:
    """The forwards of modules that are no part of the model, and that these places are inside of."""
    pairs = [pair for site in sites for pair in pairwise(site)]
    return frozenset(a[0] for a, b in pairs if isinstance(b[0], types.CodeType) and is_boundary(b[0]))


_PRECALL = opcode.opmap.get("PRECALL", -1)  # Python 3.11 only
_PRECALL_BYTES = 4  # with its one cache entry
_CACHE = opcode.opmap.get("CACHE", -1)
_TEXTS: dict[int, tuple[types.CodeType, bytes]] = {}


def _instruction(code: types.CodeType, last: int) -> int:
    """The place of a call. Python shows it at one of two instructions, or at what is cached behind the second, as it
    gets to know the function that is called."""
    known = _TEXTS.get(id(code))
    if known is None:
        known = _TEXTS[id(code)] = code, code.co_code
    text = known[1]
    while last > 0 and text[last] == _CACHE:
        last -= 2
    return last + _PRECALL_BYTES if last >= 0 and text[last] == _PRECALL else last


def describe_site(site: tuple[Any, ...]) -> str:
    """``file.py:123`` of the innermost place that is not torch's own."""
    for code, lasti in site:
        if not isinstance(code, types.CodeType):
            break
        lines = [line for start, stop, line in code.co_lines() if start <= lasti < stop and line]
        line = lines[0] if lines else code.co_firstlineno
        return f"{os.path.basename(code.co_filename)}:{line}"
    return "torch"


def in_checkpoint(site: tuple[Any, ...]) -> bool:
    """Whether a place is reached by way of ``torch.utils.checkpoint``."""
    return any(isinstance(f[0], types.CodeType) and f[0].co_filename == torch.utils.checkpoint.__file__ for f in site)


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


CONTENT_FREE = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, Tensor.new_zeros, Tensor.new_ones}


class Hook:
    """What holds the hooks of a sharded module: copies of the module share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self


def drop_hooks(module: nn.Module) -> None:
    """Take the hooks of sharding off a (copied) module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [k for k, f in hooks.items() if isinstance(getattr(f, "__self__", None), Hook)]:
            del hooks[key]


@contextmanager
def no_modes() -> Iterator[None]:
    """Run plain tensors without the recording modes seeing them."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


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
    """Inside, ``note(cls, apply, args, kwargs)`` runs the user's ``torch.autograd.Function``s (not torch's own)."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, cls)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return note(cls, run, args, kwargs)
        if cls.__module__.startswith("torch."):
            return run(*args, **kwargs)
        return note(cls, run, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original
