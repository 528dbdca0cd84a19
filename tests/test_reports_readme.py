"""The README shows what the audit of the example really prints.

After a deliberate change run this file with POOLAUDIT_REFRESH=1, then read the difference.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=```text\n).+?(?=```)", re.DOTALL)
SECONDS = re.compile(r"in\s+\d+\.\d\d s")


def _audit(*options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "auditor.cli",
        "audit",
        "examples/longdoc",
        "--isolated",
        "--no-cache",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_output_in_the_readme_is_real() -> None:
    findings = _audit("--select", "PA102,PA109", "--quiet").stdout
    summary = _audit("--no-progress").stderr.lstrip("\n")
    assert findings
    assert "Found" in summary
    text = README.read_text(encoding="utf-8")
    if os.environ.get("POOLAUDIT_REFRESH"):
        blocks = iter([findings, summary])
        text = BLOCK.sub(lambda _: next(blocks), text)
        README.write_text(text, encoding="utf-8")
    shown = [SECONDS.sub("in 0.00 s", block) for block in BLOCK.findall(text)]
    assert shown == [findings, SECONDS.sub("in 0.00 s", summary)]
