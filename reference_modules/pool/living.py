"""All pools of the process, weakly: for errors that name the right pool, and so that a fork leaves both sides
whole.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_modules.pool.tensor_pool import TensorPool

pools: weakref.WeakSet[TensorPool] = weakref.WeakSet()
_held: list[TensorPool] = []


def _before_fork() -> None:
    """Wait until no thread is inside a pool: the child gets only this thread, and must find every table
    whole.
    """
    for pool in list(pools):
        pool.lock.acquire()
        _held.append(pool)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().lock.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().reset_after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
