"""Model specs: what is built, how much of it is real, and what each mistake is told."""

import json
import resource
import textwrap
import time

import pytest
import torch
from torch import nn

from autotp import models
from autotp.errors import SpecError
from autotp.meta_build import LARGE, build
from autotp.models import load_spec, materialize

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.fixture
def config_file(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v is not None}))
        return path

    return write


@pytest.fixture
def user_file(tmp_path):
    def write(source):
        path = tmp_path / "user_model.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))
        return path

    return write


def error(spec):
    with pytest.raises(SpecError) as caught:
        load_spec(str(spec))
    return str(caught.value)


def all_meta(model):
    return all(p.is_meta for p in model.parameters())


# -- what is built


def test_torchvision_parameters_on_meta_and_buffers_real():
    loaded = load_spec("torchvision:swin_t")
    assert loaded.name == "swin_t"
    assert all_meta(loaded.model)
    index = dict(loaded.model.named_buffers())["features.1.0.attn.relative_position_index"]
    assert index.device.type == "cpu"
    assert index.max() > 0


def test_torchvision_model_that_reads_tensors_while_it_is_built():
    assert all_meta(load_spec("torchvision:regnet_y_400mf").model)


def test_torchvision_detection_fetches_no_backbone():
    assert all_meta(load_spec("torchvision:fasterrcnn_mobilenet_v3_large_fpn").model)


def test_timm():
    loaded = load_spec("timm:vit_tiny_patch16_224")
    assert loaded.name == "vit_tiny_patch16_224"
    assert all_meta(loaded.model)


def test_hf_from_file_and_from_folder(config_file):
    path = config_file()
    by_file, by_folder = load_spec(f"hf:{path}"), load_spec(f"hf:{path.parent}")
    assert type(by_file.model).__name__ == "LlamaForCausalLM"
    assert by_file.name == by_folder.name == path.parent.name
    assert all_meta(by_folder.model)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": None}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        ({"architectures": ["SomethingOfMine"]}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "t5", "num_heads": 4}, "T5ForConditionalGeneration"),
        ({"architectures": None, "model_type": "vit"}, "ViTForImageClassification"),
    ],
)
def test_hf_class(config_file, changes, expected):
    assert type(load_spec(f"hf:{config_file(**changes)}").model).__name__ == expected


def test_hf_tied_weights_stay_tied(config_file):
    model = load_spec(f"hf:{config_file(tie_word_embeddings=True)}").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hf_dtype_of_the_config(config_file):
    model = load_spec(f"hf:{config_file(dtype='bfloat16')}").model
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_405_billion_parameters_in_seconds_and_little_memory(config_file):
    path = config_file(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    model = load_spec(f"hf:{path}").model
    assert sum(p.numel() for p in model.parameters()) > 405e9
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_factory_class_and_sample(user_file):
    path = user_file("""
        class Net(nn.Linear):
            def __init__(self, width=3):
                super().__init__(width, 4)
        def make():
            return Net(), {"input": torch.randn(2, 3)}
    """)
    assert load_spec(f"{path}:Net").sample is None
    loaded = load_spec(f"{path}:make")
    assert loaded.name == "make"
    assert loaded.sample["input"].device.type == "cpu"
    assert all_meta(loaded.model)


def test_factory_in_a_module_of_the_working_folder(user_file, monkeypatch):
    path = user_file("def make(): return nn.Linear(2, 2)")
    path.rename(path.with_name("autotp_test_module.py"))
    monkeypatch.chdir(path.parent)
    assert all_meta(load_spec("autotp_test_module:make").model)


def test_factory_may_import_its_neighbours(user_file):
    path = user_file("def make():\n    import neighbour_of_mine\n    return nn.Linear(neighbour_of_mine.WIDTH, 2)")
    path.with_name("neighbour_of_mine.py").write_text("WIDTH = 6\n")
    path.write_text("import neighbour_of_mine\n" + path.read_text())
    assert load_spec(f"{path}:make").model.in_features == 6


# -- how it is built


def test_one_parameter_under_two_names_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Parameter(torch.ones(2, 2))
            self.a, self.b = shared, shared

    model = build(Tied)
    assert model.a is model.b
    assert model.a.is_meta


def test_a_constructor_that_reads_its_weights_is_built_on_cpu():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((4,), 3.0))
            self.scale = self.w.sum().item()

    model = build(Reads)
    assert model.scale == 12.0
    assert model.w.is_meta


def test_large_tensors_are_never_made():
    model = build(lambda: nn.ParameterList([nn.Parameter(torch.randn(LARGE, 1000))]))
    assert model[0].is_meta


def test_building_keeps_the_global_random_state_and_register_parameter():
    register = nn.Module.register_parameter
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build(lambda: nn.Linear(3, 3))
    assert torch.equal(torch.rand(3), expected)
    assert nn.Module.register_parameter is register


def test_attributes_and_requires_grad_of_parameters_are_kept():
    def make():
        model = nn.Linear(2, 2)
        model.extra = nn.Parameter(torch.zeros(2), requires_grad=False)
        model.extra.mark = 5
        return model

    assert not build(make).extra.requires_grad


# -- materialize


def test_materialize_is_seeded_and_leaves_nothing_constant(user_file):
    loaded = load_spec(f"{user_file('def make(): return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))')}:make")
    one, same, other = materialize(loaded), materialize(loaded), materialize(loaded, seed=1)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.device.type == "cpu"
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.min() < a.max(), name
    assert abs(one[1].weight.mean() - 1) < 0.1


def test_materialize_dtype_and_shapes(config_file):
    loaded = load_spec(f"hf:{config_file(dtype='bfloat16')}")
    model = materialize(loaded, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in loaded.model.named_parameters()}


# -- mistakes


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("torchvision:resnet5", ["torchvision has no model 'resnet5'", "resnet50"]),
        ("timm:vit_tiny_patch16_2244", ["timm has no model", "vit_tiny_patch16_224"]),
        ("resnet50", ["not a model", "Did you mean torchvision:resnet50?"]),
        ("hf:", ["names no model"]),
        ("hf:no/such/folder", ["no such file or folder", "nothing is downloaded"]),
        ("no_such_package_here:make", ["no module 'no_such_package_here'", "file.py:factory"]),
        ("torch.nn:Linearr", ["torch.nn has no 'Linearr'"]),
        ("torch.nn:Linear", ["needs arguments (in_features, out_features)", "def make()"]),
        ("torch:float32", ["is a dtype, not a factory"]),
        ("missing_file.py:make", ["no such file: missing_file.py"]),
    ],
)
def test_wrong_specs(spec, parts):
    message = error(spec)
    for part in parts:
        assert part in message


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    assert "pip install 'autotp[timm]'" in error("timm:resnet18")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON list"),
        ("{}", 'no "model_type"'),
        ('{"model_type": "lama"}', "Nearest: llama"),
        ('{"model_type": "mine", "auto_map": {}}', "needs code of its own"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "raised"),
    ],
)
def test_wrong_configs(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    assert part in error(f"hf:{tmp_path}")


def test_folder_without_config(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in error(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def make(): return 3", "returned int"),
        ("def make(): return nn.Linear(2, 2), 1, 2", "a tuple of (Linear, int, int)"),
        ("make = nn.Linear(2, 2)", "a built model, not a factory"),
        ("def other(): pass", "has no 'make'"),
        ("def make():\n    raise KeyError('width')", "KeyError: 'width' (user_model.py:4 in make)"),
        ("def make(): exit(3)", "SystemExit: 3"),
        ("1 / 0\ndef make(): pass", "ZeroDivisionError: division by zero (user_model.py:3 in <module>)"),
        ("def make(: pass", "SyntaxError"),
        ("import not_there_at_all", "ModuleNotFoundError"),
    ],
)
def test_wrong_factories(user_file, source, part):
    assert part in error(f"{user_file(source)}:make")


def test_a_file_without_factory_lists_what_it_offers(user_file):
    path = user_file("def make(): return nn.Linear(2, 2)\ndef other(width): ...")
    message = error(path)
    assert "It defines make." in message


def test_the_users_error_is_chained(user_file):
    with pytest.raises(SpecError) as caught:
        models.load_spec(f"{user_file('def make(): raise RuntimeError(1)')}:make")
    assert isinstance(caught.value.__cause__, RuntimeError)
