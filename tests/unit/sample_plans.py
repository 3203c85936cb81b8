"""Plans written by hand, for tests of everything that shows, saves or exports them."""

from autotp.plan_types import Collective, Finding, Memory, Plan, Row


def make_plan(rows, *, collectives=(), findings=(), tp=2, model="toy", **others):
    memory = Memory.of(tuple(rows))
    return Plan(
        model=model,
        mesh={"tp": tp},
        parameters=tuple(rows),
        collectives=tuple(collectives),
        memory=memory,
        findings=tuple(findings),
        **{"sample": "input_ids int64[2, 8]", **others},
    )


def row(name, shape, style="replicate", dim=None, *, tp=2, reason="whole", **others):
    local = tuple(size // tp if i == dim else size for i, size in enumerate(shape))
    return Row(name=name, shape=tuple(shape), local_shape=local, style=style, dim=dim, reason=reason, **others)


def llama_like(layers=32, tp=2, tied=True):
    """Rows in the order of named_parameters, numbers in the reasons, a tied head, findings in every layer."""
    rows = [row("model.embed_tokens.weight", (1000, 64), "embedding_rowwise", 0, tp=tp, reason="by vocabulary row")]
    for layer in range(layers):
        path = f"model.layers.{layer}"
        rows += [
            row(f"{path}.self_attn.{n}_proj.weight", (64, 64), "colwise", 0, tp=tp, reason="4 heads") for n in "qkv"
        ]
        rows += [
            row(
                f"{path}.self_attn.o_proj.weight",
                (64, 64),
                "rowwise",
                1,
                tp=tp,
                reason=f"closes the cut of {path}.self_attn.v_proj",
            ),
            row(f"{path}.mlp.up_proj.weight", (256, 64), "colwise", 0, tp=tp, reason="single features"),
            row(
                f"{path}.mlp.down_proj.weight",
                (64, 256),
                "rowwise",
                1,
                tp=tp,
                reason=f"closes the cut of {path}.mlp.up_proj",
            ),
            row(f"{path}.norm.weight", (64,), reason="norm over features that every rank has"),
        ]
    if tied:
        rows.append(
            row(
                "lm_head.weight",
                (1000, 64),
                "embedding_rowwise",
                0,
                tp=tp,
                reason="one tensor",
                tied_to="model.embed_tokens.weight",
            )
        )
    calls = [
        Collective(module=f"model.layers.{layer}.{part}", kind="all_reduce", when=when, bytes=4096)
        for when in ("forward", "backward")
        for layer in range(layers)
        for part in ("self_attn", "mlp")
    ]
    findings = [
        Finding(code="TP-NOTE", level="note", where="", message="positions are computed on every rank"),
        *(
            Finding(
                code="TP-WHOLE",
                level="warning",
                where=f"model.layers.{layer}.norm",
                message=f"model.layers.{layer}.norm could hold data and was left whole",
            )
            for layer in range(layers)
        ),
    ]
    return make_plan(rows, collectives=calls, findings=findings, tp=tp, model="hf:toy-llama")


def mlp(tp=4):
    """The MLP of case K53: 64 -> 256 -> 64 with biases, float32, batch of 8 x 16 tokens."""
    rows = [
        row("0.weight", (256, 64), "colwise", 0, tp=tp, reason="single features"),
        row("0.bias", (256,), "colwise", 0, tp=tp, reason="follows 0.weight"),
        row("2.weight", (64, 256), "rowwise", 1, tp=tp, reason="closes the cut of 0"),
        row("2.bias", (64,), reason="added after the sum"),
    ]
    calls = [Collective(module="", kind="all_reduce", when=when, bytes=32768) for when in ("forward", "backward")]
    return make_plan(rows, collectives=calls, tp=tp, model="mlp", sample="float32[8, 16, 64]")
