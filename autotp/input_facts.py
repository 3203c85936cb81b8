"""What a model's layers and config say about its inputs: vocabulary, channels, widths, image sizes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

Side = tuple[int, int]
_CONVOLUTIONS: dict[str, tuple[type[nn.Module], ...]] = {
    "signal": (nn.Conv1d, nn.ConvTranspose1d),
    "image": (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    "volume": (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}

SMALL_SIDES = (32, 64, 28, 96, 128, 224, 256, 384, 512)
LARGE_SIDE = 256  # beyond it, smaller images are tried first: the cost of a plan grows with the image
_SIDE_NAMES = ("image_size", "img_size", "input_size", "resolution", "input_resolution", "img_dim", "spec_size")
_SPECIAL_ID = re.compile(r".*(token|pad|bos|eos|start|end)_(id|index)(_list)?$|.*_token$")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that guesses about inputs rest on, each in order of how likely it is."""

    kinds: tuple[str, ...]  # of the layers that could come first: ids, image, volume, signal, features
    vocab: int  # rows of the first embedding
    special_ids: frozenset[int]
    widths: tuple[int, ...]  # input features of linear, norm and recurrent layers
    channels: dict[int, tuple[int, ...]]  # input channels of 1-, 2- and 3-dimensional convolutions
    sides: tuple[Side, ...]  # image heights and widths
    named: tuple[tuple[str, int], ...]  # a word for an input, and its features
    hidden: int  # state of the first recurrent layer, 0 without one
    configs: tuple[Any, ...]  # the config and the ones nested in it

    def width_for(self, parameter: str) -> int | None:
        """Input features of the first layer called after `parameter`: ``states`` and ``embed_state``."""
        stem = parameter.lower().rstrip("s")
        if len(stem) < 3:
            return None
        return next((width for word, width in self.named if stem in word), None)

    def lookup(self, *names: str, inside: str = "", default: int | None = None) -> int | None:
        """The first positive integer under one of `names`, in nested configs whose type matches `inside` first."""
        ranked = [c for c in self.configs if inside and re.search(inside, _config_type(c))] + list(self.configs)
        for config in ranked:
            for name in names:
                value = _get(config, name)
                if isinstance(value, (tuple, list)) and value and isinstance(value[0], int):
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return default


def read(model: nn.Module) -> Facts:
    """Collect the facts about `model`; nothing is run."""
    configs = tuple(_configs(getattr(model, "config", None)))
    kinds: dict[str, None] = {}
    widths: dict[int, None] = {}
    channels: dict[int, dict[int, None]] = {1: {}, 2: {}, 3: {}}
    vocab = 0
    for module in model.modules():
        kind, value = _first_dim(module)
        if kind is None:
            continue
        kinds.setdefault(kind)
        if kind == "ids":
            vocab = vocab or value
        elif kind == "features":
            widths.setdefault(value)
        else:
            channels[{"signal": 1, "image": 2, "volume": 3}[kind]].setdefault(value)
    for module in model.modules():  # raw weights of the user's own layers: any of their dims may face the input
        for parameter in () if type(module).__module__.startswith("torch.nn") else module.parameters(recurse=False):
            widths.update(dict.fromkeys(n for n in parameter.shape if n > 1 and parameter.dim() > 1))
    return Facts(
        kinds=tuple(kinds),
        vocab=vocab,
        special_ids=frozenset(_special_ids(configs)),
        widths=tuple(widths),
        channels={n: tuple(found) for n, found in channels.items()},
        sides=tuple(dict.fromkeys(_sides(model, configs))),
        named=tuple(_named_widths(model)),
        hidden=next((m.hidden_size for m in model.modules() if isinstance(m, (nn.RNNBase, nn.RNNCellBase))), 0),
        configs=configs,
    )


def _first_dim(module: nn.Module) -> tuple[str | None, int]:
    """The kind of input a layer takes, and how many rows, channels or features of it."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "ids", module.num_embeddings
    for kind, convs in _CONVOLUTIONS.items():
        if isinstance(module, convs):
            return kind, getattr(module, "in_channels", 0) or getattr(module, "num_features", 0)
    if isinstance(module, (nn.Linear, nn.LazyLinear)):
        return "features", module.in_features
    if isinstance(module, nn.Bilinear):
        return "features", module.in1_features
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "features", module.input_size
    if isinstance(module, nn.MultiheadAttention):
        return "features", module.embed_dim
    return _first_dim_of_unknown(module)


def _first_dim_of_unknown(module: nn.Module) -> tuple[str | None, int]:
    """Norms by their shape, and leaf layers of the user's own by the attribute or weight that tells."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and shape:
        return "features", int(shape[-1])
    if isinstance(module, (nn.BatchNorm1d, nn.GroupNorm)) or next(module.children(), None) is not None:
        return None, 0
    for name in ("in_features", "d_model", "embed_dim", "dim", "hidden_size"):
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return "features", value
    own = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    return ("features", own[0].shape[0]) if own else (None, 0)


def _named_widths(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Linear layers by their own name; torch's layers with several inputs by the names of these."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path.rpartition(".")[2].lower(), module.in_features
        elif isinstance(module, nn.Bilinear):
            yield from (("input1", module.in1_features), ("input2", module.in2_features))
        elif isinstance(module, nn.MultiheadAttention):
            yield from (("key", module.kdim), ("value", module.vdim))


def _configs(config: Any, depth: int = 0) -> Iterator[Any]:
    """The config, then the ones nested in it."""
    if config is None or depth > 3:
        return
    yield config
    for name, value in list(vars(config).items()) if hasattr(config, "__dict__") else []:
        if hasattr(value, "to_dict") and hasattr(value, "__dict__") and not name.startswith("_"):
            yield from _configs(value, depth + 1)


def _config_type(config: Any) -> str:
    return f"{_get(config, 'model_type')} {type(config).__name__}".lower()


def _get(config: Any, name: str) -> Any:
    if isinstance(config, dict):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception:  # a config may compute an attribute and fail
        return None


def _special_ids(configs: tuple[Any, ...]) -> Iterator[int]:
    for config in configs:
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            if _SPECIAL_ID.match(name):
                yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))


def _sides(model: nn.Module, configs: tuple[Any, ...]) -> Iterator[Side]:
    """Image sizes in the order to try: the model's own first where it may be bound to it, else small ones first."""
    native = list(_native_sides(model, configs))
    positions = any(re.search("pos|rel", name) for name, _ in (*model.named_parameters(), *model.named_buffers()))
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    if not positions and convolutions > 10:  # a deep net: 32 pixels would shrink to a single one
        yield from ((64, 64), (128, 128))
    if any(isinstance(m, nn.ConvTranspose2d) for m in itertools.islice(model.modules(), 4)):  # a generator
        yield from ((1, 1), (4, 4), (8, 8))
    large = [side for side in native if max(side) > LARGE_SIDE]
    yield from (side for side in native if side not in large)
    yield from (((64, 64), (128, 128), (224, 224), *large[:2]) if large else ())
    yield from ((side, side) for side in SMALL_SIDES)


def _native_sides(model: nn.Module, configs: tuple[Any, ...]) -> Iterator[Side]:
    for name in ("pretrained_cfg", "default_cfg"):  # timm
        cfg = getattr(model, name, None)
        size = _get(cfg, "input_size") if cfg is not None else None
        if isinstance(size, (tuple, list)) and len(size) == 3 and not _has_image_size(model):
            yield int(size[1]), int(size[2])
    for holder in (*configs, *model.modules()):
        for name in _SIDE_NAMES:
            side = _as_side(_get(holder, name))
            if side is not None:
                yield side
    yield from _sides_from_positions(model)


def _has_image_size(model: nn.Module) -> bool:
    """True where a layer knows the size for which this very model was built: better than the registry's default."""
    return any(_as_side(getattr(m, name, None)) for m in model.modules() for name in ("img_size", "image_size"))


def _as_side(value: Any) -> Side | None:
    if isinstance(value, dict):
        value = (value.get("height"), value.get("width"))
    if isinstance(value, (tuple, list)):
        value = tuple(value)[-2:]
        if len(value) == 2 and all(isinstance(v, int) and v > 7 for v in value):
            return value
        return _as_side(value[0]) if len(value) == 1 else None
    if isinstance(value, int) and not isinstance(value, bool) and 8 <= value <= 2048:
        return value, value
    return None


def _sides_from_positions(model: nn.Module) -> Iterator[Side]:
    """A square number of position rows (less a few class tokens) times the patch of the first convolution."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return
    patch = first.stride[0]
    for name, parameter in model.named_parameters():
        if "pos" in name and parameter.dim() >= 2:
            rows = parameter.shape[-2]
            for extra in (0, 1, 2, 5):
                root = math.isqrt(max(rows - extra, 0))
                if root > 1 and root * root == rows - extra:
                    yield root * patch, root * patch
    for width in (m.in_features for m in model.modules() if isinstance(m, nn.Linear)):  # mixers over tokens
        root = math.isqrt(width)
        if patch > 1 and root > 1 and root * root == width and root * patch <= 512:
            yield root * patch, root * patch
