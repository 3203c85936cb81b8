"""A fixed sample of architectures, built tiny from the libraries' own default configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank",), 16),
    **dict.fromkeys(("q_lora_rank",), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}  # fmt: skip
OWN: dict[str, dict[str, int]] = {"mamba2": {"num_heads": 16, "state_size": 16}}
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
DROPOUTS = ("dropout", "_pdrop", "layerdrop", "drop_path_rate")

TEXT = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "gpt_neox", "gptj", "gpt_neo", "opt", "olmo", "olmo2", "olmoe", "cohere", "cohere2", "stablelm", "starcoder2",
    "granite", "granitemoe", "deepseek_v3", "gpt_oss", "mamba", "mamba2", "glm4", "nemotron", "exaone4", "smollm3",
    "persimmon", "biogpt", "xglm", "codegen", "gpt_bigcode", "ernie4_5", "helium", "bitnet",
)  # fmt: skip
MASKED = ("bert", "roberta", "electra", "deberta-v2", "albert", "distilbert", "modernbert", "nystromformer")
SEQ2SEQ = ("t5", "bart", "pegasus", "marian", "mbart")
VISION = ("vit", "dinov2", "beit", "resnet", "mobilenet_v2", "poolformer")
TIMM = (
    "resnext50_32x4d",
    "mobilenetv3_small_100",
    "mixer_s32_224",
    "regnetx_002",
    "convmixer_768_32",
    "gmlp_s16_224",
    "vit_tiny_patch16_224",
)
TV = ("squeezenet1_1", "mnasnet0_5", "googlenet", "resnet18", "wide_resnet50_2", "regnet_y_400mf")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _shrink(config: Any) -> Any:
    """The default configuration with our sizes; nested configurations too."""
    known = config.to_dict()
    for name, value in known.items():
        small = SIZES.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and small is not None:
            setattr(config, name, small)
        elif isinstance(value, float) and any(word in name for word in DROPOUTS):
            setattr(config, name, 0.0)
    heads = known.get("num_attention_heads") or 0
    for name in KV_HEADS:
        if name in known:
            setattr(config, name, 8 if known[name] in (None, heads) else 4)
    for name, value in OWN.get(config.model_type, {}).items():
        setattr(config, name, value)
    if known.get("layer_types"):
        config.layer_types = known["layer_types"][:2]
    return config


def _hf(kind: str, auto: str) -> Built:
    import transformers

    config = _shrink(transformers.AutoConfig.for_model(kind))
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    ids = torch.arange(2 * 8).view(2, 8) % 90 + 5
    if auto.endswith("ImageClassification"):
        size = getattr(config, "image_size", 32)
        return model, (), {"pixel_values": torch.randn(2, 3, size, size)}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if auto == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = ids[:, :5]
    if kind.startswith("mamba"):
        del inputs["attention_mask"]
    return model, (), inputs


def _image(model: nn.Module, size: int) -> Built:
    return model, (torch.randn(2, 3, size, size),), {}


def _timm(name: str) -> Built:
    import timm

    size = {"img_size": 32} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    return _image(timm.create_model(name, num_classes=32, **size), 32)


def _tv(name: str) -> Built:
    import torchvision

    extra = {"init_weights": False} if name == "googlenet" else {}
    return _image(torchvision.models.get_model(name, num_classes=32, **extra), 64)


def _all() -> dict[str, Callable[[], Built]]:
    families = {"AutoModelForCausalLM": TEXT, "AutoModelForMaskedLM": MASKED, "AutoModelForSeq2SeqLM": SEQ2SEQ,
                "AutoModelForImageClassification": VISION}  # fmt: skip
    hf = {f"hf:{kind}": (lambda k=kind, a=auto: _hf(k, a)) for auto, kinds in families.items() for kind in kinds}
    return {
        **hf,
        **{f"timm:{name}": (lambda n=name: _timm(n)) for name in TIMM},
        **{f"tv:{name}": (lambda n=name: _tv(n)) for name in TV},
    }


ARCHITECTURES = _all()


def build(name: str) -> Built:
    """The model in eval mode, with seeded weights of which none is constant, and its inputs."""
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() > 1 and bool((p == p.flatten()[0]).all()):  # a bias added twice must show
                p += 0.1 * torch.randn(p.shape, generator=generator)
    return model.eval(), args, kwargs
