"""Candidate inputs for a model, the likeliest first."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from autotp import input_facts, input_roles
from autotp.input_facts import Facts
from autotp.input_tensors import Setting, Tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]

TURNS = (4, 8, 24)  # settings tried for each assignment of roles, before the next one has its turn
_VISUAL = {"image", "video", "volume"}
_LENGTHS: dict[str, tuple[int, ...]] = {
    "wave": (1600, 6400, 16000),
    "mel": (64, 100, 128, 256, 3000),
    "signal": (16, 64, 256, 1600, 16000),
    "": (7, 16, 32, 64),
}
_SIZES = {"image": 2, "video": 2, "volume": 3, "signal": 1}


def guesses(model: nn.Module) -> Iterator[Sample]:
    """Yield example inputs for `model.forward` to try in turn."""
    found = input_roles.parameters(model)
    facts = input_facts.read(model)
    needed = input_roles.required(found)
    yield from own_dummies(model)
    lanes = [
        (roles, _settings(facts, roles, kind))
        for names in _selections(model, found)
        for roles in input_roles.alternatives(found, names)
        for kind in _kinds(facts, roles)
    ]
    # In turns: a likely meaning with an odd size and an odd meaning with a likely size are both found early.
    for turn in TURNS:
        for roles, settings in lanes:
            for setting in itertools.islice(settings, turn):
                yield _sample(Tensors(facts, setting), roles, needed)
    if not found:
        yield (), {}


def own_dummies(model: nn.Module) -> Iterator[Sample]:
    """What the model offers itself, unless it is transformers' generic text, which fits few vocabularies."""
    if type(model).__module__.startswith("transformers."):
        return
    for name in ("dummy_inputs", "example_inputs", "example_input_array"):  # the last one is Lightning's
        try:
            own = getattr(model, name, None)
            own = own() if inspect.ismethod(own) else own
        except Exception:  # a property of the user's that fails is no input
            continue
        if isinstance(own, dict) and own:
            yield (), dict(own)
        elif isinstance(own, tuple) and own:
            yield own, {}
        elif own is not None and hasattr(own, "shape"):
            yield (own,), {}


def _selections(model: nn.Module, found: list[inspect.Parameter]) -> Iterator[list[str]]:
    """Which parameters to fill: the required ones and the main one, then more modalities, then their companions."""
    known = {p.name: input_roles.roles(p)[0].removeprefix("list_") for p in found}
    base = set(input_roles.required(found))
    main = getattr(model, "main_input_name", None)  # transformers; a list in a few models
    primary = [name for name, role in known.items() if role in input_roles.PRIMARY]
    base |= set(main if isinstance(main, (list, tuple)) else [main]) & set(known)
    if not base and found:
        base.add(primary[0] if primary else found[0].name)
    modalities = [n for n in primary if n != "inputs_embeds" and not n.startswith("decoder_inputs")]
    decoder = {"decoder_input_ids"} & set(known)
    companions = {n for n, role in known.items() if role in _COMPANIONS}
    tiers = [
        base | decoder,
        base,
        base | set(modalities[:2]) | decoder,
        base | set(modalities[:3]) | decoder,
        base | decoder | companions,
        base | set(modalities[:2]) | companions,
        base | {p for p in known if p == "attention_mask"} | companions,
    ]
    seen: list[list[str]] = []
    for tier in tiers:
        names = [name for name in known if name in tier]
        if names not in seen:
            seen.append(names)
            yield names


_COMPANIONS = ("grid", "ones", "image_sizes", "spatial_shapes", "boxes", "rotary")


def _kinds(facts: Facts, roles: dict[str, str]) -> list[str]:
    """Meanings of "main": those of the layers, in order, then the usual ones; one where no parameter has that role."""
    if not {"main", "other", "list_main"} & set(roles.values()):
        return ["features"]
    # Patches may also be cut by reshaping, before a linear layer.
    return list(dict.fromkeys((*facts.kinds, "features", "image", "ids")))


def _settings(facts: Facts, roles: dict[str, str], kind: str) -> Iterator[Setting]:
    """Combinations of sizes; each next one differs from the likeliest in as little as possible."""
    held = {kind if role == "main" else role for role in (r.removeprefix("list_") for r in roles.values())}
    options: dict[str, tuple[Any, ...]] = {  # of two that are equally unlikely, the later in this list varies first
        "form": _forms(held, kind),
        "frames": _frames(facts, held),
        "channels": _channels(facts, held),
        "other_width": facts.widths[:4] if "other" in held and len(facts.widths) > 1 else (0,),
        "tokens": _tokens(facts, held),
        "width": facts.widths[:4] or (64,),
        "side": facts.sides[:8] if held & _VISUAL else ((32, 32),),
        "by_name": (True, False) if any(map(facts.width_for, roles)) else (True,),
        "other": (5, 0) if "other" in held else (5,),
    }
    if not held & {"features", "embeds", "other", "state"}:
        options["width"] = options["width"][:1]
    for picks in _diagonal([len(values) for values in options.values()]):
        values = {name: some[i] for (name, some), i in zip(options.items(), picks, strict=True)}
        values["other"] = values["other"] or values["tokens"]
        values["other_width"] = values["other_width"] or values["width"]
        yield Setting(kind=kind, **values)


def _diagonal(lengths: list[int]) -> list[tuple[int, ...]]:
    """All index tuples, by the sum of their indices."""
    free = [range(min(n, 6)) for n in lengths]
    return sorted(itertools.product(*free), key=sum)


def _tokens(facts: Facts, held: set[str]) -> tuple[int, ...]:
    role = next((r for r in ("wave", "mel", "signal") if r in held), "")
    lengths = _LENGTHS[role]
    if role in ("mel", "wave"):
        fixed = facts.lookup("max_source_positions", inside="audio|speech")
        spectrum = facts.lookup("max_length", inside="audio|speech", default=0) or 0
        known = (2 * fixed,) if fixed and role == "mel" else ()
        lengths = (*known, *((spectrum,) if spectrum > 20 else ()), *lengths)
    return lengths if held & {"ids", "embeds", "features", "wave", "mel", "signal", "other"} else lengths[:1]


def _channels(facts: Facts, held: set[str]) -> tuple[int, ...]:
    dims = next((_SIZES[r] for r in ("volume", "signal", "video", "image") if r in held), 2)
    named = facts.lookup("num_channels", "in_channels", "in_chans", inside="vis|image")
    first = facts.channels[dims][:1] or facts.channels[2][:1] or facts.channels[3][:1]
    return tuple(dict.fromkeys((*first, *((named,) if named else ()), 3)))


def _frames(facts: Facts, held: set[str]) -> tuple[int, ...]:
    if not held & {"video", "volume", "image"}:
        return (4,)
    known = facts.lookup("num_frames", "frames_per_clip")
    return tuple(dict.fromkeys((*((known,) if known else ()), *((4, 16) if "image" not in held else (4, 2)))))


def _forms(held: set[str], kind: str) -> tuple[int, ...]:
    if "grid" in held:
        return (1, 2)
    if "spatial_shapes" in held:
        return (5, 0)
    if "image" in held:
        return (0, 4, 3, 6, 7)
    if held & {"wave", "mel", "volume", "video", "signal"}:
        return (0, 1, 2)
    return (0, 1, 2, 3) if held & {"features", "embeds", "series"} else (0,)


def _sample(tensors: Tensors, roles: dict[str, str], needed: list[str]) -> Sample:
    """The inputs by position where the parameter is required, by name where it is not."""
    roles = dict(roles)
    if "main" not in roles.values() and list(roles.values()).count("other") > 1:
        roles[next(name for name, role in roles.items() if role == "other")] = "main"  # (tgt, memory)
    # Where a grid says how patches lie, "hidden_states" are the patches.
    patches = "grid" in roles.values()
    values = {
        name: tensors.make("image" if patches and role in ("embeds", "list_embeds") else role, name)
        for name, role in roles.items()
    }
    args = tuple(values.pop(name) for name in needed if name in values)
    return args, values
