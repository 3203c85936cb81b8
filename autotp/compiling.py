"""The programs of a model as torch.compile runs it, where its code branches on being compiled.

Some libraries do (a mask is built instead of left out, say). So when a sharded model is compiled for the first time,
its forward is recorded again as if it were compiled; only if that run makes other calls is it analysed again, with the
cuts that the weights have by now.
"""

from __future__ import annotations

import copy
from threading import Thread
from typing import Any

import torch
from torch import nn

from autotp import torch_hooks
from autotp.construction import with_buffers
from autotp.errors import AutotpError
from autotp.hoisting import ModuleProgram
from autotp.mesh import MeshAxes
from autotp.planning import Prepared, prepare
from autotp.record import Trace
from autotp.search import Analysis
from autotp.trace import trace

Programs = dict[str, ModuleProgram]


class CompiledPrograms:
    """Works out the programs when they are first asked for. Keeps the model's modules, without its weights."""

    def __init__(self, model: nn.Module, prepared: Prepared, axes: MeshAxes) -> None:
        shapes = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, {**shapes, **{id(b): b for b in model.buffers()}})
        self.prepared, self.axes = prepared, axes
        self.found: Programs | None = None

    def programs(self) -> Programs:
        """By module path; the ones that are in use if being compiled makes no difference.

        Raises:
            AutotpError: the code that runs when compiled needs weights cut in another way.
        """
        if self.found is None:
            results: list[Any] = []
            thread = Thread(target=self._work, args=(results,))  # the compiler's own modes stay in its thread
            thread.start()
            thread.join()
            if isinstance(results[0], Exception):
                raise results[0]
            self.found = results[0]
        return self.found

    def _work(self, results: list[Any]) -> None:
        try:
            with torch_hooks.as_if_compiled():
                results.append(self._find())
        except Exception as e:
            results.append(e)

    def _find(self) -> Programs:
        used = self.prepared.analysis
        assert used is not None
        args, kwargs = self.prepared.sample
        with with_buffers(self.model):
            if _same(trace(self.model, args, kwargs, used.trace.folds, used.trace.drive), used.trace):
                return self.prepared.programs
        drive = used.trace.drive
        sample: Any = self.prepared.sample if drive is None else lambda m: drive.run(m, args, kwargs)
        again = prepare(self.model, self.axes, sample=sample, plan=self.prepared.plan)
        assert again.analysis is not None
        self._check_cuts(again.analysis)
        return again.programs

    def _check_cuts(self, found: Analysis) -> None:
        used = self.prepared.analysis
        assert used is not None
        for name, tid in used.trace.leaves.items():
            if used.dealing.sets(tid) != found.dealing.sets(found.trace.leaves[name]):
                raise AutotpError(
                    f"{name} is cut otherwise than the code needs that runs when compiled (the model branches on "
                    "torch.compiler.is_compiling()): run it uncompiled, or shard with a rule that leaves it whole"
                )


def _same(a: Trace, b: Trace) -> bool:
    """Whether two runs made the same calls in the same places."""

    def calls(t: Trace) -> list[Any]:
        return [(c.func, c.site, t.module_path(c) if c.module >= 0 else "") for c in t.calls]

    def modules(t: Trace) -> list[Any]:
        return [(m.path, m.kinds) for m in t.modules]

    return calls(a) == calls(b) and modules(a) == modules(b)
