"""Run the clean zoo until so many module-runs are made, and count false alarms:

    python -m tests.leaktests.measure_clean 1000 [NAME ...] [--minutes 15]

A run is one scenario of one module under ledger and quiet pass. Runs are kept, so it can be run in parts;
with names, only those run, and their runs are not kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from tests.leaktests.battery import first_leak
from tests.leaktests.clean import makers
from tests.leaktests.forks import Forks, forks
from tests.leaktests.sweep import PROJECT, SUPPORT, Kept, parser

AT_ONCE = 8
"""Modules in one process."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CLEAN = PROJECT / "tests" / "leaktests" / "clean"


def some(*names: str) -> None:
    """Every scenario of some modules, a line of JSON each."""
    for name in names:
        for scenario, step in makers()[name]().items():
            started = time.process_time()
            found = first_leak(step)
            told = {"run": f"{name}, {scenario}", "seconds": round(time.process_time() - started, 3)}
            print(json.dumps({**told, "alarm": f"{found[0]}: {found[1]}" if found else ""}), flush=True)


def main() -> int:
    """0: no alarm. 1: some, or a process that broke. 3: time was up before enough had run."""
    options = parser(__doc__, "leaktests-clean.jsonl")
    options.add_argument("wanted", type=int)
    options.add_argument("names", nargs="*")
    chosen = options.parse_args()
    with forks("tests.leaktests.measure_clean", ENVIRONMENT) as processes:
        if chosen.names:
            return _tell([row for row in _run(processes, chosen.names) if row["alarm"]])
        return _sweep(processes, chosen)


def _sweep(processes: Forks, chosen: Namespace) -> int:
    kept = Kept(chosen.keep, [*SUPPORT.glob("*.py"), *CLEAN.glob("*.py")], chosen.minutes)
    for turn, together in _batches():
        if len(kept.rows) >= chosen.wanted or kept.time_is_up:
            break
        if any(key.startswith(f"{turn} {together[0]},") for key in kept.rows):
            continue
        for row in _run(processes, together, kept):
            kept.add(f"{turn} {row['run']}", row)
        print(f"{len(kept.rows):5} runs, {_alarms(kept)} false alarms: {together[-1]}", flush=True)
    seconds = sum(row["seconds"] for row in kept.rows.values())
    told = f"{len(kept.rows)} module-runs, {_alarms(kept)} false alarms"
    print(f"{told}, {seconds / max(1, len(kept.rows)):.2f} s of processor time a run")
    _tell([row for row in kept.rows.values() if row["alarm"]])
    if len(kept.rows) < chosen.wanted:
        print(f"{chosen.wanted - len(kept.rows)} runs are missing: run it again to go on")
        return 3
    return 1 if _alarms(kept) else 0


def _batches() -> Iterator[tuple[int, list[str]]]:
    """Round after round through the zoo."""
    names, turn = list(makers()), 0
    while True:
        turn += 1
        for start in range(0, len(names), AT_ONCE):
            yield turn, names[start : start + AT_ONCE]


def _run(processes: Forks, names: Sequence[str], kept: Kept | None = None) -> list[dict[str, Any]]:
    """The runs of some modules in a process of their own; one that breaks is an alarm too."""
    done = processes.run("some", names)
    if kept is not None:
        kept.elsewhere = done.processor_seconds
    rows = done.rows
    if done.status:
        rows.append({"run": f"{names[0]}, process", "seconds": 0.0, "alarm": f"broke: {done.text[-800:]}"})
    return rows


def _alarms(kept: Kept) -> int:
    return sum(bool(row["alarm"]) for row in kept.rows.values())


def _tell(alarms: Sequence[dict[str, Any]]) -> int:
    for row in alarms:
        print(f"FALSE ALARM {row['run']}: {row['alarm'][:1500]}", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
