"""Tiny models of transformers with six experts, run in one of its ways: `gpt_oss/grouped_mm`, `mixtral/eager`."""

from __future__ import annotations

from typing import Any

from tests.models.common import Built, Entry, finish, tokens
from tests.models.hf import LLAMA_LIKE

RULES = {"*.experts": "expertwise"}
MOE: dict[str, Any] = {**LLAMA_LIKE, "intermediate_size": 48, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 6}),
    "qwen3": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
              {"num_experts": 6, "head_dim": 8, "moe_intermediate_size": 32, "mlp_only_layers": []}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 6}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 6, "head_dim": 8, "sliding_window": 8}),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
                 {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
                  "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 8,
                  "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 32}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig",
               {"num_local_experts": 6, "num_experts_per_tok": 1, "head_dim": 8, "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 64}),
}  # fmt: skip


def build(name: str) -> Built:
    """(model, args, kwargs) of a family and a way to run its experts; ``/one`` at the end: with one token only."""
    family, how, *one = name.split("/")

    def made() -> Built:
        import transformers

        model_name, config_name, fields = FAMILIES[family]
        model = getattr(transformers, model_name)(getattr(transformers, config_name)(**{**MOE, **fields}))
        model.config._experts_implementation = how
        return model, (), {"input_ids": tokens(batch=1, length=1) if one else tokens()}

    return finish(Entry(build=made))
