# poolaudit leaktests, sha256 d9a30c866f52616c: written again as long as that is the digest of the rest
"""What moves by itself is held still, so that memory comes and goes by the code under test alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_freezes = False
"""Whether this process keeps its objects frozen: to ask is to count them, all half a million."""


def freeze_imports() -> None:
    """What exists now, torch's half a million objects among it, is looked through by no pass of this
    process.
    """
    global _freezes
    _freezes = True
    gc.collect()
    gc.freeze()


@contextmanager
def held_still() -> Iterator[None]:
    """What exists now is frozen (later looks around are short), no collection starts by itself, and
    operations use one thread: on shared machines threads that wait for each other take most of the time of
    small steps.
    """
    global _freezes
    _freezes = _freezes or gc.get_freeze_count() > 0
    was_enabled, threads = gc.isenabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
        if _freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()
