"""autotp: tensor parallelism for any torch model, planned, proved and applied.

    model = autotp.shard(model, mesh)      # in place
    plan = autotp.plan(model, tp=8)        # what would be cut, and why
    report = autotp.verify(model, tp=2)    # sharded against unsharded

    model = autotp.on_meta(Model, config)  # no memory for its parameters
    autotp.load(model, "folder/", mesh)    # each rank reads its part

    autotp.save(model, "run/", optimizer=optimizer)    # a checkpoint
    autotp.resume(model, "run/", optimizer=optimizer)  # on any number of ranks
    autotp.export(model, "final/")                     # ordinary safetensors

Everything is loaded on first use: `import autotp` does not import torch. `plan`, `shard`, `load`,
`materialize`, `on_meta`, `save`, `resume`, `export` and `verify` are functions, so no submodule may
have one of these names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotp.checkpointing import Saving, resume, save
    from autotp.construction import on_meta
    from autotp.errors import (
        AutotpError,
        BuildError,
        CheckpointError,
        InputError,
        MeshError,
        PlanError,
        ProofError,
        RankLostError,
        RuleError,
        SpecError,
        StrictError,
        VerifyError,
        WeightsError,
    )
    from autotp.initialising import materialize
    from autotp.input_check import check_inputs
    from autotp.loading import load
    from autotp.lost_ranks import roll_call
    from autotp.plan_types import Collective, Finding, Memory, Plan, Row
    from autotp.planning import plan
    from autotp.sharding import shard
    from autotp.teaching import OpView, register_rule
    from autotp.verification import Report, verify
    from autotp.weight_export import export

__version__ = "0.1.0"

_HOMES = {
    "plan": "planning",
    "shard": "sharding",
    "verify": "verification",
    "register_rule": "teaching",
    "OpView": "teaching",
    "on_meta": "construction",
    "load": "loading",
    "materialize": "initialising",
    "save": "checkpointing",
    "resume": "checkpointing",
    "Saving": "checkpointing",
    "export": "weight_export",
    "check_inputs": "input_check",
    "roll_call": "lost_ranks",
    "Report": "verification",
    "Plan": "plan_types",
    "Row": "plan_types",
    "Collective": "plan_types",
    "Memory": "plan_types",
    "Finding": "plan_types",
    "AutotpError": "errors",
    "InputError": "errors",
    "SpecError": "errors",
    "MeshError": "errors",
    "RuleError": "errors",
    "PlanError": "errors",
    "ProofError": "errors",
    "StrictError": "errors",
    "VerifyError": "errors",
    "WeightsError": "errors",
    "BuildError": "errors",
    "CheckpointError": "errors",
    "RankLostError": "errors",
}

__all__ = [
    "AutotpError",
    "BuildError",
    "CheckpointError",
    "Collective",
    "Finding",
    "InputError",
    "Memory",
    "MeshError",
    "OpView",
    "Plan",
    "PlanError",
    "ProofError",
    "RankLostError",
    "Report",
    "Row",
    "RuleError",
    "Saving",
    "SpecError",
    "StrictError",
    "VerifyError",
    "WeightsError",
    "__version__",
    "check_inputs",
    "export",
    "load",
    "materialize",
    "on_meta",
    "plan",
    "register_rule",
    "resume",
    "roll_call",
    "save",
    "shard",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotp' has no attribute {name!r}")
    value = getattr(import_module(f"autotp.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
