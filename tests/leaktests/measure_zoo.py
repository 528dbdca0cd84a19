"""Run every kind of the zoo at both sizes and say what was caught and named:

    python -m tests.leaktests.measure_zoo [KIND ...] [--minutes 15]

Each in a fork of its own, as `poolaudit gate` runs them. Runs are kept, so it can be run in parts; kinds
that are named run again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.leaktests.battery import LARGE, SMALL, first_leak, names_the_line
from tests.leaktests.forks import Forks, forks
from tests.leaktests.sweep import PROJECT, SUPPORT, Kept, parser
from tests.leaktests.zoo import halves, kinds

ENVIRONMENT = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "1"}
ZOO = PROJECT / "tests" / "leaktests" / "zoo"


def one(name: str, size: int) -> None:
    """One kind at one size, told as a line of JSON."""
    started = time.process_time()
    found = first_leak(kinds()[name](size))
    seconds = round(time.process_time() - started, 3)
    told = {"pass": found and found[0], "named": bool(found and names_the_line(found[1])), "seconds": seconds}
    print(json.dumps({**told, "message": str(found[1]) if found else ""}), flush=True)


def main() -> int:
    """0: all caught. 1: some were not. 3: time was up before all had run."""
    options = parser(__doc__, "leaktests-zoo.jsonl")
    options.add_argument("kinds", nargs="*")
    chosen = options.parse_args()
    kept = Kept(chosen.keep, [*SUPPORT.glob("*.py"), *ZOO.glob("*.py")], chosen.minutes)
    with forks("tests.leaktests.measure_zoo", ENVIRONMENT) as processes:
        for name in (name for half in halves() for name in half):
            for size in (SMALL, LARGE):
                key = f"{name} {4 * size}"
                if kept.time_is_up or (key in kept.rows and name not in chosen.kinds):
                    continue
                if not chosen.kinds or name in chosen.kinds:
                    kept.add(key, _run(processes, name, size, kept))
                    _tell(key, kept.rows[key], whole=bool(chosen.kinds))
    for title, names in zip(("half the rules were chosen on", "other half"), halves(), strict=True):
        print(f"{title}: {_total(kept, names)}")
    missing = 2 * len(kinds()) - len(kept.rows)
    if missing:
        print(f"{missing} runs are missing: run it again to go on")
        return 3
    return 0 if all(row["pass"] for row in kept.rows.values()) else 1


def as_the_gate_runs_it(name: str, size: int) -> dict[str, Any]:
    """One kind at one size, in a process of its own."""
    with forks("tests.leaktests.measure_zoo", ENVIRONMENT) as processes:
        return _run(processes, name, size)


def _run(processes: Forks, name: str, size: int, kept: Kept | None = None) -> dict[str, Any]:
    done = processes.run("one", (name, size))
    if kept is not None:
        kept.elsewhere = done.processor_seconds
    told: dict[str, Any] = {"pass": None, "named": False, "seconds": 0.0, "message": done.text}
    told.update(done.rows[-1] if done.rows else {})
    if told["named"]:
        del told["message"]
    return told


def _tell(key: str, row: dict[str, Any], *, whole: bool) -> None:
    caught, named = row["pass"] or "MISSED", "named" if row["named"] else "NOT NAMED"
    print(f"{key:48} {caught:7} {named:9} {row['seconds']:.2f} s", flush=True)
    if "message" in row:
        print(row["message"][-1500:], flush=True)


def _total(kept: Kept, names: Sequence[str]) -> str:
    rows = [row for row in kept.rows.values() if row["key"].split()[0] in names]
    caught, named = sum(bool(row["pass"]) for row in rows), sum(row["named"] for row in rows)
    return f"{len(names)} kinds, {len(rows)} runs, {caught} caught, {named} named"


if __name__ == "__main__":
    sys.exit(main())
