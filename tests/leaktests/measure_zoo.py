"""Run every kind of the zoo at both sizes and print what was caught and named: `python -m
tests.leaktests.measure_zoo`.

Each in a process of its own, as `poolaudit gate` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from tests.leaktests.battery import LARGE, SMALL, first_leak, names_the_line
from tests.leaktests.zoo import halves, kinds

ONE = "import sys; from tests.leaktests.measure_zoo import one; one(sys.argv[1], int(sys.argv[2]))"
ENVIRONMENT = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "1"}


def one(name: str, size: int) -> None:
    """One kind at one size, told as a line of JSON."""
    started = time.perf_counter()
    found = first_leak(kinds()[name](size))
    seconds = time.perf_counter() - started
    told = {"pass": found and found[0], "named": bool(found and names_the_line(found[1])), "seconds": seconds}
    print(json.dumps({**told, "message": str(found[1]) if found else ""}), flush=True)
    os._exit(0)  # some kinds leave threads that never end


def main() -> None:
    """Both halves of the zoo, or the kinds that are named."""
    chosen = sys.argv[1:]
    for title, names in zip(("half the rules were chosen on", "other half"), halves(), strict=True):
        caught = named = runs = 0
        for name in (name for name in names if not chosen or name in chosen):
            for size in (SMALL, LARGE):
                done = subprocess.run(
                    [sys.executable, "-c", ONE, name, str(size)],
                    env=ENVIRONMENT,
                    capture_output=True,
                    text=True,
                )
                told = {"pass": None, "named": False, "seconds": 0.0, "message": done.stderr}
                told.update(json.loads(done.stdout.splitlines()[-1]) if done.stdout else {})
                runs, caught, named = runs + 1, caught + bool(told["pass"]), named + told["named"]
                print(
                    f"{name:40} {4 * size:>8} B  {told['pass'] or 'MISSED':7} "
                    f"{'named' if told['named'] else 'NOT NAMED':9} {told['seconds']:.2f} s",
                    flush=True,
                )
                if chosen or not told["named"]:
                    print(told["message"][-1500:], flush=True)
        print(f"{title}: {runs} runs, {caught} caught, {named} named", flush=True)


if __name__ == "__main__":
    main()
