"""Run the clean zoo until so many module-runs are made, and count false alarms:

    python -m tests.leaktests.measure_clean 1000 [NAME ...] [--minutes 15]

A run is one scenario of one module under ledger and quiet pass. Runs are kept, so it can be run in parts;
with names, only those run, and their runs are not kept.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.leaktests.battery import first_leak
from tests.leaktests.clean import makers
from tests.leaktests.sweep import PROJECT, SUPPORT, Kept, parser

SOME = "import sys; from tests.leaktests.measure_clean import some; some(sys.argv[1:])"
AT_ONCE = 8
"""Modules in one process: importing torch costs more than their tests."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CLEAN = PROJECT / "tests" / "leaktests" / "clean"


def some(names: list[str]) -> None:
    """Every scenario of some modules, a line of JSON each."""
    gc.collect()
    gc.freeze()  # what importing made is looked through once, not by every pass
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
    if chosen.names:
        return _tell([row for row in _run(chosen.names) if row["alarm"]])
    kept = Kept(chosen.keep, [*SUPPORT.glob("*.py"), *CLEAN.glob("*.py")], chosen.minutes)
    for turn, together in _batches():
        if len(kept.rows) >= chosen.wanted or kept.time_is_up:
            break
        if any(key.startswith(f"{turn} {together[0]},") for key in kept.rows):
            continue
        for row in _run(together):
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


def _run(names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of some modules in a process of their own; one that breaks is an alarm too."""
    command = [sys.executable, "-c", SOME, *names]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=PROJECT, capture_output=True, text=True)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        rows.append({"run": f"{names[0]}, process", "seconds": 0.0, "alarm": f"broke: {done.stderr[-800:]}"})
    return rows


def _alarms(kept: Kept) -> int:
    return sum(bool(row["alarm"]) for row in kept.rows.values())


def _tell(alarms: Sequence[dict[str, Any]]) -> int:
    for row in alarms:
        print(f"FALSE ALARM {row['run']}: {row['alarm'][:1500]}", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
