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
_KIND = functools._lru_cache_wrapper
_found: list[Any] = []
_read: set[str] = set()  # the imported modules whose functions are among those found
_seen: dict[int, Any] = {}  # what each had done when it was last looked at


def find_cached_functions() -> None:
    """Look for all cached functions there are: also of notebook cells, closures and single objects."""
    _read.update(sys.modules)
    _found[:] = [x for x in gc.get_objects() if type(x) is _KIND and _is_theirs(x)]
    _seen.clear()


def forget_tensors() -> None:
    """Empty the cached functions of models and their libraries that hold tensors."""
    for function in _functions():
        done = function.cache_info()
        if done.currsize and _seen.get(id(function)) != done and _holds_tensor(function, _DEPTH):
            function.cache_clear()
        _seen[id(function)] = function.cache_info()


def _functions() -> list[Any]:
    """The functions found, with those of modules that were imported since; looking at all objects takes 0.1 s."""
    for name in set(sys.modules) - _read:
        _read.add(name)
        inside = list(getattr(sys.modules[name], "__dict__", {}).values())
        inside += [x for c in inside if isinstance(c, type) for x in vars(c).values()]
        _found.extend(x for x in inside if type(x) is _KIND and _is_theirs(x))
    return _found


def _is_theirs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] not in _OURS


def _holds_tensor(x: Any, depth: int) -> bool:
    if isinstance(x, Tensor):
        return True
    if type(x).__module__.startswith("torch.distributed"):
        return False  # a mesh that some ranks make anew would leave the others waiting
    if depth == 0 or isinstance(x, type) or (callable(x) and not isinstance(x, _KIND)):
        return False
    return any(_holds_tensor(y, depth - 1) for y in gc.get_referents(x))
