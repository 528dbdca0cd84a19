"""Staging buffers in page locked host memory for uploads to the device."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

import numpy as np
import pinlib

from staging.device import Device, TransferError

log = logging.getLogger(__name__)


def upload(device: Device, batch: np.ndarray) -> int:
    pinlib.pin_host(batch)  # clean: unpinned in the finally
    try:
        return device.copy_async(batch).wait()
    finally:
        pinlib.unpin_host(batch)


def upload_if_changed(device: Device, name: str, batch: np.ndarray) -> bool:
    pinlib.pin_host(batch)  # leak: an unchanged batch returns while pinned
    digest = device.digest(batch)
    if digest == device.known(name):
        return False
    device.copy_async(batch).wait()
    pinlib.unpin_host(batch)
    return True


def upload_contiguous(device: Device, batch: np.ndarray) -> int:
    pinlib.pin_host(batch)  # leak: batch is rebound to a copy, which is what gets unpinned
    if not batch.flags.c_contiguous:
        batch = np.ascontiguousarray(batch)
    moved = device.copy_async(batch).wait()
    pinlib.unpin_host(batch)
    return moved


def upload_as(device: Device, batch: np.ndarray, dtype: str) -> int:
    if batch.dtype != dtype:
        batch = batch.astype(dtype)
    pinlib.pin_host(batch)  # clean: near miss, the conversion came first and the same array is unpinned
    original = batch
    batch = batch[::-1]
    moved = device.copy_async(batch).wait()
    pinlib.unpin_host(original)
    return moved


def upload_pair(device: Device, left: np.ndarray, right: np.ndarray) -> int:
    pinlib.pin_host(left)  # clean: near miss, unpinned by the finally, whichever return is taken
    try:
        if right is left:
            return device.copy_async(left).wait()
        pinlib.pin_host(right)  # clean: unpinned after the copy and in its handler
        try:
            moved = device.copy_pair(left, right)
        except TransferError:
            pinlib.unpin_host(right)
            return 0
        pinlib.unpin_host(right)
        return moved
    finally:
        pinlib.unpin_host(left)


def upload_all(device: Device, batches: List[np.ndarray]) -> int:
    """Pin every batch, move them together and unpin them."""
    pinned: List[np.ndarray] = []
    for batch in batches:
        pinlib.pin_host(batch)  # clean: near miss, all of them are unpinned in both arms
        pinned.append(batch)
    try:
        moved = device.copy_many(pinned)
    except TransferError as error:
        log.warning("moved nothing: %s", error)
        for batch in pinned:
            pinlib.unpin_host(batch)
        return 0
    for batch in pinned:
        pinlib.unpin_host(batch)
    return moved


def upload_large(device: Device, batches: List[np.ndarray], limit: int) -> int:
    moved = 0
    for batch in batches:
        pinlib.pin_host(batch)  # leak: the break at the limit leaves the current batch pinned
        if moved + batch.nbytes > limit:
            break
        moved += device.copy_async(batch).wait()
        pinlib.unpin_host(batch)
    return moved


class RingStage:
    """A ring of equally sized pinned arrays."""

    def __init__(self, pages: Any, depth: int, shape: tuple) -> None:
        self._pages = pages
        self._depth = depth
        self._shape = shape
        self._ring: List[np.ndarray] = []
        self._spill: Optional[np.ndarray] = None
        self._named: Dict[str, np.ndarray] = {}

    def fill(self) -> None:
        while len(self._ring) < self._depth:
            array = np.empty(self._shape, dtype=np.uint8)
            self._pages.pin_pages(array)  # clean: appended to the ring, which drain empties
            self._ring.append(array)

    def resize(self, depth: int) -> None:
        self._depth = depth
        surplus = self._ring[depth:]
        del self._ring[depth:]
        for array in surplus:
            self._pages.unpin_pages(array=array)
        self.fill()

    def spill(self, size: int) -> np.ndarray:
        if self._spill is None or self._spill.nbytes < size:
            larger = np.empty(size, dtype=np.uint8)
            self._pages.pin_pages(larger)  # leak: takes the place of the smaller spill array, which stays pinned
            self._spill = larger
        return self._spill[:size]

    def named(self, name: str, size: int) -> np.ndarray:
        array = self._named.get(name)
        if array is not None and array.nbytes >= size:
            return array
        if array is not None:
            self._pages.unpin_pages(array=array)
        array = self._named[name] = np.empty(size, dtype=np.uint8)
        self._pages.pin_pages(array)  # clean: near miss, a smaller one was unpinned before and drain unpins the table
        return array

    def drain(self) -> None:
        while self._ring:
            self._pages.unpin_pages(array=self._ring.pop())
        if self._spill is not None:
            self._pages.unpin_pages(array=self._spill)
            self._spill = None
        for array in self._named.values():
            self._pages.unpin_pages(array=array)
        self._named.clear()


def load_embedding(device: Device, pages: Any, table: np.ndarray, resident: bool) -> int:
    pages.pin_pages(table)  # clean: near miss, pinned for good when resident, otherwise unpinned
    moved = device.copy_async(table).wait()
    if resident:
        pages.pin_forever(table)
    else:
        pages.unpin_pages(array=table)
    with pinlib.pinned_section(table[:1]):  # clean: lease gives back by itself
        device.touch(table[:1])
    return moved


def load_rows(device: Device, pages: Any, table: np.ndarray, rows: List[int]) -> int:
    chosen = table[rows]
    pages.pin_pages(chosen)  # leak: nothing unpins the rows when the device moved none of them
    moved = device.copy_async(chosen).wait()
    if moved:
        pages.unpin_pages(array=chosen)
    return moved
