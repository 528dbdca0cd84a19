"""Where KV pages can live: device memory, host memory, disk."""
import logging
import os
from typing import List, Optional

log = logging.getLogger("tieredkv.tiers")


class TierFull(Exception):
    def __init__(self, tier, wanted):
        super().__init__(f"{tier}: {wanted} pages")
        self.tier = tier


class Tier:
    def __init__(self, name: str, pages: int):
        self.name = name
        self._free = list(range(pages))
        self.total = pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> List[int]:
        if n > len(self._free):
            raise TierFull(self.name, n)
        return [self._free.pop() for _ in range(n)]  # clean: returned, the length was tested

    def take_upto(self, n: int) -> List[int]:
        got = []
        while self._free and len(got) < n:
            got.append(self._free.pop())  # clean: returned, however many they are
        return got

    def give(self, pages: List[int]) -> None:
        self._free.extend(pages)


class Reservation:
    """Pages that are not sure to be needed: commit() moves them out, cancel() gives them up."""

    def __init__(self, tier: Tier, n: int):
        self._tier = tier
        self.pages = tier.take(n)  # clean: leaves by commit or by cancel

    def commit(self) -> List[int]:
        pages, self.pages = self.pages, []
        return pages

    def cancel(self) -> None:
        self._tier.give(self.pages)
        self.pages = []


class DiskTier:
    def __init__(self, root: str, slots: int):
        self.root = root
        self._slots = list(range(slots))

    def _path(self, slot: int) -> str:
        return os.path.join(self.root, f"{slot:06d}.kv")

    def write(self, blob: bytes) -> Optional[int]:
        if not self._slots:
            return None
        slot = self._slots.pop()  # leak: after an OSError the answer is None and the slot does not go back
        try:
            with open(self._path(slot), "wb") as fh:  # clean: with statement
                fh.write(blob)
        except OSError as exc:
            log.warning("cannot spill: %s", exc)
            return None
        return slot

    def read(self, slot: int) -> bytes:
        with open(self._path(slot), "rb") as fh:  # clean: with statement
            return fh.read()

    def erase(self, slot: int) -> None:
        try:
            os.unlink(self._path(slot))
        except FileNotFoundError:
            pass
        self._slots.append(slot)
