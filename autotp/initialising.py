"""``autotp.materialize``: give a model on meta the values that its constructor draws."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from autotp import torch_hooks
from autotp.construction import constructor_of
from autotp.errors import BuildError
from autotp.parts import Slot, fill, held, pieces, slots
from autotp.recovering import class_of
from autotp.tape import Pending, recorded


def materialize(model: nn.Module, seed: int = 0, *, device: str = "cpu") -> nn.Module:
    """Give everything in ``model`` that is on meta the values that its constructor would give it. Returns the model.

    They are those of ``torch.manual_seed(seed)`` followed by an ordinary construction on CPU, whatever the number of
    ranks: the constructor is run again, one tensor in memory at a time, and each rank keeps the part that it holds.
    So parameters that are whole are equal on all ranks, and parts of one parameter are different parts. All numbers
    are drawn on every rank; no rank waits for another.

    Args:
        model: built by :func:`autotp.on_meta`, or under ``torch.device("meta")`` by a class whose arguments can be
            told from the module; sharded or not. What has values keeps them.
        seed: of the CPU generator; the state of the generator is left as it is.
        device: where parameters go that are not sharded. A sharded one goes to the device of its mesh.

    Raises:
        BuildError: the constructor is not known, or makes another model than this one.
    """
    wanted = [slot for slot in slots(model, persistent=False) if slot.tensor.is_meta]
    if not wanted:
        return model
    construct = constructor_of(model)
    if construct is None:
        name = class_of(model).__name__
        raise BuildError(
            f"{wanted[0].name} is on meta, and it is not known how {name} was built: its arguments cannot be told from "
            f"the model. Build it as autotp.on_meta({name}, ...)"
        )
    with recorded(seed) as reel:
        made = construct()
        values = _by_name(made)
    uses: dict[int, list[Callable[[Tensor], None]]] = {}
    for slot in wanted:
        value = values.get(slot.name)
        if value is None or value.shape != slot.tensor.shape:
            found = "nothing" if value is None else f"a tensor of shape {list(value.shape)}"
            raise BuildError(
                f"{slot.name} has shape {list(slot.tensor.shape)}, but the constructor makes {found} there when it is "
                "run again: it must build the same model each time"
            )
        if isinstance(value, Pending):
            uses.setdefault(value.slot, []).append(_keeper(slot, device))
        else:
            _keeper(slot, device)(value)
    reel.play({number: _all(keepers) for number, keepers in uses.items()})
    return model


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: slot.tensor for slot in slots(model, persistent=False) for name in slot.names}


def _keeper(slot: Slot, device: str) -> Callable[[Tensor], None]:
    """Keeps this rank's part of a value."""

    def keep(value: Tensor) -> None:
        where = slot.tensor.device_mesh.device_type if torch_hooks.is_dtensor(slot.tensor) else device
        fill(slot, pieces(value.detach(), held(slot.tensor)).to(slot.tensor.dtype), where)

    return keep


def _all(keepers: list[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def keep(value: Tensor) -> None:
        for keeper in keepers:
            keeper(value)

    return keep
