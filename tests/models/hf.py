"""Models of transformers with random weights: 64 wide, 8 heads, 2 layers, 128 tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.common import LANGUAGE, OTHER, Built, Entry, floats, tokens

ENDS = {"bos_token_id": 1, "eos_token_id": 1}
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **ENDS,
}


def _text(model_name: str, config_name: str, **fields: Any) -> Built:
    """A model that takes token ids and a mask."""
    import transformers

    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))
    ids = tokens()
    return model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama() -> Built:
    """Grouped-query attention, rotary positions."""
    return _text("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)


def qwen3() -> Built:
    """Norms over each head of q and k."""
    return _text("Qwen3ForCausalLM", "Qwen3Config", **LLAMA_LIKE, head_dim=8)


def phi3() -> Built:
    """One matrix for grouped q, k, v and one for gate and up."""
    return _text("Phi3ForCausalLM", "Phi3Config", **LLAMA_LIKE)


def gpt2() -> Built:
    """Transposed weights, fused q, k, v, tied head."""
    sizes = {"vocab_size": 128, "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64, **ENDS}
    return _text("GPT2LMHeadModel", "GPT2Config", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def gpt_neox() -> Built:
    """q, k, v interleaved by head; parallel residual."""
    sizes = {name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"}
    return _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **sizes)


def bloom() -> Built:
    """Interleaved q, k, v and ALiBi."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "n_head": 8, "n_layer": 2}
    return _text("BloomForCausalLM", "BloomConfig", **sizes, hidden_dropout=0.0, attention_dropout=0.0)


def falcon() -> Built:
    """q, k, v packed by group of heads."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    return _text(
        "FalconForCausalLM", "FalconConfig", **sizes, num_kv_heads=4, new_decoder_architecture=True, ffn_hidden_size=128
    )


def falcon_multi_query() -> Built:
    """One key and value head for all."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    return _text("FalconForCausalLM", "FalconConfig", **sizes, multi_query=True, ffn_hidden_size=128)


def mpt() -> Built:
    """Fused q, k, v by chunk, ALiBi, no biases."""
    sizes = {"vocab_size": 128, "d_model": 64, "n_heads": 8, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}
    return _text("MptForCausalLM", "MptConfig", **sizes)


def bert() -> Built:
    """Encoder with a tied head whose bias is a parameter of its own; the second sequence is padded."""
    sizes = {name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, args, kwargs = _text("BertForMaskedLM", "BertConfig", **sizes, **dropout)
    kwargs["attention_mask"][1, 8:] = 0
    return model, args, kwargs


def t5() -> Built:
    """Encoder and decoder with a relative position bias by head; one matrix is both embeddings and the head."""
    import transformers

    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=8, num_heads=8, d_ff=128, num_layers=2, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, (), {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=8)}


def bart() -> Built:
    """Encoder and decoder with learned positions."""
    import transformers

    config = transformers.BartConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    return model, (), {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=8)}


def clip() -> Built:
    """Two towers and a product of both outputs."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    text = {**sizes, "vocab_size": 128, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 127}
    image = {**sizes, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=32))
    return model, (), {"input_ids": tokens(), "pixel_values": floats(2, 3, 32, 32)}


def vit() -> Built:
    """Image classifier."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=16,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), (), {"pixel_values": floats(2, 3, 32, 32)}


MODELS: dict[str, Entry] = {
    builder.__name__: Entry(build=builder, share=LANGUAGE)
    for builder in (llama, qwen3, phi3, gpt2, gpt_neox, bloom, falcon, falcon_multi_query, mpt, bert, t5, bart)
}
MODELS["clip"] = Entry(build=clip, share=LANGUAGE)
MODELS["vit"] = Entry(build=vit, share=OTHER)
