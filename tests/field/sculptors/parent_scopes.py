"""Host staging memory in nested scopes. A scope is ended by the one that opened it."""
from __future__ import annotations

import logging
from typing import Callable, Iterable

log = logging.getLogger("staging")


class Staging:
    """Budget in bytes, shared by all scopes under one root."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Scope:
    def __init__(self, staging: Staging, name: str, nbytes: int = 0) -> None:
        self.staging = staging
        self.name = name
        self.nbytes = nbytes
        self.children: dict[int, Scope] = {}

    def nest(self, name: str, nbytes: int) -> Scope | None:
        """A child with nbytes of its own; None over the limit. The parent ends it with dismiss()."""
        if self.staging.used + nbytes > self.staging.limit:
            return None
        child = Scope(self.staging, name, nbytes)
        self.staging.used += nbytes
        self.children[id(child)] = child
        return child

    def dismiss(self, child: Scope) -> None:
        child.dismiss_all()
        del self.children[id(child)]
        self.staging.used -= child.nbytes

    def dismiss_all(self) -> None:
        for child in list(self.children.values()):
            self.dismiss(child)


class CheckpointWriter:
    """Lives as long as the trainer; `root` stays open throughout."""

    def __init__(self, root: Scope, disk) -> None:
        self.root = root
        self.disk = disk
        self.open_shards: list[Scope] = []

    def write_shard(self, name: str, blob: bytes) -> bool:
        scope = self.root.nest(name, len(blob))  # clean: dismissed by the root after the write
        if scope is None:
            return False
        written = self.disk.write(name, blob)
        self.root.dismiss(scope)
        return written == len(blob)

    def write_if_changed(self, name: str, blob: bytes) -> bool:
        scope = self.root.nest(name, len(blob))  # leak: an unchanged blob returns before dismiss()
        if scope is None:
            return False
        if self.disk.checksum(name) == hash(blob):
            return True
        self.disk.write(name, blob)
        self.root.dismiss(scope)
        return True

    def write_group(self, name: str, blobs: dict[str, bytes]) -> int:
        group = self.root.nest(name, 0)  # clean: near miss, dismissed on both ways
        if group is None:
            return 0
        for key, blob in blobs.items():
            if group.nest(key, len(blob)) is None:  # clean: near miss, the end of the group ends its children
                log.warning("%s: no room for %s", name, key)
                self.root.dismiss(group)
                return 0
        written = sum(self.disk.write(f"{name}/{key}", blob) for key, blob in blobs.items())
        self.root.dismiss(group)
        return written

    def write_flat(self, blobs: dict[str, bytes]) -> int:
        scopes: list[Scope] = []
        for key, blob in blobs.items():
            scope = self.root.nest(key, len(blob))  # leak: at the first without room the others stay
            if scope is None:
                return 0
            scopes.append(scope)
        written = sum(self.disk.write(key, blob) for key, blob in blobs.items())
        for scope in scopes:
            self.root.dismiss(scope)
        return written

    def stream(self, name: str, chunks: Iterable[bytes], pack: Callable[[bytes], bytes]) -> int:
        total = 0
        for chunk in chunks:
            scope = self.root.nest(name, 2 * len(chunk))  # clean: near miss, dismissed before the continue
            if scope is None:
                break
            packed = pack(chunk)
            if not packed:
                self.root.dismiss(scope)
                continue
            total += self.disk.append(name, packed)
            self.root.dismiss(scope)
        return total

    def begin_shard(self, name: str, nbytes: int) -> bool:
        scope = self.root.nest(name, nbytes)  # leak: abandon() clears the list without a dismiss
        if scope is None:
            return False
        self.open_shards.append(scope)
        return True

    def commit(self) -> int:
        count = len(self.open_shards)
        while self.open_shards:
            scope = self.open_shards.pop()
            self.disk.seal(scope.name)
            self.root.dismiss(scope)
        return count

    def abandon(self) -> None:
        log.info("abandoning %d shards", len(self.open_shards))
        self.open_shards.clear()


def evaluate(staging: Staging, batches: list[bytes], run: Callable[[bytes], float]) -> float:
    root = Scope(staging, "evaluate")
    best = 0.0
    for batch in batches:
        if root.nest("batch", len(batch)) is None:  # clean: near miss, dismiss_all at the end of the function
            break
        best = max(best, run(batch))
    root.dismiss_all()
    return best
