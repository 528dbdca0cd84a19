"""The cycle collector held still, so that memory comes and goes by the code under test alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """What exists now is frozen (later looks around are short), and no collection starts by itself."""
    was_enabled, were_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if were_frozen:
            gc.freeze()
        if was_enabled:
            gc.enable()
