"""What the generated leak tests of the reference modules cost, pass by pass:

    python -m benchmarks.leaktest_cost [FILE ...] [--write FILE] [--repeat 1]

Each test file runs in a process of its own that has imported torch, as the gate runs it; without files those
in tests/generated run and benchmarks/results/leaktest-cost.json is written. Seconds of processor time are the
figure: on a busy machine the clock on the wall measures the others. They too grow there, two or three times,
for caches and cores are shared: with `--repeat` the cheapest run of each file counts, and `steps` holds each
test against plain training steps of the module timed just before and just after it, which grow as much.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.leaktests.probe.testing import make_ready
from auditor.leaktests.running import pytest_arguments
from auditor.leaktests.workshop import gate_environment
from benchmarks.machine import machine_facts

HERE = Path(__file__).parent
GENERATED = HERE.parent / "tests" / "generated"
RESULTS = HERE / "results" / "leaktest-cost.json"
PASSES = {
    "test_memory_stays_level": "ledger",
    "test_nothing_grows_unseen": "quiet",
    "test_nothing_stays_held_after_a_failure": "faults",
    "test_no_lease_stays_out_after_a_failed_acquire": "faults",
    "test_every_lease_comes_back": "leases",
    "test_the_pool_changes_no_bit": "equivalence",
    "test_a_planted_leak_is_found": "twins",
    "test_a_planted_object_is_found": "twins",
    "test_a_planted_lease_is_found": "twins",
    "test_what_a_planted_failure_holds_is_found": "twins",
}
COLUMNS = ("ledger", "quiet", "faults", "leases", "equivalence", "twins", "aimed", "pytest")
ONE = "import sys; from benchmarks.leaktest_cost import one; one(sys.argv[1])"
PLAIN_STEPS = 4


class Clock:
    """A pytest plugin: processor time by pass, also in plain steps, and how the tests ended."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COLUMNS, 0.0)
        self.steps = dict.fromkeys(COLUMNS, 0.0)
        self.tests = self.failed = 0
        self.step_seconds: list[float] = []
        self.beside = 0.0
        """What the plain steps took, which no test did."""
        self._step: Callable[[], object] | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Generator[None, None, None]:
        """One test's body."""
        column = PASSES.get(getattr(item, "originalname", item.name), "aimed")
        before, started = self._plain_step(item.module), time.process_time()
        try:
            return (yield)
        finally:
            spent = time.process_time() - started
            self.seconds[column] += spent
            self.steps[column] += 2 * spent / (before + self._plain_step(item.module))

    def _plain_step(self, tests: Any) -> float:
        """Seconds of one training step with nothing looking on, now."""
        started = time.process_time()
        if self._step is None:
            first = tests.SCENARIOS[0] if hasattr(tests, "SCENARIOS") else "train"
            self._step = tests.make_step(tests.build, tests.feed, first)
            for _ in range(PLAIN_STEPS):
                self._step()
        begun = time.process_time()
        for _ in range(PLAIN_STEPS):
            self._step()
        ended = time.process_time()
        self.beside += ended - started
        self.step_seconds.append((ended - begun) / PLAIN_STEPS)
        return self.step_seconds[-1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counted once a test, or where its fixtures fail."""
        self.tests += report.when == "call"
        self.failed += report.failed


def one(name: str) -> None:
    """All tests of one file, told as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as in auditor/leaktests/probe/testing.py
    make_ready()
    clock, started = Clock(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said, tempfile.TemporaryDirectory() as scratch:
        pytest.main([*pytest_arguments(Path(name), Path(scratch))], plugins=[clock])
    total = time.process_time() - started - clock.beside
    clock.seconds["pytest"] = total - sum(clock.seconds.values())
    told = {
        "module": Path(name).stem.removeprefix("test_leaks_").removeprefix("reference_modules_attention_"),
        "tests": clock.tests,
        "failed": clock.failed,
        "step": round(min(clock.step_seconds, default=0.0), 5),
        "steps": {title: round(spent) for title, spent in clock.steps.items()},
        "seconds": {title: round(spent, 3) for title, spent in clock.seconds.items()},
        "total": round(total, 3),
    }
    if clock.failed:
        print(said.getvalue(), file=sys.stderr)
    print(json.dumps(told))


def measure(files: Sequence[Path], repeat: int) -> list[dict[str, Any]]:
    """Every file in turn, each printed as it is done."""
    rows = []
    print(
        f"{'seconds of processor time':34}"
        + "".join(f"{title:>12}" for title in COLUMNS)
        + "   total   steps"
    )
    for file in files:
        row = min((_in_a_process(file) for _ in range(repeat)), key=lambda row: row["total"])
        rows.append(row)
        told = "".join(f"{row['seconds'][title]:12.2f}" for title in COLUMNS)
        print(f"{row['module'][-33:]:34}{told}{row['total']:8.2f}{sum(row['steps'].values()):8}", flush=True)
    return rows


def _in_a_process(file: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", ONE, str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=gate_environment())
    if done.returncode:
        raise SystemExit(f"{file}: its process ended with {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> int:
    """0: every test passed. 1: some did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", type=Path, help=f"default: {RESULTS.name}, if no files are named")
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each file, of which the cheapest counts"
    )
    options = parser.parse_args()
    facts = machine_facts()
    rows = measure(options.files or sorted(GENERATED.glob("test_leaks_*.py")), options.repeat)
    modules = [row for row in rows if row["tests"]]
    mean = sum(row["total"] for row in modules) / len(modules)
    tests = sum(row["tests"] for row in rows)
    steps = sum(sum(row["steps"].values()) for row in modules) / len(modules)
    print(
        f"{mean:.2f} s a module on the mean of {len(modules)}, {steps:.0f} plain steps; {tests} tests, "
        f"{sum(row['failed'] for row in rows)} failed"
    )
    file = options.write or (None if options.files else RESULTS)
    if file:
        result = {
            "machine": facts,
            "runs": options.repeat,
            "seconds_a_module": round(mean, 3),
            "steps_a_module": round(steps),
            "modules": rows,
        }
        file.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
