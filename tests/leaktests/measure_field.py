"""Run generated tests of other people's packages as the gate does, a fresh process a file:

    python -m tests.leaktests.measure_field FOLDER --keep FILE [--minutes 15] [--timeout 120]

FOLDER is what `poolaudit leaktests --output` wrote. Files that have run are kept, so it can be run in parts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from auditor.leaktests.running import FileRun, TestOrder, run_files
from auditor.leaktests.workshop import workshop
from tests.leaktests.sweep import Kept, parser, processor_seconds


def main() -> int:
    """0: every test passed. 1: some did not. 3: time was up before all had run."""
    options = parser(__doc__, "leaktests-field.jsonl")
    options.add_argument("folder", type=Path)
    options.add_argument("--timeout", type=float, default=120.0)
    chosen = options.parse_args()
    files = sorted(chosen.folder.glob("test_leaks_*.py"))
    kept = Kept(chosen.keep, [*files, *chosen.folder.glob("leak_support/*.py")], chosen.minutes)
    for file in files:
        if file.name not in kept.rows and not kept.time_is_up:
            started = processor_seconds()
            with workshop() as shop:  # one a file, so that its processor time is known
                (run,) = run_files(TestOrder([file], "cpu", chosen.timeout), shop)
            kept.add(file.name, {**_row(run), "processor_seconds": round(processor_seconds() - started, 2)})
            _tell(kept.rows[file.name])
    tests, bad = (sum(row[name] for row in kept.rows.values()) for name in ("tests", "bad"))
    print(f"{len(kept.rows)} of {len(files)} files, {tests} tests, {bad} did not pass")
    if len(kept.rows) < len(files):
        print("files are missing: run it again to go on")
        return 3
    return 1 if bad else 0


def _row(run: FileRun) -> dict[str, object]:
    return {
        "tests": len(run.cases),
        "bad": len(run.bad),
        "seconds": round(run.seconds, 2),
        "messages": {case.name: f"{case.outcome}: {case.message}" for case in run.bad},
    }


def _tell(row: dict[str, object]) -> None:
    print(
        f"{row['tests']:4} tests {row['bad']:3} bad {row['processor_seconds']:7.1f} s  {row['key']}",
        flush=True,
    )
    for name, message in dict(row["messages"]).items():  # type: ignore[call-overload]
        print(f"    {name}: {message[:1500]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
