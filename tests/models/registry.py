"""All models of the tests, by name: `hf:llama`, `timm:vit`, `tv:resnet50`, `nn:encoder`, `user:nanogpt`."""

from __future__ import annotations

from tests.models import hf, timm_models, torch_nn, user, vision
from tests.models.common import Built, Entry, finish

ENTRIES: dict[str, Entry] = {
    **{f"hf:{name}": entry for name, entry in hf.MODELS.items()},
    **{f"timm:{name}": entry for name, entry in timm_models.MODELS.items()},
    **{f"tv:{name}": entry for name, entry in vision.MODELS.items()},
    **{f"nn:{name}": entry for name, entry in torch_nn.MODELS.items()},
    **{f"user:{name}": entry for name, entry in user.MODELS.items()},
}


def names() -> list[str]:
    """All names."""
    return list(ENTRIES)


def build(name: str) -> Built:
    """(model, args, kwargs), always the same values."""
    return finish(ENTRIES[name])
