"""Every format's output for the sample runs, compared letter by letter; html has tests of its own.

After a deliberate change run this file with POOLAUDIT_REFRESH=1, then read the difference.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import reports
from auditor.model import Run
from reports import _summary
from tests.fixtures.reports.sample_runs import EMPTY, HOSTILE, TYPICAL

GOLDEN = Path(__file__).parent / "fixtures" / "reports"
RUNS = {"typical": TYPICAL, "hostile": HOSTILE, "empty": EMPTY}


def _formats() -> list[str]:
    names = {module.name for module in pkgutil.iter_modules(reports.__path__) if module.name[0] != "_"}
    return sorted(names - {"html"})


def _render(name: str) -> Callable[..., str]:
    return importlib.import_module(f"reports.{name}").render


def _cases() -> dict[str, Callable[[], str]]:
    def case(render: Callable[..., str], run: Run, color: bool = False, width: int = 80) -> Callable[[], str]:
        return partial(render, run, color=color, width=width)

    cases = {f"{name}-{kind}": case(_render(name), run) for name in _formats() for kind, run in RUNS.items()}
    for kind, run in RUNS.items():
        cases[f"summary-{kind}"] = case(partial(_summary.summary, statistics=True), run)
    cases["full-typical-color"] = case(_render("full"), TYPICAL, color=True)
    cases["full-typical-narrow"] = case(_render("full"), TYPICAL, width=50)
    cases["concise-typical-color"] = case(_render("concise"), TYPICAL, color=True)
    cases["summary-brief"] = case(partial(_summary.summary, statistics=False), TYPICAL)
    cases["failures"] = case(_summary.failures, TYPICAL)
    cases["unfollowed"] = case(_summary.unfollowed, TYPICAL)
    return cases


@pytest.mark.parametrize("name", _cases())
def test_output(name: str) -> None:
    golden = GOLDEN / f"{name}.txt"
    output = _cases()[name]().encode()
    if os.environ.get("POOLAUDIT_REFRESH"):
        golden.write_bytes(output)
    assert output == golden.read_bytes()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(_cases())
