"""transformers' own names and packings, on tensors that are read later."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from autotp.errors import WeightsError
from autotp.lazy_weights import Computed
from autotp.parts import pieces
from autotp.weight_files import open_weights
from autotp.weight_names import assign

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))


@pytest.fixture
def file(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def change(file, **changes):
    state = load_file(file)
    for key, value in changes.items():
        state.pop(key.replace("__", "."), None)
        if value is not None:
            state[key.replace("__", ".")] = value
    save_file(state, file)


def test_experts_lie_apart_in_the_file_and_together_in_the_model(model, file):
    assert any(".experts.2." in key for key in open_weights(file))
    found = {a.slot.name: a.source for a in assign(model, open_weights(file))}
    state = model.state_dict()
    assert sorted(found) == sorted(state)
    packed = [name for name, source in found.items() if isinstance(source, Computed)]
    assert len(packed) == 4
    for name, source in found.items():
        assert torch.equal(source.read((None,) * len(source.shape)), state[name])
    for name in packed:
        want = (None, ((2, 5), (9, 11)), ((0, 3),))
        assert torch.equal(found[name].read(want), pieces(state[name], want))


def test_an_expert_that_is_missing(model, file):
    (lost,) = [key for key in open_weights(file) if "layers.1" in key and "experts.1.w2" in key]
    change(file, **{lost: None})
    with pytest.raises(WeightsError) as caught:
        assign(model, open_weights(file))
    for word in ("layers.1.mlp.experts.down_proj", "[2, 16, 24]", "[3, 16, 24]", str(file)):
        assert word in str(caught.value)


def test_experts_that_do_not_fit_each_other(model, file):
    (odd,) = [key for key in open_weights(file) if "layers.1" in key and "experts.1.w2" in key]
    change(file, **{odd: torch.ones(16, 23)})
    with pytest.raises(WeightsError) as caught:
        assign(model, open_weights(file))
    for word in ("layers.1.mlp.experts.down_proj cannot be made from", "MergeModulelist", str(file)):
        assert word in str(caught.value)


def test_a_base_model_and_one_with_a_head(model, file, tmp_path):
    base = transformers.MixtralModel(model.config)
    with pytest.raises(WeightsError, match=r"lm_head\.weight in"):
        assign(base, open_weights(file))
    found = {a.slot.name for a in assign(base, open_weights(file), allow_unexpected=["lm_head.*"])}
    assert found == set(base.state_dict())
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not in"):
        assign(model, open_weights(tmp_path / "base"))
    found = {a.slot.name for a in assign(model, open_weights(tmp_path / "base"), allow_missing=["lm_head.*"])}
    assert found == set(model.state_dict()) - {"lm_head.weight"}


def test_what_old_files_hold_besides(model, file):
    change(file, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2))
    assert len(assign(model, open_weights(file))) == len(model.state_dict())


def test_one_name_from_two_keys(model, file):
    state = model.state_dict()
    change(file, model__layers__0__mlp__experts__down_proj=state["model.layers.0.mlp.experts.down_proj"])
    with pytest.raises(WeightsError, match="both from"):
        assign(model, open_weights(file))
