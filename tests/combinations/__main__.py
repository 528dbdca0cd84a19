"""Prints the leaking combinations nobody tells and the right ones that are reported.

    python -m tests.combinations [POOL or USE ...] [--reach REACH] [--show]

Two names are a cell if one is a pool and the other a use; otherwise every row and column named is judged.
Without --reach the user is given the pool under its annotated name.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from tests.combinations.judge import Cell, cells, missed, reported
from tests.combinations.program import program, reach


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--show", action="store_true", help="print the leaking programs too")
    parser.add_argument("--reach", default="annotated", help="how the user comes by the pool")
    arguments = parser.parse_args()
    by = reach(arguments.reach)
    asked = _asked(arguments.names)
    _print("missed", [cell for cell in asked if missed(*cell, by)], len(asked))
    _print("false", [cell for cell in asked if reported(*cell, right=True, by=by)], len(asked))
    if arguments.show:
        for pool, use in asked:
            print(f"# {pool.name} in {use.name}", *program(pool, use, False, by).values(), sep="\n")


def _asked(names: list[str]) -> list[Cell]:
    named = [(cell, {cell[0].name, cell[1].name} & set(names)) for cell in cells()]
    exact = [cell for cell, found in named if len(found) == 2]
    if len(names) == 2 and exact:
        return exact
    return [cell for cell, found in named if found or not names]


def _print(what: str, found: list[Cell], of: int) -> None:
    print(f"{what} {len(found)} of {of}")
    for kind, other in ((0, 1), (1, 0)):
        others: dict[str, list[str]] = defaultdict(list)
        for cell in found:
            others[cell[kind].name].append(cell[other].name)
        for name, beside in sorted(others.items(), key=lambda entry: -len(entry[1])):
            print(f"  {('pool', 'use')[kind]} {name} {len(beside)}: {', '.join(beside)}")


if __name__ == "__main__":
    main()
