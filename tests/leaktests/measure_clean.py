"""Run the clean zoo until so many module-runs are made and count false alarms:
`python -m tests.leaktests.measure_clean 1000`. A run is one scenario of one module under ledger and quiet
pass.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time

from tests.leaktests.battery import first_leak
from tests.leaktests.clean import makers

SOME = "import sys; from tests.leaktests.measure_clean import some; some(sys.argv[1:])"
AT_ONCE = 8
"""Modules in one process: importing torch costs more than their tests."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def some(names: list[str]) -> None:
    """Every scenario of some modules, a line of JSON each."""
    gc.collect()
    gc.freeze()  # what importing made is looked through once, not by every pass
    for name in names:
        for scenario, step in makers()[name]().items():
            started = time.perf_counter()
            found = first_leak(step)
            told = {"run": f"{name}, {scenario}", "seconds": time.perf_counter() - started}
            print(json.dumps({**told, "message": f"{found[0]}: {found[1]}" if found else ""}), flush=True)


def main() -> None:
    """Round after round through the zoo; with names, only those."""
    wanted, names = int(sys.argv[1]), sys.argv[2:] or list(makers())
    runs, alarms, seconds, broken, rounds = 0, 0, 0.0, 0, 0
    while runs < wanted:
        rounds += 1
        for start in range(0, len(names), AT_ONCE):
            together = names[start : start + AT_ONCE]
            done = subprocess.run(
                [sys.executable, "-c", SOME, *together], env=ENVIRONMENT, capture_output=True, text=True
            )
            for told in map(json.loads, done.stdout.splitlines()):
                runs, seconds = runs + 1, seconds + told["seconds"]
                if told["message"]:
                    alarms += 1
                    print(f"FALSE ALARM {told['run']}: {told['message'][:1500]}", flush=True)
            if done.returncode:
                broken += 1
                print(f"BROKEN {together}: {done.stderr[-800:]}", flush=True)
            print(
                f"{runs:5} runs, {alarms} false alarms, {broken} broken, {seconds:.0f} s: {together[-1]}",
                flush=True,
            )
            if runs >= wanted:
                break
    print(f"{runs} module-runs in {rounds} rounds, {alarms} false alarms, {seconds / runs:.2f} s a run")


if __name__ == "__main__":
    main()
