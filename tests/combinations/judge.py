"""Audits combinations of pools and uses: what is said of the leaking one, and of the right one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from auditor.config import Settings
from tests.combinations.program import Pool, Reach, Use, pools, program, reach, uses
from tests.field.score import NOT_JUDGED
from tests.marked_code import audited

Cell = tuple[Pool, Use]
SETTINGS = msgspec.convert({"select": ["PA1"], "enable-protocols": ["files", "locks"]}, Settings)


def cells() -> list[Cell]:
    return [(pool, use) for pool in pools() for use in uses() if use.fits(pool)]


def missed(pool: Pool, use: Use, by: Reach | None = None) -> bool:
    return not reported(pool, use, right=False, by=by)


def reported(pool: Pool, use: Use, right: bool, by: Reach | None = None) -> list[str]:
    """Lines and codes of the findings outside PA103 and PA111."""
    texts = program(pool, use, right, by or reach("annotated"))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            compile(text, f"{pool.name}_{use.name}.py", "exec")
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_text(text)
        run = audited(Path(folder), ".", SETTINGS)
    assert not run.failures, run.failures
    return [f"{found.span.line} {found.code}" for found in run.findings if found.code not in NOT_JUDGED]
