"""Losses over a cut output layer, and what ranks run to compare them with the unsharded ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, WIDTH = 4, 6, 8
EVEN, ODD = 64, 61  # classes; the odd number does not divide
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of logits (ROWS, LENGTH, classes) and targets.

    ``sent``: the all-gathers and all-reduces of forward and backward that the loss costs.
    """

    of: Callable[[Any, Tensor, Tensor], Any]
    sent: str
    targets: str = "some ignored"
    classes: int = ODD
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)


class Head(nn.Module):
    """A block with a residual stream, an output layer, and a loss of what that gives."""

    def __init__(self, case: Loss) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, case.classes)
        self.of = case.of
        for name, make in case.parts.items():
            part = make()
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """The loss."""
        return self.of(self, self.head(x + self.down(torch.relu(self.up(x)))), y)


def targets(kind: str, classes: int) -> Tensor:
    """Classes by index (``of the first rank``: of its part only), the probabilities of all of them, or other inputs."""
    generator = torch.Generator().manual_seed(1)
    if kind == "words":
        return torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    if kind == "probabilities":
        return torch.rand(ROWS * LENGTH, classes, generator=generator).softmax(-1)
    y = torch.randint(classes // 4 if kind == "of the first rank" else classes, (ROWS, LENGTH), generator=generator)
    if kind == "some ignored":
        y[0, 1] = y[2, :3] = IGNORED
    return torch.full_like(y, IGNORED) if kind == "all ignored" else y


def flat(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Cross entropy as it is mostly called."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), **options)


def shifted(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    """As transformers does: targets one further on, logits in float32."""
    y = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, ODD), y.view(-1), reduction="sum") / 7


def z_loss(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    return flat(logits, y) + 1e-2 * torch.logsumexp(logits, dim=-1).square().mean()


def by_hand(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    picked = logits.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((logits.logsumexp(-1) - picked) * (y >= 0)).sum()


def policy(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    """Log-probabilities of the tokens, and their entropy."""
    logp = logits.log_softmax(-1)
    taken = logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return -taken.mean() - 0.1 * (logits.softmax(-1) * logp).sum(-1).mean()


def distilled(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    """The teacher is another cut layer of the same classes."""
    wanted = F.softmax(m.teacher(y) / 2, dim=-1)
    return F.kl_div(F.log_softmax(logits / 2, dim=-1), wanted, reduction="sum") / 24


def chunked(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    total = logits.new_zeros(())
    for part, target in zip(logits.flatten(0, 1).chunk(3), y.flatten().chunk(3), strict=True):
        total = total + F.cross_entropy(part, target, reduction="sum", ignore_index=IGNORED)
    return total / 20


def capped(m: Any, logits: Tensor, y: Tensor) -> Tensor:
    """Soft-capped and scaled on the way, and returned beside the loss."""
    return flat(torch.tanh(logits / 5) * 5 / 0.7, y)


def _weights() -> Tensor:
    return torch.linspace(0.5, 2, ODD)


ONE = "all_gather forward"
SUM = "all_reduce forward"
BACK = "all_reduce backward"
LOSSES: dict[str, Loss] = {
    "mean": Loss(of=lambda m, x, y: flat(x, y), sent=ONE),
    "mean, even": Loss(of=lambda m, x, y: flat(x, y), sent=ONE, classes=EVEN),
    "sum": Loss(of=lambda m, x, y: flat(x, y, reduction="sum"), sent=ONE),
    "none": Loss(of=lambda m, x, y: flat(x, y, reduction="none"), sent=ONE),
    "every token of one rank": Loss(of=lambda m, x, y: flat(x, y), sent=ONE, targets="of the first rank"),
    "all ignored": Loss(of=lambda m, x, y: flat(x, y), sent=ONE, targets="all ignored"),
    "another ignore_index": Loss(
        of=lambda m, x, y: flat(x, y.clamp(min=0), ignore_index=0, label_smoothing=0.2), sent=ONE
    ),
    "label smoothing": Loss(of=lambda m, x, y: flat(x, y, label_smoothing=0.1), sent=ONE),
    "label smoothing, sum": Loss(of=lambda m, x, y: flat(x, y, label_smoothing=0.3, reduction="sum"), sent=ONE),
    "class weights": Loss(of=lambda m, x, y: flat(x, y, weight=m.w), sent=ONE, parts={"w": _weights}),
    "class weights and smoothing": Loss(
        of=lambda m, x, y: flat(x, y, weight=m.w, label_smoothing=0.2), sent=ONE, parts={"w": _weights}
    ),
    "classes in dim 1": Loss(of=lambda m, x, y: F.cross_entropy(x.transpose(1, 2), y), sent=ONE),
    "a module with weights": Loss(
        of=lambda m, x, y: m.loss(x.transpose(1, 2), y), sent=ONE,
        parts={"loss": lambda: nn.CrossEntropyLoss(weight=_weights(), reduction="none", label_smoothing=0.1)},
    ),
    "one token": Loss(of=lambda m, x, y: F.cross_entropy(x[1, 2], y[1, 2]), sent=ONE),
    "probabilities": Loss(
        of=lambda m, x, y: flat_probabilities(x, y), sent=f"{ONE}, {SUM}, {BACK}, {BACK}", targets="probabilities"
    ),
    "probabilities, weights, smoothing": Loss(
        of=lambda m, x, y: flat_probabilities(x, y, weight=m.w, label_smoothing=0.1, reduction="none"),
        sent=f"{ONE}, {SUM}, {BACK}, {BACK}", targets="probabilities", parts={"w": _weights},
    ),
    "shifted": Loss(of=shifted, sent=ONE),
    "z-loss": Loss(of=z_loss, sent=f"{ONE}, {ONE}"),
    "log_softmax and nll_loss": Loss(
        of=lambda m, x, y: F.nll_loss(F.log_softmax(x, dim=-1).flatten(0, 1), y.flatten()),
        sent=f"{ONE}, {SUM}, {BACK}",
    ),
    "nn.LogSoftmax and nn.NLLLoss with weights": Loss(
        of=lambda m, x, y: m.nll(m.norm(x).transpose(1, 2), y), sent=f"{ONE}, {SUM}, {BACK}",
        parts={"norm": lambda: nn.LogSoftmax(-1), "nll": lambda: nn.NLLLoss(_weights(), reduction="none")},
    ),
    "by hand": Loss(of=by_hand, sent=f"{ONE}, {SUM}"),
    "log-probabilities and entropy": Loss(
        of=policy, targets="all", sent=f"{ONE}, {ONE}, {SUM}, {SUM}, {BACK}, {BACK}"
    ),
    "distilled": Loss(
        of=distilled, targets="words", parts={"teacher": lambda: nn.Linear(WIDTH, ODD)},
        sent=f"{ONE}, {ONE}, {SUM}, {BACK}, {BACK}, {BACK}",
    ),
    "chunked": Loss(of=chunked, sent=", ".join([ONE] * 3)),
    "capped": Loss(of=capped, sent=ONE),
}  # fmt: skip


GATHERED: dict[str, Loss] = {
    "recomputed": Loss(of=lambda m, x, y: checkpoint(flat, x, y, use_reentrant=False), sent=ONE),
    "few classes": Loss(of=lambda m, x, y: flat(x, y.clamp(max=5)), sent=ONE, classes=6),
    "with an accuracy": Loss(
        of=lambda m, x, y: (flat(x, y), (x.argmax(-1) == y).to(x.dtype).mean()), sent=ONE, targets="all"
    ),
    "looked up": Loss(of=lambda m, x, y: -looked_up(x, y), sent=ONE, targets="all"),
    "probabilities returned": Loss(of=lambda m, x, y: x.softmax(-1), sent=ONE),
}


def looked_up(logits: Tensor, y: Tensor) -> Tensor:
    """By two index tensors."""
    logp = logits.flatten(0, 1).log_softmax(-1)
    return logp[torch.arange(y.numel()), y.flatten()].mean()


def flat_probabilities(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y, **options)


# ---------------------------------------------------------------- transformers


def built(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small model of transformers that computes its own loss, with labels; 65 words do not divide."""
    import transformers as hf

    small = {"vocab_size": 65, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    ids = torch.randint(2, 65, (2, 7))
    labels = ids.clone()
    labels[:, :3] = IGNORED
    model: Any
    if name in ("llama", "tied llama"):
        config = hf.LlamaConfig(**small, intermediate_size=64, tie_word_embeddings=name == "tied llama")
        model = hf.LlamaForCausalLM(config)
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**small, n_positions=16, bos_token_id=0, eos_token_id=1))
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**small, intermediate_size=64))
    else:
        sizes = {"vocab_size": 65, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))
    return model.eval(), (), {"input_ids": ids, "labels": labels}


class LossOnly(nn.Module):
    """A model of transformers of which only the loss is wanted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(**inputs).loss
        return loss


def of_transformers(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Figures of such a model, and the all-gathers of its plan."""
    from autotp.measuring import Settings, measure
    from tests.harness.planned import planned_once
    from tests.harness.tasks import autotp_shard, mesh_of, summary

    mesh, tp = mesh_of(payload["tp"]), payload["tp"]
    if dist.get_rank() >= tp:
        return None
    model, args, kwargs = built(payload["name"])
    model = LossOnly(model) if payload["loss only"] else model
    with planned_once(mesh) as made:
        found = summary(measure(model, (args, kwargs), mesh, autotp_shard, Settings(step=False)))
    return {**found, "gathers": [c.bytes for c in made[0].plan.collectives if c.kind == "all_gather"]}


# ---------------------------------------------------------------- what ranks run


BASE = Counter({"all_reduce forward": 1, "all_reduce backward": 2})  # of the block, and of what enters the output layer


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *made])
        return out


def measured(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Figures of one loss on this rank, what the plan says of it, what really runs, and the largest tensor."""
    from autotp import structures
    from autotp.measuring import Settings, measure
    from tests.exact.test_collectives import counted
    from tests.harness.planned import planned_once
    from tests.harness.tasks import autotp_shard, mesh_of, summary

    mesh, tp = mesh_of(payload["tp"]), payload["tp"]
    if dist.get_rank() >= tp:
        return None
    torch.manual_seed(0)
    case = {**LOSSES, **GATHERED}[payload["name"]]
    model, inputs = Head(case), ((torch.randn(ROWS, LENGTH, WIDTH), targets(case.targets, case.classes)), {})
    options = {"sequence_parallel": True} if payload.get("tokens") else {}
    found = summary(
        measure(copy.deepcopy(model), inputs, mesh, lambda *a: autotp_shard(*a, **options), Settings(step=False))
    )
    with planned_once(mesh) as prepared:
        autotp_shard(model, mesh, inputs, **options)
    made = prepared[0].plan
    x, y = (t.requires_grad_() if t.is_floating_point() else t for t in inputs[0])
    ran = Counter[str]()
    with Largest() as largest:
        with counted() as forward:
            loss = structures.weighted_sum(model(x, y))
        with counted() as backward:
            loss.backward()  # type: ignore[union-attr]
    ran.update({f"{kind} forward": n for kind, n in forward.items()})
    ran.update({f"{kind} backward": n for kind, n in backward.items()})
    planned = Counter(f"{c.kind} {c.when}" for c in made.collectives)
    rows = {r.name: (r.style, r.reason) for r in made.parameters}
    return {**found, "rows": rows, "planned": planned, "ran": ran, "largest": largest.numel}


def _both(case: Loss, tp: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A model, the same sharded, and inputs."""
    from autotp.sharding import shard
    from tests.harness.tasks import mesh_of

    torch.manual_seed(0)
    model, x = Head(case).to(dtype), torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype)
    y = targets(case.targets, case.classes)
    y = y.to(dtype) if y.is_floating_point() else y
    return model, shard(copy.deepcopy(model), mesh_of(tp), sample=(x, y)), x, y


def _step(run: Any, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gathered gradients."""
    from autotp.comparing import gathered

    loss = run(x, y)
    loss.backward()
    return loss.detach(), {n: gathered(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _error(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> float:
    """The largest difference of losses, or of gradients relative to the largest gradient."""
    scale = max(float(g.abs().max()) for g in a[1].values())
    apart = [float((g - b[1][n]).abs().max()) / scale for n, g in a[1].items()]
    return max(float((a[0] - b[0]).abs() / a[0].abs()), *apart)


def mixed(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Types and errors in bfloat16: of the model itself, and by autocast."""
    if dist.get_rank() >= 2:
        return None
    found = {}
    for name in payload["names"]:
        for auto in (False, True):
            model, sharded, x, y = _both(LOSSES[name], 2, torch.float32 if auto else torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16, enabled=auto):
                pair = [_step(m, m, x, y) for m in (model, sharded)]
            found[name, auto] = pair[0][0].dtype == pair[1][0].dtype, _error(*pair)
    return found  # type: ignore[return-value]


def compiled(payload: dict[str, Any]) -> float | None:
    """The error of a compiled sharded model against the unsharded one."""
    if dist.get_rank() >= 2:
        return None
    torch._dynamo.reset()
    model, sharded, x, y = _both(LOSSES[payload["name"]], 2, torch.float64)
    run = torch.compile(sharded, backend="aot_eager", fullgraph=True)
    return _error(_step(model, model, x, y), _step(run, sharded, x, y))


def twice(payload: dict[str, Any]) -> float | None:
    """The error of gradients of a gradient penalty."""
    from autotp.comparing import gathered

    if dist.get_rank() >= 2:
        return None
    model, sharded, x, y = _both(LOSSES[payload["name"]], 2, torch.float64)
    found = []
    for m in (model, sharded):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(m(x, y).sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append({n: gathered(p.grad) for n, p in m.named_parameters() if p.grad is not None})
    zero = torch.ones(())
    return _error((zero, found[0]), (zero, found[1]))
