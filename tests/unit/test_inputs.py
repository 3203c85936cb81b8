"""Example inputs: forms of the user's, inference for many kinds of module, the text form."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotp import inputs
from autotp.errors import InputError, SpecError


class Made(nn.Module):
    """A module with the given children or parameters; `forward` comes from the subclass."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def module(forward, **parts):
    return type("User", (Made,), {"forward": forward})(**parts)


def attempt_on(model):
    """Runs a twin on meta, and counts."""
    twin = copy.deepcopy(model).to("meta")

    def attempt(args, kwargs):
        attempt.calls += 1
        args, kwargs = inputs._map((args, kwargs), lambda t: t.to("meta"))
        try:
            with torch.no_grad():
                twin(*args, **kwargs)
        except Exception as error:
            return error
        return None

    attempt.calls = 0
    return attempt


def shown(model):
    attempt = attempt_on(model)
    args, kwargs = inputs.infer(model, attempt)
    with torch.no_grad():
        model(*args, **kwargs)  # and so it does for real, with ids in range
    return inputs.format_sample(args, kwargs)


# -- normalize, resolve


def test_normalize_accepts_the_documented_forms():
    x = torch.ones(2)
    assert inputs.normalize(x) == ((x,), {})
    assert inputs.normalize({"x": x}) == ((), {"x": x})
    assert inputs.normalize(((x, 1), {"y": x})) == ((x, 1), {"y": x})
    assert inputs.normalize(([x], {})) == ((x,), {})
    assert inputs.normalize((x, x)) == ((x, x), {})
    assert inputs.normalize([x, None]) == ((x, None), {})


@pytest.mark.parametrize(
    ("sample", "part"),
    [
        (3, "got int"),
        ("x", "got str"),
        ({1: torch.ones(1)}, "parameter names as keys"),
        ((torch.ones(1), {"y": 1}), "as a tuple: ((x,), {...})"),
        ((), "a tuple of nothing"),
        ([1, 2], "a list of int, int"),
    ],
)
def test_normalize_refuses_others(sample, part):
    with pytest.raises(InputError) as caught:
        inputs.normalize(sample)
    assert part in str(caught.value)


def test_resolve_names_the_parameter_that_was_meant():
    model = module(lambda self, hidden: self.f(hidden), f=nn.Linear(3, 3))
    with pytest.raises(InputError) as caught:
        inputs.resolve(model, {"hiden": torch.ones(2, 3)}, attempt_on(model))
    assert "forward(hidden)" in str(caught.value)
    assert "Did you mean hidden?" in str(caught.value)
    assert inputs.resolve(model, {"hidden": 1}, attempt_on(model)) == ((), {"hidden": 1})
    assert inputs.resolve(model, None, attempt_on(model))[0][0].shape == (2, 7, 3)


# -- infer


def lenet(side, channels):
    flat = 16 * ((side // 2 - 4) // 2) ** 2
    convolutions = [nn.Conv2d(channels, 6, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(flat, 10))


def lm(self, idx):
    return self.head(self.emb(idx))


def cross(self, x, context):
    q, k = self.to_q(x), self.to_k(context)
    return (q @ k.mT).softmax(-1) @ k


def unet(self, x, t, context, y):
    shift = self.time(t[:, None].float()) + self.classes(y) + self.text(context).mean(1)
    return self.conv(x) + shift[:, :, None, None]


def translate(self, src, tgt, src_mask, tgt_mask):
    return self.core(self.a(src), self.b(tgt), src_mask, tgt_mask)


def start(self, tokens, start_pos: int):
    return self.emb(tokens)[:, start_pos:]


def graph(self, x, edge_index):
    source, target = edge_index
    return self.f(x).index_add(0, target, self.f(x)[source])


def masked(self, x, mask):
    h = self.f(x)
    return (h @ h.mT).masked_fill(mask == 0, -1e9).softmax(-1) @ h


def tokens_and_lengths(self, ids, lengths):
    return self.emb(ids).sum(1) / lengths[:, None]


def towers(self, image, text):
    return self.v(image).mean((2, 3)), self.t(text).mean(1)


def with_loss(self, ids, labels):
    return F.cross_entropy(self.head(self.emb(ids)).flatten(0, 1), labels.flatten())


def passes_on(self, *args, **kwargs):
    return self.inner(*args, **kwargs)


def patches(self, img):
    return self.proj(img).flatten(2).mT + self.pos


CASES = {
    "mlp": (nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3)), "float32[2,7,13]"),
    "flat": (nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), "float32[2,784]"),
    "batch norm": (nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)), "float32[2,20]"),
    "mnist": (lenet(28, 1), "float32[2,1,28,28]"),
    "cifar": (lenet(32, 3), "float32[2,3,32,32]"),
    "big image": (lenet(224, 3), "float32[2,3,224,224]"),
    "patches": (
        module(patches, proj=nn.Conv2d(3, 16, 14, 14), pos=nn.Parameter(torch.zeros(1, 25, 16))),
        "float32[2,3,70,70]",
    ),
    "generator": (nn.Sequential(nn.ConvTranspose2d(100, 8, 4), nn.Conv2d(8, 3, 3)), "float32[2,100,1,1]"),
    "volume": (nn.Conv3d(1, 4, 3), "float32[2,1,4,32,32]"),
    "signal": (nn.Conv1d(12, 4, 3), "float32[2,12,16]"),
    "lm": (module(lm, emb=nn.Embedding(50, 8), head=nn.Linear(8, 50)), "int64[2,7]"),
    "labels": (module(with_loss, emb=nn.Embedding(50, 8), head=nn.Linear(8, 50)), "int64[2,7], int64[2,7]"),
    "lstm": (nn.LSTM(6, 5), "float32[2,7,6]"),
    "cell": (nn.LSTMCell(7, 9), "float32[2,7]"),
    "raw weight": (module(lambda self, x: x @ self.w, w=nn.Parameter(torch.zeros(12, 5))), "float32[2,7,12]"),
    "cross": (module(cross, to_q=nn.Linear(16, 8), to_k=nn.Linear(24, 8)), "float32[2,7,16], float32[2,5,24]"),
    "bilinear": (nn.Bilinear(5, 6, 7), "float32[2,7,5], float32[2,7,6]"),
    "attention": (
        nn.MultiheadAttention(16, 4, kdim=12, vdim=10, batch_first=True),
        "float32[2,7,16], float32[2,5,12], float32[2,5,10]",
    ),
    "decoder": (
        nn.TransformerDecoderLayer(16, 2, 32, batch_first=True),
        "float32[2,7,16], float32[2,5,16]",
    ),
    "transformer": (nn.Transformer(16, 2, 1, 1, 32), "float32[2,7,16], float32[2,7,16]"),
    "translate": (
        module(
            translate,
            a=nn.Embedding(50, 16),
            b=nn.Embedding(60, 16),
            core=nn.Transformer(16, 2, 1, 1, batch_first=True),
        ),
        "int64[2,7], int64[2,5], none, none",
    ),
    "start_pos": (module(start, emb=nn.Embedding(50, 8)), "int64[2,7], 0"),
    "diffusion": (
        module(
            unet,
            time=nn.Linear(1, 8),
            classes=nn.Embedding(10, 8),
            text=nn.Linear(24, 8),
            conv=nn.Conv2d(4, 8, 3, padding=1),
        ),
        "float32[2,4,32,32], int64[2], float32[2,5,24], int64[2]",
    ),
    "graph": (module(graph, f=nn.Linear(6, 8)), "float32[2,7,6], int64[2,2]"),
    "mask": (module(masked, f=nn.Linear(8, 8)), "float32[2,7,8], bool[7,7]"),
    "lengths": (module(tokens_and_lengths, emb=nn.Embedding(9, 3)), "int64[2,7], int64[2]"),
    "two towers": (module(towers, v=nn.Conv2d(3, 8, 4, 4), t=nn.Embedding(30, 8)), "float32[2,3,32,32], int64[2,7]"),
    "wrapper": (module(passes_on, inner=module(lm, emb=nn.Embedding(9, 4), head=nn.Linear(4, 9))), "int64[2,7]"),
    "no parameters": (nn.ReLU(), "float32[2,7,64]"),
}


@pytest.mark.parametrize("name", CASES)
def test_infer(name):
    model, expected = CASES[name]
    assert shown(model.eval()) == expected


def test_own_dummy_inputs_come_first():
    model = nn.Linear(3, 3)
    model.example_input_array = torch.ones(5, 3)
    assert shown(model) == "float32[5,3]"


def test_ids_avoid_the_special_ones_of_the_config():
    class Config:
        vocab_size, image_token_id = 12, 7

        def __init__(self):
            self.image_token_id = 7

    model = module(lm, emb=nn.Embedding(12, 4), head=nn.Linear(4, 12))
    model.config = Config()
    (ids,), _ = inputs.infer(model, attempt_on(model))
    assert 7 not in ids
    assert ids.max() < 12


def test_the_failure_names_parameters_and_the_call_that_works():
    model = module(lambda self, alpha, beta=None: 1 / 0, f=nn.Linear(3, 3))
    with pytest.raises(InputError) as caught:
        inputs.infer(model, attempt_on(model))
    message = str(caught.value)
    assert "User.forward(alpha, beta=...)" in message
    assert "ZeroDivisionError: division by zero" in message
    assert 'autotp.plan(model, tp=2, sample={"alpha": ' in message
    assert len(message) < 1000


def test_no_forward():
    with pytest.raises(InputError, match="no forward of its own"):
        inputs.infer(nn.ModuleList([nn.Linear(2, 2)]), lambda args, kwargs: None)


# -- transformers and timm

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
VIT = {"image_size": 24, "patch_size": 8, "num_channels": 3}
HF = {
    "LlamaForCausalLM": ({**TINY, "num_key_value_heads": 1}, "input_ids=int64[2,7]"),
    "BertForMaskedLM": (TINY, "input_ids=int64[2,7]"),
    "T5ForConditionalGeneration": (
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40},
        "input_ids=int64[2,7], decoder_input_ids=int64[2,5]",
    ),
    "ViTForImageClassification": ({**TINY, **VIT}, "pixel_values=float32[2,3,24,24]"),
    "CLIPModel": (
        {"text_config": TINY, "vision_config": {**TINY, **VIT}, "projection_dim": 8},
        "input_ids=int64[2,7], pixel_values=float32[2,3,24,24]",
    ),
    "WhisperForConditionalGeneration": (
        {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": 40,
            "num_mel_bins": 8,
            "max_source_positions": 15,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "input_features=float32[2,8,30], decoder_input_ids=int64[2,5]",
    ),
}


@pytest.mark.parametrize("name", HF)
def test_infer_for_transformers(name):
    transformers = pytest.importorskip("transformers")
    values, expected = HF[name]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**values)).eval()
    assert shown(model) == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet18", {}, "float32[2,3,64,64]"),
        ("vit_tiny_patch16_224", {"img_size": 48, "depth": 1}, "float32[2,3,48,48]"),
    ],
)
def test_infer_for_timm(name, options, expected):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False, **options).eval()
    attempt = attempt_on(model)
    assert inputs.format_sample(*inputs.infer(model, attempt)) == expected
    assert attempt.calls == 1


# -- second opinion


def test_second_opinion_changes_batch_and_lengths_together():
    ids, memory, image = torch.arange(14).view(2, 7), torch.ones(2, 5, 4), torch.ones(2, 3, 8, 8)
    args, kwargs = inputs.second_opinion((ids,), {"memory": memory, "mask": torch.ones(7, 7), "flag": True})
    assert args[0].shape == (2, 9)  # rows of the mask are no batch: only lengths change
    args, kwargs = inputs.second_opinion((ids,), {"memory": memory, "image": image, "flag": True})
    assert args[0].shape == (3, 9)
    assert args[0].max() == 13
    assert kwargs["memory"].shape == (3, 7, 4)
    assert kwargs["image"].shape == (3, 3, 8, 8)
    assert kwargs["flag"] is True


def test_second_opinion_falls_back_to_what_runs():
    fixed = module(lambda self, x: self.f(x.mT), f=nn.Linear(7, 3))
    args, _ = inputs.second_opinion((torch.ones(2, 7, 4),), {}, attempt_on(fixed))
    assert args[0].shape == (3, 7, 4)
    x = torch.ones(2, 7, 4)
    assert inputs.second_opinion((x,), {}, lambda args, kwargs: ValueError())[0][0] is x


# -- parse_sample


def test_parse_sample():
    args, kwargs = inputs.parse_sample("float32[2,16]; ids=int64[2,7]<5, mask=bool[2,7], use_cache=false, scale=0.5")
    assert inputs.format_sample(args, kwargs) == (
        "float32[2,16], ids=int64[2,7], mask=bool[2,7], use_cache=false, scale=0.5"
    )
    assert kwargs["ids"].max() < 5
    assert kwargs["mask"].all()
    assert torch.equal(args[0], inputs.parse_sample("float32[2,16]")[0][0])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "an input is empty"),
        ("x=float32[2],", "an input is empty"),
        ("x=flaot32[2]", "Did you mean float32"),
        ("x=float32[2,-1]", "the size '-1'"),
        ("x=float32[2]<4", "only integers have a bound"),
        ("x=int64[2]<0", "the bound '0'"),
        ("x=[2,3]", "cannot read '[2,3]'"),
        ("x=int64[2], float32[2]", "follows an input that has one"),
        ("x=int64[2], x=int64[2]", "given twice"),
    ],
)
def test_parse_sample_refuses(text, part):
    with pytest.raises(SpecError) as caught:
        inputs.parse_sample(text)
    assert part in str(caught.value)
