"""Index layouts as DTensor placements: text, and real gloo ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from autotp.errors import AutotpError
from autotp.layouts import (
    IndexShard,
    Layout,
    LayoutError,
    distribute,
    follow_fsdp,
    indices,
    layout_of,
    load_full_,
    local_size,
    local_slice,
    placement_for,
    to_local,
)


def heads(dim: int, *per_rank: list[int], width: int = 2) -> Layout:
    """A layout from lists of heads."""
    return Layout.from_indices(dim, [[h * width + i for h in hs for i in range(width)] for hs in per_rank])


def layouts_for(ranks: int) -> dict[str, tuple[Layout | None, tuple[int, ...]]]:
    """Name -> (layout, global shape); rank counts 2 and 4."""
    spread = {2: ([0, 1], [2]), 4: ([0, 1], [2], [3, 4], [])}[ranks]
    num_uneven = {2: 3, 4: 5}[ranks]
    share = 8 // ranks  # 8 query heads, 2 key heads, 2 value heads
    packed = [[*range(r * share, (r + 1) * share), 8 + r * 2 // ranks, 10 + r * 2 // ranks] for r in range(ranks)]
    interleaved = [[h for h in range(4 * ranks) if h % ranks == r] for r in range(ranks)]
    return {
        "whole": (None, (6, 4)),
        "even": (Layout.even(0, 8, ranks), (8, 4)),
        "chunked uneven": (Layout.even(1, 4 * ranks - 1, ranks), (3, 4 * ranks - 1)),
        "uneven heads": (heads(0, *spread, width=4), (num_uneven * 4, 3)),
        "interleaved": (heads(0, *interleaved, width=1), (4 * ranks, 5)),
        "interleaved columns": (heads(1, *interleaved), (3, 8 * ranks)),
        "packed": (heads(0, *packed), (24, 4)),  # with copies on 4 ranks
        "packed bias": (heads(0, *packed), (24,)),
        "unsorted": (heads(0, *[[ranks - 1 - r] for r in range(ranks)]), (2 * ranks, 2, 3)),
    }


# -- text --


def test_layout_is_text_in_shortest_form() -> None:
    layout = Layout(0, (((0, 2), (2, 4), (5, 5)), ((4, 6),)))
    assert layout == Layout.from_indices(0, [[0, 1, 2, 3], [4, 5]])
    assert hash(layout) == hash(Layout(0, (((0, 4),), ((4, 6),))))
    assert layout.pieces == (((0, 4),), ((4, 6),))
    assert indices(layout, 1) == [4, 5] and local_size(layout, 0) == 4 and layout.size == 6
    assert not layout.has_copies and not layout.is_chunked
    assert str(layout) == "dim 0: 0:4 | 4:6"


@pytest.mark.parametrize(
    ("per_rank", "words"),
    [
        ([[0, 1], [3]], "no rank holds indices 2..2"),
        ([[0, 1, 0], [2]], "index 0 twice"),
        ([[1, 0]], "one rank"),
        ([], "at least one rank"),
    ],
)
def test_bad_layouts_are_refused(per_rank: list[list[int]], words: str) -> None:
    with pytest.raises(AutotpError, match=words):
        Layout.from_indices(0, per_rank)


def test_stock_shard_exactly_where_chunk_semantics_hold() -> None:
    assert placement_for(Layout.even(0, 8, 4), 8) == Shard(0)
    assert placement_for(Layout.even(1, 7, 4)) == Shard(1)  # 2 2 2 1
    assert isinstance(placement_for(Layout.even(0, 5, 4)), IndexShard)  # 2 2 1 0
    assert isinstance(placement_for(Layout(0, (((0, 16),), ((16, 24),)))), IndexShard)
    with pytest.raises(LayoutError, match="covers 8 indices, the dim has 9"):
        placement_for(Layout.even(0, 8, 4), 9)


def test_placement_equality_and_pickling() -> None:
    a, b = (placement_for(heads(0, [0, 2], [1, h])) for h in (3, 0))
    assert a == placement_for(heads(0, [0, 2], [1, 3])) and a != b
    assert a != Shard(0) and Shard(0) != a
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a)
    assert not a.is_shard() and not a.is_replicate() and not a.is_partial()
    assert "0:2,4:6" in repr(a)


def test_slices_work_on_meta() -> None:
    layout = heads(1, [2, 0], [1])
    full = torch.arange(12).view(2, 6)
    assert local_slice(full, layout, 0).tolist() == [[4, 5, 0, 1], [10, 11, 6, 7]]
    assert local_slice(full.to("meta"), layout, 0).shape == (2, 4)
    with pytest.raises(LayoutError, match="does not fit"):
        local_slice(full, heads(0, [0], [1]), 0)


# -- gloo ranks --


class Suite:
    """Every check on one mesh; the same seed on all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.layouts = layouts_for(mesh.size())

    def values(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def parameters(self, seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(plain, distributed) parameters of all layouts, with gradients."""
        plain, cut = [], []
        for n, (layout, shape) in enumerate(self.layouts.values()):
            full, grad = self.values(shape, seed + n), self.values(shape, seed + 100 + n)
            plain.append(nn.Parameter(full.clone()))
            plain[-1].grad = grad.clone()
            cut.append(nn.Parameter(distribute(full, self.mesh, layout)))
            cut[-1].grad = distribute(grad, self.mesh, layout)
        return plain, cut

    def same(self, plain: list[nn.Parameter], cut: list[nn.Parameter], rtol: float = 1e-12) -> None:
        for name, a, b in zip(self.layouts, plain, cut, strict=True):
            torch.testing.assert_close(b.full_tensor().data, a.data, rtol=rtol, atol=rtol, msg=lambda m, n=name: n + m)

    def check_round_trip(self) -> None:
        for name, (layout, shape) in self.layouts.items():
            for full in (self.values(shape, 1), torch.arange(self.values(shape, 1).numel()).view(shape).bfloat16()):
                cut = distribute(full, self.mesh, layout)
                assert cut.shape == full.shape and cut.dtype == full.dtype and not cut.requires_grad
                assert torch.equal(cut.full_tensor(), full), name
                assert layout_of(cut) == layout
                if layout is not None:
                    local = cut.to_local()
                    assert local.size(layout.dim) == local_size(layout, self.mesh.get_local_rank())
                    assert local.is_contiguous() and local.untyped_storage().nbytes() == local.nbytes
            assert distribute(full.to("meta"), self.mesh, layout).is_meta

    def check_copies(self) -> None:
        _, cut = self.parameters()
        for p in cut:
            for twin in (copy.deepcopy(p), p.detach().clone(), torch.zeros_like(p).copy_(p), p.data.mul(1.0)):
                assert twin.placements == p.placements
                assert torch.equal(twin.full_tensor(), p.full_tensor())
            assert torch.equal(torch.zeros_like(p).full_tensor(), torch.zeros(p.shape, dtype=p.dtype))
            stream = io.BytesIO()
            torch.save(p.data, stream)
            stream.seek(0)
            back = torch.load(stream, weights_only=False)
            assert back.placements == p.placements and torch.equal(back.to_local(), p.to_local())
            assert p.bfloat16().placements == p.placements
            assert torch.equal(p.bfloat16().full_tensor(), p.full_tensor().bfloat16())

    def check_arithmetic(self) -> None:
        plain, cut = self.parameters()
        with torch.no_grad():
            for p in (*plain, *cut):
                p.mul_(2).add_(p.grad, alpha=0.5).lerp_(p.grad, 0.25).addcmul_(p.grad, p.grad).sub_(p * 0.1)
        self.same(plain, cut)
        for a, b in zip(plain, cut, strict=True):
            torch.testing.assert_close(b.sum().full_tensor(), a.sum())
            torch.testing.assert_close(b.max().full_tensor(), a.max())
            assert torch.equal(b, b.clone()) and not torch.equal(b, b + 1)

    def check_operation_cache(self) -> None:
        """Two layouts of one shape must not share a cached propagation."""
        ranks = self.mesh.size()
        full = self.values((4 * ranks, 5), 2)
        orders = [
            [h for h in range(4 * ranks) if h % ranks == (r + shift) % ranks]
            for shift in range(2)
            for r in range(ranks)
        ]
        layouts = [
            Layout.from_indices(0, orders[:ranks]),
            Layout.from_indices(0, orders[ranks:]),
            Layout.even(0, 4 * ranks, ranks),
        ]
        for _ in range(2):
            for layout in layouts:
                cut = distribute(full, self.mesh, layout)
                assert torch.equal((cut + cut).full_tensor(), full + full)
                assert torch.equal(torch._foreach_mul([cut], 2)[0].full_tensor(), full * 2)

    def check_optimizers(self) -> None:
        makers: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
            lambda ps: torch.optim.AdamW(ps, lr=0.1),
            lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
            lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
            lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, foreach=True),
            lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
            lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True, nesterov=True),
        ]
        for make in makers:
            plain, cut = self.parameters()
            pair = make(plain), make(cut)
            for _ in range(2):
                for optimizer in pair:
                    optimizer.step()
            self.same(plain, cut)
            state = pair[1].state_dict()
            pair[1].load_state_dict(copy.deepcopy(state))
            for name, moment in pair[0].state[plain[-1]].items():
                if moment is not None and moment.dim():
                    torch.testing.assert_close(pair[1].state[cut[-1]][name].full_tensor(), moment)
            pair[1].zero_grad(set_to_none=False)
            assert all(not p.grad.full_tensor().any() for p in cut)
            pair[1].zero_grad()
            assert all(p.grad is None for p in cut)

    def check_clipping(self) -> None:
        for foreach in (True, False, None):
            for norm_type in (2.0, 1.0, float("inf")):
                plain, cut = self.parameters()
                wanted = nn.utils.clip_grad_norm_(plain, 0.5, norm_type, foreach=foreach)
                got = nn.utils.clip_grad_norm_(cut, 0.5, norm_type, foreach=foreach)
                torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, wanted)
                for a, b in zip(plain, cut, strict=True):
                    torch.testing.assert_close(b.grad.full_tensor(), a.grad)
                    assert b.grad.placements == b.placements

    def check_gradients(self) -> None:
        rank = self.mesh.get_local_rank()
        for name, (layout, shape) in self.layouts.items():
            if layout is None:
                continue
            full = self.values(shape, 5)
            p = nn.Parameter(distribute(full, self.mesh, layout))
            with torch.no_grad():
                assert to_local(p) is p.to_local() or torch.equal(to_local(p), p.to_local())
            # Holder number n of an index contributes n + 1 times its value: their sum is the gradient.
            earlier = [i for other in range(rank) for i in indices(layout, other)]
            share = torch.tensor([1.0 + earlier.count(i) for i in indices(layout, rank)], dtype=full.dtype)
            holders = [sum(i in indices(layout, r) for r in range(self.mesh.size())) for i in range(layout.size)]
            total = torch.tensor([n * (n + 1) / 2 for n in holders], dtype=full.dtype)
            view = [1] * len(shape)
            view[layout.dim] = -1
            for times in (1, 2):
                loss = (to_local(p) ** 2 * share.view(view)).sum()
                loss.backward()
                assert p.grad.placements == p.placements and p.grad.shape == p.shape, name
                assert p.grad.stride() == p.stride() and p.grad.to_local().stride() == p.to_local().stride()
                torch.testing.assert_close(p.grad.full_tensor(), 2 * full * total.view(view) * times, msg=name)

    def check_odd_gradients(self) -> None:
        layout, shape = self.layouts["packed"]
        full = self.values(shape, 5)
        p = nn.Parameter(distribute(full, self.mesh, layout))
        (to_local(p).t().contiguous() * torch.ones(()).double()).sum().backward()  # a transposed gradient
        assert p.grad.to_local().stride() == p.to_local().stride()
        p.grad = None
        layout, shape = self.layouts["interleaved"]
        p = nn.Parameter(distribute(self.values(shape, 5), self.mesh, layout))
        (grad,) = torch.autograd.grad((to_local(p) ** 3).sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(grad.to_local().sum(), p)
        torch.testing.assert_close(second.full_tensor(), 6 * p.full_tensor().detach())
        p.grad = None
        (p.full_tensor() * torch.arange(5)).sum().backward()
        torch.testing.assert_close(p.grad.full_tensor(), torch.arange(5).double().expand(shape))

    def check_kept_gradients(self) -> None:
        """Autograd copies a gradient that someone else holds too."""
        for name, (layout, shape) in self.layouts.items():
            if layout is None:
                continue
            p, held = nn.Parameter(distribute(self.values(shape, 5), self.mesh, layout)), []
            p.register_hook(held.append)
            holders = [sum(i in indices(layout, r) for r in range(self.mesh.size())) for i in range(layout.size)]
            view = [-1 if dim == layout.dim else 1 for dim in range(len(shape))]
            once = 3 * torch.tensor(holders).double().view(view).expand(shape)  # each holder of a copy adds its own
            for times in (1, 2):
                (to_local(p) * 3.0).sum().backward()
                assert p.grad is not None and p.grad.placements == p.placements, name
                assert p.grad.to_local().stride() == p.to_local().stride(), name
                torch.testing.assert_close(p.grad.full_tensor(), once * times, msg=name)
            assert all(torch.equal(h.full_tensor(), once) for h in held), name

    def check_new_tensors(self) -> None:
        for name, (layout, shape) in self.layouts.items():
            p = distribute(self.values(shape, 5), self.mesh, layout)
            made = [p.new_zeros(shape), p.new_ones(shape), p.new_full(shape, 3.0), p.new_zeros(shape).bfloat16()]
            for new, value in zip(made, (0, 1, 3, 0), strict=True):
                assert new.placements == p.placements and torch.equal(
                    new.full_tensor(), torch.full(shape, value).to(new.dtype)
                )
            new = p.new_empty_strided(shape, tuple(torch.empty(shape[::-1]).permute(*range(len(shape))[::-1]).stride()))
            assert new.to_local().shape == p.to_local().shape and new.shape == p.shape, name

    def check_state_dict(self) -> None:
        _, cut = self.parameters(0)
        _, other = self.parameters(50)
        a, b = nn.ParameterList(cut), nn.ParameterList(other)
        b.load_state_dict(a.state_dict())
        for p, q, (layout, shape) in zip(cut, other, self.layouts.values(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()) and p is not q
            load_full_(q, self.values(shape, 77))
            assert torch.equal(q.full_tensor(), self.values(shape, 77)), layout
        even = Layout.even(0, 24, self.mesh.size())
        wrong = nn.ParameterList([nn.Parameter(distribute(torch.ones(24, 4).double(), self.mesh, even))])
        if self.mesh.size() == 4:
            right = nn.ParameterList([cut[list(self.layouts).index("packed")]])
            with pytest.raises(RuntimeError, match="laid out alike"):
                wrong.load_state_dict(right.state_dict())

    def check_redistribution(self) -> None:
        for name, (layout, shape) in self.layouts.items():
            if layout is None:
                continue
            full = self.values(shape, 9)
            cut = distribute(full, self.mesh, layout)
            whole = distribute(full, self.mesh, None)
            assert torch.equal(whole.redistribute(placements=cut.placements).to_local(), cut.to_local()), name
            for dim in range(len(shape)):
                moved = cut.redistribute(placements=[Shard(dim)])
                assert torch.equal(moved.full_tensor(), full), name
                assert torch.equal(moved.redistribute(placements=cut.placements).to_local(), cut.to_local()), name

    def check_refusals(self) -> None:
        layout, shape = self.layouts["interleaved"]
        p = distribute(self.values(shape, 3), self.mesh, layout)
        q = distribute(self.values(shape, 3), self.mesh, Layout.even(0, shape[0], self.mesh.size()))
        r = distribute(self.values(shape, 3), self.mesh, None)
        row = distribute(self.values(shape[1:], 3), self.mesh, None)
        i = torch.tensor([0])
        refused: list[Callable[[], object]] = [
            lambda: p + q, lambda: q + p, lambda: p + r, lambda: p + row, lambda: torch.equal(p, q),
            lambda: p.clone().copy_(q), lambda: q.clone().copy_(p), lambda: torch._foreach_add([q, p], [q, q]),
            lambda: p[:2], lambda: p[1], lambda: p.t(), lambda: p.T, lambda: p.permute(1, 0), lambda: p.view(-1),
            lambda: p.view(2, -1), lambda: p.flatten(), lambda: p.unsqueeze(0), lambda: p.expand(2, *shape),
            lambda: p.chunk(2), lambda: p.split(2), lambda: p.as_strided((2, 2), (1, 1)), lambda: p.roll(1, 0),
            lambda: torch.cat([p, p]), lambda: torch.stack([p, p]), lambda: p.new_zeros(4, 4), lambda: p.tril(),
            lambda: p.sum(0), lambda: p.sum(1), lambda: p.mean(), lambda: p.std(), lambda: p.norm(dim=0),
            lambda: p.amax(0), lambda: p.argmax(), lambda: p.cumsum(0), lambda: p.sort(0), lambda: p.softmax(0),
            lambda: p @ p.t(), lambda: nn.functional.linear(r, p), lambda: nn.functional.embedding(i, p),
            lambda: p.index_select(0, i), lambda: p.tolist(), lambda: p.clone().normal_(), lambda: torch.rand_like(p),
            lambda: p.clone().uniform_(), lambda: nn.functional.dropout(p), lambda: p.clone().bernoulli_(0.5),
        ]  # fmt: skip
        for action in refused:
            with pytest.raises((LayoutError, RuntimeError)):  # DTensor wraps some errors
                action()
        with torch.inference_mode(), pytest.raises((LayoutError, RuntimeError)):
            p.flatten()

    def check_checkpoint(self) -> None:
        import torch.distributed.checkpoint as dcp

        group = self.mesh.get_group()
        folder = [tempfile.mkdtemp() if self.mesh.get_local_rank() == 0 else ""]
        dist.broadcast_object_list(folder, group_src=0, group=group)
        plain, cut = self.parameters()
        names = [name.replace(" ", "_") for name in self.layouts]
        dcp.save(dict(zip(names, cut, strict=True)), checkpoint_id=folder[0], process_group=group)
        _, target = self.parameters(seed=40)
        dcp.load(dict(zip(names, (p.data for p in target), strict=True)), checkpoint_id=folder[0], process_group=group)
        self.same(plain, target)
        whole = {name: torch.zeros_like(p.data) for name, p in zip(names, plain, strict=True)}
        dcp.load(whole, checkpoint_id=folder[0], process_group=group)
        for name, p in zip(names, plain, strict=True):
            assert torch.equal(whole[name], p.data), name

    def run(self) -> None:
        """Every check, or those whose name contains the environment variable ONLY."""
        for name in sorted(dir(self)):
            if name.startswith("check_") and (only := os.environ.get("ONLY", "")) in name:
                try:
                    getattr(self, name)()
                except BaseException as error:
                    raise AssertionError(f"{name} on {self.mesh} (only={only!r}): {error}") from error


class Block(nn.Module):
    """One parameter per layout; the output depends on the input and on every local element."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((to_local(p) if isinstance(p, DTensor) else p) ** 2 * x).sum() for p in self.parameters())


def check_fsdp(grid: DeviceMesh) -> None:
    """fully_shard over dp on top of layouts over tp: values, gradients, norm, step, checkpoint."""
    import torch.distributed.checkpoint as dcp

    suite = Suite(grid["tp"])
    layouts = {
        **suite.layouts,
        "copies": (heads(0, [0, 1, 2], [1, 2, 3, 4], width=3), (15, 2)),
        "one": (heads(0, [0], [1], width=1), (2,)),
    }
    layouts = {name.replace(" ", "_"): pair for name, pair in layouts.items()}
    full = {name: suite.values(shape, n) for n, (name, (_, shape)) in enumerate(layouts.items())}
    model = Block({name: distribute(full[name], grid["tp"], layout) for name, (layout, _) in layouts.items()})
    fully_shard(model, mesh=grid["dp"])
    assert follow_fsdp(model) == 6  # the index-cut ones whose dim 0 is cut
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), full[name]), name
        assert layout_of(p) == layouts[name][0], name
        load_full_(p, full[name] * 2)
        assert torch.equal(p.full_tensor(), full[name] * 2), name
        load_full_(p, full[name])
    # Copies: each holder contributes, so their gradient is twice that of the plain model.
    plain = Block(full)
    x = 1.0 + grid.get_local_rank("dp")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, plain)]
    for _ in range(2):
        model(torch.tensor(x).double()).backward()
        plain(torch.tensor(1.5).double()).backward()  # FSDP averages over dp
        for index in (3, 4, 5, 6, 7, 8):
            plain.copies.grad[index] *= 2
        for name, p in model.named_parameters():
            assert p.grad.placements == p.placements
            torch.testing.assert_close(p.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.full_tensor().data, plain.get_parameter(name).data, msg=name)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    whole = {name: torch.zeros_like(p) for name, p in full.items()}
    dcp.load(whole, checkpoint_id=folder[0])
    for name, p in model.named_parameters():
        assert torch.equal(whole[name], p.full_tensor()), name
        load_full_(p, torch.zeros_like(full[name]))
    dcp.load(model.state_dict(), checkpoint_id=folder[0])
    for name, p in model.named_parameters():
        assert torch.equal(whole[name], p.full_tensor()), name


def _worker(rank: int, port: int, errors: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    try:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        Suite(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))).run()
        check_fsdp(grid)
        Suite(grid["tp"]).run()  # both rows at once: DTensor's equal() reduces over the world
    except BaseException:
        Path(errors, f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_on_gloo_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        mp.spawn(_worker, args=(port, str(tmp_path)), nprocs=4)
    except Exception as error:
        reports = [path.read_text() for path in sorted(tmp_path.iterdir())]
        pytest.fail("\n".join(reports) or str(error))
