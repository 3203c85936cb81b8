"""Step time on two local ranks: autotp and torch's own styles against tensor parallelism written by hand (= 1.00).

    python tests/bench/bench_step.py [--only user-small] [--repeats 30] [--profile]

One thread per rank. The ways take turns, so that a busy machine slows all of them alike. Two times are shown: the
wall clock, which includes waiting for the other rank, and the processor time of the rank's main thread, which does not
and so says what can be said on a busy machine. Each is the median of the turns (with --minimum, the least).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autotp.ranks import run_once

# layers, width, hidden, vocabulary, batch, length
SIZES = {"large": (4, 512, 1536, 2048, 2, 128), "small": (8, 64, 128, 128, 1, 8)}
HEADS, KV_HEADS = 8, 4
WAYS = ("hand", "autotp", "torch")
SECONDS = 1200
Times = dict[str, dict[str, list[tuple[float, float]]]]  # way -> step or token -> (wall, processor) of each turn


def build(kind: str, size: str, depth: int | None = None) -> Any:
    """A Llama with fixed weights: `hf`, of transformers, or `user`, with torchtitan's names."""
    import torch

    torch.manual_seed(0)
    layers, width, hidden, vocabulary, _, length = SIZES[size]
    layers = depth or layers
    if kind == "hf":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=length,
            use_cache=False,
        )
        return LlamaForCausalLM(config)
    from tests.models.user import LlamaBlock, TitanLlama, rotations

    model = TitanLlama(vocabulary, width, HEADS, KV_HEADS)
    model.layers = torch.nn.ModuleDict({str(i): LlamaBlock(width, HEADS, KV_HEADS, hidden) for i in range(layers)})
    model.turns = rotations(width // HEADS, length)
    return model


def hand(model: Any, mesh: Any, ids: Any) -> Any:
    """The yardstick."""
    from tests.bench.handwritten import by_hand

    return by_hand(model, mesh.get_group())


def autotp(model: Any, mesh: Any, ids: Any) -> Any:
    """The product."""
    from autotp.sharding import shard

    return shard(model, mesh, sample=((ids,), {}))


def torch_styles(model: Any, mesh: Any, ids: Any) -> Any:
    """The stock styles, in the usual arrangement for a Llama."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.bench.handwritten import _COLUMN, _ROW

    plan: dict[str, Any] = {}
    for name, _ in model.named_modules():
        last = name.rpartition(".")[2]
        if last in _COLUMN:
            plan[name] = ColwiseParallel()
        elif last in _ROW:
            plan[name] = RowwiseParallel()
        elif last in ("embed_tokens", "tok_embeddings"):
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif last in ("lm_head", "output"):
            plan[name] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


APPLY: dict[str, Callable[..., Any]] = {"hand": hand, "autotp": autotp, "torch": torch_styles}


def logits_of(out: Any) -> Any:
    """Logits, whichever way a model gives them."""
    return getattr(out, "logits", out)


def step(model: Any, ids: Any) -> None:
    """Forward and backward."""
    logits_of(model(ids)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def check(models: dict[str, Any], whole: Any, ids: Any) -> None:
    """All give the outputs of the unsharded model, and the gradient of its last norm."""
    import torch

    expected = logits_of(whole(ids))
    expected.square().mean().backward()
    norms = {name: p.grad for name, p in whole.named_parameters() if "norm" in name}
    for way, model in models.items():
        found = logits_of(model(ids))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m, w=way: f"{w}: {m}")
        found.square().mean().backward()
        for name, p in model.named_parameters():
            if name in norms:
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(grad, norms[name], rtol=1e-3, atol=1e-6, msg=lambda m, w=way: f"{w}: {m}")
            p.grad = None


def measure(payload: dict[str, Any]) -> Times:
    """Seconds per call of every way, by turn: `step`, and `token`, the forward of one token; wall and processor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    vocabulary, batch, length = SIZES[payload["size"]][3:]
    whole = build(payload["kind"], payload["size"])
    ids = torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(7))
    models = {way: APPLY[way](copy.deepcopy(whole), mesh, ids) for way in payload["ways"]}
    check(models, whole, ids)
    one = ids[:1, :1].contiguous()

    def token(model: Any, ids: Any) -> None:
        with torch.no_grad():
            model(one)

    times: Times = {way: {"step": [], "token": []} for way in models}
    for turn in range(payload["repeats"] + 2):
        for what, call in (("step", step), ("token", token)):
            for way, model in models.items():
                n = 1 if (payload["size"] == "large" and what == "step") else 5
                dist.barrier()
                start, busy = time.perf_counter(), time.thread_time()
                for _ in range(n):
                    call(model, ids)
                if turn >= 2:
                    times[way][what].append(((time.perf_counter() - start) / n, (time.thread_time() - busy) / n))
    if payload["profile"]:
        profile(models["autotp"], ids, step)
    return times


def profile(model: Any, ids: Any, call: Any) -> None:
    """Where the Python time of a step goes, on rank 0."""
    import cProfile
    import io
    import pstats

    import torch.distributed as dist

    found = cProfile.Profile()
    found.enable()
    for _ in range(50):
        call(model, ids)
    found.disable()
    if dist.get_rank() == 0:
        text = io.StringIO()
        pstats.Stats(found, stream=text).sort_stats("tottime").print_stats(45)
        Path(tempfile.gettempdir(), "bench_step_profile.txt").write_text(text.getvalue())


def show(name: str, times: Times, pick: Callable[[list[float]], float]) -> None:
    """One line per way."""
    for what in ("step", "token"):
        by_hand = [pick(list(column)) for column in zip(*times["hand"][what], strict=True)]
        for way, found in times.items():
            wall, busy = (pick(list(column)) for column in zip(*found[what], strict=True))
            print(
                f"{name:12} {what:6} {way:8} wall {wall * 1e3:8.2f} ms {wall / by_hand[0]:5.2f}"
                f"   processor {busy * 1e3:8.2f} ms {busy / by_hand[1]:5.2f}",
                flush=True,
            )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name: hf-large, hf-small, user-large, user-small")
    parser.add_argument("--ways", default=",".join(WAYS), help="which ways, `hand` first")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--minimum", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for kind in ("user", "hf"):
        for size in ("small", "large"):
            name = f"{kind}-{size}"
            if options.only not in name:
                continue
            payload = {"kind": kind, "size": size, "repeats": options.repeats, "profile": options.profile}
            payload["ways"] = options.ways.split(",")
            times = run_once(2, "tests.bench.bench_step:measure", payload, timeout=SECONDS)[0]
            show(name, times, min if options.minimum else statistics.median)


if __name__ == "__main__":
    main()
