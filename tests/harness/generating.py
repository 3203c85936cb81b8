"""Generation with a sharded model against the same unsharded: tokens, and the logits that they were chosen by."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp import structures
from autotp.errors import AutotpError, VerifyError
from autotp.measuring import Inputs, Settings
from autotp.promotion import widen, widen_model

STEPS = 16
SHORT = {"max_new_tokens", "min_new_tokens"}
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}
# What a forward takes and generate does not, or makes itself.
NOT_GENERATED = {
    "labels",
    "position_ids",
    "use_cache",
    "return_dict",
    "past_key_values",
    "cache_position",
    "return_loss",
}


@dataclass(frozen=True)
class Expected:
    """A call of generate that works unsharded, and what it gives with each kind of cache (or why it does not)."""

    call: dict[str, Any]
    options: dict[str, Any]
    settings: Settings
    outputs: dict[str, dict[str, Tensor] | str]


def greedy(steps: int = STEPS) -> dict[str, Any]:
    """Options of a greedy search that goes on for so many steps."""
    return {"do_sample": False, "num_beams": 1, "max_new_tokens": steps, "min_new_tokens": steps, "pad_token_id": 0}


def given(call: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """A copy of the inputs of its own."""
    copied: dict[str, Any] = structures.map_tensors(call, lambda t: widen(t.detach(), settings.dtype).clone())
    return copied


def tokens(model: nn.Module, call: dict[str, Any], settings: Settings, **options: Any) -> dict[str, Tensor]:
    """What `generate` returns, by name; the logits of every step among it."""
    with settings.mode(), torch.no_grad():
        out = model.generate(**given(call, settings), **options)  # type: ignore[operator]
    return dict(structures.named_tensors(out))


def ways(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """How `generate` may be called for inputs of `forward`, the fullest first."""
    main = getattr(model, "main_input_name", "input_ids")
    named = {**dict(zip([main], args, strict=False)), **kwargs}
    fitting = {k: v for k, v in named.items() if k not in NOT_GENERATED}
    encoded = {k: v for k, v in fitting.items() if not k.startswith("decoder_")}
    first = {k: v for k, v in named.items() if k in (main, "input_ids", "attention_mask")}
    start = {"decoder_start_token_id": 1} if _starts_nowhere(model) else {}
    logits = {"return_dict_in_generate": True, "output_logits": True}
    for inputs in (fitting, encoded, first, {k: v for k, v in named.items() if k == main}):
        yield {**inputs, **start, **logits}
        yield {**inputs, **start}


def _starts_nowhere(model: nn.Module) -> bool:
    config = getattr(model, "generation_config", None)
    ids = [getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id")]
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and ids == [None, None]


def expected(model: nn.Module, inputs: Inputs, settings: Settings | None = None) -> Expected:
    """The first way that works unsharded, for every kind of cache; in float32 if none does in float64."""
    settings = settings or Settings(backward=False)
    wide = widen_model(copy.deepcopy(model), settings.dtype)
    first: Exception | None = None
    for call, options in itertools.product(ways(model, *inputs), (greedy(), {"max_new_tokens": STEPS})):
        try:
            tokens(wide, call, settings, **{**options, **dict.fromkeys(options.keys() & SHORT, 2)})
        except Exception as error:
            first = first or error
        else:
            found = {kind: _attempt(wide, call, settings, {**options, **extra}) for kind, extra in CACHES.items()}
            return Expected(call, options, settings, found)
    why = f"{type(first).__name__}: {first}"
    if settings.promote:
        return expected(model, inputs, replace(settings, promote=False, dtype=torch.float32, obstacle=why[:300]))
    raise VerifyError(f"the unsharded model does not generate: {why}") from first


def _attempt(model: nn.Module, call: Any, settings: Settings, options: Any) -> dict[str, Tensor] | str:
    try:
        return tokens(model, call, settings, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def compared(model: nn.Module, wanted: Expected, kind: str) -> dict[str, Any]:
    """Status exact, wrong, refused, crashed, or unsupported (does not work unsharded either)."""
    before = wanted.outputs[kind]
    if isinstance(before, str):
        return {"status": "unsupported", "text": before}
    try:
        found = tokens(model, wanted.call, wanted.settings, **wanted.options, **CACHES[kind])
    except AutotpError as error:
        return {"status": "refused", "text": str(error)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"status": "crashed", "text": text, "trace": traceback.format_exc()[-3000:]}
    return differences(before, found, wanted.settings.forward_limit)


def differences(wanted: dict[str, Tensor], found: dict[str, Tensor], limit: float) -> dict[str, Any]:
    """Whether tokens are equal and logits equal up to rounding."""
    whole = {k: v for k, v in wanted.items() if not structures.differentiable(v)}
    equal = list(wanted) == list(found) and all(torch.equal(v, found[k]) for k, v in whole.items())
    largest = structures.largest(list(wanted.values())) or 1.0
    gaps = [structures.difference(v, found[k]) / largest for k, v in wanted.items() if k in found and k not in whole]
    error = max(gaps, default=0.0)
    kinds = len(torch.cat([v.reshape(-1) for v in whole.values()]).unique()) if whole else 0
    ok = equal and error <= limit
    return {"status": "exact" if ok else "wrong", "tokens": equal, "error": error, "different_tokens": kinds}


def worst(figures: dict[str, Any], group: Any) -> dict[str, Any]:
    """For every kind of cache the figures of the rank that is worst off; the same on all ranks."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, figures, group=group)
    bad = {kind: [f[kind] for f in every if f[kind]["status"] not in ("exact", "unsupported")] for kind in figures}
    return {kind: bad[kind][0] if bad[kind] else figures[kind] for kind in figures}
