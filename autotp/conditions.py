"""What the branches in a piece of code depend on, read from its bytecode.

A condition that reads attributes of a module, globals and constants only can be compared before each call. Whatever
else it computes with (tensors, what a helper returns, exceptions) is unknown.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_SIMPLE = (type(None), bool, int, float, str, torch.dtype, type, types.FunctionType, types.BuiltinFunctionType)
_MANY = 64  # elements of a list are not compared one by one
_AS_BEFORE = {"NOP", "TO_BOOL", "COPY", "NOT_TAKEN", "UNARY_NOT"}  # true or false on the same grounds
_OF_CALLS = {"CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"}
_PASSED = _AS_BEFORE | _OF_CALLS
_OF_TWO = {"COMPARE_OP", "IS_OP", "CONTAINS_OP", "BINARY_OP"}
_CONSTANT = {"LOAD_CONST", "LOAD_SMALL_INT"}
_DISPLAYS = {"BUILD_TUPLE", "BUILD_LIST", "LOAD_CONST"}
_PURE = {"range", "len", "enumerate", "zip", "reversed", "isinstance", "bool", "int", "min", "max"}


class Source(NamedTuple):
    """An attribute of the module, by its chain of names, or a global that ``function`` sees, and attributes of it."""

    function: Any  # None for the module
    names: tuple[str, ...]
    none_only: bool  # all that counts is whether it is None

    def fact(self, module: nn.Module) -> Any:
        """What branches on it depend on; LookupError if that is not known."""
        names = iter(self.names)
        value: Any = module if self.function is None else self.function.__globals__.get(next(names))
        for name in names:
            value = _attribute(value, name)
        return value is None if self.none_only else _fact(value)


def _fact(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return type(value), *map(type, value._modules.values())
    if isinstance(value, (tuple, list)) and len(value) <= _MANY:
        return type(value), *map(_fact, value)
    if not isinstance(value, _SIMPLE):
        raise LookupError(type(value))
    return value


def _attribute(x: Any, name: str) -> Any:
    """What is kept under a name; LookupError if it would be computed."""
    if not isinstance(x, nn.Module):
        return getattr(x, name, None)
    for slots in (x.__dict__, x._parameters, x._buffers, x._modules):
        if name in slots:
            return slots[name]
    value = getattr(type(x), name, None)
    if isinstance(value, property):
        raise LookupError(name)
    return value


class Code(NamedTuple):
    """Code that runs as part of a module's own, the function it is of, and what the module is called in it."""

    code: types.CodeType
    function: Any = None  # a Python function
    module: str | None = None
    is_forward: bool = False

    def of_python(self, name: str) -> bool:
        """Whether a name that the code does not define is one of Python's."""
        return self.function is not None and name not in self.function.__globals__

    def is_argument(self, instruction: dis.Instruction, stored: set[Any]) -> bool:
        """Whether an instruction loads an argument of the forward as it was given."""
        count, name = self.code.co_argcount + self.code.co_kwonlyargcount, instruction.argval
        loads = self.is_forward and instruction.opname.startswith("LOAD_FAST")
        return loads and name in self.code.co_varnames[:count] and name not in stored


@functools.lru_cache(4096)
def tested(own: Code) -> tuple[tuple[Source, ...] | None, ...]:
    """For each branch in the code the sources of its condition; None if there are others."""
    return tuple(_conditions(own))


def _conditions(own: Code) -> Iterator[tuple[Source, ...] | None]:
    instructions = list(dis.get_instructions(own.code))
    stored = {i.argval for i in instructions if i.opname.startswith(("STORE_FAST", "DELETE_FAST"))}
    for at, instruction in enumerate(instructions):
        before, after = instructions[at - 1], instructions[at + 1 : at + 2]
        words = instruction.opname.split("_")
        if instruction.opname == "PUSH_EXC_INFO" and after[0].opname != "WITH_EXCEPT_START":
            yield None  # an exception handler: where it is entered is not known
        elif instruction.opname == "GET_ITER" and before.opname not in _DISPLAYS:  # these have a fixed length
            yield _Condition(own, instructions, stored, False).read(at - 1)
        elif "JUMP" in words and "IF" in words and not _ends_badly(instructions, at):
            none_only = words[-1] == "NONE"
            if not (none_only and own.is_argument(before, stored)):  # how a forward is called is compared anyway
                yield _Condition(own, instructions, stored, none_only).read(at - 1)


def _ends_badly(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether a branch goes on or raises: an assertion, a check, the end of a ``with`` block."""
    if "WITH_EXCEPT_START" in (instructions[at - 1].opname, instructions[at - 2].opname):  # TO_BOOL may be between
        return True
    for instruction in instructions[at + 1 :]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "STORE", "FOR_ITER")):
            return False
    return False


class _Condition:
    """Reads an expression from its last instruction back to its first."""

    def __init__(self, own: Code, instructions: list[dis.Instruction], stored: set[Any], none_only: bool) -> None:
        self.own, self.instructions, self.stored, self.none_only = own, instructions, stored, none_only
        self.at = 0

    def read(self, last: int) -> tuple[Source, ...] | None:
        """The sources, or None if it computes with anything else."""
        self.at = last
        try:
            return tuple(self._operand())
        except LookupError:
            return None

    def _operand(self) -> list[Source]:
        instruction = self._next()
        if instruction.opname in _CONSTANT:
            return []
        if instruction.opname in (*_OF_TWO, "CALL"):
            self.none_only = False
        if instruction.opname in _OF_TWO:
            return self._operand() + self._operand()
        if instruction.opname == "CALL":
            return self._call(instruction.arg or 0)
        names: list[str] = []
        while instruction.opname == "LOAD_ATTR":
            names.insert(0, instruction.argval)
            instruction = self._next()
        name, function = instruction.argval, self.own.function
        if instruction.opname == "LOAD_GLOBAL" and function is not None:
            return [Source(function, (name, *names), self.none_only)]
        if instruction.opname.startswith("LOAD_FAST") and name == self.own.module and name not in self.stored:
            return [Source(None, tuple(names), self.none_only)]
        raise LookupError(instruction.opname)

    def _call(self, count: int) -> list[Source]:
        """A function of Python's that says the same of the same; of the type of an argument it may ask too."""
        found: list[Source] = []
        asked: list[int] = []
        for position in reversed(range(count)):
            if self.own.is_argument(self._peek(), self.stored):
                self._next()
                asked.append(position)
            else:
                found += self._operand()
        instruction = self._next()
        name = instruction.argval
        pure = instruction.opname == "LOAD_GLOBAL" and name in _PURE and self.own.of_python(name)
        if not pure or (asked and (name, asked) != ("isinstance", [0])):
            raise LookupError(name)
        return found

    def _peek(self) -> dis.Instruction:
        """The instruction before, but for those that change nothing of what is asked."""
        while self.instructions[self.at].opname in _PASSED:
            self.at -= 1
        return self.instructions[self.at]

    def _next(self) -> dis.Instruction:
        instruction = self._peek()
        self.at -= 1
        return instruction
