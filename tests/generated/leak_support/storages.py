# poolaudit leaktests, sha256 77facc0b82d51e50: written again as long as that is the digest of the rest
"""Weak handles of storages, as exact as C++ is: alive means that some tensor, node or kernel holds the
memory.

A storage's Python object comes and goes; the memory does not follow it. torch's own weak pointer does: it
says when the last holder has gone, Python or not, and while it is kept no other storage takes the same
address.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage


_Storage: Any = torch.UntypedStorage
weak_pointer: Callable[[torch.UntypedStorage], int] = _Storage._weak_ref
"""A weak pointer to the memory; `forget` has to end it."""
expired: Callable[[int], bool] = _Storage._expired
"""Whether nothing holds the memory behind a weak pointer any more."""
storage_at: Callable[[int], torch.UntypedStorage | None] = _Storage._new_with_weak_ptr
"""That memory, held by the caller from now on; None once it is gone."""
forget: Callable[[int], None] = _Storage._free_weak_ref


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory behind a tensor; None for tensors that own none of their own (sparse, nested, wrappers)."""
    if not has_storage(tensor):
        return None
    if type(tensor) in PLAIN_TENSORS:
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
