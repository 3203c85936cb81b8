"""Models of timm, made small through their own constructor arguments."""

from __future__ import annotations

from typing import Any

from tests.models.common import Built, Entry, floats


def _image_model(name: str, size: int, **arguments: Any) -> Built:
    import timm

    return timm.create_model(name, num_classes=16, **arguments), (floats(2, 3, size, size),), {}


def vit() -> Built:
    """q, k, v in one matrix, taken apart by a reshape and unbind."""
    return _image_model("vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=8)


def convnext() -> Built:
    """Depthwise convolutions, layer scale, norms over channels."""
    return _image_model("convnext_atto", 64, depths=(1, 1, 2, 1), dims=(16, 32, 64, 64))


def swin() -> Built:
    """Shifted windows, a position table indexed by head, patch merging."""
    sizes = {"embed_dim": 32, "depths": (2, 2), "num_heads": (4, 8), "window_size": 4}
    return _image_model("swin_tiny_patch4_window7_224", 32, img_size=32, **sizes)


MODELS: dict[str, Entry] = {builder.__name__: Entry(build=builder) for builder in (vit, convnext, swin)}
