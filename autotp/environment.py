"""What a bug report needs to say about the machine: versions and devices."""

from __future__ import annotations

import os
import platform
from importlib import metadata

PACKAGES = ("torch", "torchvision", "transformers", "timm", "safetensors", "numpy", "rich", "typer")


def facts() -> dict[str, str]:
    """Name and value, most important first. No paths, no names of users or hosts."""
    import torch
    import torch.distributed as dist

    import autotp

    found = {"autotp": autotp.__version__, "python": platform.python_version(), "platform": platform.platform()}
    found |= {name: _version(name) for name in PACKAGES}
    found["cpus"] = f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"
    found["devices"] = ", ".join(_devices()) or "none but the CPU"
    backends = ("gloo", "nccl", "mpi")
    if dist.is_available():
        found["backends"] = ", ".join(name for name in backends if dist.is_backend_available(name)) or "none"
    else:
        found["backends"] = "torch is built without torch.distributed"
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
