"""Runs generated tests, each file in a fresh process, and reads what pytest says of them."""

import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from auditor.leaktests.jobs import Job
from auditor.leaktests.workshop import Workshop

SECONDS = 120.0
"""How long one file of tests may take until it counts as hanging."""
_STACK_LINES = 8
_RAN_ALL = (0, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """One test. `outcome`: passed, failed, error or skipped."""

    name: str
    outcome: str
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class FileRun:
    """The tests of one file."""

    file: Path
    cases: tuple[Case, ...]
    seconds: float = 0.0

    @property
    def bad(self) -> tuple[Case, ...]:
        """What did not pass."""
        return tuple(case for case in self.cases if case.outcome in ("failed", "error"))


@dataclass(frozen=True, slots=True)
class TestOrder:
    """Which files, on which device, for how long each."""

    __test__ = False

    files: Sequence[Path]
    device: str = "cpu"
    seconds: float = SECONDS
    progress: Callable[[str, int, int], None] = field(default=lambda stage, done, total: None)


def run_files(order: TestOrder, shop: Workshop) -> list[FileRun]:
    """One process a file, one after the other."""
    runs = []
    for number, file in enumerate(order.files):
        order.progress("leak tests", number, len(order.files))
        runs.append(_run(file, order, shop))
    order.progress("leak tests", len(order.files), len(order.files))
    return runs


def _run(file: Path, order: TestOrder, shop: Workshop) -> FileRun:
    with tempfile.TemporaryDirectory(prefix="poolaudit-", ignore_cleanup_errors=True) as folder:
        said, report = Path(folder, "said"), Path(folder, "report.xml")
        arguments = (*pytest_arguments(file, Path(folder)), f"--junitxml={report}")
        status = shop.run(Job(str(said), order.seconds, arguments=arguments, device=order.device))
        if report.exists() and report.stat().st_size:
            return _whole(_read(file, report), status)
        text = said.read_bytes()[-20_000:].decode("utf-8", "replace") if said.exists() else ""
        return FileRun(file, (Case("process", "error", message=_ended(status, text, order.seconds)),))


def pytest_arguments(file: Path, scratch: Path) -> tuple[str, ...]:
    """How pytest is asked to run one file; `scratch` is a folder of its own."""
    settings = scratch / "pytest.ini"
    settings.write_text("[pytest]\n")  # the project's own options are meant for its own tests
    files = scratch / "files"  # of its own, or pytest would tidy up what its last runs left elsewhere
    options = ("-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(settings), "--basetemp", str(files))
    return (*options, "--rootdir", str(file.parent), str(file))


def _whole(run: FileRun, status: int) -> FileRun:
    """With a failure of its own where pytest gave up before all tests had run, as it does when it is told to
    by a KeyboardInterrupt or a call of `pytest.exit` in the code under test.
    """
    if status in _RAN_ALL or run.bad:
        return run
    message = f"the tests were broken off (pytest's status {status}) after {len(run.cases)} of them"
    return replace(run, cases=(*run.cases, Case("process", "error", message=message)))


def _read(file: Path, report: Path) -> FileRun:
    suite = ElementTree.parse(report).getroot()
    cases = tuple(_case(element) for element in suite.iter("testcase"))
    return FileRun(file, cases, sum(case.seconds for case in cases))


def _case(element: ElementTree.Element) -> Case:
    name, seconds = element.get("name", ""), float(element.get("time", "0"))
    for tag, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        told = element.find(tag)
        if told is not None:
            return Case(name or "import", outcome, seconds, _told(told))
    return Case(name, "passed", seconds)


def _told(element: ElementTree.Element) -> str:
    """The lines that pytest marks as the error; without any, all of it."""
    text = element.text or element.get("message") or ""
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if re.match(r"E\s", line)]
    return "\n".join(lines) or text.strip()


def _ended(status: int, said: str, seconds: float) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith('File "')]
    stack = "\n".join(lines[:_STACK_LINES])
    if "Timeout (" in said or status == -signal.SIGKILL:
        return f"the tests hung and were ended after {seconds:g} seconds\n{stack}".rstrip()
    if status < 0:
        name = signal.Signals(-status).name
        return f"the tests crashed the interpreter ({name})\n{stack}".rstrip()
    return f"the tests ended the interpreter (status {status})\n{said[-2000:]}".rstrip()
