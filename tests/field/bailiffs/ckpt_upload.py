"""Checkpoint upload: a bounded number of transfers, directory claims, and the manifest file."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)


class Store(Protocol):
    def upload(self, key: str, data: bytes) -> bool: ...

    def verify(self, key: str) -> bool: ...

    def delete(self, key: str) -> bool: ...


class TransferGate:
    def __init__(self, width: int) -> None:
        self._cond = threading.Condition()
        self._open = set(range(width))

    def enter(self) -> int:
        with self._cond:
            while not self._open:
                self._cond.wait()
            return self._open.pop()

    def leave(self, ticket: int) -> None:
        with self._cond:
            self._open.add(ticket)
            self._cond.notify()


class DirClaims:
    """At most one owner per checkpoint directory."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def claim(self, path: str, owner: str) -> bool:
        if path in self._owners:
            return False
        self._owners[path] = owner
        return True

    def unclaim(self, path: str) -> None:
        self._owners.pop(path, None)


def put_shard(store: Store, gate: TransferGate, key: str, data: bytes) -> bool:
    ticket = gate.enter()  # leak: an upload that answers False returns with the ticket
    if not store.upload(key, data):
        logger.error("upload of %s was refused", key)
        return False
    gate.leave(ticket)
    return True


def put_shard_twice(store: Store, gate: TransferGate, key: str, data: bytes) -> bool:
    ticket = gate.enter()  # clean: near miss, left before the answer is judged
    stored = store.upload(key, data) or store.upload(key, data)
    gate.leave(ticket)
    if not stored:
        logger.error("upload of %s was refused twice", key)
        return False
    return True


def put_shard_verified(store: Store, gate: TransferGate, key: str, data: bytes) -> str | None:
    ticket = gate.enter()  # leak: refused by verify, the function gives None and keeps the ticket
    if not store.upload(key, data):
        gate.leave(ticket)
        return None
    if not store.verify(key):
        return None
    gate.leave(ticket)
    return f"{key}@ok"


def put_all(store: Store, gate: TransferGate, shards: dict[str, bytes], tries: int) -> list[str]:
    """Keys that could not be stored."""
    failed: list[str] = []
    for key, data in shards.items():
        for attempt in range(tries):
            ticket = gate.enter()  # leak: only the attempt that succeeds leaves the gate
            if store.upload(key, data):
                gate.leave(ticket)
                break
            logger.warning("%s: attempt %d failed", key, attempt)
        else:
            failed.append(key)
    return failed


def put_all_once(store: Store, gate: TransferGate, shards: dict[str, bytes]) -> list[str]:
    failed: list[str] = []
    for key, data in shards.items():
        ticket = gate.enter()  # clean: near miss, each of the two branches leaves
        if store.upload(key, data):
            gate.leave(ticket)
            continue
        gate.leave(ticket)
        failed.append(key)
    return failed


@dataclass
class Inflight:
    key: str
    ticket: int
    future: Future


class AsyncUploader:
    def __init__(self, store: Store, gate: TransferGate) -> None:
        self._store = store
        self._gate = gate
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._inflight: dict[int, Inflight] = {}
        self.lost: list[str] = []

    def submit(self, step: int, key: str, data: bytes) -> None:
        ticket = self._gate.enter()  # leak: poll forgets a refused upload without leaving the gate
        future = self._pool.submit(self._store.upload, key, data)
        self._inflight[step] = Inflight(key, ticket, future)

    def poll(self) -> int:
        for step, item in list(self._inflight.items()):
            if not item.future.done():
                continue
            del self._inflight[step]
            if item.future.exception() is not None or not item.future.result():
                self.lost.append(item.key)
                continue
            self._gate.leave(item.ticket)
        return len(self._inflight)


class DeltaUploader:
    def __init__(self, store: Store, gate: TransferGate) -> None:
        self._store = store
        self._gate = gate
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._inflight: dict[int, Inflight] = {}
        self.lost: list[str] = []

    def submit(self, step: int, key: str, data: bytes) -> None:
        ticket = self._gate.enter()  # clean: near miss, poll skips what still runs and leaves for all others
        future = self._pool.submit(self._store.upload, key, data)
        self._inflight[step] = Inflight(key, ticket, future)

    def poll(self) -> int:
        for step, item in list(self._inflight.items()):
            if not item.future.done():
                continue
            self._gate.leave(self._inflight.pop(step).ticket)
            if item.future.exception() is not None or not item.future.result():
                self.lost.append(item.key)
        return len(self._inflight)


def write_manifest(path: str, entries: list[dict]) -> int | None:
    out = open(path + ".tmp", "w")  # leak: left open where there are no entries
    total = sum(e.get("bytes", 0) for e in entries)
    if not total:
        os.unlink(path + ".tmp")
        return None
    json.dump({"total": total, "entries": entries}, out)
    out.close()
    os.replace(path + ".tmp", path)
    return total


def save_group(store: Store, gate: TransferGate, shards: list[tuple[str, bytes]], world: int) -> int:
    stored = 0
    with contextlib.ExitStack() as stack:
        ticket = gate.enter()  # leak: the callback is registered only where world is more than one
        if world > 1:
            stack.callback(gate.leave, ticket)
        for key, data in shards:
            stored += store.upload(f"r{world}/{key}", data)
    return stored


def save_single(store: Store, gate: TransferGate, shards: list[tuple[str, bytes]], verify: bool) -> int:
    stored = 0
    with contextlib.ExitStack() as stack:
        ticket = gate.enter()  # clean: near miss, registered in any case, only the report is conditional
        stack.callback(gate.leave, ticket)
        if verify:
            stack.callback(logger.info, "verified %d shards", len(shards))
        for key, data in shards:
            if verify and not store.verify(key):
                return stored
            stored += store.upload(key, data)
    return stored


def rotate(store: Store, claims: DirClaims, paths: list[str], owner: str) -> int:
    removed = 0
    for path in paths:
        if not claims.claim(path, owner):  # leak: unclaimed only where the deletion succeeded
            continue
        deleted = store.delete(path)
        if deleted:
            removed += 1
            claims.unclaim(path)
    return removed


def prune(store: Store, claims: DirClaims, paths: list[str], owner: str) -> int:
    removed = 0
    for path in paths:
        if not claims.claim(path, owner):  # clean: near miss, unclaimed after the test
            continue
        if store.delete(path):
            removed += 1
        claims.unclaim(path)
    return removed
