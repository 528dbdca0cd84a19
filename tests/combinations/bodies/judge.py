"""Audits bodies of pools: what is said of the losing one, and of the right one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.combinations.bodies.program import Body, Store, program, stores, ways
from tests.combinations.judge import SETTINGS
from tests.marked_code import audited

Cell = tuple[Store, Body]


def cells() -> list[Cell]:
    return [(store, way) for store in stores() for way in ways() if way.fits(store)]


def reported(store: Store, way: Body, right: bool) -> list[str]:
    """Lines and codes of the findings; where nothing raises but in so many words PA103 counts as well."""
    text = program(store, way, right)
    compile(text, f"{store.name}_{way.name}.py", "exec")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "m.py").write_text(text)
        run = audited(Path(folder), ".", SETTINGS)
    assert not run.failures, run.failures
    return [f"{found.span.line} {found.code}" for found in run.findings if found.code != "PA111"]
