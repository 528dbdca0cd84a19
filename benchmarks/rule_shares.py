"""Which share of an audit does each rule take? One command, one run under the profiler.

    python benchmarks/rule_shares.py --tree DIR

A rule takes the analysis that is made for it alone (for PA201, 202, 204 and 207 that is one analysis) and its
check. The profiler slows Python code down evenly enough that shares can be compared; seconds it cannot tell.
Exit status 1: a rule takes more than a tenth.
"""

import argparse
import cProfile
import gc
import json
import pstats
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.rule import all_rules
from benchmarks.machine import machine_facts

RESULT = Path(__file__).parent / "results" / "rule-shares.json"
GOAL = 0.10
ANALYSES = {
    "PA201, PA202, PA204, PA207": (
        ("misused.py", "_life"),
        ("misused.py", "_given"),
        ("misused.py", "_handed_over"),
        ("twice_by_methods.py", "misuses"),
        ("twice_by_calls.py", "misuses"),
    ),
    "PA203": (("foreign.py", "misuses"), ("locks.py", "misuses")),
    "PA205": (("tensor_misuse.py", "_recorded"),),
    "PA206": (
        ("tensor_misuse.py", "_unwritten"),
        ("uninitialised.py", "memory_unwritten"),
        ("uninitialised_bytes.py", "may_read_unwritten"),
    ),
    "PA208": (("tensor_misuse.py", "_in_flight"),),
}
"""The functions under which a rule's own analysis runs, as file and name."""

Stats = dict[tuple[str, int, str], tuple[int, int, float, float, object]]


def shares(tree: Path) -> dict[str, float]:
    """Rule -> its part of the time of an audit of `tree`, in one process and without a cache."""
    profile = cProfile.Profile()
    request = Request((str(tree),), Settings(select=("ALL",)), tree)
    gc.collect()
    profile.runcall(audit, request)
    stats: Stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = max(entry[3] for entry in stats.values())
    found = {rule: _spent(stats, functions) / total for rule, functions in ANALYSES.items()}
    for rule in all_rules():
        name = Path(sys.modules[rule.check.__module__].__file__ or "").name
        found[f"{rule.meta.code} (check)"] = _spent(stats, ((name, "check"),)) / total
    return {rule: round(share, 5) for rule, share in found.items()}


def _spent(stats: Stats, functions: tuple[tuple[str, str], ...]) -> float:
    return sum(
        entry[3]
        for (file, _, name), entry in stats.items()
        if any(Path(file).name == wanted and name == function for wanted, function in functions)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, required=True, action="append", help="what to audit; repeatable")
    chosen = parser.parse_args()
    results = {tree.resolve().name: shares(tree.resolve()) for tree in chosen.tree}
    RESULT.parent.mkdir(exist_ok=True)
    kept = {"machine": machine_facts(), "goal": GOAL, "shares": results}
    RESULT.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    missed = False
    for tree, found in results.items():
        print(f"{tree}:")
        for rule, share in sorted(found.items(), key=lambda item: -item[1]):
            if share >= 0.0005:
                print(f"  {share:7.2%}  {rule}")
        print(f"  all others below 0.05 % each; {len(found)} measured")
        missed = missed or max(found.values()) > GOAL
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
