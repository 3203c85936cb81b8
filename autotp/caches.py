"""Functions that remember tensors between calls (``functools.lru_cache``).

What a recorded run leaves in them has no content, and what an earlier run left there hides calls from the record. So
they are emptied before and after; they fill again by themselves.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

from torch import Tensor

_OURS = ("torch", "torchvision", "autotp", "numpy", *sys.stdlib_module_names)
_DEPTH = 5  # from the cached function to its table, an entry, a result, and tensors in a tuple or dict of results
_found: tuple[int, list[Any]] = (0, [])
_seen: dict[int, Any] = {}  # what each had done when it was last looked at


def forget_tensors() -> None:
    """Empty all cached functions of models and their libraries that hold tensors."""
    for function in _functions():
        done = function.cache_info()
        if done.currsize and _seen.get(id(function)) != done and _holds_tensor(function, _DEPTH):
            function.cache_clear()
        _seen[id(function)] = function.cache_info()


def _functions() -> list[Any]:
    """All cached functions, looked for again when modules were imported since."""
    global _found
    if _found[0] != len(sys.modules):
        kind = functools._lru_cache_wrapper
        every = [x for x in gc.get_objects() if type(x) is kind]
        _found = len(sys.modules), [f for f in every if str(f.__module__).partition(".")[0] not in _OURS]
    return _found[1]


def _holds_tensor(x: Any, depth: int) -> bool:
    if isinstance(x, Tensor):
        return True
    if type(x).__module__.startswith("torch.distributed"):
        return False  # a mesh that some ranks make anew would leave the others waiting
    if depth == 0 or isinstance(x, type) or (callable(x) and not isinstance(x, functools._lru_cache_wrapper)):
        return False
    return any(_holds_tensor(y, depth - 1) for y in gc.get_referents(x))
