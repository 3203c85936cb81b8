"""Make the plan files anew, each by the command in its header, and the table in README.md.

    python plans/refresh.py                       all of them, one at a time
    python plans/refresh.py --stale               those that are missing or older than the code: resumes a run
    python plans/refresh.py llama_3_1_8b swin_t   these

Every plan is made by a process of its own, whose time and memory are told. Read the difference (git diff plans)
before keeping it: that is the review.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autotp.display.sections import share_text, size_text
from autotp.plan_types import Plan

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
TORCHVISION = ("convnext_tiny", "resnet50", "swin_t", "vit_b_16")
WITH_INPUTS = ("gemma_3_27b", "llava_1_5_7b", "whisper_large_v3")


def names() -> list[str]:
    """All plans there are to be."""
    return sorted((*TORCHVISION, *(path.stem for path in (FOLDER / "configs").glob("*.json"))))


def command(name: str) -> list[str]:
    """The words of the command that makes a plan file, without `autotp`."""
    model = f"hf:plans/configs/{name}.json"
    if name in TORCHVISION:
        model = f"torchvision:{name}"
    elif name in WITH_INPUTS:
        model = f"plans/with_inputs.py:{name}"
    return ["plan", model, "--tp", "8", "--save", f"plans/{name}.toml"]


def stale(name: str) -> bool:
    """Whether a plan file is missing, or older than any file that it is made by."""
    path = FOLDER / f"{name}.toml"
    sources = [*(ROOT / "autotp").rglob("*.py"), *(FOLDER / "configs").glob(f"{name}.json")]
    return not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def make(name: str) -> bool:
    """Run the command; whether it went well."""
    words = command(name)
    sys.stderr.write(shlex.join(["autotp", *words]) + "\n")
    start = time.monotonic()
    quiet = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(sys.executable, [sys.executable, "-m", "autotp", *words], os.environ, file_actions=[quiet])
    _, status, usage = os.wait4(pid, 0)
    figures = f"{time.monotonic() - start:.0f} s, {usage.ru_maxrss / 2**20:.1f} GB"
    sys.stderr.write(f"  {'FAILED, ' if status else ''}{figures}\n")
    return status == 0


def table() -> str:
    """One row per plan file."""
    head = "| plan | parameters | cut | weights on rank 0 | collectives forward | backward |"
    lines = [head, "|---|---|---|---|---|---|"]
    for path in sorted(FOLDER.glob("*.toml")):
        plan = Plan.load(path)
        numbers = sum(prod(row.shape) for row in plan.parameters if row.tied_to is None)
        passes = [sum(call.when == when for call in plan.collectives) for when in ("forward", "backward")]
        memory = plan.memory
        share = f"{size_text(memory.local_parameters)} of {size_text(memory.parameters)}"
        cells = (f"[{path.stem}]({path.name})", count(numbers), share_text(plan.cut_share), share, *passes)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def count(number: int) -> str:
    """`8.03 B`, `355 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def write_table() -> None:
    """Put the table between the marks in README.md."""
    readme = FOLDER / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->")[2]
    readme.write_text(f"{before}<!-- table -->\n{table()}\n<!-- end -->{after}", encoding="utf-8")


def main(words: list[str]) -> int:
    """Make what is asked for; the number of plans that could not be made."""
    os.chdir(ROOT)
    wanted = [word for word in words if word != "--stale"] or names()
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        sys.stderr.write(f"no such plan: {', '.join(unknown)}\n")
        return 2
    failed = sum(not make(name) for name in wanted if "--stale" not in words or stale(name))
    write_table()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
