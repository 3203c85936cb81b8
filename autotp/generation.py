"""``generate`` of a sharded model: planned when it is first called in some way, and drawing alike on all ranks.

What a model runs while it generates (a prefill, steps of one token with a cache that grows or is written into, an
encoder by itself) is not what one forward runs. So the first call of ``generate`` with some kind of arguments runs it
once on shapes, for a few steps, and plans that as the forward was planned: owners, local programs, proof. The weights
stay as they are laid out. The programs run for as long as ``generate`` does. Where it then takes a path that was not
seen, it is planned again, by what it was called with, and called again.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autotp.analysis import Analysis
from autotp.errors import AutotpError, NotPlannedError
from autotp.extending import Dealt, extend, layouts_of
from autotp.held import Layouts, is_object, tensors_in, with_tensors
from autotp.hoisting import Hoisting, ModuleProgram
from autotp.record import Trace
from autotp.styles.bound import Running
from autotp.styles.comm import Ranks
from autotp.styles.local import LocalForward
from autotp.styles.random import drawing_alike
from autotp.torch_hooks import Hook, is_dtensor, kept_rng, uncompiled
from autotp.trace import Drive, trace
from autotp.trees import Ref, flatten, kinds

STEPS = 3  # a prefill, and two steps: the second may take another path than the first
GUESSED_STEPS = 10  # where several tokens are guessed and checked at once
MOST_STEPS, MOST_VARIANTS = 24, 6
_ALONE = {"streamer", "synced_gpus"}  # not for a run on shapes
_GUESSING = {"assistant_model", "prompt_lookup_num_tokens"}
_MADE_IN = "_autotp_made_in"
Mode = tuple[Any, ...]


@dataclass(frozen=True)
class Planned:
    """Programs by module path, and how caches are laid out; no programs, and why, where it does not run on shapes.

    ``read_whole``: parameters that are whole in use, and read by code outside of the forwards of their modules (a
    method of an image encoder that generate calls), where they would be DTensors.
    """

    programs: dict[str, ModuleProgram] | None
    held: Layouts = field(default_factory=dict)
    read_whole: tuple[str, ...] = ()
    obstacle: str = ""


def plan_generate(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    size: int,
    dealt: Dealt,
    steps: int = STEPS,
    held: Layouts | None = None,
) -> Planned:
    """Plan ``model.generate(*args, **kwargs)`` for ``size`` ranks that hold the weights as ``dealt`` says.

    Args:
        steps: how often code outside of the model may call one module before the run is cut off.
        held: how caches among the arguments are laid out already.

    Raises:
        ProofError: no program could be proved.
    """
    run, kwargs = _generate, {k: v for k, v in kwargs.items() if k not in _ALONE}
    if any(kwargs.get(name) is not None for name in _GUESSING):
        kwargs, run, steps = {k: v for k, v in kwargs.items() if k not in _GUESSING}, _generate_guessing, GUESSED_STEPS
    try:
        record = _recorded(run, model, args, kwargs, steps, held)
    except Exception as error:
        why = str(error) if isinstance(error, AutotpError) else f"{type(error).__name__}: {error}"
        return Planned(None, obstacle=why)
    found = extend(model, record, args, kwargs, size, dealt)
    return Planned(Hoisting(found).run(), layouts_of(found), _read_whole(found))


def _read_whole(found: Analysis) -> tuple[str, ...]:
    record = found.trace
    outside = {x.tid for c in record.calls if c.module < 0 for x in c.leaves if isinstance(x, Ref)}
    whole = {t for t in outside if t in found.dealing.at_rest or not found.dealing.sets(t)}
    return tuple(name for name, t in record.leaves.items() if t in whole)


def _recorded(run: Any, model: nn.Module, args: Any, kwargs: Any, steps: int, held: Layouts | None) -> Trace:
    """A record of generate, that no token ends where it runs without one that does."""
    with kept_rng():
        try:
            return trace(model, args, kwargs, drive=Drive(functools.partial(_endless, run), steps), held=held)
        except Exception:
            return trace(model, args, kwargs, drive=Drive(run, steps), held=held)


def _generate(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]


def _generate_guessing(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Whoever guesses the tokens, the model checks some at once: on shapes it may as well guess them itself."""
    config: Any = getattr(model, "generation_config", None)
    if hasattr(config, "num_assistant_tokens"):
        config.num_assistant_tokens = 2
    return _generate(model, args, {**kwargs, "assistant_model": model})


def _endless(run: Any, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """On shapes the tokens are made up: the one that ends generation must not be among them by chance."""
    for config in (getattr(model, "generation_config", None), *args, *kwargs.values()):
        if getattr(config, "eos_token_id", None) is not None and hasattr(config, "cache_implementation"):
            config.eos_token_id = None
    return run(model, args, {k: v for k, v in kwargs.items() if k != "eos_token_id"})


def mode_of(model: nn.Module, args: Any, kwargs: Any) -> Mode:
    """What steers generate: which arguments are given, flags and names, those of configurations among them."""
    given = [getattr(model, "generation_config", None), *args, *kwargs.values()]
    return "generate", kinds(model, args, kwargs), *(_flags(x) for x in given if is_object(x)), *map(_facts, given)


def _flags(x: Any) -> tuple[Any, ...]:
    if not hasattr(x, "cache_implementation"):
        return (any(True for _ in tensors_in(x)),)  # a cache: whether there is something in it
    return tuple((k, v) for k, v in sorted(vars(x).items()) if isinstance(v, (bool, str)))


def _facts(x: Any) -> Any:
    """Whether a mask leaves something out."""
    if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.ndim > 1:
        return bool((x == 1).all())
    return None


class Generation(Hook):
    """What a sharded model knows about generating; copies of the model share it."""

    def __init__(self, ranks: Ranks, running: Running, dealt: Dealt, held: Layouts) -> None:
        self.ranks, self.running, self.dealt = ranks, running, dealt
        self.held: dict[Any, Layouts] = {None: held}  # of the caches that were made in a mode
        self.planned: dict[Mode, list[Planned]] = {}

    def run(self, model: nn.Module, generate: Any, args: Any, kwargs: Any) -> Any:
        """Call ``generate`` by the programs planned for this kind of call, after planning them if need be."""
        if self.running.mode is not None or self.running.depth:
            return generate(model, *args, **kwargs)  # called by a generate that is running
        mode = mode_of(model, args, kwargs)
        given = _Given(args, kwargs, keep=mode not in self.planned)
        known = self.planned.setdefault(mode, [])
        n, steps, seen = 0, STEPS, 0
        with drawing_alike(self.ranks) as begin_again:
            while True:
                if n == len(known):
                    known.append(self._plan(model, args, kwargs, steps))
                    seen = steps
                try:
                    return self._call(model, generate, mode, n, args, kwargs)
                except NotPlannedError:
                    n, steps = n + 1, max(self.running.turns + 1, STEPS)
                    last = n == len(known)
                    if last and (known[-1].obstacle or steps <= seen or steps > MOST_STEPS or n == MOST_VARIANTS):
                        raise
                    given.restore()
                    begin_again()

    def _plan(self, model: nn.Module, args: Any, kwargs: Any, steps: int) -> Planned:
        held: Layouts = {}
        for x in _objects(args, kwargs):
            held.update(self._laid_out(x))
        planned = plan_generate(model, args, kwargs, self.ranks.size, self.dealt, steps, held)
        if planned.obstacle and self.ranks.rank == 0:
            text = f"{type(model).__name__}.generate does not run on shapes, so it is run by what was planned for"
            warnings.warn(f"{text} forward alone ({planned.obstacle})", stacklevel=5)
        return planned

    def _laid_out(self, x: Any) -> Layouts:
        """How the tensors in a cache are laid out that this model has filled."""
        known = self.held.get(getattr(x, _MADE_IN, None), {})
        out: Layouts = {}
        for place, t in tensors_in(x):
            cut = known.get(place, {})
            if cut and t.numel() and all(t.shape[d] == len(parts[self.ranks.rank]) for d, parts in cut.items()):
                out[place] = cut
        return out

    def _call(self, model: nn.Module, generate: Any, mode: Mode, n: int, args: Any, kwargs: Any) -> Any:
        planned, running = self.planned[mode][n], self.running
        key = (*mode, n) if planned.programs is not None else None
        if planned.programs is not None:
            _attach(model, planned.programs, key, self.ranks, running)
            self.held[key] = planned.held
        running.turns, running.mode = 0, key
        try:
            with uncompiled(), _shown_whole(model, planned.read_whole, running):
                out = generate(model, *args, **kwargs)
        finally:
            running.mode = None
        for x in _objects(args, kwargs, out):
            if hasattr(x, "__dict__") and any(True for _ in tensors_in(x)):
                setattr(x, _MADE_IN, key)
        return out


@contextmanager
def _shown_whole(model: nn.Module, names: tuple[str, ...], running: Running) -> Iterator[None]:
    """Plain whole tensors in place of these parameters; the forwards of their modules still find the real ones."""
    slots: list[tuple[Any, str, Any]] = []
    for path, _, name in (full.rpartition(".") for full in names):
        inside = model.get_submodule(path)._parameters
        slots += [(inside, name, inside[name])] if is_dtensor(inside.get(name)) else []
    for inside, name, real in slots:
        inside[name] = real.full_tensor()
        running.shown_whole[id(inside[name])] = real
    try:
        yield
    finally:
        running.shown_whole.clear()
        for inside, name, real in slots:
            inside[name] = real


def _objects(*trees: Any) -> list[Any]:
    return [x for tree in trees for x in flatten(tree)[0] if is_object(x)]


class _Given:
    """The caches among the arguments as they were, in case a call must be made again."""

    def __init__(self, args: Any, kwargs: Any, keep: bool) -> None:
        caches = [x for x in _objects(args, kwargs) if not callable(x) and not hasattr(x, "cache_implementation")]
        self.kept = [(x, with_tensors(x, lambda _, t: t.clone()) if keep else None) for x in caches]

    def restore(self) -> None:
        """Give them their content back; raises what is being handled if that cannot be done."""
        for x, before in self.kept:
            if before is None or before is x or hasattr(x, "put"):  # a streamer has told its user
                raise
            vars(x).clear()
            vars(x).update(vars(with_tensors(before, lambda _, t: t.clone())))


def _forward_of(module: nn.Module) -> LocalForward | None:
    hooks = (getattr(f, "__self__", None) for f in module._forward_pre_hooks.values())
    return next((h for h in hooks if isinstance(h, LocalForward)), None)


def _attach(model: nn.Module, programs: dict[str, ModuleProgram], mode: Any, ranks: Ranks, running: Running) -> None:
    """Tell every module its program, and hook up those that had none to do so far."""
    for path, module in model.named_modules():
        program = programs.get(path)
        if program is None or not program.does_something:
            continue
        local = _forward_of(module)
        if local is None:
            local = LocalForward(path, module, set(), ranks, running)
            local.learn(ModuleProgram(path))
            local.attach(module)
        if mode not in local.programs:
            local.learn(program, mode)


def install(model: nn.Module, generation: Generation) -> None:
    """Let ``model.generate`` be planned and draw alike; nothing for models that have none."""
    original = getattr(type(model), "generate", None)
    if not callable(original) or "generate" in vars(model):
        return

    @functools.wraps(original)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return generation.run(self, type(self).generate, args, kwargs)  # type: ignore[attr-defined]

    generate.generation = generation  # type: ignore[attr-defined]
    model.generate = types.MethodType(generate, model)  # type: ignore[assignment]


def generation_of(model: nn.Module) -> Generation | None:
    """What a sharded model knows about generating; None for one without ``generate``."""
    found = getattr(vars(model).get("generate"), "generation", None)
    return found if isinstance(found, Generation) else None
