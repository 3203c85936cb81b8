"""A Transformer in two pipeline stages on a (pp, dp, tp) mesh, against the whole model on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import autotp
from autotp.comparing import local
from autotp.demo_models import LanguageModel
from tests.harness.tasks import grid_of

MICROBATCHES, BATCH, LENGTH = 2, 8, 6
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class First(nn.Module):
    """Embeddings and the first half of the blocks."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids to features."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Features to scores."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole() -> LanguageModel:
    """Three blocks, so that the stages differ; the head is not tied, as it is in another stage."""
    torch.manual_seed(0)
    model = LanguageModel(depth=3)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model.double()


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def step(payload: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of one step of a schedule; errors relative to the largest gradient of the whole model."""
    mesh = grid_of((2, 2, 2), ("pp", "dp", "tp"))
    number, half = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    ids = torch.randint(512, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    given, targets = (part.chunk(2)[half] for part in (ids[:, :-1], ids[:, 1:]))
    model = whole()
    expected = copy.deepcopy(model)
    loss = loss_of(expected(ids[:, :-1]), ids[:, 1:])
    loss.backward()

    module = (First, Last)[number](model)
    want = dict((First, Last)[number](expected).named_parameters())
    micro = BATCH // 2 // MICROBATCHES
    sample = given[:micro] if number == 0 else torch.zeros(micro, LENGTH, 64, dtype=torch.float64)
    autotp.shard(module, mesh["dp", "tp"], sample=sample)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = SCHEDULES[payload["schedule"]](stage, MICROBATCHES, loss_fn=loss_of)
    losses: list[Tensor] = []
    schedule.step(*([given] if number == 0 else []), **({"target": targets, "losses": losses} if number else {}))

    largest = max(float(p.grad.abs().max()) for p in expected.parameters() if p.grad is not None)
    found = {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    own = loss_of(expected(given), targets)
    autotp.save(module, f"{payload['folder']}/stage{number}").wait()
    kept = {n: p.full_tensor().clone() for n, p in module.named_parameters()}  # type: ignore[attr-defined]
    with torch.no_grad():
        for p in module.parameters():
            local(p).zero_()
    autotp.resume(module, f"{payload['folder']}/stage{number}")
    return {
        "names": sorted(found) == sorted(want),
        "gradient": max(float((found[n] - p.grad).abs().max()) for n, p in want.items() if p.grad is not None)
        / largest,
        "loss": abs(float(torch.stack(losses).mean() - own)) if losses else 0.0,
        "held": sum(local(p).numel() for p in module.parameters()) / sum(p.numel() for p in module.parameters()),
        "resumed": all(torch.equal(p.full_tensor(), kept[n]) for n, p in module.named_parameters()),  # type: ignore[attr-defined]
    }
