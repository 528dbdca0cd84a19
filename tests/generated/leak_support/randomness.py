# poolaudit leaktests, sha256 f9fad3a69e373445: written again as long as that is the digest of the rest
"""Random numbers that are the same in every step."""

from __future__ import annotations

import torch


def set_seed(number: int) -> None:
    """As `torch.manual_seed`, which for each kind of device that was not used yet writes down a whole stack:
    a quarter of the time of small steps.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
