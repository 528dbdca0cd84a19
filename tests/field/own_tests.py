"""Whether a package's tests that pass still do once it is fixed: `-m tests.field.own_tests SOURCE TEST ...`.

SOURCE is an unpacked source distribution, TEST files or folders of tests within it. It is copied twice, one
copy is fixed with --unsafe-fixes, and each file of tests runs in a process of its own, in the one and in the
other. Tests that cannot run where this is run (no GPU, no compiled extension, a missing dependency, too slow)
fail before and count for nothing. What passes before and not after is tried once more in both, for tests that
come and go. One line of JSON for each file that has passing tests, then one of sums. This runs the package's
code.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.field.fix_copies import poolaudit

BAD = ("failure", "error", "skipped")


@dataclass(frozen=True, slots=True)
class Runner:
    """How tests are run: with which Python, and for how many seconds a test and a file may take."""

    python: str
    a_test: int
    a_file: int

    def passed(self, folder: Path, file: str) -> set[str]:
        """The names of the file's tests that pass; none where it cannot be collected or does not end."""
        report = folder / "own-tests.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", "--timeout", str(self.a_test), f"--junitxml={report}"]
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            [self.python, "-m", "pytest", *options, file],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as running:
            try:
                running.wait(self.a_file)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)  # with the servers that its tests have started
        return _good(report) if report.exists() else set()


def _good(report: Path) -> set[str]:
    cases = ElementTree.parse(report).iter("testcase")
    good = (case for case in cases if not any(case.find(kind) is not None for kind in BAD))
    return {f"{case.get('classname')}::{case.get('name')}" for case in good}


def files_of(source: Path, tests: Sequence[str]) -> Iterator[str]:
    """The files of tests, folders taken apart, each once."""
    found: dict[str, None] = {}
    for test in tests:
        path = source / test
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found |= dict.fromkeys(str(file.relative_to(source)) for file in files)
    return iter(found)


def compare(before: Path, after: Path, file: str, runner: Runner) -> tuple[int, list[str]]:
    """How many tests pass before, and which of them do not after."""
    good = runner.passed(before, file)
    lost = good - runner.passed(after, file) if good else set()
    if lost:
        lost = (lost & runner.passed(before, file)) - runner.passed(after, file)
    return len(good), sorted(lost)


def measure(source: Path, tests: Sequence[str], package: str, runner: Runner) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch) / "before", Path(scratch) / "after"
        shutil.copytree(source, before, symlinks=True)
        shutil.copytree(source, after, symlinks=True)
        done = poolaudit(after, "fix", "--unsafe-fixes", package)
        passed, lost, files = 0, [], 0
        for file in files_of(source, tests):
            number, gone = compare(before, after, file, runner)
            passed, lost, files = passed + number, [*lost, *gone], files + bool(number)
            if number:
                yield {"file": file, "passed before": number, "lost": gone}
        said = " ".join(done.stderr.strip().splitlines()[-2:]) if done.stderr else ""
        yield {"package": package, "said": said, "files": files, "passed before": passed, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--package", required=True, help="the folder within SOURCE that is fixed")
    parser.add_argument("--python", default=sys.executable, help="one with the package's dependencies")
    parser.add_argument("--seconds", type=int, default=60, help="for one test")
    parser.add_argument("--file-seconds", type=int, default=300, help="for one file of tests")
    given = parser.parse_args()
    runner = Runner(given.python, given.seconds, given.file_seconds)
    for each in measure(given.source.resolve(), given.tests, given.package, runner):
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
