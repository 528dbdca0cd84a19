# poolaudit leaktests, sha256 d4577f6a70f6fab1: written again as long as that is the digest of the rest
"""What this process holds, by every counter that there is: Python's blocks, C's heap, the device's
allocator.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch


class Held(NamedTuple):
    """One reading. Where a counter does not exist it stays 0."""

    python_blocks: int
    heap_bytes: int
    cuda_bytes: int
    cuda_blocks: int


class _MallInfo(ctypes.Structure):
    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("free_chunks", ctypes.c_size_t),
        ("free_fast", ctypes.c_size_t),
        ("mapped_chunks", ctypes.c_size_t),
        ("mapped_bytes", ctypes.c_size_t),
        ("unused", ctypes.c_size_t),
        ("free_fast_bytes", ctypes.c_size_t),
        ("used_bytes", ctypes.c_size_t),
        ("free_bytes", ctypes.c_size_t),
        ("releasable", ctypes.c_size_t),
    )


def _find_mallinfo() -> Callable[[], _MallInfo] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # not glibc, or one before 2.33
        return None
    function.restype = _MallInfo
    found: Callable[[], _MallInfo] = function
    return found


_mallinfo = _find_mallinfo()
_clear_caches: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


def heap_bytes() -> int:
    """Bytes that malloc has handed out, large ones included; 0 where the C library does not say."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.used_bytes) + int(info.mapped_bytes)


def held() -> Held:
    """Collect, wait for the device, and read all counters.

    Python's cache of attributes is emptied: it holds the names that were looked up, and torch looks up names
    that it makes anew each time, so that it fills for hundreds of steps by a few of its 4,096 places each.
    """
    _clear_caches()
    gc.collect()
    cuda_bytes, cuda_blocks = _cuda()
    return Held(sys.getallocatedblocks(), heap_bytes(), cuda_bytes, cuda_blocks)


def _cuda() -> tuple[int, int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.current"], stats["active.all.current"]
