"""Which axis of a device mesh does what: tensor parallel, FSDP, replicas.

`parse_mesh("tp=8,dp=4")` and `resolve_mesh(device_mesh)` give the same `MeshAxes`. The text
form needs neither torch nor a process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import MeshError
from .plan_types import TP_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

FSDP_NAMES = ("dp", "fsdp", "dp_shard", "data_parallel")
REPLICATE_NAMES = ("dp_replicate",)
_ALL_NAMES = (*TP_NAMES, *FSDP_NAMES, *REPLICATE_NAMES)
_KNOWN = (
    f"{' / '.join(TP_NAMES)} (tensor parallel), {' / '.join(FSDP_NAMES)} (FSDP2), "
    "dp_replicate (replicas, with one of these)"
)


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The axes of a mesh by role: name and size. An axis of size 1 has no role and is `None`.

    `axes` holds all of them as given, in mesh order.
    """

    axes: tuple[tuple[str, int], ...]
    tp_name: str | None = None
    fsdp_name: str | None = None
    replicate_name: str | None = None

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.size_of(self.tp_name)

    @property
    def fsdp(self) -> int:
        """Number of ranks that share the parameters of one tensor-parallel rank."""
        return self.size_of(self.fsdp_name)

    @property
    def replicate(self) -> int:
        """Number of replicas beside FSDP."""
        return self.size_of(self.replicate_name)

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    def size_of(self, name: str | None) -> int:
        """Size of an axis; 1 if there is none."""
        return dict(self.axes).get(name, 1) if name else 1

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def resolve_mesh(mesh: DeviceMesh) -> MeshAxes:
    """The roles of a `DeviceMesh`'s axes. A 1-D mesh is tensor parallel whatever its name."""
    sizes = tuple(int(size) for size in mesh.shape)
    names = mesh.mesh_dim_names
    if len(sizes) == 1:
        name = names[0] if names else "tp"
        return MeshAxes(axes=((name, sizes[0]),), tp_name=name if sizes[0] > 1 else None)
    if not names:
        raise MeshError(
            f"a mesh of {len(sizes)} axes {sizes} needs axis names to tell them apart. Known names: {_KNOWN}. "
            f"For example init_device_mesh(device, {sizes}, mesh_dim_names=('dp', 'tp'))"
        )
    return _assign(zip(names, sizes, strict=True))


def of_one_model(root: DeviceMesh) -> DeviceMesh:
    """The axes of a mesh that one model is spread over: without others, as of pipeline stages."""
    known = tuple(name for name in root.mesh_dim_names or () if name in _ALL_NAMES)
    return root[known] if known and root.ndim > len(known) else root


def parse_mesh(text: str | int) -> MeshAxes:
    """`MeshAxes` from text such as "tp=8,dp=4", or from a number of tensor-parallel ranks."""
    if isinstance(text, int) and not isinstance(text, bool):
        return _assign([("tp", text)])
    if not isinstance(text, str):
        raise MeshError(f"a mesh is written as 'tp=8,dp=4' or as a number, not as {text!r}")
    axes = []
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (name and equals and size.isascii() and size.isdigit()):
            raise MeshError(
                f"cannot read {part.strip()!r} in mesh {text!r}: write axes as name=size, as in 'tp=8,dp=4'"
            )
        axes.append((name, int(size)))
    return _assign(axes)


def as_mesh_axes(mesh: Any) -> MeshAxes:
    """`MeshAxes` from whatever a user may pass: a number, text, a DeviceMesh, or MeshAxes."""
    if isinstance(mesh, MeshAxes):
        return mesh
    if isinstance(mesh, (int, str)):
        return parse_mesh(mesh)
    if hasattr(mesh, "mesh_dim_names"):
        return resolve_mesh(mesh)
    raise MeshError(f"a mesh is a number, text such as 'tp=8,dp=4', or a DeviceMesh, not {type(mesh).__name__}")


def _assign(named_sizes: Iterable[tuple[str, int]]) -> MeshAxes:
    axes = tuple(named_sizes)
    found = ", ".join(f"{name}={size}" for name, size in axes)
    names = [name for name, _ in axes]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise MeshError(f"axis {sorted(doubled)[0]!r} is named twice in the mesh ({found})")
    if bad := [f"{name}={size}" for name, size in axes if size < 1]:
        raise MeshError(f"an axis needs at least one rank: {', '.join(bad)} in the mesh ({found})")
    # An axis of size 1 does nothing, whatever its name.
    if unknown := [name for name, size in axes if name not in _ALL_NAMES and size > 1]:
        raise MeshError(f"cannot tell what axis {unknown[0]!r} is for (axes found: {found}). Known names: {_KNOWN}")
    fsdp = _only(axes, FSDP_NAMES, found)
    replicate = _only(axes, REPLICATE_NAMES, found)
    if replicate and not fsdp:
        raise MeshError(
            f"axis 'dp_replicate' needs an FSDP axis of more than one rank beside it (axes found: {found}): "
            "add dp_shard, or name the axis dp to share the parameters over it"
        )
    return MeshAxes(axes=axes, tp_name=_only(axes, TP_NAMES, found), fsdp_name=fsdp, replicate_name=replicate)


def _only(axes: tuple[tuple[str, int], ...], names: tuple[str, ...], found: str) -> str | None:
    """The one axis of more than one rank among `names`, if any."""
    matches = [name for name, size in axes if name in names and size > 1]
    if len(matches) > 1:
        raise MeshError(f"axes {' and '.join(matches)} have the same role, keep one (axes found: {found})")
    return matches[0] if matches else None
