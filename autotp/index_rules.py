"""Which operations a DTensor with an `IndexShard` placement may take part in.

Pointwise operations (optimizers, clipping, arithmetic, copies) on operands of the very same
layout, and full reductions (norm, sum, max, min). Everything else raises `LayoutError`:
DTensor's own rules would treat the placement as an ordinary shard and lose the index lists.

Stock propagation still decides everything about the *other* operands. It sees a stand-in for
each IndexShard, and what it says about the stand-in is translated back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .index_ranges import LayoutError
from .torch_compat import DTensorSpec, OpSchema, OutputSharding, Propagate, TensorMeta, guard_propagation

_REDUCTIONS = {"linalg_vector_norm", "_foreach_norm", "sum", "max", "min"}
_SAME_LAYOUT = {
    *("alias", "clone", "detach", "copy_", "_to_copy", "zero_", "fill_", "equal"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "lift_fresh"),
}
_FACTORIES = {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
_SAME_LAYOUT_PREFIXES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_NOT_POINTWISE = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}

_placement_type: type[Placement] | None = None


def install(placement_type: type[Placement]) -> None:
    """Register the rules with DTensor, once per process."""
    global _placement_type
    if _placement_type is None:
        _placement_type = placement_type
        guard_propagation(_concerns, _propagate)


def _is_indexed(placement: Placement) -> bool:
    assert _placement_type is not None
    return isinstance(placement, _placement_type)


def _indexed(spec: DTensorSpec) -> bool:
    return any(_is_indexed(p) for p in spec.placements)


def _specs(tree: Any) -> list[DTensorSpec]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, DTensorSpec)]


def _all_specs(schema: OpSchema) -> list[DTensorSpec]:
    return _specs((schema.args_schema, schema.kwargs_schema))


def _concerns(schema: OpSchema) -> bool:
    return any(_indexed(spec) for spec in _all_specs(schema))


def _propagate(schema: OpSchema, stock: Propagate) -> OutputSharding:
    if _base_name(schema.op) in _FACTORIES and _keeps_shape(schema):
        return _made(schema)
    if _is_whole_reduction(schema):
        return _reduce(schema, stock)
    if _is_pointwise(schema.op):
        _check_operands(schema)
        return _pointwise(schema, stock)
    if torch.Tag.nondeterministic_seeded in schema.op.tags:
        raise _refusal(
            schema,
            "would draw for each part by itself",
            "autotp.materialize(model, seed) draws what the constructor of the whole model draws",
        )
    raise _refusal(schema, "is not known to be right on index lists")


_INSTEAD = "Use .full_tensor() for the whole tensor or autotp.layouts.to_local() for this rank's part"


def _refusal(schema: OpSchema, why: str, instead: str = _INSTEAD) -> LayoutError:
    held = {str(p) for s in _all_specs(schema) for p in s.placements if _is_indexed(p)}
    return LayoutError(f"{schema.op} {why}; placements: {', '.join(sorted(held))}. {instead}")


def _base_name(schema_op: Any) -> str:
    return str(schema_op._schema.name).split("::")[-1]


# -- pointwise --


def _is_pointwise(op: Any) -> bool:
    name = _base_name(op)
    if name in _NOT_POINTWISE or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    listed = name in _SAME_LAYOUT or name.startswith(_SAME_LAYOUT_PREFIXES)
    return listed or torch.Tag.pointwise in op.tags


def _check_operands(schema: OpSchema) -> None:
    """All operands of one result must have the same shape and placements, or be scalars."""
    arguments = [*schema.args_schema, *schema.kwargs_schema.values()]
    lists = [a for a in arguments if isinstance(a, (list, tuple)) and _specs(a)]
    singles = [a for a in arguments if isinstance(a, DTensorSpec)]
    for position in range(max((len(a) for a in lists), default=1)):
        group = singles + [a[position] for a in lists if position < len(a)]
        first = next((s for s in _specs(group) if _indexed(s)), None)
        for other in _specs(group) if first is not None else []:
            assert first is not None
            is_scalar = other.shape.numel() == 1 and not _indexed(other)
            if not is_scalar and (other.shape, other.placements) != (first.shape, first.placements):
                raise _refusal(
                    schema,
                    f"got operands {tuple(first.shape)} {first.placements} and "
                    f"{tuple(other.shape)} {other.placements}, which must be laid out alike",
                )


def _pointwise(schema: OpSchema, stock: Propagate) -> OutputSharding:
    """Elements do not meet, so a stand-in `Replicate` makes stock rules leave them alone."""
    standins = _StandIns(as_cut=lambda _: False, keeps=lambda _: True)
    answer = stock(standins.put(schema))
    lists = [a for a in schema.args_schema if isinstance(a, (list, tuple)) and _specs(a)]
    single = next((s for s in _all_specs(schema) if _indexed(s)), None)
    output = _restore_output(standins, answer.output_spec, lists[0] if lists else [single])
    target = answer.redistribute_schema
    if target is not None:
        target = standins.take_back(schema, target)
    return replace(answer, output_spec=output, redistribute_schema=target)


def _restore_output(standins: _StandIns, output: Any, sources: Any) -> Any:
    """Give each result the index lists of the operand that it follows."""
    if not isinstance(output, (list, tuple)):
        source = sources[0]
        same = isinstance(output, DTensorSpec) and output.shape == source.shape
        return standins.restore(output, source) if same and _indexed(source) else output
    if any(isinstance(part, (list, tuple)) for part in output):  # one list per updated operand
        return type(output)(_restore_output(standins, part, sources) for part in output)
    if len(sources) != len(output):
        sources = [sources[0]] * len(output)
    return type(output)(_restore_output(standins, spec, [source]) for spec, source in zip(output, sources, strict=True))


# -- new tensors: autograd makes one for a gradient that someone else holds too --


def _keeps_shape(schema: OpSchema) -> bool:
    spec = schema.args_schema[0]
    return isinstance(spec, DTensorSpec) and tuple(spec.shape) == tuple(schema.args_schema[1])  # type: ignore[arg-type]


def _made(schema: OpSchema) -> OutputSharding:
    """A tensor of the operand's layout, made on each rank in the size of its part."""
    spec, shape, *others = schema.args_schema
    assert isinstance(spec, DTensorSpec) and spec.tensor_meta is not None
    local, stride = _local_shape(spec), spec.stride
    if _base_name(schema.op) == "new_empty_strided":
        stride = tuple(others[0])  # type: ignore[arg-type]
        others[0] = _stride_of(local, stride)
    meta = TensorMeta(torch.Size(shape), stride, schema.kwargs_schema.get("dtype") or spec.tensor_meta.dtype)  # type: ignore[arg-type]
    return OutputSharding(
        DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta),
        redistribute_schema=OpSchema(schema.op, (spec, local, *others), schema.kwargs_schema),
        needs_redistribute=True,
        use_val_from_redistribute_schema=True,
    )


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    shape, coordinate = list(spec.shape), spec.mesh.get_coordinate()
    cut = [p.dim for p in spec.placements if isinstance(p, Shard) or _is_indexed(p)]  # type: ignore[attr-defined]
    if coordinate is None or len(set(cut)) < len(cut):
        raise LayoutError(f"no new tensor can be made like one with placements {spec.placements}")
    for axis, p in enumerate(spec.placements):
        if _is_indexed(p):
            shape[p.dim] = p.local_shard_size_and_offset(shape[p.dim], spec.mesh.size(axis), coordinate[axis], 2)[0]  # type: ignore[attr-defined]
        elif isinstance(p, Shard):
            shape[p.dim] = p.local_shard_size_and_offset(shape[p.dim], spec.mesh.size(axis), coordinate[axis])[0]
    return tuple(shape)


def _stride_of(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, of dims in the order that other strides have."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return tuple(stride)


# -- reductions over a whole tensor --


def _is_whole_reduction(schema: OpSchema) -> bool:
    name, args = _base_name(schema.op), schema.args_schema
    if name not in _REDUCTIONS:
        return False
    if name == "linalg_vector_norm":
        return not any(args[2:4]) and not any(map(schema.kwargs_schema.get, ("dim", "keepdim")))
    return name == "_foreach_norm" or (len(args) == 1 and len(_specs(args)) == 1)


def _reduce(schema: OpSchema, stock: Propagate) -> OutputSharding:
    """Each rank reduces its own part; where ranks hold copies or nothing, the tensor is gathered.

    To count a copy once a rank would have to skip a part of its tensor, for which DTensor has
    no hook (tensors with copies are key/value projections: small); and nothing has no maximum.
    """
    standins = _StandIns(as_cut=_is_partition, keeps=_is_partition)
    seen = standins.put(schema)
    answer = stock(seen)
    if answer.needs_redistribute:  # stock rules want to move parts: only whole tensors may move
        standins = _StandIns(as_cut=lambda _: False, keeps=lambda _: False)
        seen = standins.put(schema)
        answer = stock(seen)
    target = standins.take_back(schema, (answer.needs_redistribute and answer.redistribute_schema) or seen)
    changed = target.args_schema != schema.args_schema
    return replace(answer, needs_redistribute=changed, redistribute_schema=target if changed else None)


def _is_partition(spec: DTensorSpec) -> bool:
    return all(p.layout.is_partition for p in spec.placements if _is_indexed(p))  # type: ignore[attr-defined]


# -- stand-ins --


@dataclass(frozen=True, kw_only=True)
class _StandIns:
    """Swaps every IndexShard for a stock placement, and back.

    In specs that are `as_cut` it looks like `Shard(dim)`, in others like `Replicate`. Where
    stock rules kept a stand-in, it stands for the real placement in specs that it `keeps`.
    """

    as_cut: Callable[[DTensorSpec], bool]
    keeps: Callable[[DTensorSpec], bool]

    def standin(self, placement: Placement, spec: DTensorSpec) -> Placement:
        """What stock rules see in the place of `placement`."""
        if not _is_indexed(placement):
            return placement
        return Shard(placement.dim) if self.as_cut(spec) else Replicate()  # type: ignore[attr-defined]

    def put(self, schema: OpSchema) -> OpSchema:
        """The schema as stock rules may see it."""

        def swap(spec: DTensorSpec) -> DTensorSpec:
            if not _indexed(spec):
                return spec
            placements = tuple(self.standin(p, spec) for p in spec.placements)
            return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)

        args, kwargs = tree_map_only(DTensorSpec, swap, (schema.args_schema, schema.kwargs_schema))
        return OpSchema(schema.op, args, kwargs, schema.schema_info)

    def restore(self, seen: DTensorSpec, source: DTensorSpec) -> DTensorSpec:
        """`seen` with the index lists of `source` wherever stock rules kept the stand-in."""
        keeps = self.keeps(source)
        placements = tuple(
            old if keeps and now == self.standin(old, source) else now
            for old, now in zip(source.placements, seen.placements, strict=True)
        )
        return DTensorSpec(seen.mesh, placements, tensor_meta=seen.tensor_meta)

    def take_back(self, schema: OpSchema, seen: OpSchema) -> OpSchema:
        """The operands that stock rules want, in terms of the real placements."""
        sources = tree_leaves((schema.args_schema, schema.kwargs_schema))
        wanted, structure = tree_flatten((seen.args_schema, seen.kwargs_schema))
        if len(sources) != len(wanted):
            raise _refusal(schema, "is rewritten by DTensor's own rules")
        leaves = [
            self.restore(now, old) if isinstance(old, DTensorSpec) and _indexed(old) else now
            for old, now in zip(sources, wanted, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, structure)
        return OpSchema(seen.op, args, kwargs, seen.schema_info)
