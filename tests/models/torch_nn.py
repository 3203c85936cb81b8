"""torch's own transformer layers, in training mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.common import LANGUAGE, Built, Entry, floats, tokens


class Tagger(nn.Module):
    """An encoder between an embedding and a head."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        layer = nn.TransformerEncoderLayer(64, 8, 128, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """Scores per token."""
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


def encoder() -> Built:
    """Norm after each block; the second sequence is padded."""
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True
    return Tagger(norm_first=False), (tokens(),), {"padding": padding}


def encoder_norm_first() -> Built:
    """Norm before each block."""
    return Tagger(norm_first=True), (tokens(), torch.zeros(2, 12, dtype=torch.bool)), {}


def transformer() -> Built:
    """Encoder and decoder with a causal mask, time first."""
    model = nn.Transformer(64, 8, 2, 2, 128, dropout=0.0)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    return model, (floats(12, 2, 64), floats(9, 2, 64, seed=8)), {"tgt_mask": mask}


MODELS: dict[str, Entry] = {
    builder.__name__: Entry(build=builder, share=LANGUAGE, train=True)
    for builder in (encoder, encoder_norm_first, transformer)
}
