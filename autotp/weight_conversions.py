"""Names and layouts of transformers' weight files: what they are called and how they are packed in the model at hand.

transformers keeps a table of renamings and conversions per architecture, and knows that a file of a base model fits
a model with a head, and the other way round. Its own code is run, on tensors that are read later.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from autotp.errors import WeightsError
from autotp.lazy_weights import Lazy
from autotp.stored import Stored

_COMPUTED = re.compile(r"rotary_emb\.inv_freq")  # kept in files of old versions; every version computes it anew


def concerns(model: nn.Module) -> bool:
    """Whether a model is one of transformers', whose files may need conversion."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def ignored(model: Any, key: str) -> bool:
    """Whether transformers itself leaves out a key of a file that the model has no place for."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return bool(_COMPUTED.search(key)) or any(re.search(pattern, key) for pattern in patterns)


def converted(model: Any, stored: Mapping[str, Stored], names: Collection[str]) -> dict[str, Stored]:
    """The stored tensors under the names, and in the shapes, that the model has; the others under their own.

    Raises:
        WeightsError: a conversion that fails, with the key and the file it began with.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = dict.fromkeys(names, True)
    prefix = model.base_model_prefix
    found: dict[str, Stored] = {}
    packed: dict[str, Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            found[key] = stored[key]
        elif pattern is None:
            _add(found, name, stored[key])
        else:
            packing = packed.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            packing.add_tensor(name, key, pattern, Lazy(stored[key]))
    for name, packing in packed.items():
        for made_name, source in _convert(model, name, packing).items():
            _add(found, made_name, source)
    return found


def reverted(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model under the names, and in the packing, of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return made


def _convert(model: Any, name: str, packing: Any) -> dict[str, Stored]:
    first = next(iter(packing.collected_tensors.values()))[0].source
    try:
        made = packing.convert(name, model=model, config=model.config)
        made = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return {key: value.source for key, value in made.items()}
    except Exception as error:  # the code of a conversion, on a file that it may not have been written for
        steps = ", ".join(type(op).__name__ for op in packing.operations)
        raise WeightsError(
            f"{name} cannot be made from {first.key} (and what belongs to it) in {first.file}: transformers' "
            f"conversion ({steps}) raised {type(error).__name__}: {error}"
        ) from error


def _add(found: dict[str, Stored], name: str, source: Stored) -> None:
    if name in found:
        raise WeightsError(
            f"{name} is to come both from {found[name].key} in {found[name].file} and from {source.key} in "
            f"{source.file}"
        )
    found[name] = source
