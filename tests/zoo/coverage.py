"""The coverage page from the record of a run.

python tests/zoo/coverage.py zoo.jsonl docs/coverage.md [generation.jsonl]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
GROUPS = {"hf": "transformers", "timm": "timm", "tv": "torchvision", "torch": "torch.nn", "user": "hand-written"}
HEAD = """# Coverage

Written by `tests/zoo/coverage.py` from a run of `tests/zoo/run.py`: hundreds of architectures, built tiny with random
weights, sharded over gloo ranks in float64 and compared with themselves, unsharded: all outputs, all gradients, equal
values on all ranks, and with `--step` what one optimizer step makes of it. `exact` means that all differences are
rounding (forward 1e-10, gradients 1e-9; 1e-5 and 1e-4 where the model does not run in float64). `cut` is the share of
the bytes of parameters with two or more dims of which a rank holds only a part. `fixups` are calls of which a number
is changed on a rank; collectives are those of one forward and backward.

"""


def main() -> None:
    """Read the records, write the page."""
    Path(sys.argv[2]).write_text(page(*map(_latest, [sys.argv[1], *sys.argv[3:]])))


def _latest(path: str) -> list[Record]:
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return list({(r["name"], r["tp"]): r for r in records}.values())


def page(records: list[Record], generated: Sequence[Record] = ()) -> str:
    """The whole page; ``generated`` are records of `tests/zoo/generation.py`."""
    records = sorted((r for r in records if r["status"] != "broken"), key=lambda r: (r["name"], r["tp"]))
    entries = len({r["name"] for r in records})
    parts = [
        HEAD,
        f"{entries} entries are in this record.\n\n",
        *(_summary(records, tp) for tp in sorted({r["tp"] for r in records})),
    ]
    bad = [r for r in records if r["status"] != "exact"]
    parts.append(_not_exact(bad) if bad else "")
    parts.append(_generation(generated) if generated else "")
    parts.append("## All entries\n\n| entry | tp | result | cut | fixups | collectives | what stayed whole |\n")
    parts.append("|---|---|---|---|---|---|---|\n" + "".join(map(_line, records)))
    return "".join(parts)


def _summary(records: list[Record], tp: int) -> str:
    lines = [f"## {tp} ranks\n\n| | entries | exact | refused | other | cut, median | cut >= 90 % | cut >= 85 % |\n"]
    lines.append("|---|---|---|---|---|---|---|---|\n")
    for key, title in GROUPS.items():
        mine = [r for r in records if r["tp"] == tp and r["name"].startswith(key + ":")]
        if mine:
            lines.append(_group(title, mine))
    without = sum(r["tp"] == tp and not r.get("step", True) for r in records)
    note = f"\n{without} of these were run without the optimizer step.\n" if without else ""
    return "".join(lines) + note + "\n"


def _group(title: str, records: list[Record]) -> str:
    counts = Counter(r["status"] for r in records)
    cuts = [r["cut_share"] for r in records if "cut_share" in r]
    shares = [f"{sum(c >= least for c in cuts) / len(cuts):.0%}" if cuts else "-" for least in (0.9, 0.85)]
    other = len(records) - counts["exact"] - counts["refused"]
    middle = f"{median(cuts):.1%}" if cuts else "-"
    cells = (title, len(records), counts["exact"], counts["refused"], other, middle, *shares)
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _not_exact(records: list[Record]) -> str:
    lines = [f"| {r['name']} | {r['tp']} | {r['status']} | {_cell(_why(r))} |\n" for r in records]
    return "## Not exact\n\n| entry | tp | result | why |\n|---|---|---|---|\n" + "".join(lines) + "\n"


def _generation(records: Sequence[Record]) -> str:
    """How many generate alike with either kind of cache, and those that do not."""
    lines = [
        "## Generation\n\nGreedy search of 16 steps by `tests/zoo/generation.py`: equal tokens, logits up to rounding."
        " Left out are entries that do not generate unsharded as they are called here.\n\n"
        "| tp | cache | entries | exact | not |\n|---|---|---|---|---|\n"
    ]
    not_exact = ""
    for tp in sorted({r["tp"] for r in records}):
        for kind in ("dynamic", "static"):
            found = [(r, r.get(kind, r)) for r in records if r["tp"] == tp]
            ran = [(r, f) for r, f in found if f.get("status") not in ("no generation", "broken", "unsupported")]
            bad = [(r, f) for r, f in ran if f.get("status") != "exact"]
            lines.append(f"| {tp} | {kind} | {len(ran)} | {len(ran) - len(bad)} | {len(bad)} |\n")
            not_exact += "".join(
                f"| {r['name']} | {tp} | {kind}: {f.get('status')} | {_cell(_why({**r, **f}))} |\n" for r, f in bad
            )
    head = "\n| entry | tp | result | why |\n|---|---|---|---|\n"
    return "".join(lines) + (head + not_exact if not_exact else "") + "\n"


def _why(record: Record) -> str:
    text = record.get("text") or "; ".join(record.get("problems", [])) or record.get("first_bad", "")
    if record["status"] == "hung":
        return "no answer in the time given"
    return text.strip().splitlines()[-1] if record["status"] == "crashed" and text else text


def _line(record: Record) -> str:
    reasons = Counter(row["reason"] for row in record.get("whole", []))
    whole = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(record.get("collectives", {}).items()))
    cut = f"{record['cut_share']:.1%}" if "cut_share" in record else "-"
    cells = (record["name"], record["tp"], record["status"], cut, record.get("fixups", "-"), kinds, _cell(whole))
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _cell(text: str, limit: int = 240) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[: limit - 1] + "…"


if __name__ == "__main__":
    main()
