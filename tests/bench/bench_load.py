"""Sharded loading against plain safetensors reading the same bytes (= 1.00), and its memory against its promise.

    python tests/bench/bench_load.py [--tp 2] [--depth 8] [--width 1024] [--repeats 5]

Each rank reads the slices it holds: `plain` by ``safe_open`` and ``get_slice``, one clone each; `autotp` is all of
``autotp.load`` on a model that is planned and sharded already: checks, exchanges, reading, putting in place. The two
take turns on warm files; times are the median over the turns of the slowest rank, by the wall clock and by the
processor (which leaves out waiting, for the other rank or, on a busy machine, for anybody). Memory is the highest
resident memory of a rank above what it had before, against the bytes it holds plus the largest tensor. Exit code 1
beyond a limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autotp.ranks import run_once

TIME_LIMIT, MEMORY_LIMIT = 1.3, 1.0
SECONDS = 1200.0


def build(depth: int, width: int) -> Any:
    """Blocks with packed and transposed cuts, 12 width^2 parameters each, and an embedding."""
    from autotp.demo_models import LanguageModel

    return LanguageModel(vocabulary=16 * width, width=width, heads=8, depth=depth)


def plain(model: Any, folder: Path) -> dict[str, Any]:
    """The same slices by safetensors alone."""
    import torch
    from safetensors import safe_open

    from autotp.parts import held

    wants = {name: held(p) for name, p in model.named_parameters()}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                want, stored = wants[key], opened.get_slice(key)
                dim = next((d for d, ranges in enumerate(want) if ranges is not None), None)
                if dim is None:
                    found[key] = stored[:].clone()
                    continue
                before = (slice(None),) * dim
                parts = [stored[(*before, slice(a, b))] for a, b in want[dim]]
                found[key] = (torch.cat(parts, dim) if len(parts) > 1 else parts[0]).clone(
                    memory_format=torch.contiguous_format
                )
    return found


def rank(payload: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn of each way, and memory in bytes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autotp
    from autotp.comparing import local
    from tests.cases.tasks_meta import peak_of

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    folder = Path(payload["folder"])
    ids = torch.arange(8).view(1, 8)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "autotp": []}
    for turn in range(payload["repeats"] + 1):
        with torch.device("meta"):
            model = build(payload["depth"], payload["width"])
        autotp.shard(model, mesh, sample=ids)
        for way in times:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            if way == "plain":
                expected = plain(model, folder)
            elif turn:
                autotp.load(model, folder, mesh)
            else:
                _, peak = peak_of(lambda: autotp.load(model, folder, mesh))  # noqa: B023
            times[way].append((time.perf_counter() - start[0], time.process_time() - start[1]))
        wrong = [n for n, p in model.named_parameters() if not torch.equal(local(p), expected[n])]
        assert not wrong, wrong
        del expected
    held_bytes = sum(local(p).numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    turns = {way: seconds[1:] for way, seconds in times.items()}  # the first turn is for memory, files and imports
    return {"times": turns, "peak": peak, "held": held_bytes, "largest": largest}


def main() -> int:
    """Write the files, run the ranks, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tp", 2), ("depth", 8), ("width", 1024), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _write(given.depth, given.width, Path(folder))
        answers = run_once(given.tp, "tests.bench.bench_load:rank", {**vars(given), "folder": folder}, timeout=SECONDS)
    first, mib = answers[0], 1 << 20
    print(
        f"tp={given.tp}, {first['held'] / mib:.0f} MiB held by a rank, largest tensor {first['largest'] / mib:.0f} MiB"
    )
    ratios = []
    for i, clock in enumerate(("wall", "processor")):
        plain_time, ours = (
            statistics.median(max(t[i] for t in turn) for turn in zip(*(a["times"][way] for a in answers), strict=True))
            for way in ("plain", "autotp")
        )
        ratios.append(ours / plain_time)
        print(f"{clock:9} plain {plain_time:.3f} s, autotp {ours:.3f} s: {ratios[-1]:.2f} (limit {TIME_LIMIT})")
    memory_ratio = max(a["peak"] / (a["held"] + a["largest"]) for a in answers)
    print(f"memory    peak {max(a['peak'] for a in answers) / mib:.0f} MiB: {memory_ratio:.2f} (limit {MEMORY_LIMIT})")
    return int(min(ratios) > TIME_LIMIT or memory_ratio > MEMORY_LIMIT)


def _write(depth: int, width: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = dict(build(depth, width).named_parameters())  # tied ones once
    names = sorted(state)
    for i in range(2):
        save_file({name: state[name].detach().contiguous() for name in names[i::2]}, folder / f"part-{i}.safetensors")


if __name__ == "__main__":
    sys.exit(main())
