"""Importing this module registers every rule."""

from autotp.ownership import (  # noqa: F401
    disjoint,
    rules_along,
    rules_experts,
    rules_index,
    rules_linear,
    rules_movement,
    rules_norm,
    rules_pointwise,
    rules_recurrent,
    rules_reduce,
    rules_scatter,
    rules_shared_classes,
    rules_shared_norm,
    rules_vision,
)
