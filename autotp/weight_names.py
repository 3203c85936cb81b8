"""Which stored tensor belongs to which parameter or buffer, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from autotp import weight_conversions
from autotp.errors import WeightsError
from autotp.lookup import nearest
from autotp.parts import Slot, slots
from autotp.stored import Stored

_SHOWN = 4  # of each kind of problem
Rename = Callable[[str], str | None]
Allow = bool | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """A parameter or buffer and where it comes from; a tied one may be stored under several of its names."""

    slot: Slot
    source: Stored
    others: tuple[Stored, ...] = ()


def assign(
    model: nn.Module,
    stored: Mapping[str, Stored],
    *,
    rename: Rename | None = None,
    allow_missing: Allow = False,
    allow_unexpected: Allow = False,
    cast: bool = False,
) -> list[Assigned]:
    """A source for every parameter and every buffer of the model's state dict.

    Raises:
        WeightsError: keys that are missing or left over (unless allowed: `True`, or globs), shapes or dtypes that
            differ (dtypes unless `cast`). One text with all of them; each with its key and its file.
    """
    wanted = slots(model)
    names = {name: slot for slot in wanted for name in slot.names}
    if rename is not None:
        stored = _renamed(stored, rename)
    found = dict(stored)
    if weight_conversions.concerns(model):
        found = weight_conversions.converted(model, stored, names)
    left = {key: source for key, source in found.items() if key not in names}
    if weight_conversions.concerns(model):
        left = {key: source for key, source in left.items() if not weight_conversions.ignored(model, key)}
    unexpected = {key: source for key, source in left.items() if not _allowed(key, allow_unexpected)}
    missing = [s for s in wanted if not any(n in found for n in s.names)]
    lost = [s for s in missing if not any(_allowed(n, allow_missing) for n in s.names)]
    made = [_assigned(s, found) for s in wanted if any(n in found for n in s.names)]
    problems = [
        *_shown([partial(_missing, s, stored, unexpected) for s in lost], "allow_missing"),
        *_shown([partial(_stray, key, s) for key, s in unexpected.items()], "allow_unexpected"),
        *_shown([partial(str, text) for a in made for text in _misfits(a, cast)], "cast"),
    ]
    if problems:
        raise WeightsError(f"the weights do not fit {type(model).__name__}: " + "; ".join(problems))
    return made


def _renamed(stored: Mapping[str, Stored], rename: Rename) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for key, source in stored.items():
        name = rename(key)
        if name in found:
            raise WeightsError(f"rename gives {name} for both {found[name].key} and {key} in {source.file}")
        if name is not None:
            found[name] = source
    return found


def _assigned(slot: Slot, found: Mapping[str, Stored]) -> Assigned:
    first, *others = (found[name] for name in slot.names if name in found)
    return Assigned(slot=slot, source=first, others=tuple(others))


def _allowed(name: str, allow: Allow) -> bool:
    return allow if isinstance(allow, bool) else any(fnmatchcase(name, glob) for glob in allow)


def _missing(slot: Slot, stored: Mapping[str, Stored], unexpected: Mapping[str, Stored]) -> str:
    files = list(dict.fromkeys(source.file for source in stored.values()))
    where = str(files[0]) if len(files) == 1 else f"the {len(files)} files in {files[0].parent}" if files else "no file"
    tied = f" (nor under {', '.join(slot.names[1:])}, to which it is tied)" if len(slot.names) > 1 else ""
    near = nearest(slot.name, list(unexpected))
    hint = f", which {'has' if len(files) == 1 else 'have'} {near[0]}" if near else ""
    return f"{slot.name} is not in {where}{tied}{hint}"


def _misfits(assigned: Assigned, cast: bool) -> Iterable[str]:
    slot = assigned.slot
    for source in (assigned.source, *assigned.others):
        name = slot.name if source.key in slot.names else f"{slot.name} (from {source.key})"
        if tuple(source.shape) != tuple(slot.tensor.shape):
            yield f"{name} has shape {list(source.shape)} in {source.file}, {list(slot.tensor.shape)} in the model"
        elif source.dtype != slot.tensor.dtype and not cast:
            yield f"{name} is {_dtype(source.dtype)} in {source.file}, {_dtype(slot.tensor.dtype)} in the model"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _stray(key: str, source: Stored) -> str:
    return f"{key} in {source.file} has no place in the model"


def _shown(problems: Sequence[Callable[[], str]], option: str) -> Iterable[str]:
    if problems:
        more = f", and {len(problems) - _SHOWN} more like this" if len(problems) > _SHOWN else ""
        yield f"{', '.join(text() for text in problems[:_SHOWN])}{more} [{_HINTS[option]}]"


_HINTS = {
    "allow_missing": "allow_missing=['glob'] leaves such parameters on meta",
    "allow_unexpected": "allow_unexpected=['glob'] leaves such keys out",
    "cast": "cast=True converts dtypes; shapes must be equal",
}
