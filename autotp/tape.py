"""Run a constructor without memory for what it makes, and remember how each tensor would get its values.

Every operation on a tensor without data goes on a tape. Played back in the same order and with the same seed
(:mod:`autotp.playback`), it gives the values that the constructor would have given.

Nouns
    Pending   a tensor without data; it reports a CPU device and knows its slot
    slot      the number of a tensor on the tape
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import torch_hooks, torch_ops
from autotp.errors import BuildError
from autotp.playback import UNSET, Entry, Reel, Return, SetState
from autotp.trees import Ref, flatten, rebuild

SMALL = 1 << 16  # elements; tensors up to this size with fixed content are simply made
_TAKES_VALUES = {"tolist", "numpy", "__array__", "__reduce_ex__", "data_ptr", "untyped_storage", "storage"}


class Pending(torch.Tensor):
    """A tensor whose values are still to be made."""

    inner: Tensor  # type: ignore[assignment]  # torch keeps that name for Tensor.inner
    slot: int

    @staticmethod
    def __new__(cls: type[Pending], inner: Tensor, slot: int) -> Pending:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cpu"),
        )
        made.inner, made.slot = inner, slot
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise BuildError(f"{func} was called on a tensor of a constructor that had ended")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pending({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch.no_grad():
            made = self.detach().clone()
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("inner", "slot")})
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made


@contextmanager
def recorded(seed: int) -> Iterator[Reel]:
    """Inside, constructors write on the tape; what they read back has the values that `seed` gives."""
    ops = _Ops(Reel(seed))
    with torch.random.fork_rng(devices=[]), _Attributes(ops), ops:
        yield ops.reel


class _Ops(TorchDispatchMode):
    """Puts operations on the tape."""

    def __init__(self, reel: Reel) -> None:
        super().__init__()
        self.reel = reel
        self.first_state = self.last_state = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = torch_ops.without_device(func, kwargs or {})
        leaves, spec = flatten((args, kwargs))
        waiting = any(isinstance(x, Pending) for x in leaves)
        random = torch_ops.is_random(func)
        written = torch_ops.written_args(func, args, kwargs)
        if not waiting and not random and not _is_deferred(func, leaves):
            return func(*args, **kwargs)
        by_content = func is torch.ops.aten._local_scalar_dense.default or (
            torch.Tag.dynamic_output_shape in func.tags and not written
        )
        if (waiting and by_content) or any(not isinstance(w, Pending) for w in written):
            return self._now(func, leaves, spec, random)
        return self.noted(func, leaves, spec, random, written)

    def noted(self, func: Any, leaves: list[Any], spec: Any, random: bool, written: list[Tensor]) -> Any:
        """Run on shapes, and write it down."""
        given = [_shape(x) for x in leaves]
        content = {id(m): x for m, x in zip(given, leaves, strict=True) if type(x) is Tensor}
        args, kwargs = rebuild(given, spec)
        if any(a.name == "device" for a in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = torch_ops.run_on_meta(func, args, kwargs, content)
        for w in written:
            if isinstance(w, Pending) and w.inner.shape != w.shape:
                raise BuildError(f"{func} changes the shape of a tensor in place, from {list(w.shape)}")
        originals = {id(x.inner): x for x in leaves if isinstance(x, Pending)}
        outs, out_spec = flatten(out)
        made = [self._pending(o, originals) if isinstance(o, Tensor) else o for o in outs]
        state = self._generator_state(func, leaves, spec) if random else None
        self.reel.steps.append(
            Entry(
                func=func,
                leaves=[Ref(x.slot) if isinstance(x, Pending) else _kept(x) for x in leaves],
                spec=spec,
                outs=[x.slot if isinstance(x, Pending) and id(x.inner) not in originals else None for x in made],
                writes=[w.slot for w in written if isinstance(w, Pending)],
                random=random,
                state=state,
            )
        )
        return rebuild(made, out_spec)

    def _pending(self, inner: Tensor, originals: dict[int, Pending]) -> Pending:
        if id(inner) in originals:
            return originals[id(inner)]
        self.reel.inners.append(inner)
        return Pending(inner, len(self.reel.inners) - 1)

    def _generator_state(self, func: Any, leaves: list[Any], spec: Any) -> Tensor | None:
        """Of a generator that was passed, which then draws as if; else see whether the default one was touched."""
        generator = next((x for x in leaves if isinstance(x, torch.Generator)), None)
        with torch_hooks.no_modes():
            if generator is None:
                self.note_seeding()
                return None
            state = generator.get_state()
            scratch = [torch.empty_like(_shape(x), device="cpu") if isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = rebuild(scratch, spec)
            func(*args, **kwargs)
            return state

    def note_seeding(self) -> None:
        """The constructor may have seeded the default generator, or be back from where it had done so."""
        now = torch.get_rng_state()
        if torch.equal(now, self.last_state):
            return
        if torch.equal(now, self.first_state):
            self.reel.steps.append(Return())
        else:
            self.reel.steps.append(SetState(now, keep=torch.equal(self.last_state, self.first_state)))
        self.last_state = now

    def value(self, x: Any) -> Any:
        """What a tensor holds at this moment of the constructor."""
        if not isinstance(x, Pending):
            return x
        found: list[Tensor] = []
        with torch_hooks.no_modes():
            self.reel.play({x.slot: lambda value: found.append(value.clone())})
        return found[0].requires_grad_(x.requires_grad and not torch.is_grad_enabled())

    def _now(self, func: Any, leaves: list[Any], spec: Any, random: bool) -> Any:
        """Run it on the values of this moment; if it draws, with the generator as it would be."""
        args, kwargs = rebuild([self.value(x) for x in leaves], spec)
        if not random or any(isinstance(x, torch.Generator) for x in leaves):
            return func(*args, **kwargs)
        with torch_hooks.no_modes():
            self.note_seeding()
            torch.set_rng_state(self.reel.play({}))
            out = func(*args, **kwargs)
            self.reel.steps.append(SetState(torch.get_rng_state()))
            torch.set_rng_state(self.last_state)
        return out


class _Attributes(TorchFunctionMode):
    """What reaches for a tensor's memory without being an operation."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if of is torch.Tensor.data and isinstance(args[0], Pending) and name == "__get__":
            return args[0].detach()
        if of is torch.Tensor.data and name == "__set__":
            return self._set_data(func, *args)
        if name in _TAKES_VALUES and any(isinstance(x, Pending) for x in args):
            return func(*(self.ops.value(x) for x in args), **kwargs)
        return func(*args, **kwargs)

    def _set_data(self, func: Any, target: Tensor, value: Tensor) -> None:
        if isinstance(target, Pending) and not isinstance(value, Pending):
            with torch.no_grad():
                leaves, spec = flatten(((value,), {}))
                value = self.ops.noted(torch.ops.aten.clone.default, leaves, spec, False, [])
        elif not isinstance(target, Pending):
            value = self.ops.value(value)
        func(target, value)
        if isinstance(target, Pending) and isinstance(value, Pending):
            target.inner, target.slot = value.inner, value.slot


def _is_deferred(func: Any, leaves: list[Any]) -> bool:
    """Whether a factory makes something without content, or large."""
    if func.overloadpacket.__name__ in UNSET:
        return True
    if any(isinstance(x, Tensor) for x in leaves):
        return False
    size = 1
    for x in leaves:
        size *= max(abs(x), 1) if type(x) is int else 1
    return size > SMALL


def _shape(x: Any) -> Any:
    if isinstance(x, Pending):
        return x.inner
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, torch.Generator):
        return None  # it is one of a CPU
    return torch.device("meta") if isinstance(x, torch.device) else x


def _kept(x: Any) -> Any:
    """Others may write into a tensor of theirs later."""
    if not isinstance(x, Tensor):
        return x
    with torch_hooks.no_modes():
        return x.detach().clone()
