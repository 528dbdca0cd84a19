"""Seeds of dropout: backward must draw what forward drew, and no two places may draw alike."""

from __future__ import annotations

import hashlib


def derived(seed: int | None, *place: int) -> int | None:
    """Another seed for each place, the same each time; None stays None."""
    if seed is None:
        return None
    text = repr((seed, *place)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
