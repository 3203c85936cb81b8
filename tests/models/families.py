"""Tiny models of the families in plans/: the published configs, shrunk field by field, of the same class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.common import Built, Entry, finish, floats, tokens

CONFIGS = Path(__file__).parents[2] / "plans" / "configs"

WIDTH = dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 64)
INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "shared_expert"), 128
)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 8
)
LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2
)
POSITIONS = dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64)
OTHERS = {
    "vocab_size": 128, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "d_kv": 8, "image_size": 32,
    "patch_size": 8, "projection_dim": 32, "state_size": 16, "n_groups": 4, "chunk_size": 8, "num_mel_bins": 8,
    "max_source_positions": 16, "sliding_window": 8, "query_pre_attn_scalar": 8, "relative_attention_num_buckets": 8,
    "mm_tokens_per_image": 4, "boi_token_index": 125, "eoi_token_index": 126, "image_token_index": 127,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SMALL = {**WIDTH, **INNER, **HEADS, **LAYERS, **POSITIONS, **OTHERS}
NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "dropout_rate", "hidden_dropout", "attention_dropout",
     "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0
)  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}


def names() -> list[str]:
    """All families with a published config."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """A config with every size small; shared key heads stay shared, layers of two kinds stay of two kinds."""
    small = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrunk(value)
        elif name in ("num_key_value_heads", "num_kv_heads"):
            heads = values.get("num_attention_heads", value)
            small[name] = 8 if value == heads else 4 if value >= 8 else 1  # on two ranks as the published on eight
        elif name == "first_k_dense_replace":
            small[name] = 1
        elif name not in TOKENS:
            small[name] = SMALL.get(name, value) if value is not None else None
    if values.get("model_type") == "mamba2":
        small["head_dim"] = 16  # heads times their size are twice the width
    if isinstance(values.get("rope_scaling"), dict):
        small["rope_scaling"] = {**values["rope_scaling"], "original_max_position_embeddings": 32}
    return small


def config_of(name: str) -> Any:
    """The tiny config of a family."""
    import transformers

    values = shrunk(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[values["model_type"]]
    values.update({k: v for k, v in {**NO_DROPOUT, **TOKENS}.items() if hasattr(kind(), k)})
    return kind.from_dict(values)


def model_of(name: str) -> nn.Module:
    """A tiny model of a family, of the class that its config names."""
    import transformers

    config = config_of(name)
    (architecture,) = config.architectures
    return getattr(transformers, architecture)(config)  # type: ignore[no-any-return]


def with_image(config: Any) -> dict[str, Any]:
    """Two sequences of text around one image each."""
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    count = getattr(config, "mm_tokens_per_image", None) or patches
    text, image = tokens(120, length=10), torch.full((2, count), config.image_token_id)
    pixels = floats(2, 3, config.vision_config.image_size, config.vision_config.image_size)
    return {"input_ids": torch.cat([text[:, :5], image, text[:, 5:]], 1), "pixel_values": pixels}


def build(name: str) -> Built:
    """(model, args, kwargs) with fixed values; the inputs are like those of the plan file."""
    from autotp.inputs import resolve

    def made() -> Built:
        model = model_of(name).eval()
        if hasattr(model.config, "image_token_id"):
            return model, (), with_image(model.config)
        if model.config.model_type == "whisper":
            sound = floats(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
            return model, (), {"input_features": sound, "decoder_input_ids": tokens(120, length=7)}

        def attempt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
            try:
                with torch.no_grad():
                    model(*args, **kwargs)
            except Exception as error:
                return error
            return None

        return (model, *resolve(model, None, attempt))

    return finish(Entry(build=made))
