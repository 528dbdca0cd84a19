"""Audits combinations of pools and uses: what is said of the leaking one, and of the right one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from auditor.config import Settings
from tests.combinations.program import Pool, Use, pools, program, uses
from tests.field.score import NOT_JUDGED
from tests.marked_code import audited

Cell = tuple[Pool, Use]
_SETTINGS = msgspec.convert({"select": ["PA1"], "enable-protocols": ["files", "locks"]}, Settings)


def cells() -> list[Cell]:
    return [(pool, use) for pool in pools() for use in uses() if use.fits(pool)]


def missed(pool: Pool, use: Use) -> bool:
    return not reported(pool, use, right=False)


def reported(pool: Pool, use: Use, right: bool) -> list[str]:
    """Lines and codes of the findings outside PA103 and PA111."""
    text = program(pool, use, right)
    compile(text, f"{pool.name}_{use.name}.py", "exec")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "m.py").write_text(text)
        run = audited(Path(folder), "m.py", _SETTINGS)
    assert not run.failures, run.failures
    return [f"{found.span.line} {found.code}" for found in run.findings if found.code not in NOT_JUDGED]
