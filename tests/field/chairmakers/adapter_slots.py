"""LoRA adapters on the device: a fixed number of slots, loaded on demand.

Module-level state on purpose: one model per process, and the layers look slots up here.
"""
import contextlib
import logging
import threading
from collections import OrderedDict
from typing import Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)

MAX_SLOTS = 8
MAX_RANK = 64

_lock = threading.RLock()
_free_slots: List[int] = list(range(MAX_SLOTS))
_resident: "OrderedDict[str, Resident]" = OrderedDict()
_weights: Dict[str, Dict[str, torch.Tensor]] = {}
_stacked: Dict[str, torch.Tensor] = {}
_row_ids: List[int] = list(range(4096))
_request_rows: Dict[str, List[int]] = {}
_request_pins: Dict[str, "Pin"] = {}
_stats = {"loads": 0, "evictions": 0}


class AdapterError(Exception):
    pass


class RankTooLarge(AdapterError):
    pass


class NoSlot(AdapterError):
    pass


class Resident:
    def __init__(self, name: str, slot: int) -> None:
        self.name, self.slot = name, slot
        self.pins = 0


class Pin(NamedTuple):
    """Keeps an adapter resident. Give it to unpin()."""
    name: str
    slot: int


def _take_slot() -> int:
    with _lock:
        if _free_slots:
            return _free_slots.pop()  # clean: handed to the caller
        for name, res in _resident.items():
            if res.pins == 0:
                del _resident[name]
                _stats["evictions"] += 1
                return res.slot
        raise NoSlot("all adapters are pinned")


def _return_slot(slot: int) -> None:
    with _lock:
        _free_slots.append(slot)


def _copy_in(slot: int, tensors: Dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        rank = min(tensor.shape)
        if rank > MAX_RANK:
            raise RankTooLarge(f"{key} has rank {rank}")
        target = _stacked[key][slot]
        target.zero_()
        target[: tensor.shape[0], : tensor.shape[1]].copy_(tensor, non_blocking=True)


def register(name: str, tensors: Dict[str, torch.Tensor]) -> None:
    with _lock:
        _weights[name] = tensors


def load(name: str) -> Resident:
    """Makes the adapter resident, without pinning it."""
    with _lock:
        res = _resident.get(name)
        if res is not None:
            _resident.move_to_end(name)
            return res
        slot = _take_slot()  # leak: RankTooLarge out of _copy_in() loses the slot
        _copy_in(slot, _weights[name])
        res = Resident(name, slot)
        _resident[name] = res
        _stats["loads"] += 1
        return res


def pin(name: str) -> Pin:
    with _lock:
        res = load(name)
        res.pins += 1
        return Pin(name, res.slot)


def unpin(p: Pin) -> None:
    with _lock:
        res = _resident.get(p.name)
        if res is None:
            logger.error("unpin of %s, which is not resident", p.name)
            return
        res.pins -= 1


@contextlib.contextmanager
def pinned(name: str):
    p = pin(name)  # clean: unpinned in the finally
    try:
        yield p.slot
    finally:
        unpin(p)


def unload(name: str) -> bool:
    with _lock:
        res = _resident.get(name)
        if res is None or res.pins:
            return False
        del _resident[name]
        _return_slot(res.slot)
        return True


def reload(name: str, tensors: Dict[str, torch.Tensor]) -> Optional[int]:
    """New weights under the same name. The new ones get a fresh slot, so that running steps are not disturbed."""
    with _lock:
        fresh = _take_slot()  # clean: near miss, goes back on a bad rank, otherwise into the table for the older slot, which goes back then
        try:
            _copy_in(fresh, tensors)
        except RankTooLarge:
            _return_slot(fresh)
            return None
        _weights[name] = tensors
        old = _resident.pop(name, None)
        res = Resident(name, fresh)
        if old is not None:
            res.pins = old.pins
            _return_slot(old.slot)
        _resident[name] = res
        return fresh


def alloc_rows(count: int) -> List[int]:
    """Rows of the batched index that a request occupies while it runs."""
    rows: List[int] = []
    with _lock:
        while len(rows) < count:
            if not _row_ids:
                raise AdapterError(f"no row for {count - len(rows)} of {count}")
            rows.append(_row_ids.pop())  # leak: the raise in a later round does not return the rows gathered so far
    return rows


def free_rows(rows: List[int]) -> None:
    with _lock:
        _row_ids.extend(rows)
        rows.clear()


def begin_request(request_id: str, adapter: Optional[str], rows: int) -> Optional[int]:
    """Slot that the request uses, -1 for the base model, None when it cannot start now."""
    if request_id in _request_rows:
        return None
    p: Optional[Pin] = None
    if adapter is not None:
        try:
            p = pin(adapter)  # clean: near miss, unpinned when there are no rows, else in the table of pins
        except NoSlot:
            return None
    try:
        got = alloc_rows(rows)  # clean: near miss, end_request() frees them by the request's id
    except AdapterError as exc:
        logger.info("%s waits: %s", request_id, exc)
        if p is not None:
            unpin(p)
        return None
    _request_rows[request_id] = got
    if p is None:
        return -1
    _request_pins[request_id] = p
    return p.slot


def end_request(request_id: str) -> None:
    rows = _request_rows.pop(request_id, None)
    if rows:
        free_rows(rows)
    p = _request_pins.pop(request_id, None)
    if p is not None:
        unpin(p)


def switch_adapter(request_id: str, adapter: str) -> Optional[int]:
    """Goes on with another adapter from the next turn on."""
    if request_id not in _request_rows:
        return None
    p = pin(adapter)  # leak: when the request uses this adapter already the second pin is counted and dropped
    old = _request_pins.get(request_id)
    if old is not None:
        if old.name == adapter:
            return old.slot
        unpin(old)
    _request_pins[request_id] = p
    return p.slot


def grow_request(request_id: str, extra: int) -> bool:
    """More rows for parallel samples."""
    rows = alloc_rows(extra)  # leak: for a request that has ended meanwhile the rows are dropped
    held = _request_rows.get(request_id)
    if held is None:
        return False
    held.extend(rows)
    return True


def warm(names: List[str]) -> List[str]:
    """Pins the favourites for a moment so that loading them does not evict one another."""
    pins: List[Pin] = []
    loaded: List[str] = []
    try:
        for name in names:
            try:
                pins.append(pin(name))  # clean: near miss, a failing one is passed over and the finally unpins the rest
            except AdapterError as exc:
                logger.warning("cannot warm %s: %s", name, exc)
                continue
            loaded.append(name)
    finally:
        for p in pins:
            unpin(p)
    return loaded


def norm_of(name: str) -> float:
    with pinned(name) as slot:  # clean: with statement
        return sum(float(stack[slot].norm()) for stack in _stacked.values())


def compare(a: str, b: str, probe: torch.Tensor) -> float:
    """Mean distance of what two adapters add to the same input."""
    first = pin(a)  # leak: NoSlot or RankTooLarge for the second leaves the first pinned
    second = pin(b)  # clean: unpinned below
    total = 0.0
    for stack in _stacked.values():
        total += float((probe @ stack[first.slot] - probe @ stack[second.slot]).abs().mean())
    unpin(first)
    unpin(second)
    return total / max(1, len(_stacked))
