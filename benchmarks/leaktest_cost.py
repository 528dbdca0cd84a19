"""What the generated leak tests of the reference modules cost, pass by pass:

    python -m benchmarks.leaktest_cost [FILE ...] [--write FILE]

Each test file runs in a process of its own that has imported torch, as the gate runs it; without files those
in tests/generated run and benchmarks/results/leaktest-cost.json is written. Seconds of processor time are the
figure: on a busy machine the clock on the wall measures the others. `steps` is what a pass costs in plain
training steps of the module, the least that any test of it could take.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.leaktests.running import pytest_arguments
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
PLAIN_STEPS = 20


class Clock:
    """A pytest plugin: processor time by pass, and how the tests ended."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COLUMNS, 0.0)
        self.tests = self.failed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """One test's body."""
        started = time.process_time()
        try:
            return (yield)
        finally:
            name = getattr(item, "originalname", item.name)
            self.seconds[PASSES.get(name, "aimed")] += time.process_time() - started

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counted once a test, or where its fixtures fail."""
        self.tests += report.when == "call"
        self.failed += report.failed


def one(name: str) -> None:
    """All tests of one file, told as a line of JSON."""
    import torch
    import torch._dynamo  # what checkpointing and pickling would import; the gate's process holds it ready

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as in auditor/leaktests/probe/testing.py
    gc.collect()
    gc.freeze()
    clock, started = Clock(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said, tempfile.TemporaryDirectory() as scratch:
        pytest.main([*pytest_arguments(Path(name), Path(scratch))], plugins=[clock])
    total = time.process_time() - started
    clock.seconds["pytest"] = total - sum(clock.seconds.values())
    told = {
        "module": Path(name).stem.removeprefix("test_leaks_").removeprefix("reference_modules_attention_"),
        "tests": clock.tests,
        "failed": clock.failed,
        "step": _plain_step(Path(name)),
        "seconds": {title: round(spent, 3) for title, spent in clock.seconds.items()},
        "total": round(total, 3),
    }
    if clock.failed:
        print(said.getvalue(), file=sys.stderr)
    print(json.dumps(told))


def _plain_step(file: Path) -> float:
    """Seconds of one training step with nothing looking on."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    tests: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    first = tests.SCENARIOS[0] if hasattr(tests, "SCENARIOS") else "train"
    step = tests.make_step(tests.build, tests.feed, first)
    for _ in range(PLAIN_STEPS):
        step()
    started = time.process_time()
    for _ in range(PLAIN_STEPS):
        step()
    return round((time.process_time() - started) / PLAIN_STEPS, 5)


def measure(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Every file in turn, each printed as it is done."""
    rows = []
    print(
        f"{'seconds of processor time':34}"
        + "".join(f"{title:>12}" for title in COLUMNS)
        + "   total   steps"
    )
    for file in files:
        done = subprocess.run([sys.executable, "-c", ONE, str(file)], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{file}: its process ended with {done.returncode}")
        row = json.loads(done.stdout.splitlines()[-1])
        row["steps"] = round(row["total"] / row["step"]) if row["step"] else None
        rows.append(row)
        told = "".join(f"{row['seconds'][title]:12.2f}" for title in COLUMNS)
        print(f"{row['module'][-33:]:34}{told}{row['total']:8.2f}{row['steps']:8}", flush=True)
    return rows


def main() -> int:
    """0: every test passed. 1: some did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", type=Path, help=f"default: {RESULTS.name}, if no files are named")
    options = parser.parse_args()
    facts = machine_facts()
    rows = measure(options.files or sorted(GENERATED.glob("test_leaks_*.py")))
    modules = [row for row in rows if row["tests"]]
    mean = sum(row["total"] for row in modules) / len(modules)
    tests = sum(row["tests"] for row in rows)
    print(
        f"{mean:.2f} s a module on the mean of {len(modules)}; {tests} tests, "
        f"{sum(row['failed'] for row in rows)} failed"
    )
    file = options.write or (None if options.files else RESULTS)
    if file:
        result = {"machine": facts, "seconds_a_module": round(mean, 3), "modules": rows}
        file.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
