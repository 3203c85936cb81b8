"""Roles of mesh axes, from text and from a DeviceMesh."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from autotp.errors import AutotpError
from autotp.mesh import MeshAxes, as_mesh_axes, parse_mesh, resolve_mesh
from autotp.plan_types import Memory, Plan


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> SimpleNamespace:
    """What resolve_mesh reads of a DeviceMesh, without a process group."""
    return SimpleNamespace(shape=shape, mesh_dim_names=names)


@pytest.mark.parametrize(
    ("text", "tp", "fsdp", "replicate"),
    [
        ("tp=8", 8, 1, 1),
        (8, 8, 1, 1),
        (1, 1, 1, 1),
        (" dp = 4 , tp=8 ", 8, 4, 1),
        ("fsdp=4,tp=2", 2, 4, 1),
        ("dp_replicate=2,dp_shard=4,tp=2", 2, 4, 2),
        ("dp_replicate=1,dp=4,tp=1", 1, 4, 1),
        ("pp=1,tp=2", 2, 1, 1),
        ("dp=1,fsdp=2,tp=2", 2, 2, 1),
    ],
)
def test_text(text: str | int, tp: int, fsdp: int, replicate: int) -> None:
    axes = parse_mesh(text)
    assert (axes.tp, axes.fsdp, axes.replicate) == (tp, fsdp, replicate)
    assert axes.world_size == tp * fsdp * replicate
    assert parse_mesh(str(axes)) == axes == as_mesh_axes(axes)
    names, sizes = zip(*axes.axes, strict=True)
    if len(sizes) > 1:
        assert resolve_mesh(device_mesh(sizes, names)) == axes == as_mesh_axes(device_mesh(sizes, names))


def test_axes_of_size_one_have_no_role() -> None:
    axes = parse_mesh("tp=1,dp=4")
    assert axes.tp_name is None and axes.fsdp_name == "dp" and axes.axes == (("tp", 1), ("dp", 4))


@pytest.mark.parametrize("names", [None, ("tp",), ("model",), ("dp",)])
def test_one_axis_is_tensor_parallel_whatever_its_name(names: tuple[str, ...] | None) -> None:
    axes = resolve_mesh(device_mesh((4,), names))
    assert axes.tp == 4 and axes.fsdp == 1 and axes.tp_name == (names[0] if names else "tp")
    assert resolve_mesh(device_mesh((1,), names)).tp_name is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=2,tp=4", "cannot tell what axis 'pp' is for (axes found: pp=2, tp=4). Known names: tp / "),
        ("tp=2,tp=4", "named twice"),
        ("tp=0", "at least one rank"),
        (-2, "at least one rank"),
        ("tp", "cannot read 'tp'"),
        ("tp=two", "cannot read 'tp=two'"),
        ("", "cannot read ''"),
        ("tp=2,", "cannot read ''"),
        ("=2", "cannot read '=2'"),
        ("tp=\u00b2", "cannot read"),
        ("dp=2,fsdp=2", "dp and fsdp have the same role"),
        ("dp_replicate=2,tp=2", "needs an FSDP axis"),
        (True, "not as True"),
        (2.0, "not as 2.0"),
    ],
)
def test_bad_text(text: object, words: str) -> None:
    with pytest.raises(AutotpError) as caught:
        parse_mesh(text)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_bad_device_meshes() -> None:
    with pytest.raises(AutotpError, match="needs axis names"):
        resolve_mesh(device_mesh((2, 4), None))
    with pytest.raises(AutotpError, match=r"axis 'cp'.*dp=2, cp=4.*Known names"):
        resolve_mesh(device_mesh((2, 4), ("dp", "cp")))
    with pytest.raises(AutotpError, match="not list"):
        as_mesh_axes([2, 4])


def test_a_real_device_mesh() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert resolve_mesh(mesh) == parse_mesh("dp=2,tp=4")
        assert resolve_mesh(mesh["tp"]) == MeshAxes(axes=(("tp", 4),), tp_name="tp")
        assert resolve_mesh(mesh["dp"]).tp == 2
    finally:
        dist.destroy_process_group()


def test_names_of_lightning() -> None:
    axes = parse_mesh("data_parallel=2,tensor_parallel=4")
    assert (axes.tp, axes.fsdp, axes.tp_name) == (4, 2, "tensor_parallel")
    assert Plan(model="toy", mesh=dict(axes.axes), parameters=(), collectives=(), memory=Memory.of(())).tp == 4


def test_text_needs_no_torch() -> None:
    code = "import sys; from autotp.mesh import parse_mesh; parse_mesh('tp=2'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
