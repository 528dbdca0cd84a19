"""The analysis against brute force: on generated loop-free programs both give the same verdict."""

import os

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from auditor.config import AnalysisSettings
from auditor.facts import EXCEPTIONAL, Lease
from auditor.project.analysis import analyse
from tests.flow.hand_written import HAND_WRITTEN
from tests.flow.path_oracle import COUNTED, TooManyPaths, Verdict, verdicts
from tests.flow.programs import Program, program, programs

NORMAL, BY_RAISE, KEPT = Verdict.NORMAL, Verdict.EXCEPTIONAL, Verdict.KEPT


def _hand_written() -> dict[str, tuple[str, list[Verdict]]]:
    """Title -> body and expected verdicts."""
    words = {"normal": NORMAL, "swallowed": Verdict.SWALLOWED, "raise": BY_RAISE, "kept": KEPT}
    read = {}
    for block in HAND_WRITTEN.strip().split("\n\n"):
        head, _, body = block.partition("\n")
        title, _, verdict = head.removeprefix("# ").partition(": ")
        read[title] = (body, [words[word] for word in verdict.split() if word in words])
    return read


CHECKED = _hand_written()


@pytest.mark.parametrize("name", CHECKED)
def test_oracle_on_programs_a_reader_can_check(name: str) -> None:
    body, expected = CHECKED[name]
    found = verdicts(program(body))
    assert [found[site] for site in sorted(found)] == expected


def test_the_option_decides_which_exceptions_count() -> None:
    by_call = program("a = pool.acquire(1)\nwork(a)\npool.release(a)")
    by_statement = program("a = pool.acquire(1)\nassert c0\npool.release(a)")
    found = {
        mode: [*verdicts(by_call, mode).values(), *verdicts(by_statement, mode).values()] for mode in COUNTED
    }
    assert found == {"calls": [BY_RAISE, BY_RAISE], "explicit": [KEPT, BY_RAISE], "none": [KEPT, KEPT]}


@pytest.mark.parametrize("mode", COUNTED)
def test_what_a_handler_swallows_is_an_ordinary_way_out_with_an_excuse(mode: str) -> None:
    body = (
        "a = pool.acquire(1)\ntry:\n    work(a)\nexcept Exception:\n    #reached\n    return\npool.release(a)"
    )
    assert verdicts(program(body), mode) == {1: Verdict.SWALLOWED}


def test_what_a_failing_release_leaves_behind_is_doubtful() -> None:
    failing = "try:\n    pool.release(b)\nexcept ValueError:\n    #reached\n    return\n"
    body = "b = None\na = pool.acquire(1)\n" + failing + "return a"
    assert verdicts(program(body)) == {1: Verdict.DOUBTFUL}


def _said(lease: Lease | None) -> Verdict:
    if lease is None or not lease.leaks:
        return KEPT
    return BY_RAISE if all(leak.loss in EXCEPTIONAL for leak in lease.leaks) else NORMAL


def _analysed(drawn: Program) -> dict[int, Verdict]:
    """The analysis' verdict on each site; a `with pool.lease(...)` is an acquire too, and never lost."""
    result = analyse({"program.py": drawn.source}, AnalysisSettings())
    assert not result.failures and not result.unfollowed, (result.failures, result.unfollowed)
    said = {(lease.span.line, lease.span.column): _said(lease) for lease in result.leases}
    others = [place for place in said if place not in drawn.sites.values()]
    assert all(said[place] is KEPT for place in others), f"a lost `with` at {others}"
    return {site: said[place] for site, place in drawn.sites.items() if place in said}


# What the analysis may say where the oracle says this.
ACCEPTED = {
    NORMAL: {NORMAL},
    Verdict.SWALLOWED: {NORMAL, BY_RAISE},
    Verdict.OVERRULED: {NORMAL, BY_RAISE},
    BY_RAISE: {BY_RAISE},
    Verdict.DOUBTFUL: {NORMAL, BY_RAISE, KEPT},
    KEPT: {KEPT},
}


def _assert_same_verdicts(drawn: Program) -> None:
    try:
        wanted = verdicts(drawn)
    except TooManyPaths:
        assume(False)
    found = _analysed(drawn)
    wrong = {
        site: (wanted[site], found.get(site))
        for site in wanted
        if found.get(site) not in ACCEPTED[wanted[site]]
    }
    assert not wrong, f"site: (oracle, analysis) {wrong}\n{drawn.source}"


@pytest.mark.parametrize("name", CHECKED)
def test_analysis_on_programs_a_reader_can_check(name: str) -> None:
    body, _ = CHECKED[name]
    _assert_same_verdicts(program(body))


def _profile(examples: int) -> settings:
    return settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@_profile(300)
@given(programs())
def test_same_verdict_on_generated_programs(drawn: Program) -> None:
    _assert_same_verdicts(drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@_profile(10_000 if os.environ.get("POOLAUDIT_FUZZ") else 800)
@given(programs())
def test_same_verdict_on_many_generated_programs(drawn: Program) -> None:
    _assert_same_verdicts(drawn)
