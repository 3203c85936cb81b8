"""`autotp demo`: two small models planned, sharded over two processes of this machine, and trained beside their
unsharded twins. Needs no GPU, no download and nothing beyond autotp's own dependencies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp import demo_models, structures
from autotp.comparing import gathered, local
from autotp.display import plan_sections, show
from autotp.display.sections import size_text
from autotp.ranks import RankPool

TP = 2
STEPS = 5
LOSS_LIMIT = 1e-10
GRADIENT_LIMIT = 1e-9
WEIGHT_LIMIT = 1e-6
SECONDS = 120.0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model to show, what is to be seen in its plan, and its training data."""

    title: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def model(self) -> nn.Module:
        """The same weights on every call; float64, where only rounding is left of what should be equal."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().double()


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of training, unsharded and sharded."""

    loss: float
    sharded_loss: float
    gradients: float


@dataclass(kw_only=True)
class Training:
    """What one rank saw; `held` and `whole` are bytes of weights, gradients and AdamW's state, here and unsharded."""

    steps: list[Step] = field(default_factory=list)
    weights: float = 0.0
    held: int = 0
    whole: int = 0

    def problems(self) -> list[str]:
        """What is beyond its limit, in words; not-a-number is beyond any."""
        checks = (
            ("loss", [abs(step.loss - step.sharded_loss) for step in self.steps], LOSS_LIMIT),
            ("a gradient", [step.gradients for step in self.steps], GRADIENT_LIMIT),
            ("a weight after training", [self.weights], WEIGHT_LIMIT),
        )
        wrong = [(what, [gap for gap in gaps if not gap <= limit], limit) for what, gaps, limit in checks]
        found = [f"{what} differs by {gaps[0]:.1e}, the limit is {limit:.0e}" for what, gaps, limit in wrong if gaps]
        return found if self.held < self.whole else [*found, "a rank holds no less than the unsharded model"]


def _sentences() -> Batch:
    """Sequences in which every token follows from the one before."""
    start = torch.randint(512, (8, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + 3 * torch.arange(25)) % 512
    return ids[:, :-1], ids[:, 1:].reshape(-1)


def _images() -> Batch:
    """Noise with a bright bar whose row tells the class."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(10, (16,), generator=generator)
    images = torch.randn(16, 3, 16, 16, generator=generator, dtype=torch.float64)
    images[torch.arange(16), :, classes] += 3
    return images, classes


EXAMPLES = (
    Example(
        title="A language model",
        about="One matrix makes q, k and v; two query heads share a key head; the output layer is the token embedding.",
        build=demo_models.LanguageModel,
        batch=_sentences,
    ),
    Example(
        title="A convolutional network",
        about="Batch norm, depthwise convolutions and pooling work channel by channel, so channels can be dealt out.",
        build=demo_models.ConvNet,
        batch=_images,
    ),
)


def run(out: TextIO, progress: TextIO) -> int:
    """Show everything; 0 if sharded and unsharded training agree on all ranks, else 1."""
    began = time.monotonic()

    def tell(text: str) -> None:
        progress.write(f"[{time.monotonic() - began:4.0f} s] {text}\n")
        progress.flush()

    results: dict[str, list[Training]] = {}
    with RankPool(TP, timeout=SECONDS, imports=("autotp.sharding",)) as pool:
        for number, example in enumerate(EXAMPLES):
            _heading(out, f"{number + 1}. {example.title}", example.about)
            tell(f"planning {example.title.lower()} for {TP} ranks")
            show(plan_sections(autotp.plan(example.model(), tp=TP, sample=example.batch()[0])), stream=out)
            tell(f"training it on {TP} processes of this machine" + ("" if results else ", which start now"))
            try:
                results[example.title] = pool.run("autotp.demo:train", number)
            except autotp.AutotpError as error:
                out.write(f"\nFAIL  {example.title} could not be trained on {TP} ranks: {error}\n")
                return 1
            _show_training(out, results[example.title])
    tell("done")
    return _summary(out, results)


def train(number: int) -> Training:
    """What each rank does: shard one copy, train it and another side by side, compare every step."""
    example = EXAMPLES[number]
    inputs, wanted = example.batch()
    reference, sharded = example.model(), example.model()
    autotp.shard(sharded, init_device_mesh("cpu", (dist.get_world_size(),)), sample=inputs)
    pair = [(model, torch.optim.AdamW(model.parameters(), lr=3e-3)) for model in (reference, sharded)]
    seen = Training()
    for _ in range(STEPS):
        losses = []
        for model, optimizer in pair:
            optimizer.zero_grad()
            scores = model(inputs)
            loss = F.cross_entropy(scores.reshape(len(wanted), -1), wanted)
            loss.backward()
            losses.append(float(loss.detach()))
        seen.steps.append(Step(loss=losses[0], sharded_loss=losses[1], gradients=_gradient_gap(reference, sharded)))
        for _, optimizer in pair:
            optimizer.step()
    ours, theirs = sharded.state_dict(), reference.state_dict()
    seen.weights = max(_gap(theirs[name], gathered(ours[name])) for name in theirs)
    seen.whole, seen.held = (_bytes(model, optimizer) for model, optimizer in pair)
    return seen


def _gradient_gap(reference: nn.Module, sharded: nn.Module) -> float:
    pairs = zip(reference.parameters(), sharded.parameters(), strict=True)
    return max(_gap(a.grad, gathered(b.grad)) for a, b in pairs if a.grad is not None and b.grad is not None)


def _gap(expected: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest value expected."""
    return structures.difference(expected, found) / max(structures.largest([expected]), 1e-12)


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    weights = list(model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kept: list[Any] = [*weights, *(p.grad for p in weights), *moments]
    return sum(local(tensor).numel() * tensor.element_size() for tensor in kept if tensor is not None)


# What is printed


def _heading(out: TextIO, title: str, about: str) -> None:
    out.write(f"{title}\n{'=' * len(title)}\n{about}\n\n")


def _show_training(out: TextIO, ranks: list[Training]) -> None:
    out.write(f"\nTraining: {STEPS} steps of AdamW on the same data, on one rank and on {TP} ranks\n")
    out.write("  step  unsharded loss   sharded loss     largest gradient difference (relative)\n")
    for number, step in enumerate(ranks[0].steps):
        worst = max(seen.steps[number].gradients for seen in ranks)
        out.write(f"  {number + 1:>4}  {step.loss:<15.12f}  {step.sharded_loss:<15.12f}  {worst:.1e}\n")
    held = ", ".join(f"rank {rank}: {size_text(seen.held)}" for rank, seen in enumerate(ranks))
    out.write(f"  weights, gradients and optimizer state: unsharded {size_text(ranks[0].whole)}; {held}\n\n\n")


def _summary(out: TextIO, results: dict[str, list[Training]]) -> int:
    out.write("Summary\n=======\n")
    failed = False
    for title, ranks in results.items():
        problems = [f"rank {rank}: {text}" for rank, seen in enumerate(ranks) for text in seen.problems()]
        worst = max(step.gradients for seen in ranks for step in seen.steps)
        share = max(seen.held for seen in ranks) / ranks[0].whole
        verdict = "; ".join(problems) or f"gradients agree to {worst:.0e}, each rank holds {share:.0%} of the memory"
        out.write(f"  {'FAIL' if problems else 'ok':<4}  {title}: {verdict}\n")
        failed = failed or bool(problems)
    if failed:
        out.write("\nThe sharded models did not train as the unsharded ones did. This is a fault of autotp.\n")
    else:
        out.write(
            f"\nautotp read how each model computes, dealt its weights out to {TP} processes, and trained it there.\n"
            "Losses, gradients and weights are those of the unsharded model, up to rounding\n"
            f"(limits: loss {LOSS_LIMIT:.0e}, gradients {GRADIENT_LIMIT:.0e}, weights {WEIGHT_LIMIT:.0e} relative).\n"
            "\nNext: autotp plan FILE.py:FACTORY --tp 2 for a model of yours; autotp plan --help says more.\n"
        )
    return int(failed)
