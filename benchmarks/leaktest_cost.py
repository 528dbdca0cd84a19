"""What each pass of a leak test costs a module: `python -m benchmarks.leaktest_cost [--json FILE]`.

Every module in a process of its own, once torch is imported. Seconds of processor time are the figure: on a
busy machine the clock on the wall measures the others.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import machine_facts

PASSES = ("ledger", "quiet", "leases", "faults", "equivalence", "all scenarios")
ONE = "import sys; from benchmarks.leaktest_cost import one; one(sys.argv[1])"


def one(name: str) -> None:
    """All passes over one reference module, pooled; figures as a line of JSON."""
    import torch

    from auditor.leaktests import support
    from reference_modules.pool import TensorPool
    from tests.leaktests.clean.ours import MODULES, built

    feed, pool = MODULES[name][1], TensorPool(threshold_mb=0.0)
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)

    def step(scenario: str = "train") -> support.Step:
        return support.make_step(lambda: built(name, pool), feed, scenario)

    plain = step()
    plain()
    figures: dict[str, float] = {"one step": _seconds(plain)}
    passes: dict[str, Callable[[], object]] = {
        "ledger": lambda: support.assert_no_growth(step()),
        "quiet": lambda: support.assert_quiet(step()),
        "leases": lambda: support.assert_no_leases(step(), pool),
        "equivalence": lambda: support.assert_equivalent(lambda on: built(name, pool if on else None), feed),
        "all scenarios": lambda: [support.assert_no_growth(step(scenario)) for scenario in support.SCENARIOS],
    }
    operations = support.count_places(step())
    if operations <= 400:
        passes["faults"] = lambda: support.inject_faults(step(), pools=(pool,))
    for title, run in passes.items():
        figures[title] = _seconds(run)
    print(json.dumps({"module": name, "operations": operations, "seconds": figures}))


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return round(time.process_time() - started, 4)


def main() -> None:
    """One line a module, and the sum of the passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    options = parser.parse_args()
    from tests.leaktests.clean.ours import MODULES

    facts, rows = machine_facts(), []
    print(f"{'seconds of processor time':34} {'step':>7} " + " ".join(f"{title:>13}" for title in PASSES))
    for name in MODULES:
        done = subprocess.run([sys.executable, "-c", ONE, name], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        rows.append(row)
        seconds = row["seconds"]
        told = " ".join(f"{seconds.get(title, float('nan')):13.2f}" for title in PASSES)
        print(f"{name:34} {seconds['one step']:7.4f} {told}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "modules": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
