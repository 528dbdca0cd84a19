"""The analysis against brute force: on generated loop-free programs both give the same verdict."""

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from auditor.config import AnalysisSettings
from auditor.facts import EXCEPTIONAL, Lease
from auditor.project.analysis import analyse
from tests.flow.path_oracle import TooManyPaths, Verdict, verdicts
from tests.flow.programs import Program, program, programs

NORMAL, BY_RAISE, KEPT = Verdict.NORMAL, Verdict.EXCEPTIONAL, Verdict.KEPT

# Programs whose verdicts a reader can check: body, and the verdict of each site in turn.
HAND_WRITTEN = {
    "never released": ("a = pool.acquire(1)", [NORMAL]),
    "released": ("a = pool.acquire(1)\npool.release(a)", [KEPT]),
    "call between": ("a = pool.acquire(1)\nwork(a)\npool.release(a)", [BY_RAISE]),
    "early return": ("a = pool.acquire(1)\nif c0:\n    return\npool.release(a)", [NORMAL]),
    "explicit raise": ("a = pool.acquire(1)\nif c0:\n    raise ValueError\npool.release(a)", [BY_RAISE]),
    "assertion": ("a = pool.acquire(1)\nassert c0\npool.release(a)", [BY_RAISE]),
    "same flag twice": ("if c0:\n    a = pool.acquire(1)\nif c0:\n    pool.release(a)", [KEPT]),
    "other flag": ("a = pool.acquire(1)\nif c0:\n    pool.release(a)\nif not c1:\n    return", [NORMAL]),
    "opposite flags": (
        "a = pool.acquire(1)\nif c0:\n    pool.release(a)\nif not c0:\n    pool.release(a)",
        [KEPT],
    ),
    "absent": ("a = pool.acquire(1)\nif a is None:\n    return\npool.release(a)", [KEPT]),
    "second fails": (
        "a = pool.acquire(1)\nb = pool.acquire(2)\nif b is None:\n    return\npool.release(a)\npool.release(b)",
        [NORMAL, KEPT],
    ),
    "second raises": (
        "a = pool.acquire(1)\nb = pool.acquire(2)\npool.release(a)\npool.release(b)",
        [BY_RAISE, KEPT],
    ),
    "finally": (
        "a = pool.acquire(1)\ntry:\n    work(a)\nfinally:\n    #reached\n    pool.release(a)",
        [KEPT],
    ),
    "finally returns": (
        "a = pool.acquire(1)\ntry:\n    return a\nfinally:\n    #reached\n    return None",
        [NORMAL],
    ),
    "swallowed": (
        "a = pool.acquire(1)\ntry:\n    work(a)\nexcept ValueError:\n    #reached\n    return\npool.release(a)",
        [NORMAL],
    ),
    "narrow handler": (
        "a = pool.acquire(1)\ntry:\n    work()\nexcept ValueError:\n    #reached\n    pool.release(a)\n    raise\npool.release(a)",
        [BY_RAISE],
    ),
    "wide handler": (
        "a = pool.acquire(1)\ntry:\n    work()\nexcept Exception:\n    #reached\n    pool.release(a)\n    raise\npool.release(a)",
        [KEPT],
    ),
    "returned": ("return pool.acquire(1)", [KEPT]),
    "returned with another": ("a = pool.acquire(1)\nb = None\nreturn a, b", [KEPT]),
    "returned sometimes": ("a = pool.acquire(1)\nreturn a if c0 else None", [NORMAL]),
    "stored": ("a = pool.acquire(1)\nholder.f1 = a\nwork()", [KEPT]),
    "stored too late": ("a = pool.acquire(1)\nwork()\nsink.append(a)", [BY_RAISE]),
    "discarded": ("pool.acquire(1)", [NORMAL]),
    "rebound": ("a = pool.acquire(1)\na = None\nraise ValueError", [NORMAL]),
    "rebound with an alias": ("a = pool.acquire(1)\nb = a\na = None\npool.release(b)", [KEPT]),
    "deleted": ("a = pool.acquire(1)\ndel a", [NORMAL]),
    "packed and unpacked": (
        "p = (pool.acquire(1), pool.acquire(2))\na, b = p\npool.release(a)\npool.release(b)",
        [BY_RAISE, KEPT],
    ),
    "half unpacked": (
        "p = (pool.acquire(1), pool.acquire(2))\na = p[0]\npool.release(a)",
        [BY_RAISE, NORMAL],
    ),
    "conditional acquire": ("a = pool.acquire(1) if c0 else None\nif c0:\n    pool.release(a)", [KEPT]),
    "walrus": ("if (a := pool.acquire(1)) is not None:\n    pool.release(a)", [KEPT]),
    "success flag": (
        "a = pool.acquire(1)\nd0 = False\ntry:\n    work(a)\n    d0 = True\nfinally:\n    #reached\n    if not d0:\n"
        "        pool.release(a)\nreturn a",
        [KEPT],
    ),
    "dead code": ("d0 = False\nif d0:\n    a = pool.acquire(1)", [KEPT]),
    "only ever raises": ("a = pool.acquire(1)\nraise ValueError", [BY_RAISE]),
    "temporary swallowed": (
        "try:\n    p = (pool.acquire(1), pool.acquire(2))\nexcept Exception:\n    #reached\n    return\nreturn p",
        [NORMAL, KEPT],
    ),
    "lease needs nothing": ("a = pool.acquire(1)\nwith pool.lease(8):\n    pool.release(a)", [BY_RAISE]),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_oracle_on_programs_a_reader_can_check(name: str) -> None:
    body, expected = HAND_WRITTEN[name]
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


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_analysis_on_programs_a_reader_can_check(name: str) -> None:
    body, _ = HAND_WRITTEN[name]
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
