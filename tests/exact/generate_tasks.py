"""What the ranks run to compare generation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp import structures
from autotp.comparing import cut_share
from autotp.generation import generation_of
from autotp.held import tensors_in
from autotp.measuring import Settings
from autotp.promotion import widen, widen_model
from tests.harness.generating import CACHES, compared, differences, expected, greedy, tokens, worst
from tests.harness.planned import planned_once
from tests.harness.tasks import autotp_shard, mesh_of
from tests.models.common import finish
from tests.models.generating import GENERATING
from tests.models.methods import WIDTH, CallsMethods

SETTINGS = Settings(backward=False)


def on_first_ranks(task: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """A task for ``payload["tp"]`` ranks, which plan once for all of them; None on others."""

    @functools.wraps(task)
    def run(payload: dict[str, Any]) -> Any:
        if dist.get_rank() >= payload["tp"]:
            return None
        with planned_once(mesh_of(payload["tp"])):
            return task(payload)

    return run


def built(name: str) -> tuple[nn.Module, Any, Any]:
    """The model in float64, its inputs, and an unsharded copy."""
    model, args, kwargs = finish(GENERATING[name])
    widen_model(model, SETTINGS.dtype)
    inputs = structures.map_tensors((args, kwargs), lambda t: widen(t, SETTINGS.dtype))
    return model, inputs, copy.deepcopy(model)


def sharded(model: nn.Module, inputs: Any, tp: int, **options: Any) -> nn.Module:
    """Cut over the first ranks."""
    with SETTINGS.mode():
        return autotp_shard(model, mesh_of(tp), inputs, **options)


def call_of(name: str) -> dict[str, Any]:
    """Arguments of generate for the inputs of a model's forward."""
    kwargs = finish(GENERATING[name])[2]
    logits = {"return_dict_in_generate": True, "output_logits": True}
    return {**{k: v for k, v in kwargs.items() if k != "labels"}, **logits}


@on_first_ranks
def greedily(payload: dict[str, Any]) -> dict[str, Any]:
    """Greedy search with every kind of cache; how large the cache is that each leaves behind."""
    model, args, kwargs = finish(GENERATING[payload["name"]])
    wanted = expected(model, (args, kwargs))
    widen_model(model, wanted.settings.dtype)
    inputs = structures.map_tensors((args, kwargs), lambda t: widen(t, wanted.settings.dtype))
    model = sharded(model, inputs, payload["tp"], **payload.get("options", {}))
    figures = {kind: compared(model, wanted, kind) for kind in CACHES}
    figures = worst(figures, mesh_of(payload["tp"]).get_group())
    return {**figures, "promoted": wanted.settings.promote, "cut_share": cut_share(model)}


@on_first_ranks
def cache_share(payload: dict[str, Any]) -> list[float]:
    """For each kind of cache: its elements on this rank, as a share of those of the unsharded model's."""
    model, inputs, reference = built(payload["name"])
    model = sharded(model, inputs, payload["tp"])
    call = call_of(payload["name"])
    return [_elements(model, call, extra) / _elements(reference, call, extra) for extra in CACHES.values()]


def _elements(model: nn.Module, call: dict[str, Any], extra: dict[str, Any]) -> int:
    with SETTINGS.mode(), torch.no_grad():
        out = model.generate(**call, **greedy(4), **extra)  # type: ignore[operator]
    return sum(t.numel() for _, t in tensors_in(out.past_key_values) if t.is_floating_point())


@on_first_ranks
def sampled(payload: dict[str, Any]) -> dict[str, Any]:
    """Two samples drawn with seeds that differ from rank to rank, and what the user's generator gives next."""
    model, inputs, reference = built(payload["name"])
    model = sharded(model, inputs, payload["tp"])
    call, own = call_of(payload["name"]), 40 + dist.get_rank()
    torch.manual_seed(own)
    drawn = [_sample(model, call) for _ in range(2)]
    after = torch.rand(3).tolist()
    torch.manual_seed(40)
    again = [_sample(reference, call) for _ in range(2)]
    unsharded_after = torch.rand(3).tolist()
    torch.manual_seed(own)
    tokens(model, call, SETTINGS, **greedy(3))
    untouched = torch.rand(3).tolist()
    torch.manual_seed(own)
    return {
        "tokens": drawn, "again": again, "after": after, "unsharded_after": unsharded_after, "untouched": untouched,
        "at_first": torch.rand(3).tolist(),
    }  # fmt: skip


def _sample(model: nn.Module, call: dict[str, Any]) -> list[list[int]]:
    options = {**greedy(12), "do_sample": True, "temperature": 2.0}
    return tokens(model, call, SETTINGS, **options)["sequences"].tolist()


@on_first_ranks
def searched(payload: dict[str, Any]) -> dict[str, Any]:
    """Any other options of generate, greedy or beam search, against the unsharded model."""
    model, inputs, reference = built(payload["name"])
    model = sharded(model, inputs, payload["tp"])
    call, options = call_of(payload["name"]), {**greedy(10), **payload["options"]}
    if payload.get("padded"):
        call["attention_mask"][1, :4] = 0
    if payload.get("one"):
        call = {k: v[:1] if isinstance(v, Tensor) else v for k, v in call.items()}
    wanted = tokens(reference, call, SETTINGS, **options)
    found = [differences(wanted, tokens(model, call, SETTINGS, **options), 1e-10) for _ in range(2)]
    return {"found": found, "plans": {k[2:]: len(v) for k, v in generation_of(model).planned.items()}}  # type: ignore


@on_first_ranks
def assisted(payload: dict[str, Any]) -> dict[str, Any]:
    """Tokens guessed by a smaller model, which is sharded or not."""
    model, inputs, reference = built(payload["name"])
    model = sharded(model, inputs, payload["tp"])
    helper = _helper()
    call = {k: v[:1] if isinstance(v, Tensor) else v for k, v in call_of(payload["name"]).items()}
    wanted = tokens(reference, call, SETTINGS, **greedy(12), assistant_model=copy.deepcopy(helper))
    if payload["cut_helper"]:
        helper = sharded(helper, inputs, payload["tp"])
    found = [tokens(model, call, SETTINGS, **greedy(12), assistant_model=helper) for _ in range(2)]
    return {"found": [differences(wanted, f, 1e-10) for f in found], "guessed": len(wanted)}


def _helper() -> nn.Module:
    """A model of one layer that knows the same tokens."""
    import transformers

    from tests.models.hf import LLAMA_LIKE

    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**LLAMA_LIKE, "num_hidden_layers": 1})
    return widen_model(transformers.LlamaForCausalLM(config).eval(), SETTINGS.dtype)


@on_first_ranks
def goes_on(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """A second call of generate goes on with the cache that the first has filled; a third with one filled by hand."""
    model, inputs, reference = built(payload["name"])
    model = sharded(model, inputs, payload["tp"])
    call = call_of(payload["name"])
    with SETTINGS.mode(), torch.no_grad():
        every = [_two_turns(which, call) + _by_hand(which, call) for which in (reference, model)]
    return [differences({"tokens": a}, {"tokens": b}, 0.0) for a, b in zip(*every, strict=True)]


def _two_turns(model: Any, call: dict[str, Any]) -> list[Tensor]:
    first = model.generate(**call, **greedy(5))
    ids = torch.cat([first.sequences, first.sequences[:, :3]], 1)
    again = {**call, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return [first.sequences, model.generate(**again, **greedy(5), past_key_values=first.past_key_values).sequences]


def _by_hand(model: Any, call: dict[str, Any]) -> list[Tensor]:
    """A loop of the user's own over forward, with the cache that forward gives."""
    ids = call["input_ids"]
    out = model(input_ids=ids, use_cache=True)
    for _ in range(5):
        new = out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
        out = model(input_ids=new, past_key_values=out.past_key_values, use_cache=True)
    return [ids]


@on_first_ranks
def by_methods(payload: dict[str, Any]) -> dict[str, Any]:
    """How far generate is off that calls methods of modules, and forward around it; the parts of the parameters."""
    torch.manual_seed(0)
    model = CallsMethods().double().eval()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(model)
    model = autotp_shard(model, mesh_of(payload["tp"]), ((x,), {}))
    pairs = [(f(model), f(reference)) for f in (lambda m: m(x), lambda m: m.generate(x), lambda m: m.generate(x))]
    pairs.append((model(x), reference(x)))
    return {
        "errors": [float((a - b).abs().max().detach()) for a, b in pairs],
        "placed": {n: tuple(p.to_local().shape) for n, p in model.named_parameters()},  # type: ignore[operator]
    }
