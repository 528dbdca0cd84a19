# poolaudit leaktests, sha256 c0a50033da07f79d: written again as long as that is the digest of the rest
"""Weak handles of storages, as exact as C++ is: alive means that some tensor, node or kernel holds the
memory.

A storage's Python object comes and goes; the memory does not follow it. torch's own weak pointer does: it
says when the last holder has gone, Python or not, and while it is kept no other storage takes the same
address.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

_Storage = torch.UntypedStorage
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Handle:
    """A weak pointer to one storage."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()

    @property
    def alive(self) -> bool:
        """Whether anything still holds the memory."""
        return not _Storage._expired(self._weak)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, held by the caller from now on; None once it is gone."""
        found: torch.UntypedStorage | None = _Storage._new_with_weak_ptr(self._weak)
        return found

    def __del__(self) -> None:
        _Storage._free_weak_ref(self._weak)  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory behind a tensor; None for tensors that own none of their own (sparse, nested, wrappers)."""
    if not torch._C._has_storage(tensor):
        return None
    if type(tensor) in _PLAIN:
        return tensor.untyped_storage()
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters refuse every question
        return tensor.untyped_storage()


def of_python_objects(*, youngest: bool = False) -> Iterator[tuple[object, torch.UntypedStorage]]:
    """Every tensor and storage object that the collector knows and has not frozen, with its storage; with
    `youngest` only what was made since its last run.
    """
    tensor_types, storage_types = _family(torch.Tensor), _family(torch.UntypedStorage)
    for candidate in gc.get_objects(generation=0 if youngest else None):
        kind = type(candidate)
        if kind in tensor_types:
            storage = storage_of(candidate)
            if storage is not None:
                yield candidate, storage
        elif kind in storage_types:
            yield candidate, candidate


def _family(kind: type[Any]) -> set[type[Any]]:
    """A class and all that derive from it: asking an object's type runs none of the object's own code."""
    found: set[type[Any]] = {kind}
    children: list[type[Any]] = type.__subclasses__(kind)
    for child in children:
        found |= _family(child)
    return found
