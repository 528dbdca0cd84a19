"""Which classes of a project lend, and what a step leaves lent through one line."""

import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from auditor.leaktests.plan import Aim
from auditor.leaktests.support.leases import Counter, goes_through
from auditor.leaktests.support.pools import counter_watched, pair_of_class
from auditor.leaktests.support.scenarios import Step


def pool_classes(root: str, module: ModuleType) -> list[type]:
    """The pools among the classes of the target's project that were imported with it."""
    found: dict[type, None] = {}
    for neighbour in _neighbours(root, module.__name__.partition(".")[0]):
        own = [value for value in list(vars(neighbour).values()) if isinstance(value, type)]
        for kind in own:
            importable = kind.__module__ == neighbour.__name__ and kind.__qualname__ == kind.__name__
            if importable and not _is_a_part(kind) and pair_of_class(kind) is not None:
                found[kind] = None
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


def _is_a_part(kind: type) -> bool:
    """Modules that borrow through a method of their own do not lend."""
    return issubclass(kind, torch.nn.Module)


def _neighbours(root: str, top: str) -> Iterator[ModuleType]:
    """What lies below the folder from which the target is imported; of installed packages its own alone."""
    installed = "-packages" in root
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        below = isinstance(file, str) and file.startswith(root + os.sep)
        if below and (not installed or name.partition(".")[0] == top):
            yield module


def left_lent(step: Step, pools: Sequence[type], aims: Sequence[Aim]) -> set[str]:
    """Run a step twice and close it: the fingerprints of the aims through whose line more was lent after the
    second step than after the first, or some after the end.
    """
    if not pools:
        step()
        return set()
    counter = Counter()
    with counter_watched(tuple(pools), counter.called):
        step()
        first = [_through(counter, aim) for aim in aims]
        step()
        second = [_through(counter, aim) for aim in aims]
        step.close()
        at_the_end = [_through(counter, aim) for aim in aims]
    return {
        aim.fingerprint
        for aim, before, after, left in zip(aims, first, second, at_the_end, strict=True)
        if after > before or left
    }


def _through(counter: Counter, aim: Aim) -> int:
    return sum(goes_through(frames, aim.where) for frames in counter.standing())
