"""Greedy generation of every zoo entry that can generate, sharded against unsharded.

    python tests/zoo/generation.py ZOO_FOLDER 'hf:(llama|gpt2):' --tp 2 --record generation.jsonl

16 steps with the default cache and with a static one, in float64 where the model runs in it: tokens must be equal and
logits equal up to rounding. One line per entry is added to the record; what is in it already is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.zoo.run import arguments, remaining, warm_up, work

CACHES = ("dynamic", "static")


def main() -> int:
    """Exit code 1 if an entry that generates unsharded is wrong, crashed or hung sharded."""
    options = arguments(__doc__, record="generation.jsonl", records="tests.zoo.generating:records")
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    index = json.loads((Path(options.zoo) / "zoo_index.json").read_text())
    names = [n for n, entry in index.items() if entry.get("ok") and re.search(options.pattern, n)]
    names.sort(key=lambda n: hashlib.sha256(n.encode()).digest())
    todo = remaining(names, tuple(options.tp), Path(options.record))
    warm_up()
    start = time.monotonic()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in CACHES}
    with open(options.record, "a") as file:
        for n, found in enumerate(work(todo, options), 1):
            for record in found:
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record.get("status") == "no generation":
                    continue
                for kind in CACHES:
                    counts[kind][status(record, kind)] += 1
                print(f"[{n}/{len(todo)} {time.monotonic() - start:.0f} s] {line(record)}", flush=True)
    for kind, some in counts.items():
        print(f"{kind}: " + (", ".join(f"{n} {s}" for s, n in sorted(some.items())) or "nothing to do"))
    return 1 if any({"wrong", "crashed", "hung"} & set(some) for some in counts.values()) else 0


def status(record: dict[str, Any], kind: str) -> str:
    """How an entry did with a kind of cache."""
    return str(record[kind]["status"] if kind in record else record["status"])


def line(record: dict[str, Any]) -> str:
    """One line for people, and what went wrong below it."""
    text = f"tp={record['tp']} {record.get('seconds', 0):6.1f}s  {record['name']}"
    for kind in CACHES:
        found = record.get(kind, {})
        text += f"  {kind} {status(record, kind)}"
        text += f" {found['error']:.0e} {found['different_tokens']} tokens" if "error" in found else ""
    text += "" if record.get("promoted", True) else "  (float32)"
    text += "  replanned" if record.get("replanned") else ""
    for kind in CACHES:
        found = record.get(kind, {})
        if found.get("status") in ("refused", "crashed"):
            text += f"\n    {kind}: {found['text'][:500]}"
    reason = record.get("text") or "; ".join(record.get("obstacles", []))
    return text + ("\n    " + reason.strip()[-500:].replace("\n", "\n    ") if reason else "")


if __name__ == "__main__":
    sys.exit(main())
