"""More models of transformers that generate, beside those of `hf`: each has a cache or a step of its own kind."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.common import Built, Entry, floats, tokens
from tests.models.hf import ENDS, LLAMA_LIKE, MODELS, _text

WINDOW = 8  # shorter than the prompt, so that every step drops a token


def mistral() -> Built:
    """A sliding window in every layer."""
    return _text("MistralForCausalLM", "MistralConfig", **LLAMA_LIKE, sliding_window=WINDOW)


def gemma2() -> Built:
    """A sliding window in every other layer, scores and logits capped."""
    return _text("Gemma2ForCausalLM", "Gemma2Config", **LLAMA_LIKE, head_dim=8, sliding_window=WINDOW)


def gemma3() -> Built:
    """A sliding window in one layer of two, norms over each head."""
    layers = ["sliding_attention", "full_attention"]
    sizes = {**LLAMA_LIKE, "head_dim": 8, "sliding_window": WINDOW, "layer_types": layers}
    return _text("Gemma3ForCausalLM", "Gemma3TextConfig", **sizes)


def deep() -> Built:
    """So many layers that alike ones are planned once, of two kinds."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    sizes = {**LLAMA_LIKE, "head_dim": 8, "sliding_window": WINDOW, "layer_types": layers, "num_hidden_layers": 12}
    return _text("Gemma3ForCausalLM", "Gemma3TextConfig", **sizes)


def mixtral() -> Built:
    """Experts."""
    return _text("MixtralForCausalLM", "MixtralConfig", **LLAMA_LIKE, num_local_experts=4)


def deepseek() -> Built:
    """Latent attention, whose rotary key is one for all heads; grouped experts."""
    sizes: dict[str, Any] = {**LLAMA_LIKE, "num_key_value_heads": 8, "moe_intermediate_size": 64, "n_routed_experts": 4}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    return _text("DeepseekV3ForCausalLM", "DeepseekV3Config", **sizes, **latent, **groups)


def mamba2() -> Built:
    """States in place of keys; a step is another computation than a prefill."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "head_dim": 16}
    heads = {"num_heads": 8, "n_groups": 4, "expand": 2, "chunk_size": 8, "pad_token_id": 0}
    return _text("Mamba2ForCausalLM", "Mamba2Config", **sizes, **heads, **ENDS)


def whisper() -> Built:
    """Speech in, tokens out: the encoder runs once, by itself."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=32, max_source_positions=64,
        max_target_positions=64, dropout=0.0, decoder_start_token_id=1, pad_token_id=0, begin_suppress_tokens=None,
        **ENDS,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return model, (), {"input_features": floats(2, 32, 128), "decoder_input_ids": tokens(length=4, seed=8)}


def llava() -> Built:
    """An image before the text, in the prefill only."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**LLAMA_LIKE)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=127, vision_feature_layer=-1
    )
    ids = torch.cat([torch.full((2, 16), 127), tokens(127, length=6)], 1)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": floats(2, 3, 32, 32)}
    return transformers.LlavaForConditionalGeneration(config), (), kwargs


GENERATING: dict[str, Entry] = {
    **{name: MODELS[name] for name in ("llama", "qwen3", "gpt2", "gpt_neox", "t5", "bart")},
    **{f.__name__: Entry(build=f) for f in (mistral, gemma2, gemma3, deep, mixtral, deepseek, mamba2, whisper, llava)},
}
