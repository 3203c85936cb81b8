"""How long planning takes and how much memory it needs, from a cold start, on one core.

    python tests/bench/bench_plan.py [--only 405b]

Llama-3.1-405B is planned from a config.json written here, no weights. Limits: 15 s and 2 GiB for all of it, at most
1.5 times as long for 126 layers as for 32 (without the start of Python and torch), 1 s for a tiny Transformer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS, BYTES, RATIO, TINY = 15.0, 2 * 2**30, 1.5, 1.0
LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY_MODELS = ("hf:llama", "hf:gpt2", "hf:bert", "hf:t5", "timm:vit", "user:nanogpt")

_COMMAND = "import sys; from autotp.cli import main; sys.exit(main())"
# Processor times of the parts, taken inside: the start of Python and torch can be told from planning.
_INSIDE = """
import json, sys, time
start = time.process_time()
import torch
from autotp.models import load_spec
from autotp.planning import plan
import transformers.models.llama.modeling_llama
imported = time.process_time()
loaded = load_spec(sys.argv[1])
built = time.process_time()
made = plan(loaded.model, tp=int(sys.argv[2]), sample=loaded.sample)
planned = time.process_time()
text = str(made)
print(json.dumps({"import": imported - start, "build": built - imported, "plan": planned - built,
                  "table": time.process_time() - planned, "cut": made.cut_share, "rows": len(made.parameters)}))
"""
_TINY = """
import json, sys, time
import torch
torch.set_num_threads(1)
from autotp.planning import plan
from tests.models import registry
out = {}
for name in sys.argv[1:]:
    model, args, kwargs = registry.build(name)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        plan(model, tp=2, sample=(args, kwargs))
        times.append(time.perf_counter() - start)
    out[name] = times
print(json.dumps(out))
"""


def cold(command: list[str]) -> tuple[float, int, str]:
    """Seconds, peak bytes and output of a fresh process on one core."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=err, preexec_fn=_one_core)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)[:200]} failed:\n{err.read()[-3000:]}")
        unit = 1 if sys.platform == "darwin" else 1024
        return seconds, usage.ru_maxrss * unit, out.read()


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def verdict(found: float, limit: float) -> str:
    """Whether a number keeps to its limit."""
    return "ok" if found <= limit else "TOO MUCH"


def config(folder: str, layers: int) -> str:
    """The spec of a 405B config with that many layers."""
    path = Path(folder) / f"llama_{layers}" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**LLAMA_405B, "num_hidden_layers": layers}))
    return f"hf:{path}"


def bench_405b() -> bool:
    """All of `autotp plan`, then its parts at two depths."""
    with tempfile.TemporaryDirectory() as folder:
        specs = {layers: config(folder, layers) for layers in (32, 126)}
        seconds, peak, table = cold([sys.executable, "-c", _COMMAND, "plan", specs[126], "--tp", "8"])
        assert "layers.{" in table, table[:500]
        print(
            f"405B, autotp plan --tp 8   {seconds:7.2f} s (limit {SECONDS:g})  {verdict(seconds, SECONDS)}", flush=True
        )
        print(f"405B, peak memory          {peak / 2**30:7.2f} GiB (limit 2)  {verdict(peak, BYTES)}", flush=True)
        parts = {}
        for layers, spec in specs.items():
            parts[layers] = json.loads(cold([sys.executable, "-c", _INSIDE, spec, "8"])[2])
            print(f"{layers:3} layers: " + "  ".join(f"{k} {v:.2f}" for k, v in parts[layers].items()), flush=True)
    ratio = parts[126]["plan"] / parts[32]["plan"]
    print(f"126 layers against 32      {ratio:7.2f} (limit {RATIO:g})  {verdict(ratio, RATIO)}", flush=True)
    return seconds <= SECONDS and peak <= BYTES and ratio <= RATIO


def bench_tiny() -> bool:
    """Two-layer models: the first plan in a process, and the best of three."""
    found = json.loads(cold([sys.executable, "-c", _TINY, *TINY_MODELS])[2])
    for name, times in found.items():
        best = min(times)
        print(f"{name:26} {best:7.2f} s (limit {TINY:g})  {verdict(best, TINY)}   first {times[0]:.2f}", flush=True)
    return all(min(times) <= TINY for times in found.values())


def main() -> int:
    """Measure; exit code 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["405b", "tiny"])
    only = parser.parse_args().only
    good = [bench() for name, bench in (("405b", bench_405b), ("tiny", bench_tiny)) if only in (None, name)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
