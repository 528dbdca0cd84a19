"""Prints the bodies that lose something and are not told, and the right ones that are reported.

python -m tests.combinations.bodies [STORE or WAY ...] [--show]
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from tests.combinations.bodies.judge import Cell, cells, reported
from tests.combinations.bodies.program import program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--show", action="store_true", help="print the losing programs too")
    arguments = parser.parse_args()
    names = set(arguments.names)
    asked = [cell for cell in cells() if not names or names <= {each.name for each in cell}]
    asked = asked or [cell for cell in cells() if names & {each.name for each in cell}]
    _print("missed", [cell for cell in asked if not reported(*cell, right=False)], len(asked))
    _print("false", [cell for cell in asked if reported(*cell, right=True)], len(asked))
    for store, way in asked if arguments.show else ():
        print(f"# {store.name} in {way.name}", program(store, way, right=False), sep="\n")


def _print(what: str, found: list[Cell], of: int) -> None:
    print(f"{what} {len(found)} of {of}")
    beside: dict[str, list[str]] = defaultdict(list)
    for store, way in found:
        beside[way.name].append(store.name)
    for name, others in sorted(beside.items(), key=lambda entry: -len(entry[1])):
        print(f"  {name} {len(others)}: {', '.join(others)}")


if __name__ == "__main__":
    main()
