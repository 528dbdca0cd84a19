# poolaudit leaktests, sha256 84cb5b69ff4c0248: written again as long as that is the digest of the rest
"""What only the cycle collector frees, and whether it could hold a storage."""

from __future__ import annotations

import gc
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    NoneType,
)

_CONTAINERS = {
    *(dict, list, set, frozenset, tuple, type, property, classmethod, staticmethod),
    *(CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType),
}
"""All that they hold, they tell the collector."""
_ATOMS = {str, int, float, complex, bool, bytes, NoneType, CodeType, type}
"""They hold nothing; built-in classes are not made by steps."""


def unreachable() -> list[object]:
    """What a collection now would free, kept for a look."""
    flags, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return gc.garbage[before:]
    finally:
        gc.set_debug(flags)
        del gc.garbage[before:]


def free_harmless() -> None:
    """Free the garbage that is in cycles, if no storage can be in it or behind it: none of it may be of a
    kind whose insides nobody knows, as tensors, arrays and graphs are. Classes and functions that were made
    in a function are such garbage; torch.load leaves some at each call.
    """
    if _holds_nothing(unreachable()):
        gc.collect()


def _holds_nothing(garbage: list[object]) -> bool:
    members = {id(member) for member in garbage}
    if not all(type(member) in _CONTAINERS for member in garbage):
        return False
    left = gc.get_referents(*garbage)
    while left:
        behind = left.pop()
        if id(behind) in members or gc.is_tracked(behind):
            continue  # looked at already, or held by something else: it would be garbage otherwise
        if type(behind) in (dict, tuple):  # not tracked as long as they hold no containers
            left += gc.get_referents(behind)
        elif type(behind) not in _ATOMS:
            return False
    return True
