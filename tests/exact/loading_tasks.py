"""What the ranks run for tests/exact/test_loading.py: save a model, load it sharded, compare it with the original."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.comparing import local
from autotp.errors import AutotpError
from tests.harness.tasks import grid_of, mesh_of
from tests.models import hf, registry
from tests.models.common import Built, Entry, finish, floats, tokens


def mixtral() -> Built:
    """Experts packed in the model, one by one in its files."""
    sizes = {**hf.LLAMA_LIKE, "num_local_experts": 4, "experts_implementation": "eager"}
    return hf._text("MixtralForCausalLM", "MixtralConfig", **sizes)


def llama_tied() -> Built:
    """Head and embedding are one."""
    return hf._text("LlamaForCausalLM", "LlamaConfig", **hf.LLAMA_LIKE, tie_word_embeddings=True)


class Uneven(nn.Module):
    """Three heads in one matrix and 37 features: neither divides; a norm with statistics per feature."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.norm, self.down = nn.Linear(24, 37), nn.BatchNorm1d(37), nn.Linear(37, 24)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention with a bias by head, then an MLP."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 3, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) * self.scale + self.slopes * torch.arange(length)
        y = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 24))
        h = self.norm(self.up(y).flatten(0, 1)).relu()
        return y + self.down(h).view(batch, length, 24)


MODELS: dict[str, Callable[[], Built]] = {
    "mixtral": mixtral,
    "llama tied": llama_tied,
    "uneven": lambda: (Uneven(), (floats(2, 5, 24),), {}),
}


def entry(name: str) -> Entry:
    """How a model is built."""
    return Entry(build=MODELS[name]) if name in MODELS else registry.ENTRIES[name]


def original(name: str) -> Built:
    """The unsharded model in float64, with noise on what is constant."""
    model, args, kwargs = finish(entry(name))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.running_mean)
            torch.nn.init.uniform_(module.running_var)
    double = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    return model.double(), tuple(map(double, args)), {k: double(v) for k, v in kwargs.items()}


def empty(name: str, way: str) -> nn.Module:
    """The same model without values, or with others."""
    if way == "other values":
        return entry(name).build()[0].double().eval()
    if way == "on_meta":
        return autotp.on_meta(lambda: entry(name).build()[0]).double().eval()
    with torch.device("meta"):
        return entry(name).build()[0].double().eval()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What safetensors can hold: tied tensors once."""
    kept: dict[int, str] = {}
    return {
        name: x.detach().contiguous()
        for name, x in model.state_dict().items()
        if kept.setdefault(x.data_ptr() or id(x), name) == name
    }


def written(model: nn.Module, folder: Path, kind: str) -> Path:
    """The model in files of one kind; the path to load."""
    state = state_of(model)
    if kind == "one":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "pretrained":
        model.save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder
    if kind == "pickle":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return folder
    assert kind == "two"
    names = list(state)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, folder / f"part-{i}.safetensors")
    return folder


def shared_folder(make: Callable[[Path], Path]) -> Path:
    """A folder that rank 0 makes and fills, and all ranks see."""
    path = [make(Path(tempfile.mkdtemp())) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, 0)
    assert path[0] is not None
    return path[0]


def removed(path: Path) -> None:
    """After all ranks are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path if path.is_dir() else path.parent)


def mesh_for(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of the first ranks, or (dp, tp)."""
    if len(shape) == 1:
        return mesh_of(shape[0])
    return grid_of(shape, ("dp", "tp"))


def full(x: Tensor) -> Tensor:
    """All of a parameter or buffer."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def output(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """The main output."""
    out = model(*args, **kwargs)
    out = getattr(out, "logits", out)
    return out[0] if isinstance(out, tuple) else out


def loaded(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Save, load, compare: names that differ in any bit, the error of the output, local shapes against shard's."""
    name, shape = payload["name"], tuple(payload["shape"])
    model, args, kwargs = original(name)
    path = shared_folder(lambda folder: written(model, folder, payload["kind"]))
    mesh = mesh_for(shape)
    if mesh.get_coordinate() is None:
        removed(path)
        return None
    expected = copy.deepcopy(model)
    autotp.shard(model, mesh, sample=(args, kwargs))
    made = empty(name, payload["way"])
    before = [id(p) for p in made.parameters()]
    if payload["way"] == "sharded":
        autotp.shard(made, mesh, sample=(args, kwargs))
        before = [id(p) for p in made.parameters()]
        autotp.load(made, path, mesh)
        assert before == [id(p) for p in made.parameters()], "a parameter is another object"
    else:
        assert autotp.load(made, path, mesh, sample=(args, kwargs)) is made
    found = compared(made, model, expected, args, kwargs)
    removed(path)
    return found


@torch.no_grad()
def compared(made: nn.Module, sharded: nn.Module, expected: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Against a model that was sharded with its values, and against one that was not sharded."""
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    ours = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    shapes = {n: tuple(local(p).shape) for n, p in made.named_parameters()}
    found = {
        "names": list(ours) == list(theirs),
        "meta": [n for n, x in ours.items() if x.is_meta],
        "wrong": [n for n, x in ours.items() if not torch.equal(full(x), theirs[n])],
        "shapes": shapes == {n: tuple(local(p).shape) for n, p in sharded.named_parameters()},
        "ties": tied(made) == tied(expected),
        "share": sum(local(p).numel() for p in made.parameters()) / sum(p.numel() for p in expected.parameters()),
    }
    whole = output(expected, args, kwargs)  # last: fully_shard leaves the root's parameters together after a forward
    return {**found, "error": float((output(made, args, kwargs) - whole).abs().max() / whole.abs().max())}


def tied(model: nn.Module) -> dict[str, str]:
    """Names of one parameter, by the first of them."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}


def completed(payload: dict[str, Any]) -> dict[str, Any] | None:
    """A parameter that the files lack is drawn afterwards, the others are the file's."""
    mesh = mesh_of(2)
    ids = tokens(512)
    made = shared_folder(lambda folder: _headless(folder / "model.safetensors"))
    if mesh.get_coordinate() is None:
        removed(made)
        return None
    model = autotp.on_meta(Headed)
    autotp.load(model, made, mesh, sample=ids, allow_missing=["head.*"])
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    autotp.materialize(model, seed=4)
    torch.manual_seed(4)
    expected = Headed()
    expected.load_state_dict(load_file(made), strict=False)
    wrong = [n for n, p in model.named_parameters() if not torch.equal(full(p), expected.get_parameter(n))]
    removed(made)
    return {"meta": meta, "wrong": wrong}


class Headed(nn.Module):
    """A body with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(512, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 512)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores."""
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def _headless(path: Path) -> Path:
    torch.manual_seed(1)
    save_file({name: x for name, x in Headed().state_dict().items() if "head" not in name}, path)
    return path


# ---------------------------------------------------------------- what goes wrong


def refused(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Rank `bad` (or all) meets a fault; what every rank raises, and what is left of the model."""
    model, args, kwargs = original("uneven")
    path = shared_folder(lambda folder: written(model, folder, "one"))
    mesh = mesh_of(2)
    if mesh.get_coordinate() is None:
        removed(path)
        return None
    mine = path
    if payload["bad"] in (None, dist.get_rank()):
        mine = FAULTS[payload["fault"]](path)
    made = empty("uneven", "meta")
    kept = {n: (id(p), p.is_meta) for n, p in (*made.named_parameters(), *made.named_buffers())}
    text = ""
    try:
        autotp.load(made, mine, mesh, sample=(args, kwargs))
    except AutotpError as error:
        text = str(error)
    same = kept == {n: (id(p), p.is_meta) for n, p in (*made.named_parameters(), *made.named_buffers())}
    dist.barrier(mesh.get_group())
    autotp.load(made, path, mesh, sample=(args, kwargs))
    right = all(torch.equal(full(p), model.get_parameter(n)) for n, p in made.named_parameters())
    removed(path)
    return {"text": text, "untouched": same, "works afterwards": right}


def _changed(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    state = load_file(path)
    change(state)
    other = path.parent / f"rank-{dist.get_rank()}.safetensors"
    save_file(state, other)
    return other


def _without(state: dict[str, Tensor]) -> None:
    del state["up.weight"]


def _single(state: dict[str, Tensor]) -> None:
    state["up.weight"] = state["up.weight"].float()


def _narrow(state: dict[str, Tensor]) -> None:
    state["up.weight"] = state["up.weight"][:, 1:].contiguous()


def _more(state: dict[str, Tensor]) -> None:
    state["stray.weight"] = torch.ones(1)


def _short(path: Path) -> Path:
    other = path.parent / f"rank-{dist.get_rank()}.safetensors"
    other.write_bytes(path.read_bytes()[:-8])
    return other


FAULTS: dict[str, Callable[[Path], Path]] = {
    "missing": lambda path: _changed(path, _without),
    "dtype": lambda path: _changed(path, _single),
    "shape": lambda path: _changed(path, _narrow),
    "unexpected": lambda path: _changed(path, _more),
    "truncated": _short,
    "nothing": lambda path: path.parent / "nothing.safetensors",
}
