"""From a forward parameter's name and annotation to what it probably holds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

PRIMARY = ("ids", "image", "video", "wave", "mel", "embeds", "series")

# The first pattern that matches the whole name decides. Several roles are alternatives, the likeliest first;
# "main" is whatever the first layers take, "other" the same for a second sequence of another length.
_ROLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r".*mask.*", ("none", "mask", "square_mask")),
    (r"(position|pos)_ids|positions?|input_pos|cache_position", ("positions",)),
    (r"token_type_ids|segment_ids|segments?|segment_label", ("zeros",)),
    (r".*grid_(thw|hws?)", ("grid",)),
    (r"(image|original|target)_sizes", ("image_sizes",)),
    (r".*merge_sizes", ("ones",)),
    (r"spatial_shapes", ("spatial_shapes",)),
    (r"bbox|boxes", ("boxes",)),
    (r"position_embeddings|rotary(_pos)?_emb|freqs_cis|freqs", ("rotary", "main")),
    (r"edge_index|edges", ("edges",)),
    (r".*(lengths?|_lens?)|lens", ("lengths",)),
    (r"start_pos|offset|start|step|.*_idx|.*_index", ("zero", "classes")),
    (r"idx|x_ids|task_inputs", ("ids",)),
    (r"decoder_input_ids|(tgt|trg|target|dec)_(ids|tokens|input)|prev_output_tokens", ("other_ids",)),
    (r"(.*_)?(ids?|indices|tokens?|text|texts|sentences?|words)", ("ids",)),
    (r"pixel_values_videos|videos?|clips?|frames?", ("video", "image")),
    (r"(.*_)?pixel_values|(.*_)?(images?|imgs?|pixels?|rgb)_?\d*", ("image", "main")),
    (r"input_values|wav(eform)?s?|audio(_values)?|speech|raw_audio", ("wave",)),
    (r"input_features|mels?|(log_)?(mel_)?spec(trogram)?s?|audio_features|audio_mel", ("mel", "embeds")),
    (r"past_values", ("series",)),
    (r"memory|context|cond(itioning)?|encoder_(hidden_states|outputs?)|cross_.*|keys?|values?|k|v|tgt|trg|target_seq",
     ("other", "main")),
    (r"t|times?|timesteps?|sigmas?|noise_levels?", ("times_int", "times_float", "main")),
    (r"y|labels?|class_labels|targets?", ("other", "classes", "main")),
    (r"h|hx|h_?0|state", ("state", "embeds")),
    (r"inputs_embeds|hidden(_states?)?|embeddings|features?|latents?", ("embeds", "main")),
)  # fmt: skip


def parameters(model: nn.Module, depth: int = 0) -> list[inspect.Parameter]:
    """The named parameters of `model.forward`; where it takes only ``*args``, those of the module it wraps."""
    found = list(inspect.signature(model.forward).parameters.values())
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if named or depth > 3:
        return named
    for child in model.children():
        if type(child).forward is not nn.Module.forward and (inner := parameters(child, depth + 1)):
            return inner
    return []


def required(found: list[inspect.Parameter]) -> list[str]:
    """Names of the parameters without a default."""
    return [p.name for p in found if p.default is p.empty]


def roles(parameter: inspect.Parameter) -> tuple[str, ...]:
    """What `parameter` may hold, the likeliest first."""
    kind = "" if parameter.annotation is parameter.empty else str(parameter.annotation)
    plain = re.sub(r"<class '(\w+)'>", r"\1", kind).replace("Optional[", "").split("|")[0].strip(" ]")
    if plain in ("bool", "int", "float", "str"):
        return (plain,)
    name = parameter.name.lower()
    found = next((roles for pattern, roles in _ROLES if re.fullmatch(pattern, name)), ("main", "embeds"))
    if "LongTensor" in kind and found[0] == "main":
        found = ("ids", *found)
    if re.search(r"[Ll]ist\[.*Tensor", kind):
        found = tuple(f"list_{role}" for role in found if role != "none") + found
    return found


def alternatives(found: list[inspect.Parameter], names: list[str]) -> Iterator[dict[str, str]]:
    """Assignments of a role to each of `names`: the likeliest everywhere, then one changed at a time."""
    options = {p.name: roles(p) for p in found if p.name in names}
    first = {name: some[0] for name, some in options.items()}
    yield first
    for depth in (1, 2):
        for name, some in options.items():
            if len(some) > depth:
                yield {**first, name: some[depth]}
    if len(options) > 1:  # all at once
        yield {name: some[min(1, len(some) - 1)] for name, some in options.items()}
