"""K44: decode loops over a model with room for all tokens, beside the unsharded model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist

from autotp.comparing import local
from autotp.errors import AutotpError
from autotp.promotion import widen_model
from autotp.sharding import shard
from tests.cases.modules_cache import KV, VOCABULARY, CachedDecoder, decode
from tests.cases.tasks import seeded
from tests.harness.tasks import mesh_of
from tests.models.common import tokens

PROMPT, STEPS = 5, 12


def _built(payload: dict[str, Any]) -> tuple[CachedDecoder, CachedDecoder, torch.Tensor]:
    torch.manual_seed(0)
    model = CachedDecoder(payload["inside"], payload.get("apart", False)).eval()
    widen_model(model)
    reference, ids = copy.deepcopy(model), tokens(VOCABULARY, length=PROMPT)
    sample: Any = (ids, 0, model.new_cache(len(ids))), {}
    if payload.get("driven"):
        sample = functools.partial(decode, ids=ids, steps=2)
    shard(model, mesh_of(payload["tp"]), sample=sample)
    return model, reference, ids


def decoded(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A greedy loop of the user's own, twice: tokens, error of the logits, heads of the cache on this rank."""
    if dist.get_rank() >= payload["tp"]:
        return None
    model, reference, ids = _built(payload)
    with torch.no_grad():
        wanted, logits = decode(reference, ids, STEPS)
        try:
            found = [decode(model, ids, STEPS) for _ in range(2)]
        except AutotpError as error:
            return {"refused": str(error)}
    store = model.blocks[0].attention.store if payload["inside"] else None
    return {
        "equal": [torch.equal(wanted, t) for t, _ in found],
        "errors": [float((logits - x).abs().max() / logits.abs().max()) for _, x in found],
        "tokens": found[0][0].tolist(),
        "held": local(store.k).numel() / reference.blocks[0].attention.store.k.numel() if store is not None else None,
        "heads": KV,
    }


def drawn(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens drawn by the model's own `generate`, with seeds that differ from rank to rank."""
    if dist.get_rank() >= payload["tp"]:
        return None
    model, _, ids = _built(payload)
    seeded(mesh_of(payload["tp"]), by_rank=True)
    greedy = model.generate(ids, STEPS)
    return {"tokens": [model.generate(ids, STEPS, 1.0).tolist() for _ in range(2)], "greedy": greedy.tolist()}
