"""Operations of torchvision that find places in images by numbers, which are not to be tried out."""

from __future__ import annotations

from autotp.ownership.engine import Ownership
from autotp.ownership.registry import no_rule, rule
from autotp.ownership.rules_dims import Operand, argument, by_dims
from autotp.record import Op

_CHANNELS = (None, 1, None, None)


@rule("torchvision::roi_align", "torchvision::roi_pool")
def boxes(own: Ownership, op: Op) -> None:
    """Boxes cut out of images and pooled: every channel on its own."""
    by_dims(own, op, [Operand(op.args[0].tid, _CHANNELS)], [1], [_CHANNELS] * len(op.outs))


@rule("torchvision::deform_conv2d")
def deformed(own: Ownership, op: Op) -> None:
    """A convolution that looks at shifted places: cut by its output channels."""
    if argument(op, "groups") != 1:
        return no_rule(own, op)
    weight, bias = Operand(op.args[1].tid, (1, None, None, None)), Operand(op.args[4].tid, (1,))
    rest = [Operand(a.tid, (None,) * 4) for i, a in enumerate(op.args[:4]) if i != 1]
    return by_dims(own, op, [*rest, weight, bias], [1])
