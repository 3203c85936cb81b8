"""Weight files, opened without reading them: which tensors they hold, and where.

    stored = open_weights("folder/")   # {key: Stored}

What is wrong with a file is found here, before anything is read, and said with the file and the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.errors import WeightsError
from autotp.stored import InPickle, InSafetensors, Stored

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format


def open_weights(path: str | Path | Sequence[str | Path]) -> dict[str, Stored]:
    """All tensors of a file, of a folder, or of several files, by key.

    A folder holds one weight file, or several with or without a ``*.safetensors.index.json`` (or
    ``*.bin.index.json``) that says which key lies where; safetensors files are preferred to others.

    Raises:
        WeightsError: nothing there, a file that is truncated, corrupted or of another kind, one key in two files, an
            index that does not fit its files. The text names the file, and the key where there is one.
    """
    if not isinstance(path, (str, Path)):
        return _together([Path(p) for p in path])
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_index(path)
    return _open_file(path)


def safetensors_name(key: str, dtype: torch.dtype) -> str:
    """What the safetensors format calls a dtype.

    Raises:
        WeightsError: it has no name for it.
    """
    if dtype not in _NAMES:
        raise WeightsError(f"{key} is {dtype}, which safetensors files cannot hold")
    return _NAMES[dtype]


def _open_folder(folder: Path) -> dict[str, Stored]:
    for endings in ((".safetensors",), (".bin", ".pt", ".pth")):
        indices = sorted(p for e in endings for p in folder.glob(f"*{e}.index.json"))
        if len(indices) > 1:
            raise WeightsError(
                f"{folder} holds several indices ({', '.join(p.name for p in indices)}): pass the path of one"
            )
        if indices:
            return _open_index(indices[0])
        files = sorted(p for e in endings for p in folder.glob(f"*{e}") if p.is_file())
        if files:
            return _together(files)
    held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise WeightsError(f"{folder} holds no weight file (*.safetensors, *.bin, *.pt), only {held}")


def _together(files: Sequence[Path]) -> dict[str, Stored]:
    if not files:
        raise WeightsError("no weight file was given: the list of paths is empty")
    found: dict[str, Stored] = {}
    for file in files:
        for key, stored in _open_file(file).items():
            if key in found:
                raise WeightsError(f"{key} is both in {found[key].file} and in {file}: pass the files of one model")
            found[key] = stored
    return found


def _open_index(index: Path) -> dict[str, Stored]:
    content = _json(index, _read(index))
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise WeightsError(f'{index} is no index of weights: it has no "weight_map" of keys to file names')
    found: dict[str, Stored] = {}
    for name in dict.fromkeys(where.values()):
        keys = [key for key, file in where.items() if file == name]
        file = index.parent / name
        if Path(name).name != name or not file.is_file():
            raise WeightsError(f"{keys[0]} should be in {file}, says {index}, but there is no such file in its folder")
        held = _open_file(file)
        if lost := [key for key in keys if key not in held]:
            raise WeightsError(f"{lost[0]} is not in {file}, where {index} says it is{_more(lost)}")
        if stray := [key for key in held if where.get(key) != name]:
            raise WeightsError(f"{stray[0]} is in {file}, but not according to {index}{_more(stray)}")
        found.update(held)
    return found


def _open_file(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        raise WeightsError(f"{file}: no such file or folder")
    if file.suffix == ".safetensors":
        return dict(_safetensors(file))
    if file.suffix in (".bin", ".pt", ".pth"):
        return _pickle(file)
    raise WeightsError(f"{file}: weights lie in .safetensors, .bin, .pt and .pth files, not in {file.suffix!r}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error


def _json(file: Path, text: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            raise WeightsError(f"{file} is corrupted: {next(n for n in names if names.count(n) > 1)} occurs twice")
        return dict(pairs)

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{file} is corrupted: its description is not valid JSON ({error})") from None


def _safetensors(file: Path) -> Iterator[tuple[str, Stored]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            what = "empty" if not size else "truncated or no safetensors file"
            raise WeightsError(f"{file} is {what}: {size} bytes, and a header of {length} bytes is announced")
        header = _json(file, opened.read(length))
    if not isinstance(header, dict):
        raise WeightsError(f"{file} is corrupted: its header is a JSON {type(header).__name__}")
    header.pop("__metadata__", None)
    base, end = 8 + length, 0
    entries = {key: _entry(file, key, value, base) for key, value in header.items()}
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.size)):
        if entry.start + entry.size > size:
            raise WeightsError(
                f"{file} is truncated: {entry.key} ends at byte {entry.start + entry.size}, the file at byte {size}"
            )
        if entry.start != base + end:
            raise WeightsError(
                f"{file} is corrupted: {entry.key} begins at byte {entry.start}, where {base + end} is expected"
            )
        end += entry.size
    if base + end != size:
        raise WeightsError(f"{file} is corrupted: its tensors end at byte {base + end}, the file at byte {size}")
    yield from entries.items()


def _entry(file: Path, key: str, value: Any, base: int) -> InSafetensors:
    try:
        shape, name, (begin, stop) = tuple(value["shape"]), value["dtype"], value["data_offsets"]
        numbers = all(type(n) is int for n in (*shape, begin, stop))
    except (KeyError, TypeError, ValueError):
        numbers = False
    if not numbers:
        raise WeightsError(f"{file} is corrupted: {key} is described by {value!r}")
    if name not in _DTYPES:
        raise WeightsError(f"{key} in {file} has dtype {name!r}; known are {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    expected = math.prod(shape) * dtype.itemsize
    if min((0, *shape)) < 0 or begin < 0 or stop - begin != expected:
        raise WeightsError(
            f"{file} is corrupted: {key} of shape {list(shape)} and dtype {name} takes {expected} bytes, "
            f"not bytes {begin} to {stop}"
        )
    return InSafetensors(key=key, file=file, shape=shape, dtype=dtype, start=base + begin, size=expected)


def _pickle(file: Path) -> dict[str, Stored]:
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a broken or hostile file makes of the unpickler
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{file} cannot be read as tensors alone (torch.load with weights_only=True and mmap=True): {first}. "
            "Save its state dict with safetensors, or with torch.save as it is by default"
        ) from error
    if not isinstance(state, dict):
        raise WeightsError(f"{file} holds a {type(state).__name__}, not a state dict")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{file} is no state dict: {key!r} is a {type(value).__name__}. Save model.state_dict() itself, "
                "without anything around it"
            )
    return {key: InPickle(key=key, file=file, tensor=value) for key, value in state.items()}


def _more(keys: Sequence[str]) -> str:
    return f" (and {len(keys) - 1} more keys)" if len(keys) > 1 else ""
