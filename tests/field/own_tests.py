"""Whether a package's tests that pass still do once it is fixed: `-m tests.field.own_tests SOURCE TEST ...`.

SOURCE is an unpacked source distribution, TEST paths of tests within it. It is copied; the tests are run, the
copy is fixed with --unsafe-fixes, and they are run again. Tests that cannot run where this is run (no GPU, no
compiled extension, a missing dependency) fail before and count for nothing. This runs the package's code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.field.fix_copies import poolaudit

BAD = ("failure", "error", "skipped")


def passed(folder: Path, tests: Sequence[str], python: str, seconds: int) -> set[str]:
    """The names of the tests that pass, those of files that cannot be collected left out."""
    report = folder / "own-tests.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "--timeout", str(seconds), f"--junitxml={report}"]
    command = [python, "-m", "pytest", *options, "--continue-on-collection-errors", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    good = (case for case in cases if not any(case.find(kind) is not None for kind in BAD))
    return {f"{case.get('classname')}::{case.get('name')}" for case in good}


def measure(source: Path, tests: Sequence[str], package: str, python: str, seconds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "source"
        shutil.copytree(source, folder, symlinks=True)
        before = passed(folder, tests, python, seconds)
        done = poolaudit(folder, "fix", "--unsafe-fixes", package)
        after = passed(folder, tests, python, seconds)
        return {
            "package": package,
            "said": done.stderr.strip().splitlines()[-1] if done.stderr else "",
            "passed before": len(before),
            "of these pass after": len(before & after),
            "lost": sorted(before - after),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--package", required=True, help="the folder within SOURCE that is fixed")
    parser.add_argument("--python", default=sys.executable, help="one with the package's dependencies")
    parser.add_argument("--seconds", type=int, default=60, help="for one test")
    given = parser.parse_args()
    print(
        json.dumps(measure(given.source, given.tests, given.package, given.python, given.seconds)), flush=True
    )


if __name__ == "__main__":
    main()
