"""The command line: options, streams and exit codes. The only file that imports typer.

Answers go to stdout, everything else to stderr; `--json` prints one document, also on failure.
Exit codes: 0 fine, 1 findings, 2 bad usage or bad input, 3 our fault. Nothing heavy is imported
before a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autotp.errors import AutotpError

if TYPE_CHECKING:
    from autotp.commands import Request
    from autotp.display import Notes

FINE, FINDINGS, BAD_INPUT, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer has its own copy of click, or not


def _epilog(*examples: str) -> str:
    lines = "\n".join(f"  autotp {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit codes: 0 fine, 1 findings, 2 bad usage or bad input, 3 our fault."


app = typer.Typer(
    name="autotp",
    epilog=_epilog("plan torchvision:resnet50 --tp 4", "demo"),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:NAME, timm:NAME, hf:DIR_OR_CONFIG_JSON, package.module:factory or file.py:factory.",
    ),
]
Tp = Annotated[int | None, typer.Option("--tp", min=1, metavar="N", help="Ranks on the tensor-parallel axis.")]
Dp = Annotated[int | None, typer.Option("--dp", min=1, metavar="N", help="Ranks on the data-parallel axis.")]
Sp = Annotated[bool, typer.Option("--sp", help="Sequence parallel: cut tokens between the cut layers.")]
Sample = Annotated[
    str | None, typer.Option(metavar="SPEC", help="Example inputs, as input_ids=int64[2,7]<128; else inferred.")
]
Rules = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="GLOB=STYLE", help="Your choice for these parameters; may be repeated."),
]
PlanFile = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE", help="Take the choices of a saved plan, or of a tp_plan dict in a .json."),
]
Save = Annotated[str | None, typer.Option(metavar="FILE", help="Write the plan as TOML.")]
Shipped = Annotated[
    bool,
    typer.Option(
        "--diff-shipped",
        help="Compare with the tp_plan that transformers ships; exit 1 if it is unsound, or cuts what we leave whole.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 1 if a weight that could be cut was left whole.")]
Dtype = Annotated[str, typer.Option(help="Floating point type to compute with.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Wide = Annotated[bool, typer.Option("--wide", help="Show every column, however wide the terminal.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Version = Annotated[bool, typer.Option("--version", help="Show the version.")]


@app.callback(invoke_without_command=True)
def autotp(version: Version = False) -> None:
    """Tensor parallelism for any torch model: planned, explained and verified, without a GPU."""
    if version:
        from autotp import __version__

        typer.echo(f"autotp {__version__}")
        raise typer.Exit


@app.command(
    epilog=_epilog(
        "plan torchvision:resnet50 --tp 4",
        "plan model.py:build --tp 8 --set 'layers.*.fc=replicate' --save model.toml",
    )
)
def plan(
    model: Model,
    tp: Tp = None,
    dp: Dp = None,
    sp: Sp = False,
    sample: Sample = None,
    rules: Rules = None,
    plan_file: PlanFile = None,
    save: Save = None,
    json: Json = False,
    wide: Wide = False,
    strict: Strict = False,
    diff_shipped: Shipped = False,
    debug: Debug = False,
) -> int:
    """Show how every parameter would be cut, what it costs, and why."""
    from autotp import commands
    from autotp.display import Notes, plan_sections, show

    notes = Notes(quiet=json)
    request = commands.Request(
        model=model, tp=tp, dp=dp, sequence_parallel=sp, sample=sample, rules=rules or (), plan_file=plan_file
    )
    if diff_shipped:
        return _diff_shipped(request, notes, json=json, wide=wide)
    made = commands.make_plan(request, notes)
    if save:
        commands.save_plan(made, save, sys.argv[1:])
        notes.note(f"plan saved to {save}")
    if json:
        typer.echo(commands.json_text(made.to_dict()))
    else:
        show(plan_sections(made), wide=wide)
    whole = commands.left_whole(made) if strict else []
    for finding in whole:
        notes.warning(f"{finding.code} {finding.where}: {finding.message}")
    return FINDINGS if whole else FINE


def _diff_shipped(request: Request, notes: Notes, *, json: bool, wide: bool) -> int:
    from autotp import commands
    from autotp.display import comparison_sections, show

    comparison = commands.compare_shipped(request, notes)
    if json:
        typer.echo(commands.json_text(comparison.to_dict()))
    else:
        show(comparison_sections(comparison), wide=wide)
    return FINE if comparison.ok else FINDINGS


@app.command(epilog=_epilog("verify torchvision:resnet18 --tp 2", "verify model.py:build --plan model.toml"))
def verify(
    model: Model,
    tp: Tp = None,
    sp: Sp = False,
    sample: Sample = None,
    rules: Rules = None,
    plan_file: PlanFile = None,
    dtype: Dtype = "float64",
    json: Json = False,
    wide: Wide = False,
    debug: Debug = False,
) -> int:
    """Run a model sharded and unsharded, and compare all numbers."""
    from autotp import commands
    from autotp.display import Notes, report_sections, show

    saved = commands.load_plan(plan_file)
    ranks: int = tp or getattr(saved, "tp", None) or 2
    choices = commands.read_rules(rules or ()) or None
    with Notes(quiet=json).working(f"verifying {model} on {ranks} ranks"):
        from autotp.verification import verify_spec

        report = verify_spec(
            model,
            tp=ranks,
            sample=commands.read_sample(sample),
            rules=choices,
            plan=saved,
            dtype=commands.read_dtype(dtype),
            sequence_parallel=sp,
        )
    if json:
        typer.echo(commands.json_text(commands.verified(report, model, ranks)))
    else:
        show(report_sections(report), wide=wide)
    return FINE if report.ok else FINDINGS


@app.command(
    epilog=_epilog(
        "explain torchvision:resnet18 layer1.0.conv1.weight --tp 2", "explain model.py:build layers.0.fc --tp 8"
    )
)
def explain(
    model: Model,
    parameter: Annotated[str, typer.Argument(metavar="PARAMETER", help="Its name, or that of its module.")],
    tp: Tp = None,
    dp: Dp = None,
    sp: Sp = False,
    sample: Sample = None,
    rules: Rules = None,
    plan_file: PlanFile = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Say why one parameter is cut as it is."""
    from autotp import commands
    from autotp.display import Notes

    request = commands.Request(
        model=model, tp=tp, dp=dp, sequence_parallel=sp, sample=sample, rules=rules or (), plan_file=plan_file
    )
    made = commands.make_plan(request, Notes(quiet=json))
    typer.echo(commands.json_text(commands.explained(made, parameter)) if json else made.explain(parameter))
    return FINE


@app.command(epilog=_epilog("demo", "demo > demo.txt"))
def demo(debug: Debug = False) -> int:
    """Plan, shard and verify small models on this machine."""
    from autotp.demo import run as run_demo

    return int(run_demo(out=sys.stdout, progress=sys.stderr))


@app.command(epilog=_epilog("env", "env --json"))
def env(json: Json = False, debug: Debug = False) -> int:
    """Show versions and devices, to paste into a bug report."""
    from autotp.commands import json_text
    from autotp.environment import facts

    found = facts()
    width = max(map(len, found))
    lines = "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())
    typer.echo(json_text({"schema": 1, **found}) if json else lines)
    return FINE


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command; every failure becomes a message and an exit code."""
    debug, json = "--debug" in words, "--json" in words
    try:
        code = int(app(words or ["--help"], prog_name="autotp", standalone_mode=False) or FINE)
        sys.stdout.flush()
        return code
    except (AutotpError, _USAGE_ERROR) as error:
        return _failed(error, BAD_INPUT, debug=debug, json=json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted (`autotp plan ... | head`); keep the interpreter from flushing again.
        sys.stdout = None
        return FINE
    except Exception as error:
        return _failed(error, OUR_FAULT, debug=debug, json=json)


def _failed(error: Exception, exit_code: int, *, debug: bool, json: bool) -> int:
    from autotp.commands import json_text
    from autotp.display import Notes

    if debug:
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    told = getattr(error, "format_message", error.__str__)()
    code = getattr(error, "code", "TP-USAGE")
    if exit_code == OUR_FAULT:
        code = "TP-INTERNAL"
        told = f"{type(error).__name__}: {told}. This is a fault of autotp, not yours; --debug shows where it happened"
    if json:
        typer.echo(json_text({"schema": 1, "error": {"code": code, "message": told}}))
    context = getattr(error, "ctx", None)
    usage = f"\n{context.get_usage()}" if context is not None else ""
    Notes().error(f"{code}: {told}{usage}")
    return exit_code
