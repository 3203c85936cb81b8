"""Small tensors for each role a forward parameter may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.input_facts import Facts, Side

BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One choice of sizes. The defaults are small and unlike any number of heads."""

    kind: str = "features"  # what "main" means
    tokens: int = 7
    other: int = 5  # length of a second sequence
    side: Side = (32, 32)
    width: int = 64
    other_width: int = 64
    channels: int = 3
    frames: int = 4
    by_name: bool = True  # look for a layer called after the parameter
    form: int = 0  # which of the usual arrangements of the dims


class Tensors:
    """Makes tensors for one model; the same `facts` and `setting` always give the same values."""

    def __init__(self, facts: Facts, setting: Setting) -> None:
        self.facts, self.setting = facts, setting
        self.generator = torch.Generator().manual_seed(0)
        self.patch = facts.lookup("patch_size", inside="vis|image", default=8) or 8
        self.temporal = facts.lookup("temporal_patch_size", inside="vis|image", default=1) or 1

    def make(self, role: str, parameter: str = "") -> Any:
        """A value for `role`; a layer called after the forward's `parameter` settles how wide features are."""
        width = (
            self.facts.width_for(parameter) if role in ("main", "other", "embeds") and self.setting.by_name else None
        )
        if width and (role == "embeds" or self.setting.kind == "features"):
            return self.features(self.setting.other if role == "other" else self.setting.tokens, width)
        if role.startswith("list_"):
            return list(self.make(role[5:]).unbind(0))
        return _MAKERS[role](self)

    def floats(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def ids(self, tokens: int) -> Tensor:
        """Token ids below the vocabulary, none of them special to the config."""
        vocab = self.facts.lookup("vocab_size") or 0
        bound = min(vocab or self.facts.vocab, self.facts.vocab or vocab) or 16
        usable = [i for i in range(min(bound, 128)) if i not in self.facts.special_ids and i > 3] or [0]
        picks = torch.randint(0, len(usable), (BATCH, tokens), generator=self.generator)
        return torch.tensor(usable)[picks]

    def main(self) -> Tensor:
        makers = {"ids": "ids", "image": "image", "volume": "volume", "signal": "signal", "features": "embeds"}
        return self.make(makers[self.setting.kind])

    def other_main(self) -> Tensor:
        setting = self.setting
        if setting.kind == "ids":
            return self.ids(setting.other)
        return self.features(setting.other, setting.other_width)

    def features(self, tokens: int, width: int) -> Tensor:
        shapes = ((BATCH, tokens, width), (BATCH, width), (BATCH, width, tokens), (width,))
        return self.floats(*shapes[self.setting.form % len(shapes)])

    def image(self) -> Tensor:
        s, (h, w), p = self.setting, self.setting.side, self.patch
        rows = BATCH * 16  # patches of two images of 4 x 4
        shapes = (
            (BATCH, s.channels, h, w),
            (rows, s.channels * self.temporal * p * p),
            (rows, s.channels, p, p),
            (BATCH, 1, s.channels, h, w),
            (BATCH, s.frames, s.channels, h, w),
            (BATCH, (h // p) * (w // p), s.channels * p * p),
            (BATCH, h, w, s.channels),
            (s.channels, h, w),
        )
        return self.floats(*shapes[s.form % len(shapes)])

    def volume(self) -> Tensor:
        s, (h, w) = self.setting, self.setting.side
        shapes = ((BATCH, s.channels, s.frames, h, w), (BATCH, s.frames, s.channels, h, w))
        return self.floats(*shapes[s.form % 2])

    def video(self) -> Tensor:
        s, (h, w) = self.setting, self.setting.side
        shapes = ((BATCH, s.frames, s.channels, h, w), (BATCH, s.channels, s.frames, h, w))
        return self.floats(*shapes[s.form % 2])

    def signal(self) -> Tensor:
        s = self.setting
        shapes = ((BATCH, s.channels, s.tokens), (BATCH, s.tokens, s.channels), (BATCH, s.tokens))
        return self.floats(*shapes[s.form % 3])

    def mel(self) -> Tensor:
        names = (
            "num_mel_bins",
            "n_mels",
            "feature_size",
            "input_feat_size",
            "mel_bins",
            "input_dim",
            "num_mel_filters",
        )
        bins = self.facts.lookup(*names, inside="audio|speech|encoder", default=80) or 80
        shapes = ((BATCH, bins, self.setting.tokens), (BATCH, self.setting.tokens, bins))
        return self.floats(*(shapes[self.setting.form % 2]))

    def wave(self) -> Tensor:
        tokens = self.setting.tokens
        if self.setting.form in (1, 3):
            return self.mel()
        return self.floats(BATCH, tokens) if self.setting.form == 0 else self.floats(BATCH, 1, tokens)

    def series(self) -> Tensor:
        length = self.facts.lookup("context_length", default=self.setting.tokens) or 7
        lags = [max(v) for c in self.facts.configs if isinstance(v := getattr(c, "lags_sequence", None), list) and v]
        channels = self.facts.lookup("num_input_channels", "input_size", default=1) or 1
        length += max(lags, default=0)
        return self.floats(BATCH, length, channels) if self.setting.form == 0 else self.floats(BATCH, length)

    def rotary(self) -> tuple[Tensor, Tensor]:
        heads = self.facts.lookup("num_attention_heads", default=1) or 1
        width = self.facts.lookup("head_dim") or (self.facts.lookup("hidden_size", default=64) or 64) // heads
        return self.floats(BATCH, self.setting.tokens, width), self.floats(BATCH, self.setting.tokens, width)

    def grid(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)

    def patches(self) -> Tensor:
        (h, w), p = self.setting.side, self.patch
        return torch.tensor([[h // p, w // p]] * BATCH)


def _size(get: Callable[[Setting], Any]) -> Callable[[Tensors], Any]:
    return lambda t: get(t.setting)


_MAKERS: dict[str, Callable[[Tensors], Any]] = {
    "main": Tensors.main,
    "other": Tensors.other_main,
    "ids": lambda t: t.ids(t.setting.tokens),
    "other_ids": lambda t: t.ids(t.setting.other),
    "image": Tensors.image,
    "volume": Tensors.volume,
    "video": Tensors.video,
    "signal": Tensors.signal,
    "wave": Tensors.wave,
    "mel": Tensors.mel,
    "series": Tensors.series,
    "embeds": lambda t: t.features(t.setting.tokens, t.setting.width),
    "rotary": Tensors.rotary,
    "grid": Tensors.grid,
    "spatial_shapes": Tensors.patches,
    "image_sizes": _size(lambda s: torch.tensor([list(s.side)] * BATCH)),
    "boxes": _size(lambda s: torch.tensor([1, 2, 8, 9]).expand(BATCH, s.tokens, 4).contiguous()),
    "positions": _size(lambda s: torch.arange(s.tokens).expand(BATCH, -1).contiguous()),
    "zeros": _size(lambda s: torch.zeros(BATCH, s.tokens, dtype=torch.int64)),
    "mask": _size(lambda s: torch.ones(BATCH, s.tokens, dtype=torch.bool)),
    "square_mask": _size(lambda s: torch.ones(s.tokens, s.tokens, dtype=torch.bool)),
    "lengths": _size(lambda s: torch.full((BATCH,), s.tokens)),
    "ones": lambda t: torch.ones(BATCH, dtype=torch.int64),
    "classes": lambda t: torch.zeros(BATCH, dtype=torch.int64),
    "state": lambda t: t.floats(BATCH, t.facts.hidden or t.setting.width),
    "edges": lambda t: torch.tensor([[0, 1], [1, 0]]),
    "times_int": lambda t: torch.tensor([1, 3]),
    "times_float": lambda t: torch.tensor([0.25, 0.75]),
    "none": lambda t: None,
    "zero": lambda t: 0,
    "bool": lambda t: False,
    "int": lambda t: 0,
    "float": lambda t: 1.0,
    "str": lambda t: "",
}
