"""The models of all cases by name, with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases import modules_attention as attention
from tests.cases import modules_mlp as mlp
from tests.cases import modules_whole as whole
from tests.models.common import Built, floats, tokens

Builder = Callable[[], Built]


def on(make: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> Builder:
    """A builder of a model called with these inputs."""
    return lambda: (make(), args, kwargs)


def _multi_head(**options: Any) -> Builder:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    k, v = floats(2, 6, options.get("kdim") or 32, seed=4), floats(2, 6, options.get("vdim") or 32, seed=5)
    return on(lambda: whole.MultiHead(**options), attention.sequence(length=5), k, v, padding)


def _encoder_layer() -> Built:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return whole.EncoderLayer(), (attention.sequence(), padding), {}


def _wrapped(*names: str) -> Builder:
    def build() -> Built:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = whole.Recomputed(recompute=False)
        for name in names:
            setattr(model, name, checkpoint_wrapper(getattr(model, name)))
        return model, (attention.sequence(),), {}

    return build


def _lora() -> nn.Module:
    return mlp.MLP(mlp.LoRA(16, 32), mlp.LoRA(32, 16))


def _ids(*values: int) -> Tensor:
    return torch.tensor([values])


x, rows = attention.sequence, mlp.rows

RECIPES: dict[str, Builder] = {
    "K01": on(attention.NormedHeads, x()),
    "K03a": on(mlp.ScaledMLP, rows()),
    "K03b": on(attention.PerHeadScale, x()),
    "K05": on(lambda: attention.LatentAttention(norm=False), x()),
    "K05 norm": on(lambda: attention.LatentAttention(norm=True), x()),
    "K06": on(mlp.Experts, rows()),
    "K06 after": on(lambda: mlp.Experts(inside=False), rows()),
    "K06 top-2": on(lambda: mlp.Experts(top=2), rows()),
    "K06 packed": on(mlp.PackedExperts, rows()),
    "K07": on(attention.FusedQKV, x()),
    "K09": on(mlp.PackedGate, rows()),
    "K09 interleaved": on(lambda: mlp.PackedGate(interleaved=True), rows()),
    "K09 36": on(lambda: mlp.PackedGate(36), rows()),
    "K09 35": on(lambda: mlp.PackedGate(35), rows()),
    "K11 buffer": on(lambda: attention.Alibi("buffer"), x()),
    "K11 computed": on(lambda: attention.Alibi("computed"), x()),
    "K11 list": on(lambda: attention.Alibi("list"), x()),
    "K12": on(whole.TiedLM, tokens(40)),
    **{f"K13 {kind}": on(lambda kind=kind: mlp.Reduced(kind), rows()) for kind in [*mlp.REDUCTIONS, "module"]},
    "K13 view": on(lambda: mlp.Reduced("view", 12), rows()),
    "K15": on(whole.Dropping, rows()),
    "K16": on(whole.StartsDifferent, rows(width=8)),
    "K17": _multi_head(),
    "K17 no bias": _multi_head(bias=False),
    "K17 dims": _multi_head(kdim=24, vdim=20),
    "K17 layer": _encoder_layer,
    "K18 1": on(lambda: attention.GroupedAttention(1), x(64)),
    "K18 2": on(lambda: attention.GroupedAttention(2), x(64)),
    "K18 4": on(lambda: attention.GroupedAttention(4), x(64)),
    "K20": on(attention.FixedHeads, x(length=8)),
    "K22": on(mlp.Residuals, rows()),
    **{f"K23 {n}": on(mlp.NormedBlocks, x(16, length=n)) for n in (1, 3, 7)},
    "K24": on(lambda: whole.UntiedLM(53), _ids(0, 13, 14, 26, 27, 52)),
    "K24 large": on(lambda: whole.UntiedLM(50257), _ids(1, 50256)),
    "K26": on(mlp.NormedBlocks, x(16, length=8)),
    "K27": on(whole.ByKeyword, pair=(x(), x() + 1)),
    "K29": on(whole.Normed, rows(width=8)),
    **{
        f"K31 {inner} {out}": on(
            lambda inner=inner, out=out: nn.Sequential(mlp.NormedBlocks(inner), nn.Linear(16, out)), x(16)
        )
        for inner, out in ((32, 10), (13, 7))
    },
    "K35 transposed": on(lambda: mlp.MLP(mlp.Transposed(16, 32), mlp.Transposed(32, 16)), rows()),
    "K35 shared": on(mlp.Shared, rows()),
    "K35 view": on(mlp.noncontiguous, rows()),
    "K35 weight norm": on(mlp.weight_normed, rows()),
    "K40": on(_lora, rows()),
    "K42": on(lambda: whole.Recomputed(recompute=True), x()),
    "K42 dropout": on(lambda: whole.Recomputed(recompute=True, dropout=0.1), x()),
    "K42 plain": on(lambda: whole.Recomputed(recompute=False), x()),
    "K42 attention": _wrapped("attention"),
    "K42 mlp": _wrapped("mlp"),
    "K45 conv": on(whole.ConvNet, floats(4, 3, 8, 8)),
    "K45 LSTM": on(lambda: whole.Recurrent("LSTM"), rows(6, 8)[None]),
    "K45 GRU": on(lambda: whole.Recurrent("GRU"), rows(6, 8)[None]),
    "K48": whole.vision_language,
    "K53": on(lambda: mlp.MLP(nn.Linear(64, 256), nn.Linear(256, 64)), floats(8, 16, 64)),
    "pair": on(lambda: mlp.MLP(nn.Linear(16, 32), nn.Linear(32, 16)), rows()),
}
