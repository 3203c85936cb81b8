"""Models that see or hear, as factories with example inputs: `autotp plan plans/with_inputs.py:llava_1_5_7b --tp 8`.

Inferred inputs would be text alone, and the plan would then say nothing of the part that sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.model_sources import hf

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def llava_1_5_7b() -> tuple[nn.Module, Sample]:
    """One image of 336 x 336 for each of two sequences."""
    return _built("llava_1_5_7b")


def gemma_3_27b() -> tuple[nn.Module, Sample]:
    """One image of 896 x 896 for each of two sequences."""
    return _built("gemma_3_27b")


def whisper_large_v3() -> tuple[nn.Module, Sample]:
    """Thirty seconds of sound, the one length that its encoder takes, and some tokens."""
    model = _model("whisper_large_v3")
    shape = 1, model.config.num_mel_bins, 2 * model.config.max_source_positions
    sound = torch.zeros(shape, dtype=model.config.dtype)
    return model, ((), {"input_features": sound, "decoder_input_ids": torch.arange(2, 9)[None]})


def _model(name: str) -> nn.Module:
    return hf(str(Path(__file__).parent / "configs" / f"{name}.json"))()


def _built(name: str) -> tuple[nn.Module, Sample]:
    model = _model(name)
    return model, with_image(model.config)


def with_image(config: Any, batch: int = 2) -> Sample:
    """Token ids, as many of them image tokens as one image gives, and the image, for each sequence."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    count = getattr(config, "mm_tokens_per_image", None) or patches
    image = torch.full((batch, count), config.image_token_id)
    text = torch.arange(2, 7).expand(batch, -1)
    pixels = torch.zeros(batch, 3, vision.image_size, vision.image_size)
    return (), {"input_ids": torch.cat([text, image, text], 1), "pixel_values": pixels}
