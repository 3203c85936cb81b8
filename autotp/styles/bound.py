"""A module's program as functions of this rank, and what is known of the path that its code takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from autotp import torch_frames
from autotp.branches import Branches, branches_of
from autotp.hoisting import ModuleProgram
from autotp.styles import tokens, traced
from autotp.styles.comm import Ranks
from autotp.styles.edits import BoundCall, Place, operand, outcome
from autotp.trees import kinds

if TYPE_CHECKING:
    from autotp.styles.local import LocalForward


@dataclass
class Running:
    """Where a sharded model is in this process; its parts share one.

    ``depth`` counts the forwards around the running code that take and give whole tensors, ``turns`` how often one
    was called from outside of the model. ``mode`` names the programs that run (None: those of ``forward``).
    """

    lengths: tokens.Lengths
    depth: int = 0
    turns: int = 0
    mode: Any = None
    compiled: Any = None  # works out the programs that run when compiled
    graph: Any = None  # the graph in which the model's forward is being traced
    parts: list[LocalForward] = field(default_factory=list)
    shown_whole: dict[int, Any] = field(default_factory=dict)  # of a plain tensor's id, the parameter it stands for

    def real(self, parameter: Any) -> Any:
        """The parameter that is there, also while a plain tensor stands in its place."""
        return self.shown_whole.get(id(parameter), parameter) if self.shown_whole else parameter

    def enter(self) -> None:
        """A forward begins that takes and gives whole tensors."""
        if not self.depth:
            self.lengths.clear()
            self.turns += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return self


@dataclass(frozen=True)
class OwnCode:
    """What a module's own code branches on, and how that was when it was sharded."""

    branches: Branches
    facts: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> OwnCode | None:
        """None for torch's own layers, which have one way to run; code of others may branch on what it is given."""
        if type(module).__module__.startswith("torch.nn.modules."):
            return None
        branches = branches_of(module)
        return cls(branches, branches.facts(module))


class BoundProgram:
    """A module's program as functions of this rank."""

    def __init__(
        self, program: ModuleProgram, ranks: Ranks, model: Running, code: OwnCode | None, keys: dict[Any, str]
    ) -> None:
        self.program, self.inner, self.reached = program, program.inner, program.reached
        here = Place(program.path)
        self.params = [(n, operand(e, ranks, model, here) if e else None) for n, e in program.params.items()]
        self.inputs = [(p, operand(e, ranks, model, here)) for p, e in program.inputs.items()]
        self.outputs = [(p, outcome(e, ranks, model, here)) for p, e in program.outputs.items()]
        self.table = {
            site: [BoundCall.of(e, ranks, model, Place(program.path, site)) for e in edits if len(edits) > 1 or e]
            for site, edits in program.calls.items()
        }
        self.sites = torch_frames.Sites(self.table)
        self.edits_calls = program.edits_calls
        self.region = program.holds_cut or program.inner or bool(program.inputs)
        self.known: set[Any] | None = None  # ways to be called of which the path is known
        self.code, self.open = code, False
        if code is not None and self.region:
            self.open = code.branches.open_with(torch_frames.code_of(self.table))
            self.known = set() if self.open else {(kinds, code.facts) for kinds in program.kinds}
        self.traced = traced.Places(program, self.table, keys)
        self.when_compiled: BoundProgram | None = None

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """How it is called, if it is not known which path that takes."""
        if self.known is None or self.code is None:
            return None
        called = (kinds(module, args, kwargs), self.code.branches.facts(module))
        return None if called in self.known else called

    def knows(self, module: nn.Module, called: Any) -> bool:
        """Whether it is known which path it takes if its arguments are of these kinds."""
        return self.known is None or self.code is None or (called, self.code.branches.facts(module)) in self.known

    def followed(self, called: Any) -> None:
        """It was called in such a way, and every call that it made was a planned one."""
        if self.known is not None and not self.open:
            self.known.add(called)

    def edges_alike(self) -> bool:
        """Whether the module is entered and left in the same way when it is compiled."""
        if self.when_compiled is None or self.when_compiled is self:
            return True
        a, b = self.program, self.when_compiled.program
        return (a.params, a.inputs, a.outputs) == (b.params, b.inputs, b.outputs)

    def not_met(self, met: set[str]) -> str:
        """Which edited call is missing among those that were seen, if the module ran in pieces."""
        missing = self.traced.not_met(met | self.traced.shown)
        if missing and self.when_compiled is not None:
            return self.when_compiled.traced.not_met(met | self.traced.shown)
        return missing
