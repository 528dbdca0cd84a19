"""Prints the leaking combinations nobody tells and the right ones that are reported.

    python -m tests.combinations [POOL or USE ...] [--show]

With names, only combinations of them; `--show` prints the programs.
"""

from __future__ import annotations

import argparse
from collections import Counter

from tests.combinations.judge import Cell, cells, missed, reported
from tests.combinations.program import program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    asked = [
        cell
        for cell in cells()
        if set(arguments.names) <= {cell[0].name, cell[1].name} or _one_of(cell, arguments.names)
    ]
    _print("missed", [cell for cell in asked if missed(*cell)], len(asked))
    _print("false", [cell for cell in asked if reported(*cell, right=True)], len(asked))
    if arguments.show:
        for pool, use in asked:
            print(f"# {pool.name} in {use.name}\n{program(pool, use, right=False)}")


def _one_of(cell: Cell, names: list[str]) -> bool:
    return len(names) > 2 and (cell[0].name in names or cell[1].name in names)


def _print(what: str, found: list[Cell], of: int) -> None:
    print(f"{what} {len(found)} of {of}")
    for kind in (0, 1):
        for name, count in Counter(cell[kind].name for cell in found).most_common():
            print(
                f"  {('pool', 'use')[kind]} {name} {count}: {', '.join(cell[1 - kind].name for cell in found if cell[kind].name == name)[:150]}"
            )


if __name__ == "__main__":
    main()
