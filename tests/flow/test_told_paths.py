"""What a finding's path tells: the branches on which the leak hangs, each once, and no others."""

from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from auditor.config import Settings
from tests.marked_code import audited

PATHS = {
    "a branch that decides nothing": (
        """
        def load(pool, size, loud, wanted):
            block = pool.acquire(size)
            if loud:
                print(size)
            if not wanted:
                return None
            pool.release(block)
        """,
        ["acquired here", "when not `wanted`", "returns here, still holding it"],
    ),
    "a whole condition after the part that decided it": (
        """
        def load(pool, size, wanted, free):
            block = pool.acquire(size)
            if wanted and free:
                pool.release(block)
            return None
        """,
        ["acquired here", "when `wanted and free` is false", "returns here, still holding it"],
    ),
    "every part of a condition that must hold": (
        """
        def load(pool, size, late, full):
            block = pool.acquire(size)
            if late and full:
                return None
            pool.release(block)
        """,
        ["acquired here", "when `late`", "when `full`", "returns here, still holding it"],
    ),
    "the same question asked again": (
        """
        def load(pool, size, profiler, failed):
            block = pool.acquire(size)
            if profiler is not None:
                profiler.start()
            if failed:
                return None
            if profiler is not None:
                profiler.stop()
            pool.release(block)
        """,
        ["acquired here", "when `failed`", "returns here, still holding it"],
    ),
    "one turn of a loop": (
        """
        def load(pool, sizes, known):
            for size in sizes:
                block = pool.acquire(size)
                if size > 8:
                    known.add(8)
                if size in known:
                    continue
                pool.release(block)
        """,
        ["acquired here", "when `size in known`", "goes on with the next turn"],
    ),
}


@pytest.mark.parametrize("title", PATHS)
def test_only_what_decides_is_told(title: str, tmp_path: Path) -> None:
    code, expected = PATHS[title]
    (tmp_path / "pools.py").write_text(dedent(code), encoding="utf-8")
    (finding,) = audited(tmp_path, "pools.py", msgspec.convert({"select": ["PA102"]}, Settings)).findings
    assert [step.note for step in finding.trace][: len(expected)] == expected
    assert len(finding.trace) <= len(expected) + 1  # where a loop's turn ends in the next acquire
