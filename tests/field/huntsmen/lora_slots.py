"""Adapter slots of a multi-LoRA server.  Plain functions over module state, one process per GPU.

The base model has MAX_SLOTS rows in its stacked A/B tensors; a resident adapter occupies
one row.  `grab_slot`/`drop_slot` move rows, `pin`/`unpin` keep an adapter from eviction.
"""
import logging
import os
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager

import torch
from safetensors.torch import load_file

LOG = logging.getLogger("lora")

MAX_SLOTS = int(os.environ.get("LORA_SLOTS", "16"))
MAX_RANK = int(os.environ.get("LORA_MAX_RANK", "64"))

_lock = threading.RLock()
_free = list(range(MAX_SLOTS))
_slot_of = {}
_lru = OrderedDict()
_users = Counter()
_tenant_slots = {}
_stack_a = _stack_b = None


class AdapterError(Exception):
    pass


class NoSlot(Exception):
    pass


def init_stacks(hidden, device):
    global _stack_a, _stack_b
    _stack_a = torch.zeros(MAX_SLOTS, MAX_RANK, hidden, device=device)
    _stack_b = torch.zeros(MAX_SLOTS, hidden, MAX_RANK, device=device)


def grab_slot(evict=True):
    with _lock:
        if _free:
            return _free.pop()  # clean: handed to the caller
        if evict:
            return _steal_coldest()  # clean: passed on to the caller, or None
        return None


def _steal_coldest():
    for name in list(_lru):
        if not _users[name]:
            del _lru[name]
            LOG.info("evicting %s", name)
            return _slot_of.pop(name)  # clean: near miss, the row leaves the table and becomes the caller's
    return None


def drop_slot(slot):
    with _lock:
        _stack_a[slot].zero_()
        _stack_b[slot].zero_()
        _free.append(slot)


def _read(path):
    tensors = load_file(path)
    a, b = tensors.get("lora_A"), tensors.get("lora_B")
    if a is None or b is None:
        raise AdapterError(f"{path}: no lora_A/lora_B")
    if a.shape[0] != b.shape[1]:
        raise AdapterError(f"{path}: ranks differ")
    return a, b


def _write_row(slot, a, b):
    rank = a.shape[0]
    _stack_a[slot, :rank].copy_(a, non_blocking=True)
    _stack_b[slot, :, :rank].copy_(b, non_blocking=True)


def ensure_loaded(name, path):
    with _lock:
        if name in _slot_of:
            _lru.move_to_end(name)
            return
        slot = grab_slot()  # leak: _read raises AdapterError for a bad file, which the server answers with a 400
        if slot is None:
            raise NoSlot(name)
        a, b = _read(path)
        _write_row(slot, a, b)
        _slot_of[name] = slot
        _lru[name] = path


def unload(name):
    with _lock:
        if _users[name]:
            return False
        _lru.pop(name, None)
        slot = _slot_of.pop(name, None)
        if slot is not None:
            drop_slot(slot)
        return True


def pin(name):
    with _lock:
        if name not in _slot_of:
            raise AdapterError(f"{name} is not resident")
        _users[name] += 1
        _lru.move_to_end(name)
        return _slot_of[name]


def unpin(name):
    with _lock:
        _users[name] -= 1


@contextmanager
def pinned(name):
    slot = pin(name)  # clean: unpinned in the finally
    try:
        yield slot
    finally:
        unpin(name)


def hot_swap(name, path):
    """Replace the weights of an adapter without a pause for its requests."""
    a, b = _read(path)
    slot = grab_slot(evict=False)  # clean: near miss, takes over the entry of the old row, which is dropped
    if slot is None:
        raise NoSlot(name)
    _write_row(slot, a, b)
    with _lock:
        old = _slot_of.get(name)
        _slot_of[name] = slot
        _lru[name] = path
    if old is not None:
        drop_slot(old)


def install_many(items):
    """First load at boot: rows for all adapters, in order, stopping when there are no more."""
    for name, path in items:
        a, b = _read(path)
        slot = grab_slot(evict=False)  # leak: a name listed twice overwrites its row in the table
        if slot is None:
            LOG.warning("no row for %s", name)
            break
        _write_row(slot, a, b)
        _slot_of[name] = slot
        _lru[name] = path


def serve_batch(requests, forward):
    held = []
    rows = []
    try:
        for req in requests:
            if req.adapter is None:
                rows.append(-1)
                continue
            rows.append(pin(req.adapter))  # clean: near miss, the names in `held` are unpinned in the finally
            held.append(req.adapter)
        return forward([r.tokens for r in requests], torch.tensor(rows))
    except AdapterError as exc:
        LOG.warning("batch refused: %s", exc)
        return None
    finally:
        for name in held:
            unpin(name)


def stream_tokens(req, step, limit=512):
    row = pin(req.adapter)  # leak: the unpin stands after the loop, and stream_reply() leaves the generator on a stop word
    state = None
    for _ in range(limit):
        token, state = step(req.tokens, row, state)
        if token is None:
            break
        yield token
    unpin(req.adapter)


def stream_reply(req, step, send, stop_words=()):
    text = []
    for token in stream_tokens(req, step):
        text.append(token)
        send(token)
        if token in stop_words:
            break
    return "".join(text)


def blend(left, right, weight, out_name):
    """Average two resident adapters into a third one."""
    try:
        i = pin(left)  # leak: when the pin of `right` raises AdapterError the handler returns
        j = pin(right)  # clean: the try below unpins both
    except AdapterError as exc:
        LOG.error("cannot blend: %s", exc)
        return False
    try:
        with _lock:
            k = _slot_of.get(out_name)
            if k is None:
                k = _slot_of[out_name] = grab_slot(evict=False)  # clean: near miss, a None is taken out of the table again
                if k is None:
                    del _slot_of[out_name]
                    return False
                _lru[out_name] = None
        _stack_a[k] = weight * _stack_a[i] + (1 - weight) * _stack_a[j]
        _stack_b[k] = weight * _stack_b[i] + (1 - weight) * _stack_b[j]
        return True
    finally:
        unpin(left)
        unpin(right)


def norm_probe(path):
    """Norm of the delta of an adapter, computed on the device through a spare row."""
    a, b = _read(path)
    slot = grab_slot(evict=False)  # leak: row 0 is falsy, so it is never dropped
    norm = float("nan")
    if slot is not None:
        _write_row(slot, a, b)
        norm = (_stack_b[slot] @ _stack_a[slot]).norm().item()
    if slot:
        drop_slot(slot)
    return norm


def reserve_for_tenant(tenant, n):
    got = []
    for _ in range(n):
        slot = grab_slot(evict=False)  # clean: near miss, too few are all dropped, else the tenant's list owns them
        if slot is None:
            break
        got.append(slot)
    if len(got) < n:
        for slot in got:
            drop_slot(slot)
        return False
    _tenant_slots.setdefault(tenant, []).extend(got)
    return True


def release_tenant(tenant):
    for slot in _tenant_slots.pop(tenant, []):
        drop_slot(slot)


def score_with(name, tokens, score):
    with pinned(name) as row:  # clean: the context manager unpins
        return score(tokens, row)
