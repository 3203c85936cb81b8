import io
import re
from html.parser import HTMLParser

import pytest
from golden import check_golden
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import llama_like, make_plan, mlp, row

from autotp.display import Notes, plan_sections, report_sections, show
from autotp.display.sections import Table, share_text, size_text
from autotp.display.text import fit, wrap_name
from autotp.verification import Report


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_colour_settings(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def shown(sections, width, monkeypatch, **options):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    show(sections, stream=stream, **options)
    return stream.getvalue()


def names_of(plan):
    return {
        re.sub(r"\.\d+\.", lambda _: ".{0..31}.", r.name) if "layers" in r.name else r.name for r in plan.parameters
    }


# Golden output


@pytest.mark.parametrize("width", [60, 80, 160])
def test_golden_terminal(width, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    check_golden(f"plan_{width}.txt", shown(plan_sections(llama_like()), width, monkeypatch))


def test_golden_pipe():
    stream = io.StringIO()
    show(plan_sections(llama_like()), stream=stream)
    check_golden("plan_pipe.txt", stream.getvalue())
    assert str(llama_like()) + "\n" == stream.getvalue()


def test_golden_html():
    check_golden("plan.html", llama_like()._repr_html_())


# What the golden files must keep true


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160, 300])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(width, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(plan_sections(llama_like()), width, monkeypatch)
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and "..." not in text
    # Names wrap inside their own column: join the first column's pieces.
    table = text.partition("why")[2].partition("Collectives")[0] if width >= 60 else ""
    joined = "".join(line[: line.find("  ")] if "  " in line else line for line in table.splitlines())
    if width >= 60:
        for name in names_of(llama_like()):
            assert name in joined.replace(" ", "")


def test_pipe_has_no_boxes_no_colour_and_no_limit():
    reason = "a long reason " * 40
    text = str(make_plan([row("x" * 300 + ".weight", (4, 4), reason=reason.strip())]))
    assert text.isascii() and "\033" not in text
    assert "x" * 300 in text and reason.strip() in text


def test_wide_shows_all_columns_on_one_line(monkeypatch):
    text = shown(plan_sections(llama_like()), 60, monkeypatch, wide=True)
    assert "global" in text and "not shown" not in text
    assert "closes the cut of model.layers.{0..31}.mlp.up_proj" in text


def test_colour_on_a_terminal_only_and_no_color_is_obeyed(monkeypatch):
    assert "\033[" in shown(plan_sections(mlp()), 80, monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[3" not in shown(plan_sections(mlp()), 80, monkeypatch)


def test_a_dumb_terminal_keeps_its_width(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = shown(plan_sections(llama_like()), 160, monkeypatch)
    assert "\033" not in text and max(map(len, text.splitlines())) > 80


def test_colour_never_carries_meaning_alone(monkeypatch):
    coloured = shown(plan_sections(llama_like()), 100, monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(plan_sections(llama_like()), 100, monkeypatch)
    strip = re.compile(r"\033\[[0-9;]*m")
    assert strip.sub("", coloured) == strip.sub("", plain)


def test_warnings_come_before_notes_and_fold():
    findings = str(llama_like()).partition("Findings")[2]
    assert findings.index("warning: TP-WHOLE model.layers.{0..31}.norm") < findings.index("note: TP-NOTE")
    assert "[32 times]" in findings


def test_totals_say_what_k53_says():
    text = str(mlp())
    assert "129 KiB in all, 32.5 KiB on rank 0 (25.1 %)" in text
    assert "forward 1 call, 32.0 KiB; backward 1 call, 32.0 KiB" in text
    assert "(estimate)" in text and "not counted: activations" in text


def test_a_plan_with_nothing_in_it():
    text = str(make_plan([]))
    assert "Parameters (0)" in text and "Collectives (0)" in text and "0.0 %" in text


@given(st.integers(20, 200), st.lists(st.text("ab.", min_size=1, max_size=90), min_size=1, max_size=4))
def test_a_fitted_table_is_never_wider_than_asked_unless_it_must_be(width, names):
    table = Table(
        headers=("name", "style", "global", "why"),
        rows=tuple((name, "colwise", "64x64", "because " * 9) for name in names),
        notes=3,
        droppable=(2,),
    )
    fitted = fit(table, width)
    total = sum(fitted.widths) + 3 * (len(fitted.widths) - 1)
    assert total <= max(width, 12 + 3 + len("colwise") + 3 + len("[1]"))


@given(st.text("ab.{}0", max_size=60), st.integers(1, 30))
def test_wrapping_a_name_loses_nothing(name, width):
    lines = wrap_name(name, width).split("\n")
    assert "".join(lines) == name and all(len(line) <= width for line in lines)


def test_wrapping_prefers_dots_but_not_those_of_a_range():
    assert wrap_name("layers.{0..31}.mlp.up", 14).split("\n") == ["layers.", "{0..31}.mlp.up"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (16 * 2**30, "16.0 GiB"), (2**60, "1024 PiB")]
)
def test_sizes(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.0 %"), (1, "100.0 %"), (0.9999, ">99.9 %"), (0.00001, "<0.1 %"), (0.251, "25.1 %")]
)
def test_shares_are_never_rounded_to_all_or_nothing(share, text):
    assert share_text(share) == text


# HTML


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_well_formed_without_script_or_style_sheet():
    parser = Balanced()
    parser.feed(llama_like()._repr_html_())
    assert parser.open == []
    assert "details" in parser.tags and not parser.tags & {"script", "style", "link", "img", "iframe"}


def test_html_escapes_names():
    text = make_plan([row("<b>&.w", (4, 4), reason="<script>")], model="<i>")._repr_html_()
    assert "<script>" not in text and "<i>" not in text and "&lt;b&gt;&amp;." in text


def test_html_stays_small_and_says_what_it_left_out():
    rows = [row(f"block{i}.weight", (4, 4), reason=f"reason {i}") for i in range(3000)]
    text = make_plan(rows)._repr_html_()
    assert len(text.encode()) < 100_000
    assert "more rows" in text and "Totals" in text


# Reports


def make_report(**changes):
    errors = {f"l.{i}.weight": i * 1e-16 for i in range(20)}
    facts = {"model": "toy", "tp": 2, "ok": True, "dtype": "float64", "forward_error": 1e-15, "gradients": errors}
    return Report(**{**facts, "input_gradients": {"x": 1e-17}, "cut_share": 0.98, **changes})


def test_golden_report():
    bad = make_report(
        ok=False,
        first_bad="l.3: output differs by 0.5",
        gradients={"l.3.weight": float("nan"), "l.2.weight": 1.0},
        state=False,
        ranks_agree=False,
    )
    check_golden("report_pass.txt", str(make_report()) + "\n")
    check_golden("report_fail.txt", str(bad) + "\n")


def test_a_report_says_its_verdict_in_words(monkeypatch):
    assert str(make_report()).startswith("Verify toy on tp=2 in float64: PASS\n")
    assert "FAIL" in make_report(ok=False)._repr_html_()
    assert "gradients   not compared" in str(make_report(gradients={}, input_gradients={}))
    assert "PASS" in shown(report_sections(make_report()), 60, monkeypatch)


# Notes


def test_notes_put_the_word_first_and_quiet_keeps_warnings():
    stream = io.StringIO()
    notes = Notes(stream, quiet=True)
    notes.note("saved")
    notes.warning("look")
    with notes.working("planning"):
        pass
    assert stream.getvalue() == "autotp: warning: look\n"


def test_progress_is_shown_on_a_terminal_only():
    pipe, terminal = io.StringIO(), Terminal()
    with Notes(pipe).working("planning x"), Notes(terminal).working("planning x"):
        pass
    assert pipe.getvalue() == ""
    assert "planning x" in terminal.getvalue()
