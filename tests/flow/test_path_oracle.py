"""The analysis against brute force: on generated loop-free programs both give the same verdict."""

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from auditor.config import AnalysisSettings
from auditor.facts import EXCEPTIONAL, Lease
from auditor.project.analysis import analyse
from tests.flow.hand_written import HAND_WRITTEN
from tests.flow.path_oracle import TooManyPaths, Verdict, verdicts
from tests.flow.programs import Program, program, programs

NORMAL, BY_RAISE, KEPT = Verdict.NORMAL, Verdict.EXCEPTIONAL, Verdict.KEPT


def _hand_written() -> dict[str, tuple[str, list[Verdict]]]:
    """Title -> body and expected verdicts."""
    words = {"normal": NORMAL, "raise": BY_RAISE, "kept": KEPT}
    read = {}
    for block in HAND_WRITTEN.strip().split("\n\n"):
        head, _, body = block.partition("\n")
        title, _, verdict = head.removeprefix("# ").partition(": ")
        read[title] = (body, [words[word] for word in verdict.split()])
    return read


CHECKED = _hand_written()


@pytest.mark.parametrize("name", CHECKED)
def test_oracle_on_programs_a_reader_can_check(name: str) -> None:
    body, expected = CHECKED[name]
    found = verdicts(program(body))
    assert [found[site] for site in sorted(found)] == expected


def test_without_raising_calls_only_explicit_raises_lose() -> None:
    body = "a = pool.acquire(1)\nwork(a)\nif c0:\n    raise ValueError\npool.release(a)"
    assert verdicts(program(body), calls_raise=False) == {1: BY_RAISE}
    assert verdicts(program("a = pool.acquire(1)\nwork(a)\npool.release(a)"), calls_raise=False) == {1: KEPT}


def _said(lease: Lease | None) -> Verdict:
    if lease is None or not lease.leaks:
        return KEPT
    return BY_RAISE if all(leak.loss in EXCEPTIONAL for leak in lease.leaks) else NORMAL


def _analysed(drawn: Program, exceptions: str) -> dict[int, Verdict]:
    """The analysis' verdicts by site: the acquires of a line come in the order of their columns."""
    result = analyse({"program.py": drawn.source}, AnalysisSettings(exceptions=exceptions))
    assert not result.failures and not result.unfollowed, (result.failures, result.unfollowed)
    leases = sorted(result.leases, key=lambda lease: lease.span)
    sites = sorted(drawn.sites)
    assert len(leases) == len(sites), f"{len(leases)} acquires seen, {len(sites)} written"
    return {site: _said(lease) for site, lease in zip(sites, leases, strict=True)}


def _compare(drawn: Program, exceptions: str) -> None:
    try:
        wanted = verdicts(drawn, calls_raise=exceptions == "calls")
    except TooManyPaths:
        assume(False)
    found = _analysed(drawn, exceptions)
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
