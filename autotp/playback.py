"""Playing a tape: the values of some of its tensors, with as little memory as can be.

First backwards, to see what is needed: a write counts only if somebody reads what it wrote, and one that covers all of
a memory makes everything written there before it superfluous. Then forwards, in the order in which it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotp.trees import Ref, rebuild

Use = Callable[[Tensor], None]

UNSET = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITES = {
    "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
    "log_normal_", "cauchy_",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One operation: `leaves` hold a :class:`Ref` to a slot where a tensor without data was."""

    func: Any
    leaves: Sequence[Any]
    spec: Any
    outs: Sequence[int | None]
    writes: Sequence[int] = ()
    random: bool = False
    state: Tensor | None = None  # of the generator among its arguments

    @property
    def reads(self) -> list[int]:
        """The slots that go in."""
        return [x.tid for x in self.leaves if isinstance(x, Ref)]

    def run(self, real: Callable[[int], Tensor]) -> Any:
        """The operation on these tensors."""
        given = [real(x.tid) if isinstance(x, Ref) else self._generator(x) for x in self.leaves]
        args, kwargs = rebuild(given, self.spec)
        return self.func(*args, **kwargs)

    def _generator(self, x: Any) -> Any:
        return torch.Generator().set_state(self.state) if self.state is not None and type(x) is torch.Generator else x


@dataclass(frozen=True)
class SetState:
    """The default generator is put into a state; with `keep`, the one it is in is kept for :class:`Return`."""

    state: Tensor
    keep: bool = False


@dataclass(frozen=True)
class Return:
    """The default generator goes back to where it was before it was put into another state."""


Step = Entry | SetState | Return


@dataclass
class Reel:
    """The steps of a tape, and the shape (a meta tensor) and memory of every slot."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    inners: list[Tensor] = field(default_factory=list)  # kept, so that a memory keeps its identity

    def memory(self, slot: int) -> int:
        """A number for the memory that a slot is a view of."""
        key: int = self.inners[slot].untyped_storage()._cdata
        return key

    def covers(self, slot: int) -> bool:
        """Whether a slot is all of its memory."""
        inner = self.inners[slot]
        return inner.numel() * inner.element_size() == inner.untyped_storage().nbytes()

    def is_view(self, step: Entry) -> bool:
        """Whether all that a step makes is another view of what it gets."""
        given = {self.memory(slot) for slot in step.reads}
        return bool(given) and all(slot is None or self.memory(slot) in given for slot in step.outs)

    def scratch(self, slot: int) -> Tensor:
        """A tensor of the shape and strides of a slot, with any content."""
        inner = self.inners[slot]
        return torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype)

    def play(self, uses: Mapping[int, Use]) -> Tensor:
        """Hand each of these slots over as it is at the end of the tape; gives the generator's state at the end."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(self.seed)  # torch.manual_seed would seed accelerators too
            _Player(self, uses).run()
            return torch.get_rng_state()


class _Player:
    def __init__(self, reel: Reel, uses: Mapping[int, Use]) -> None:
        self.reel, self.uses = reel, uses
        self.real: dict[int, Tensor] = {}
        self.made: dict[int, list[int]] = {}  # memory -> its slots that are there
        self.kept: list[Tensor] = []
        self.live = _needed(reel, uses)
        self.done: dict[int, list[int]] = {}  # step -> slots that are complete after it
        self.over: dict[int, list[int]] = {}  # step -> memories that nobody needs after it
        self.makers = {slot: s for _, s in self._entries() for slot in s.outs if slot is not None}
        self._when()

    def _when(self) -> None:
        last_write: dict[int, int] = {}
        last_use: dict[int, int] = {}
        born: dict[int, int] = {}
        for i, step in self._entries():
            for slot in (*step.reads, *(o for o in step.outs if o is not None)):
                last_use[self.reel.memory(slot)] = i
            for made in step.outs:
                if made is not None:
                    born.setdefault(made, i)
                    last_write.setdefault(self.reel.memory(made), i)
            for written in step.writes:
                last_write[self.reel.memory(written)] = i
        for slot in self.uses:
            memory = self.reel.memory(slot)
            at = max(last_write[memory], born[slot])
            self.done.setdefault(at, []).append(slot)
            last_use[memory] = max(last_use[memory], at)
        for memory, i in last_use.items():
            self.over.setdefault(i, []).append(memory)

    def _entries(self) -> list[tuple[int, Entry]]:
        return [(i, s) for i, s in enumerate(self.reel.steps) if i in self.live and isinstance(s, Entry)]

    def run(self) -> None:
        """Play."""
        for i, step in enumerate(self.reel.steps):
            if not isinstance(step, Entry):
                self._turn(step)
            elif i not in self.live:
                if step.random and step.state is None:
                    step.run(self.reel.scratch)  # in step with a constructor that makes everything
            else:
                if not self._waits(step):
                    self._make(step)
                for slot in self.done.get(i, ()):
                    self.uses[slot](self._value(slot))
                for memory in self.over.get(i, ()):
                    for slot in self.made.pop(memory, ()):
                        del self.real[slot]

    def _waits(self, step: Entry) -> bool:
        """Whether a step makes no content, so that memory is taken only when there is some."""
        if step.writes or step.random:
            return False
        return step.func.overloadpacket.__name__ in UNSET or self.reel.is_view(step)

    def _value(self, slot: int) -> Tensor:
        if slot not in self.real:
            self._make(self.makers[slot])
        return self.real[slot]

    def _make(self, step: Entry) -> None:
        out = step.run(self._value)
        made = out if isinstance(out, (tuple, list)) else (out,)
        for slot, value in zip(step.outs, made, strict=True):
            if slot is not None and slot not in self.real:
                self.real[slot] = value
                self.made.setdefault(self.reel.memory(slot), []).append(slot)

    def _turn(self, step: SetState | Return) -> None:
        if isinstance(step, Return):
            torch.set_rng_state(self.kept.pop())
            return
        if step.keep:
            self.kept.append(torch.get_rng_state())
        torch.set_rng_state(step.state)


def _needed(reel: Reel, uses: Mapping[int, Use]) -> set[int]:
    """The steps without which these slots would have other values."""
    slots = set(uses)
    contents = {reel.memory(slot) for slot in slots}
    live: set[int] = set()
    for i in range(len(reel.steps) - 1, -1, -1):
        step = reel.steps[i]
        if not isinstance(step, Entry):
            continue
        writes = any(reel.memory(slot) in contents for slot in step.writes)
        # How much a draw takes from the generator may depend on what it reads.
        draws = step.random and step.state is None and set(step.reads) > set(step.writes)
        if not (writes or draws or any(slot in slots for slot in step.outs)):
            continue
        live.add(i)
        slots.update(step.reads)
        given = {reel.memory(slot) for slot in step.reads}
        for slot in step.outs:
            if slot is not None and reel.memory(slot) not in given:
                contents.discard(reel.memory(slot))  # it is born here
        if step.writes and step.func.overloadpacket.__name__ in _OVERWRITES and reel.covers(step.writes[0]):
            contents.discard(reel.memory(step.writes[0]))
            contents.update(reel.memory(slot) for slot in step.reads if slot not in step.writes)
        elif step.writes or not reel.is_view(step):
            contents.update(given)
    return live
