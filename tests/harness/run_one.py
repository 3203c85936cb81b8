"""Shard models on local ranks, compare with the unsharded ones, print the figures.

    python tests/harness/run_one.py llama --tp 2
    python tests/harness/run_one.py --zoo DIR 'hf:(gpt2|llama):' --tp 4 --jsonl figures.jsonl --timeout 120

The name is a regular expression over the names of tests/models, or of the zoo; an exact name is taken as it is.
Each model is one task with a time limit; a failure is recorded and the next model is taken.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autotp.errors import AutotpError, VerifyError
from autotp.ranks import RankError, RankPool


def names_in(zoo: str | None) -> list[str]:
    """All names that can be built."""
    if zoo is None:
        from tests.models import registry

        return registry.names()
    index = json.loads((Path(zoo) / "zoo_index.json").read_text())
    return [name for name, entry in index.items() if entry.get("ok")]


def chosen(pattern: str, names: list[str]) -> list[str]:
    """The name itself, or all that match."""
    found = [pattern] if pattern in names else [name for name in names if re.search(pattern, name)]
    return found or ([pattern] if ":" in pattern else [])


def record(pool: RankPool, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Figures of one model: status exact, refused, wrong, crashed, hung or broken (does not run unsharded)."""
    start = time.perf_counter()
    entry: dict[str, Any] = {"name": payload["name"], "tp": payload["tp"]}
    try:
        entry.update(pool.run("tests.harness.tasks:measure_model", payload, timeout=timeout)[0])
        entry["status"] = "exact" if entry["ok"] else "wrong"
    except VerifyError as error:
        entry.update(status="broken", text=str(error))
    except RankError as error:
        entry.update(status="hung" if error.hung else "crashed", text=str(error))
    except AutotpError as error:
        entry.update(status="refused", text=f"{type(error).__name__}: {error}")
        if error.__cause__:
            entry["trace"] = str(error.__cause__)
    entry["total_seconds"] = round(time.perf_counter() - start, 2)
    return entry


def line(entry: dict[str, Any]) -> str:
    """One line for people."""
    text = f"{entry['status']:8}{entry['total_seconds']:6.1f}s  {entry['name']}"
    if "forward_error" in entry:
        text += (
            f"  forward {entry['forward_error']:.1e}  gradients {entry['gradient_error']:.1e}"
            f"  step {entry['optimizer_error']:.1e}  spread {entry['spread']:.1e}  cut {entry['cut_share']:.1%}"
            f"  shard {entry['shard_seconds']:.2f}s"
        )
        text += "" if entry["promoted"] else f"  (float32: {entry['obstacle'][:120]})"
    return text


def details(entry: dict[str, Any], trace_lines: int) -> str:
    """What went wrong, indented."""
    parts = [entry.get("first_bad", ""), *entry.get("problems", []), *entry.get("wrong_gradients", [])]
    if "text" in entry:
        parts.append("\n".join(entry["text"].strip().splitlines()[-trace_lines:]))
    return "\n".join("    " + piece.replace("\n", "\n    ") for piece in parts if piece)


def main() -> int:
    """Run all chosen models; exit code 1 if one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a name or a regular expression")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--zoo", help="a folder with zoo.py; without it the names of tests/models")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per model")
    parser.add_argument("--jsonl", help="append one record per model to this file; names already in it are passed over")
    parser.add_argument("--apply", default="tests.harness.tasks:autotp_shard", help="module:function that shards")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON keywords for it: '{\"min_bytes\": 1000}'")
    parser.add_argument("--float32", action="store_true", help="measure in float32 with its limits")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--lines", type=int, default=25, help="lines of a traceback to print")
    parser.add_argument("--list", action="store_true", help="print the chosen names and stop")
    parser.add_argument("--part", default="0/1", help="K/N: take every N-th name starting at K, to share the work")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    names = chosen(options.pattern, names_in(options.zoo))[part::parts]
    if options.list:
        print("\n".join(names))
        return 0
    return run_all(names, options)


def run_all(names: list[str], options: argparse.Namespace) -> int:
    """One task per name on one pool, restarted now and then so that memory does not pile up."""
    done = _names_done(options.jsonl, options.tp)
    counts: dict[str, int] = {}
    settings: dict[str, Any] = {"backward": not options.forward_only}
    if options.float32:
        import torch

        settings.update(promote=False, dtype=torch.float32)
    with RankPool(options.tp, timeout=options.timeout) as pool:
        for index, name in enumerate(name for name in names if name not in done):
            payload = {"name": name, "tp": options.tp, "zoo": options.zoo, "settings": settings}
            payload.update(apply=options.apply, options=options.options)
            entry = record(pool, payload, options.timeout)
            counts[entry["status"]] = counts.get(entry["status"], 0) + 1
            print(line(entry), flush=True)
            if entry["status"] != "exact":
                print(details(entry, options.lines), flush=True)
            if options.jsonl:
                with open(options.jsonl, "a") as file:
                    file.write(json.dumps(entry) + "\n")
            if index % 40 == 39:
                pool.stop()
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing to do")
    return 0 if set(counts) <= {"exact"} else 1


def _names_done(path: str | None, tp: int) -> set[str]:
    if path is None or not Path(path).exists():
        return set()
    entries = [json.loads(text) for text in Path(path).read_text().splitlines()]
    return {entry["name"] for entry in entries if entry["tp"] == tp}


if __name__ == "__main__":
    sys.exit(main())
