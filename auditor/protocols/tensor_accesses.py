"""What torch operations do with a tensor's values, and what they keep for backward: tables, read once."""

import tomllib
from collections.abc import Iterable
from enum import Enum
from functools import cache
from importlib import resources


class Access(Enum):
    """What an operation does to the values of the tensor that it is called on or given."""

    READ = "read"
    OVERWRITE = "overwrite"
    NEUTRAL = "neutral"


def _read(name: str) -> dict[str, object]:
    return tomllib.loads(resources.files("auditor.protocols").joinpath(name).read_text(encoding="utf-8"))


@cache
def _accesses() -> dict[str, frozenset[str]]:
    table = _read("tensor-accesses.toml")
    return {key: frozenset(names) for key, names in table.items() if isinstance(names, list)}


@cache
def _known_operations() -> frozenset[str]:
    operations = _read("tensor-operations.toml")["new"]
    assert isinstance(operations, list)
    return frozenset(operations) | frozenset(_saving())


@cache
def _saving() -> dict[str, str]:
    """Operation -> the way in which it keeps inputs."""
    found: dict[str, str] = {}
    for way, table in _read("saved-inputs.toml").items():
        assert isinstance(table, dict)
        found.update(dict.fromkeys(table["names"], way))
    return found


def access_of(name: str) -> Access | None:
    """None where the tables are silent."""
    table = _accesses()
    if name in table["overwrite"]:
        return Access.OVERWRITE
    if name in table["neutral"]:
        return Access.NEUTRAL
    if name in _known_operations() or (name.endswith("_") and not name.endswith("__")):
        return Access.READ
    return None


def carries_gradient(name: str) -> bool:
    """Whether the result of the operation leads back to its inputs."""
    return name not in _accesses()["without_gradient"]


def makes_leaf(name: str) -> bool:
    """Whether this function of torch makes a tensor out of nothing."""
    return name in _accesses()["source"]


def module_keeps_input(name: str) -> bool:
    return _saving().get(name) == "modules"


def keeps(name: str, position: int, needing: Iterable[int]) -> bool:
    """Whether the operation keeps its operand at `position`, when those at `needing` need a gradient."""
    needed = set(needing)
    match _saving().get(name):
        case "crosswise":
            return bool(needed - {position})
        case "all":
            return bool(needed)
        case "own":
            return position == 0 and bool(needed)
        case "quotient":
            return bool(needed) if position == 1 else 1 in needed
        case "added":
            return position > 0 and bool(needed - {0, position})
        case "result":
            return position == 0 and bool(needed)
    return False
