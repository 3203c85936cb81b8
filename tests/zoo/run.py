"""Shard every architecture of a zoo on local ranks and compare it with itself, unsharded.

    python tests/zoo/run.py ZOO_FOLDER --record zoo.jsonl
    python tests/zoo/run.py ZOO_FOLDER 'hf:.*moe' --tp 2 --record zoo.jsonl

The record has one line per entry and tensor-parallel size; what is in it already is passed over, so that a run that
was stopped goes on. Every entry is a process of its own: one that crashes or hangs takes nothing with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))


class Running(NamedTuple):
    """A child at work."""

    process: Any
    pipe: Connection
    name: str
    sizes: tuple[int, ...]
    deadline: float


def main() -> int:
    """Exit code 1 if an entry is wrong, crashed or hung."""
    options = arguments()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    index = json.loads((Path(options.zoo) / "zoo_index.json").read_text())
    names = [n for n, entry in index.items() if entry.get("ok") and re.search(options.pattern, n)]
    names.sort(key=lambda n: hashlib.sha256(n.encode()).digest())  # so that a run cut short is a fair sample
    todo = remaining(names, tuple(options.tp), Path(options.record))
    warm_up()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended too
    start = time.monotonic()
    counts: dict[str, int] = {}
    with open(options.record, "a") as file:
        for n, found in enumerate(work(todo, options), 1):
            for record in found:
                counts[record["status"]] = counts.get(record["status"], 0) + 1
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"[{n}/{len(todo)} {time.monotonic() - start:.0f} s] {line(record)}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing to do")
    return 0 if set(counts) <= {"exact", "refused", "broken"} else 1


def arguments(
    text: str | None = __doc__, record: str = "zoo.jsonl", records: str = "tests.zoo.entry:records"
) -> argparse.Namespace:
    """What the command line says; `records` is the function that measures an entry."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(records=records)
    parser.add_argument("zoo", help="a folder with zoo.py, which has build(name), and zoo_index.json")
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression over the names")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4], help="tensor-parallel sizes")
    parser.add_argument("--record", default=record, help="file that records are added to")
    parser.add_argument("--jobs", type=int, default=2, help="entries at a time")
    parser.add_argument("--step", action="store_true", help="compare an optimizer step too, at twice the time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds per entry and size")
    return parser.parse_args()


def remaining(names: list[str], sizes: tuple[int, ...], record: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The names with the sizes that the record lacks."""
    done = set()
    if record.exists():
        done = {(r["name"], r["tp"]) for r in map(json.loads, record.read_text().splitlines())}
    left = [(name, tuple(tp for tp in sizes if (name, tp) not in done)) for name in names]
    return [(name, missing) for name, missing in left if missing]


def warm_up() -> None:
    """Import once what every child would import."""
    import torch

    torch.set_num_threads(1)
    for name in ("torchvision", "transformers.modeling_utils", "timm", "tests.zoo.entry"):
        try:
            importlib.import_module(name)
        except ImportError:
            pass


def work(todo: list[tuple[str, tuple[int, ...]]], options: argparse.Namespace) -> Any:
    """Yields the records of one entry after another, a few entries at a time."""
    waiting, running = list(reversed(todo)), dict[Any, Running]()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                started = launch(*waiting.pop(), options)
                running[started.pipe] = started
            for pipe in wait(list(running), timeout=1.0):
                yield collect(running.pop(pipe))
            for late in [c for c in running.values() if time.monotonic() > c.deadline]:
                del running[late.pipe]
                yield give_up(late, "hung", "no answer in time")
    finally:
        for left in running.values():
            _end(left)


def launch(name: str, sizes: tuple[int, ...], options: argparse.Namespace) -> Running:
    """A fork of its own for one entry, in a process group of its own."""
    ours, theirs = mp.Pipe(duplex=False)
    context = mp.get_context("fork")
    process = context.Process(target=child, args=(theirs, name, sizes, options))
    process.start()
    theirs.close()
    return Running(process, ours, name, sizes, time.monotonic() + options.timeout * 2 * len(sizes))


def child(pipe: Connection, name: str, sizes: tuple[int, ...], options: argparse.Namespace) -> None:
    """What the fork does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    module, _, function = options.records.partition(":")
    settings = {"step": True} if options.step else {}
    pipe.send(getattr(importlib.import_module(module), function)(options.zoo, name, sizes, options.timeout, **settings))


def collect(done: Running) -> list[dict[str, Any]]:
    """The answer of a child that has one, or that it died."""
    try:
        found = done.pipe.recv()
    except (EOFError, OSError):
        return give_up(done, "crashed", "the process ended without an answer")
    _end(done)
    return list(found)


def give_up(bad: Running, status: str, text: str) -> list[dict[str, Any]]:
    """End a child that is late or dead, with all of its ranks."""
    _end(bad)
    return [{"name": bad.name, "tp": tp, "status": status, "text": text, "seconds": 0.0} for tp in bad.sizes]


def _end(done: Running) -> None:
    try:
        os.killpg(done.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    done.process.join()
    done.pipe.close()


def line(record: dict[str, Any]) -> str:
    """One line for people."""
    text = f"{record['status']:8} tp={record['tp']} {record.get('seconds', 0):6.1f}s  {record['name']}"
    if "forward_error" in record:
        text += f"  forward {record['forward_error']:.0e}  gradients {record['gradient_error']:.0e}"
        text += f"  cut {record['cut_share']:.1%}" + ("" if record["promoted"] else "  (float32)")
    if record["status"] != "exact":
        reason = record.get("text") or "; ".join(record.get("problems", [])) or record.get("first_bad", "")
        text += "\n    " + reason.strip()[-600:].replace("\n", "\n    ")
    return text


if __name__ == "__main__":
    sys.exit(main())
