"""The analysis against brute force: on generated loop-free programs both give the same verdict."""

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from auditor.config import AnalysisSettings
from auditor.facts import EXCEPTIONAL, Lease
from auditor.project.analysis import analyse
from tests.flow.hand_written import HAND_WRITTEN
from tests.flow.path_oracle import COUNTED, TooManyPaths, Verdict, verdicts
from tests.flow.programs import Program, program, programs

NORMAL, BY_RAISE, KEPT = Verdict.NORMAL, Verdict.EXCEPTIONAL, Verdict.KEPT


def _hand_written() -> dict[str, tuple[str, list[Verdict]]]:
    """Title -> body and expected verdicts."""
    words = {"normal": NORMAL, "raise": BY_RAISE, "kept": KEPT}
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


def test_a_swallowed_exception_is_an_ordinary_way_out_in_every_mode() -> None:
    body = (
        "a = pool.acquire(1)\ntry:\n    work(a)\nexcept Exception:\n    #reached\n    return\npool.release(a)"
    )
    assert {mode: verdicts(program(body), mode)[1] for mode in COUNTED} == dict.fromkeys(COUNTED, NORMAL)


def _said(lease: Lease | None) -> Verdict:
    if lease is None or not lease.leaks:
        return KEPT
    return BY_RAISE if all(leak.loss in EXCEPTIONAL for leak in lease.leaks) else NORMAL


def _analysed(drawn: Program, exceptions: str) -> dict[int, Verdict]:
    """The analysis' verdict on each site; a `with pool.lease(...)` is an acquire too, and never lost."""
    result = analyse({"program.py": drawn.source}, AnalysisSettings(exceptions=exceptions))
    assert not result.failures and not result.unfollowed, (result.failures, result.unfollowed)
    said = {(lease.span.line, lease.span.column): _said(lease) for lease in result.leases}
    others = [place for place in said if place not in drawn.sites.values()]
    assert all(said[place] is KEPT for place in others), f"a lost `with` at {others}"
    return {site: said[place] for site, place in drawn.sites.items() if place in said}


def _compare(drawn: Program, exceptions: str) -> None:
    try:
        wanted = verdicts(drawn, exceptions)
    except TooManyPaths:
        assume(False)
    found = _analysed(drawn, exceptions)
    found = {
        site: verdict for site, verdict in found.items() if site in wanted
    }  # the others stand in dead code
    assert found == wanted, f"--exceptions {exceptions}\n{drawn.source}"


@pytest.mark.parametrize("name", CHECKED)
def test_analysis_on_programs_a_reader_can_check(name: str) -> None:
    body, _ = CHECKED[name]
    _compare(program(body), "calls")


def _profile(examples: int):
    return settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


EXCEPTIONS = st.sampled_from(("calls", "calls", "calls", "explicit"))


@_profile(500)
@given(programs(), EXCEPTIONS)
def test_same_verdict_on_generated_programs(drawn: Program, exceptions: str) -> None:
    _compare(drawn, exceptions)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@_profile(10_000)
@given(programs(), EXCEPTIONS)
def test_same_verdict_on_ten_thousand_generated_programs(drawn: Program, exceptions: str) -> None:
    _compare(drawn, exceptions)
