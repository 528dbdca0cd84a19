"""The byte pre-filter: from a file's bytes alone, how much of it the index has to parse."""

import re
from enum import Enum

# The contract counts imports and attributes by these words, so they are looked for exactly.
POOL_WORDS = (b"memory_pool", b"MemoryPool")

_POOL_CLASS = re.compile(rb"^class +\w*(?:Pool|PoolMixin|Arena|Workspace)\b", re.MULTILINE)


class Need(Enum):
    """How much of a file can matter to the index."""

    NOTHING = "nothing"  # lines are counted from the bytes, and that is all
    MODULES = "modules"  # imports, class headers, and the classes that may allocate on their forward path
    WHOLE = "whole"  # it names a pool or defines one


def prefilter(data: bytes) -> Need:
    """Decide from bytes; `bytes.find` runs at memory speed, so the common answer costs microseconds."""
    if any(word in data for word in POOL_WORDS):
        return Need.WHOLE
    if b"Pool" in data and _POOL_CLASS.search(data):
        return Need.WHOLE
    if b"def forward(" in data or b"nn.Module)" in data:
        return Need.MODULES
    return Need.NOTHING


def count_lines(data: bytes) -> int:
    """Lines as an editor counts them: a last line without newline is a line."""
    return data.count(b"\n") + (not data.endswith(b"\n") if data else 0)
