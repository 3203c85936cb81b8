"""Which stored tensor goes where, and the errors of those that do not fit: each with its key and its file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autotp.errors import WeightsError
from autotp.weight_files import open_weights
from autotp.weight_names import assign


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def save(file, **changes):
    state = {**Model().state_dict(), **{key.replace("__", "."): value for key, value in changes.items()}}
    save_file({key: value.clone() for key, value in state.items() if value is not None}, file)
    return open_weights(file)


def error(stored, *words, model=None, **options):
    with pytest.raises(WeightsError) as caught:
        assign(model or Model(), stored, **options)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def names(assigned):
    return {a.slot.name: a.source.key for a in assigned}


def test_parameters_and_the_buffers_of_a_state_dict(file):
    found = names(assign(Model(), save(file)))
    assert found == {key: key for key in Model().state_dict()}


def test_a_missing_key(file):
    stored = save(file, norm__weight=None)
    error(stored, "norm.weight is not in", file, "allow_missing")
    error(stored, "norm.weight", allow_missing=["norm.bias"])
    assert "norm.weight" not in names(assign(Model(), stored, allow_missing=["norm.*"]))
    assert "norm.weight" not in names(assign(Model(), stored, allow_missing=True))


def test_a_missing_key_with_another_name(file):
    error(save(file, norm__weight=None, layer_norm__weight=torch.ones(4)), "norm.weight", "which has layer_norm.weight")


def test_an_unexpected_key(file):
    stored = save(file, extra__weight=torch.ones(1))
    error(stored, "extra.weight", file, "no place", "allow_unexpected")
    assert "extra.weight" not in names(assign(Model(), stored, allow_unexpected=["extra.*"]))


def test_a_buffer_that_state_dicts_leave_out_is_unexpected(file):
    error(save(file, scratch=torch.zeros(2)), "scratch", "no place")


def test_another_shape(file):
    stored = save(file, head__weight=torch.ones(6, 5))
    error(stored, "head.weight has shape [6, 5] in", file, "[6, 4] in the model", cast=True, allow_missing=True)


def test_another_dtype(file):
    stored = save(file, head__weight=torch.ones(6, 4, dtype=torch.bfloat16))
    error(stored, "head.weight is bfloat16 in", file, "float32 in the model", "cast=True")
    assert "head.weight" in names(assign(Model(), stored, cast=True))


def test_all_of_it_is_told_at_once_and_not_at_length(file):
    stored = save(file, norm__weight=None, embed__weight=torch.ones(1), **{f"x{i}": torch.ones(1) for i in range(9)})
    error(stored, "norm.weight is not", "embed.weight has shape", "x0", "and 5 more")


def test_tied_parameters_need_one_of_their_names(file):
    found = assign(Model(tied=True), save(file, head__weight=None))
    assert names(found)["embed.weight"] == "embed.weight"
    assert names(assign(Model(tied=True), save(file, embed__weight=None)))["embed.weight"] == "head.weight"
    (both,) = (a for a in assign(Model(tied=True), save(file)) if a.slot.name == "embed.weight")
    assert [s.key for s in both.others] == ["head.weight"]
    error(save(file, head__weight=None, embed__weight=None), "embed.weight", "nor under head.weight", model=Model(True))


def test_rename(file):
    stored = save(file, head__weight=None, lm__head=torch.ones(6, 4), junk=torch.ones(1))
    table = {"lm.head": "head.weight", "junk": None}
    assert names(assign(Model(), stored, rename=lambda key: table.get(key, key)))["head.weight"] == "lm.head"
    error(stored, "embed.weight for both", file, rename=lambda key: "embed.weight")
    error(save(file, head__weight=None, odd=torch.ones(2)), "from odd", rename={"odd": "head.weight"}.get)


def test_names_that_wrappers_add(file):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.head = checkpoint_wrapper(model.head)
    assert names(assign(model, save(file)))["head.weight"] == "head.weight"
