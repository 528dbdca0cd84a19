"""What people wait for: the common commands load neither templates nor the formats that they do not write."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import PROJECT, UNUSED

HEAVY = {"jinja2", "markupsafe", "xml", "libcst", "networkx", "torch"}
OURS = {
    "reports.html",
    "reports.sarif",
    "reports.junit",
    "reports.markdown",
    "reports.gitlab",
    "auditor.history",
}
TELL = """
import sys
from auditor.cli import main
try:
    main()
finally:
    print(" ".join(sys.modules), file=sys.stderr)
"""


def _loaded(folder: Path, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", TELL, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(PROJECT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [("--version",), ("audit", "a.py", "--isolated")], ids=["version", "warm"]
)
def test_nothing_heavy_is_loaded(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    _loaded(tmp_path, *arguments)  # fills the cache
    loaded = _loaded(tmp_path, *arguments)
    assert "auditor.cli" in loaded
    assert loaded & (HEAVY | OURS) == set()


def test_a_format_loads_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    loaded = _loaded(tmp_path, "audit", "a.py", "--isolated", "--format", "sarif")
    assert loaded & OURS == {"reports.sarif"}
