"""Peak memory of a loss over a large vocabulary: on cut logits, and on gathered ones, in the same run.

    python tests/bench/bench_loss.py                    2 ranks, 2048 tokens, 32000 words, float32
    python tests/bench/bench_loss.py --tp 4 --dtype bfloat16 --tokens 1024

What is measured is one forward and backward of an output layer and its cross entropy (in float32, as transformers
does), on CPU ranks with one thread each. Memory is counted by a dispatch mode that follows every storage that any
operation makes from its birth to its end: exact for what torch's operations return, on any machine; scratch space
inside of an operation is not seen. The gathered way is the same model with the loss outside of it.
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotp.ranks import RankPool

WIDTH = 256
MIB = 1 << 20


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, of those made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if type(x) is Tensor}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is Tensor and x.untyped_storage()._cdata not in given | self.bytes.keys():
                self._born(x.untyped_storage())
        return out

    def _born(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.bytes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.bytes.pop(key, 0)


class Head(nn.Module):
    """An output layer, with its loss or without."""

    def __init__(self, words: int, inside: bool) -> None:
        super().__init__()
        self.head, self.inside = nn.Linear(WIDTH, words, bias=False), inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss (inside), or the logits."""
        logits: Tensor = self.head(x)
        return loss_of(logits, y) if self.inside else logits


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """In float32."""
    return F.cross_entropy(logits.float(), y)


def measured(payload: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes and seconds of both ways on this rank, and the loss that each gives."""
    from torch.distributed.device_mesh import init_device_mesh

    from autotp.sharding import shard

    mesh = init_device_mesh("cpu", (payload["tp"],), mesh_dim_names=("tp",))
    dtype, words, tokens = getattr(torch, payload["dtype"]), payload["words"], payload["tokens"]
    found: dict[str, Any] = {}
    for way in ("gathered", "cut"):
        torch.manual_seed(0)
        x, y = torch.randn(tokens, WIDTH, dtype=dtype), torch.randint(words, (tokens,))
        model = Head(words, way == "cut").to(dtype)
        shard(model, mesh, sample=(x, y))
        for step in range(2):  # the first one warms up
            model.zero_grad()
            start = time.perf_counter()
            with Live() as live:
                loss = model(x.requires_grad_(), y) if way == "cut" else loss_of(model(x.requires_grad_(), y), y)
                loss.backward()
            found[way] = {"peak": live.peak, "seconds": time.perf_counter() - start, "loss": float(loss), "step": step}
            del loss
    return found


def main() -> None:
    """Print one line per way; exit code 1 if the losses differ, or if cutting does not save memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    payload = vars(parser.parse_args())
    with RankPool(payload["tp"], timeout=900) as pool:
        ranks = pool.run("tests.bench.bench_loss:measured", payload)
    whole = payload["tokens"] * payload["words"] * getattr(torch, payload["dtype"]).itemsize
    print(f"{payload['tokens']} tokens, {payload['words']} words, {payload['dtype']}, tp={payload['tp']}")
    print(f"all logits once: {whole / MIB:.0f} MiB\n\nway       peak MiB of a rank  seconds  loss")
    peaks = {}
    for way in ("gathered", "cut"):
        peaks[way] = max(r[way]["peak"] for r in ranks)
        seconds = max(r[way]["seconds"] for r in ranks)
        print(f"{way:9} {peaks[way] / MIB:18.0f}  {seconds:7.2f}  {ranks[0][way]['loss']:.6f}")
    print(f"\ncut / gathered: {peaks['cut'] / peaks['gathered']:.2f} of the memory")
    losses = [r[way]["loss"] for r in ranks for way in r]
    wrong = max(losses) - min(losses) > 1e-2 * abs(losses[0])
    sys.exit(int(wrong or peaks["cut"] >= peaks["gathered"]))


if __name__ == "__main__":
    main()
