"""The collectives that really run: as few as by hand, and exactly those that the plan announces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp.ranks import RankPool

pytestmark = pytest.mark.slow

# Whatever torch may call to move tensors between ranks, and what it counts as.
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
MODELS = ["hf:llama", "hf:gpt2", "hf:bert", "timm:vit", "user:titan_llama", "user:nanogpt"]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, every collective is counted; functional ones (those of DTensors) count as `functional`."""
    found: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in KINDS if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[KINDS[name]] += 1
            return originals[name](*args, **kwargs)

        return call

    class Functional(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d_functional" in func.namespace and "wait" not in func.__name__:
                found["functional"] += 1
            return func(*args, **(kwargs or {}))

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        with Functional():
            yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def floats_of(out: Any) -> list[Tensor]:
    """The tensors of an output that a gradient can start from."""
    if isinstance(out, Tensor):
        return [out] if out.requires_grad else []
    items = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return [x for item in items for x in floats_of(item)]


def run(model: nn.Module, args: Any, kwargs: Any) -> dict[str, dict[str, int]]:
    """Collectives of one forward and one backward; inputs need gradients where they can, as the plan supposes."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    with counted() as forward:
        out = model(*args, **kwargs)
    loss = sum(x.square().sum() for x in floats_of(out))
    with counted() as backward:
        loss.backward()  # type: ignore[union-attr]
    return {"forward": dict(forward), "backward": dict(backward)}


def count_model(payload: tuple[str, bool]) -> dict[str, Any] | None:
    """What runs, and what the plan says, for a model of tests/models, with sequence parallelism or without."""
    from autotp.planning import plan
    from autotp.sharding import shard
    from tests.harness.tasks import mesh_of
    from tests.models import registry

    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    name, tokens = payload
    model, args, kwargs = registry.build(name)
    planned: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for c in plan(model, tp=2, sample=(args, kwargs), sequence_parallel=tokens).collectives:
        planned[c.when][c.kind] += 1
    shard(model, mesh, sample=(args, kwargs), sequence_parallel=tokens)
    return {"run": run(model, args, kwargs), "planned": {k: dict(v) for k, v in planned.items()}}


def count_depth(payload: tuple[str, int]) -> dict[str, dict[str, int]] | None:
    """What runs in a Llama of some layers: transformers' own or the one with torchtitan's names."""
    from autotp.sharding import shard
    from tests.bench.bench_step import build
    from tests.harness.tasks import mesh_of

    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    kind, layers = payload
    model = build(kind, "small", layers)
    ids = torch.arange(2, 10).view(1, 8)
    shard(model, mesh, sample=((ids,), {}))
    return run(model, (ids,), {})


@pytest.mark.parametrize("kind", ["hf", "user"])
def test_a_llama_layer_has_two_all_reduces_each_way(ranks: RankPool, kind: str) -> None:
    """As many as by hand; peers need 7 to 8. The difference of two depths leaves out embedding and head."""
    two, five = (ranks.run(count_depth, (kind, layers))[0] for layers in (2, 5))
    for when in ("forward", "backward"):
        more = Counter(five[when])
        more.subtract(two[when])
        assert {k: n for k, n in more.items() if n} == {"all_reduce": 3 * 2}, when


@pytest.mark.parametrize("kind", ["hf", "user"])
def test_a_llama_has_one_more_each_for_embedding_and_head(ranks: RankPool, kind: str) -> None:
    found = ranks.run(count_depth, (kind, 2))[0]
    assert found["forward"] == {"all_reduce": 2 * 2 + 1, "all_gather": 1}
    assert found["backward"] == {"all_reduce": 2 * 2 + 1}


@pytest.mark.parametrize("tokens", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_announces_what_runs(ranks: RankPool, name: str, tokens: bool) -> None:
    found = ranks.run(count_model, (name, tokens))[0]
    assert found["run"] == found["planned"]


def test_sequence_parallelism_sends_no_more_bytes() -> None:
    """An all-reduce sends what a reduce-scatter and an all-gather send."""
    from autotp.planning import plan
    from tests.models import registry

    model, args, kwargs = registry.build("user:nanogpt")
    norms = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "norm" in name)
    sent = {}
    for way in (False, True):
        made = plan(model, tp=2, sample=(args, kwargs), sequence_parallel=way)
        sent[way] = sum(c.bytes * (2 if c.kind == "all_reduce" else 1) for c in made.collectives)
    assert sent[True] == sent[False] + 2 * norms, "the gradients of the norms are all that comes on top"
