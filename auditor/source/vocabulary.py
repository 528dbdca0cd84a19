"""The byte pre-filter: from a file's bytes alone, how much of it the index has to parse."""

import re
from enum import Enum

from auditor.source.searched import Searched

# The contract counts imports and attributes by these words, so they are looked for exactly.
POOL_WORDS = (b"memory_pool", b"MemoryPool")

_POOL_CLASS = re.compile(rb"class(?<![^\n]class) +\w*(?:Pool|PoolMixin|Arena|Workspace)\b")  # literal first


class Need(Enum):
    """How much of a file can matter to the index."""

    NOTHING = "nothing"  # lines are counted from the bytes, and that is all
    MODULES = "modules"  # imports, class headers, and the classes that may allocate on their forward path
    WHOLE = "whole"  # it names a pool or defines one


def prefilter(file: Searched) -> Need:
    """Decide from bytes."""
    if any(file.has(word) for word in POOL_WORDS):
        return Need.WHOLE
    if file.has(b"Pool") and _POOL_CLASS.search(file.data):
        return Need.WHOLE
    if file.has(b"def forward(") or file.has(b"nn.Module)"):
        return Need.MODULES
    return Need.NOTHING


def count_lines(data: bytes) -> int:
    """Lines as an editor counts them: a last line without newline is a line."""
    return data.count(b"\n") + (not data.endswith(b"\n") if data else 0)
