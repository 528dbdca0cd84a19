"""No text of the audited tree can break out of a report: any text at all, any width."""

import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from auditor.model import (
    ClassRow,
    Conventions,
    Failure,
    Finding,
    FixOffer,
    Run,
    Safety,
    Severity,
    Span,
    Step,
    Summary,
    SwitchUse,
)
from reports import _summary, concise, full, github
from reports import json as json_report
from reports._source import view
from reports._text import cells, safe, wrap
from tests.fixtures.reports.sample_runs import EMPTY, HOSTILE, TYPICAL

EXAMPLES = 1000 if os.environ.get("POOLAUDIT_FUZZ") else 60
PROPERTY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ODD = st.sampled_from(
    ["\x1b[31m", "\r\n", "\t", "\u202e", "中文", "😀", "e\u0301", "[bold]", "%0A", "::", "\ud800", "\x85"]
)
TEXT = st.lists(st.text(max_size=20) | ODD | st.just("x" * 90), max_size=6).map("".join)
NUMBER = st.integers(1, 12) | st.just(10_000_000)
PATHS = st.sampled_from(["a.py", "b/\x1b]0;x\x07.py", "c\n:: d,%.py"])
STEPS = st.builds(Step, PATHS, NUMBER, NUMBER, TEXT)
SPANS = st.builds(lambda path, line, column, more: Span(path, line, column, line + more // 8, column + more),
                  PATHS, NUMBER, NUMBER, st.integers(0, 100))  # fmt: skip
FINDINGS = st.builds(
    Finding,
    code=st.sampled_from(["PA101", "PA302"]),
    name=st.just("never-released"),
    severity=st.sampled_from(Severity),
    span=SPANS,
    symbol=TEXT,
    message=TEXT,
    trace=st.lists(STEPS, max_size=5).map(tuple) | st.lists(STEPS, min_size=30, max_size=30).map(tuple),
    fix=st.none() | st.builds(FixOffer, st.sampled_from(Safety), TEXT),
)
CLASSES = st.builds(
    ClassRow,
    name=TEXT,
    path=PATHS,
    line=NUMBER,
    bases=st.just(()),
    switch=st.none(),
    switch_default=st.none(),
    support=st.sampled_from(["none", "partial", "full"]),
    priority=st.sampled_from(["high", "low", None]),
    estimated_bytes=st.none() | TEXT,
    reason=TEXT,
)
RUNS = st.builds(
    Run,
    version=st.just("0.1.0"),
    summary=st.builds(Summary, acquire_names=st.lists(TEXT, max_size=15).map(tuple)),
    classes=st.lists(CLASSES, max_size=2).map(tuple),
    conventions=st.builds(
        Conventions,
        acquire=st.none() | TEXT,
        switch=st.none() | TEXT,
        switches=st.lists(st.builds(SwitchUse, TEXT, NUMBER, NUMBER, NUMBER), max_size=2).map(tuple),
        unused_imports=st.lists(TEXT, max_size=2).map(tuple),
    ),
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    failures=st.lists(st.builds(Failure, PATHS, NUMBER, TEXT), max_size=2).map(tuple),
    excerpts=st.dictionaries(PATHS, st.dictionaries(NUMBER, TEXT, max_size=8), max_size=3),
)
OBEYED = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def assert_fits(text: str, width: int) -> None:
    assert not OBEYED.search(text)
    assert all(cell_len(line) <= width for line in text.split("\n")), text


@PROPERTY
@given(run=RUNS, width=st.integers(40, 120))
def test_property_full_and_summary_fit_and_are_harmless(run: Run, width: int) -> None:
    for text in (
        full.render(run, color=False, width=width),
        _summary.summary(run, color=False, width=width, statistics=True),
    ):
        assert_fits(text, width)


@PROPERTY
@given(run=RUNS)
def test_property_colour_adds_nothing_but_its_escapes(run: Run) -> None:
    for render in (full.render, concise.render):
        plain, colored = (render(run, color=color, width=80) for color in (False, True))
        stripped = [line.rstrip() for line in COLOR.sub("", colored).split("\n")]
        assert stripped == plain.split("\n")


@PROPERTY
@given(run=RUNS)
def test_property_line_formats_keep_one_record_a_line(run: Run) -> None:
    lines = concise.render(run, color=False, width=80).splitlines()
    assert len(lines) == len(run.findings)
    commands = github.render(run, color=False, width=80).splitlines()
    assert len(commands) == len(run.findings) + len(run.failures)
    assert all(re.match(r"::(error|warning|notice) file=[^:,]*,[^:]*::", command) for command in commands)


@PROPERTY
@given(run=RUNS)
def test_property_json_gives_every_text_back(run: Run) -> None:
    document = json.loads(json_report.render(run, color=False, width=80))
    assert [finding["message"] for finding in document["findings"]] == [f.message for f in run.findings]
    assert [[step["note"] for step in finding["trace"]] for finding in document["findings"]] == [
        [step.note for step in finding.trace] for finding in run.findings
    ]


@pytest.mark.parametrize("render", [full.render, concise.render, github.render])
def test_nothing_is_said_of_an_empty_run(render) -> None:
    assert render(EMPTY, color=True, width=80) == ""


def test_a_megabyte_line_is_cut_without_being_read() -> None:
    line = "x" * 5_000_000 + "acquire()" + "y" * 5_000_000
    seen = view(line, 5_000_000, 5_000_009, 60)
    assert seen.text[seen.start : seen.start + seen.length] == "acquire()"
    assert len(seen.text) <= 60


@pytest.mark.parametrize("run", [TYPICAL, HOSTILE])
def test_a_terminal_too_narrow_to_draw_on_gets_forty_columns(run: Run) -> None:
    assert full.render(run, color=False, width=1) == full.render(run, color=False, width=40)


def test_a_caret_past_the_end_of_a_line_that_just_fits_is_still_in_sight() -> None:
    seen = view("x" * 60, 999, 1000, 60)
    assert seen.start + seen.length <= 60


def test_carets_stand_under_wide_characters() -> None:
    line = "    缓冲 = 池.allocate(8)"
    start = line.index("池")
    seen = view(line, start, len(line), 60)
    assert (seen.start, seen.length) == (cells("    缓冲 = "), cells("池.allocate(8)"))


def test_controls_become_one_visible_character_each() -> None:
    assert safe("a\x1bb\x07c\x7fd\u202ee\x9bf") == "a␛b␇c␡d\ufffde\ufffdf"
    assert safe("a\tb") == "a    b"


def test_wrapping_breaks_words_only_where_it_must() -> None:
    assert wrap("one two three", 8, hanging=2) == ["one two", "  three"]
    assert wrap("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert wrap("x", 10, first=3) == ["   x"]
