"""What ranks run to test a script of the documents."""

from __future__ import annotations

import torch.distributed as dist

from tests.harness.tasks import mesh_of


def on_two_ranks(text: str) -> None:
    """A script that is written for two ranks and calls its mesh ``mesh_of(2)``."""
    mesh = mesh_of(2)  # all ranks make it
    if dist.get_rank() < mesh.size():
        exec(compile(text, "script", "exec"), {"__name__": "__main__", "mesh_of": mesh_of})
