"""Private corners of torch, one of three: where in the user's code a torch function is called, by its instruction."""

from __future__ import annotations

import opcode
import os
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise, takewhile
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

_MODULE_FILE = nn.modules.module.__file__
_HOOKED, _UNHOOKED = "inner", "_call_impl"  # the frames that call a forward: of a module with hooks, and of one without
_BOUNDARY = {_HOOKED, _UNHOOKED, "_wrapped_call_impl"}
_UNHOOKED_CODE = nn.Module._call_impl.__code__
_HOOKED_CODE = {id(c) for c in _UNHOOKED_CODE.co_consts if isinstance(c, types.CodeType) and c.co_name == _HOOKED}
_CALLS_CODE = {*_HOOKED_CODE, id(_UNHOOKED_CODE)}
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MACHINERY = tuple(
    _HERE + name
    for name in ("trace.py", "proof.py", "repeats.py", "torch_hooks.py", "torch_ops.py", "promotion.py", "styles")
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
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


class Sites:
    """The places that calls are made from while a forward runs: :func:`call_site`, worked out once for every stack."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        self.known, self.through = known, led_through(known)
        self._found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._kept: set[types.CodeType] = set()  # so that no other code gets the id of one

    def here(self, base: types.FrameType, depth: int = 2) -> tuple[Any, ...]:
        """Of the call that is being made, below the frame ``base``; empty if another module's forward makes it."""
        frame: types.FrameType | None = sys._getframe(depth)
        stack: list[int] = []
        others = _HOOKED_CODE if self.through else _CALLS_CODE
        while frame is not None and frame is not base:
            code = id(frame.f_code)
            if code in others:
                return ()
            stack.append(code)
            stack.append(frame.f_lasti)
            frame = frame.f_back
        key = tuple(stack)
        site = self._found.get(key)
        if site is None or frame is None:
            site = call_site(depth + 1, base, self.known, self.through)
            if frame is not None:
                self._keep(sys._getframe(depth), base)
                self._found[key] = site
        return site

    def _keep(self, frame: types.FrameType | None, base: types.FrameType) -> None:
        while frame is not None and frame is not base:
            self._kept.add(frame.f_code)
            frame = frame.f_back


def led_through(sites: Iterable[tuple[Any, ...]]) -> frozenset[types.CodeType]:
    """The forwards of modules that are no part of the model, and that these places are inside of."""
    pairs = [pair for site in sites for pair in pairwise(site)]
    return frozenset(a[0] for a, b in pairs if isinstance(b[0], types.CodeType) and is_boundary(b[0]))


def code_of(sites: Iterable[tuple[Any, ...]]) -> set[types.CodeType]:
    """The code that these places are in, or are reached by way of, but for torch's own."""
    code = {place[0] for site in sites for place in site if isinstance(place[0], types.CodeType)}
    return {c for c in code if not c.co_filename.startswith(_TORCH)}


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
    """``file.py:123`` of the innermost place that is not torch's own, if there is one."""
    places = list(takewhile(lambda place: isinstance(place[0], types.CodeType), site))
    if not places:
        return "torch"
    code, lasti = next((p for p in places if not p[0].co_filename.startswith(_TORCH)), places[0])
    lines = [line for start, stop, line in code.co_lines() if start <= lasti < stop and line]
    return f"{os.path.basename(code.co_filename)}:{lines[0] if lines else code.co_firstlineno}"


def in_checkpoint(site: tuple[Any, ...]) -> bool:
    """Whether a place is reached by way of ``torch.utils.checkpoint``."""
    return any(isinstance(f[0], types.CodeType) and f[0].co_filename == torch.utils.checkpoint.__file__ for f in site)
