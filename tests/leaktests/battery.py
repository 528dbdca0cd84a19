"""All passes on one step, cheapest first: what a generated test does, for steps that come without a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from auditor.leaktests.support import (
    Leak,
    assert_no_growth,
    assert_no_leases,
    assert_quiet,
    inject_faults,
)

SMALL, LARGE = 1, 1 << 18
"""Floats: 4 bytes and 1 MB."""


def first_leak(step: Callable[[], object]) -> tuple[str, Leak] | None:
    """The pass that complains, and what it says."""
    pools = getattr(step, "pools", ())
    passes: list[tuple[str, Callable[[], object]]] = [
        ("ledger", lambda: assert_no_growth(step)),
        ("quiet", lambda: assert_quiet(step)),
    ]
    if pools:
        passes.insert(0, ("leases", lambda: assert_no_leases(step, *pools)))
    if getattr(step, "fails", False):
        passes.append(("faults", lambda: inject_faults(step, pools=pools)))
    for name, run in passes:
        try:
            run()
        except Leak as leak:
            return name, leak
    return None


def names_the_line(leak: Leak) -> bool:
    """Whether the first culprit was born in a line that is marked as the leak."""
    if not leak.culprits:
        return False
    path, _, rest = leak.culprits[0].line.rpartition(":")
    if not Path(path).is_file():
        return False
    return Path(path).read_text().splitlines()[int(rest.split()[0]) - 1].rstrip().endswith("# leak")
