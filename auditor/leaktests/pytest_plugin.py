"""The pytest plugin: `@pytest.mark.no_leaks` and the fixture `leak_ledger`. torch is imported when a test
asks for it.

    @pytest.mark.no_leaks
    def test_forward(module):
        module(torch.randn(2, 8))

runs the test's body again and again and fails it if memory grows. Without torch the body runs once and says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

MARKER = (
    "no_leaks(quiet=False, warmup=3, windows=3, steps=4, settle=9, cycles='fail'): run the test's body "
    "as a step of the ledger pass, and with quiet=True of the quiet pass too; memory must not grow"
)
SUPPORT = "auditor.leaktests.support"


class LeakLedger:
    """What the fixture `leak_ledger` gives: the passes, for steps of your own."""

    def check(self, step: Callable[[], object], **options: Any) -> Any:
        """`assert_no_growth(step, ...)`: live storages and bytes are equal after every window of steps."""
        return _support().assert_no_growth(step, **options)

    def check_quiet(self, step: Callable[[], object], **options: Any) -> Any:
        """`assert_quiet(step, ...)`: Python's blocks, C's heap and the device come to rest."""
        return _support().assert_quiet(step, **options)

    def check_faults(self, step: Callable[[], object], **options: Any) -> int:
        """`inject_faults(step, ...)`: a failure at every operation leaves nothing behind; returns how
        many.
        """
        injected: int = _support().inject_faults(step, **options)
        return injected

    @contextmanager
    def nothing_stays(self) -> Iterator[None]:
        """A block at whose end no memory may be alive that was made inside."""
        with _support().nothing_stays():
            yield


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def leak_ledger() -> LeakLedger:
    """The passes of a leak test: check, check_quiet, check_faults, nothing_stays. Skips where torch is
    missing.
    """
    if find_spec("torch") is None:
        pytest.skip("leak_ledger needs torch: pip install 'poolaudit[torch,pytest]'")
    return LeakLedger()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test as a step. `None` leaves a test to pytest."""
    marker = pyfuncitem.get_closest_marker("no_leaks")
    if marker is None:
        return None
    if find_spec("torch") is None:
        pyfuncitem.warn(
            pytest.PytestWarning("no_leaks not checked: torch is missing (pip install 'poolaudit[torch]')")
        )
        return None
    _run_as_step(pyfuncitem, dict(marker.kwargs))
    return True


def _run_as_step(item: pytest.Function, options: dict[str, Any]) -> None:
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    quiet = options.pop("quiet", False)

    def step() -> None:
        result = item.obj(**arguments)
        if hasattr(result, "__await__") or hasattr(result, "__aiter__"):
            pytest.fail("no_leaks runs plain functions only; call asyncio.run inside the test", pytrace=False)

    support = _support()
    try:
        support.assert_no_growth(step, **options)
        if quiet:
            support.assert_quiet(step)
    except support.Leak as leak:
        pytest.fail(str(leak), pytrace=False)


def _support() -> Any:
    return import_module(SUPPORT)
