"""Sharded models in the hands of other libraries, against unsharded ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autotp
from autotp.errors import AutotpError
from tests.exact.around_tasks import double, errors_of, held
from tests.exact.compile_tasks import step
from tests.harness.tasks import mesh_of

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)).double()


def adapters(payload: dict[str, Any]) -> dict[str, Any] | None:
    """peft's LoRA, put in before or after sharding."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double("hf:llama")
    reference = _with_lora(copy.deepcopy(model))
    expected = step(reference, args, kwargs)
    try:
        if payload["before"]:
            model = autotp.shard(_with_lora(model), mesh, sample=(args, kwargs))
        else:
            model = _with_lora(autotp.shard(model, mesh, sample=(args, kwargs)))
        found = step(model, args, kwargs)
    except AutotpError as e:
        return {"refused": str(e)}
    same = [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    return {**errors_of(expected, found), "names": same, "held": held(model)}
