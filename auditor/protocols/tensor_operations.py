"""Which torch operations keep a tensor's identity: the table is data, this reads it."""

import tomllib
from functools import cache
from importlib import resources

from auditor.flow.effects import BORROWED, PERHAPS_SAME, SAME, Treatment


@cache
def _table() -> dict[str, Treatment]:
    text = resources.files("auditor.protocols").joinpath("tensor-operations.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    table = dict.fromkeys(data["new"], BORROWED)
    table.update(dict.fromkeys(data["perhaps"], PERHAPS_SAME))
    table.update(dict.fromkeys(data["views"], SAME))
    return table


def treatment_of(name: str) -> Treatment | None:
    """Of a tensor that is the receiver or first argument of operation `name`; None where the table is
    silent."""
    found = _table().get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        return SAME  # in-place operations return their receiver
    return found
