"""One pool per size class; a lease remembers where it came from."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping


@dataclass(eq=False)
class Chunk:
    owner: SizeClass
    offset: int

    def release(self) -> None:
        self.owner.give(self)


class SizeClass:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.free = [Chunk(self, i * size) for i in range(count)]

    def obtain(self) -> Chunk | None:
        return self.free.pop() if self.free else None

    def give(self, chunk: Chunk) -> None:
        self.free.append(chunk)


class Router:
    def __init__(self, classes: Mapping[int, SizeClass]) -> None:
        self.classes = dict(sorted(classes.items()))

    def route(self, nbytes: int) -> Chunk | None:
        for size, pool in self.classes.items():
            if size < nbytes:
                continue
            chunk = pool.obtain()  # clean: near miss, the first that is not none is returned to the caller
            if chunk is not None:
                return chunk
        return None

    def largest(self) -> int:
        best = 0
        for size, pool in self.classes.items():
            chunk = pool.obtain()  # clean: near miss, given back to the pool it came from
            if chunk is None:
                continue
            best = size
            pool.give(chunk)
        return best

    def usable(self) -> list[int]:
        sizes = []
        for size, pool in self.classes.items():
            chunk = pool.obtain()  # leak: chunks at offset zero are passed over and kept
            if chunk is None or chunk.offset == 0:
                continue
            sizes.append(size)
            pool.give(chunk)
        return sizes


def copy_through(router: Router, data: bytes) -> int:
    chunk = router.route(len(data))  # clean: near miss, the chunk's own release method
    if chunk is None:
        return -1
    try:
        return chunk.offset + len(data)
    finally:
        chunk.release()


def copy_two(router: Router, a: bytes, b: bytes) -> int:
    first = router.route(len(a))  # leak: no room for the second, and the first is kept
    if first is None:
        return -1
    second = router.route(len(b))  # clean: near miss, released below or none
    if second is None:
        return -2
    span = abs(first.offset - second.offset)
    second.release()
    first.release()
    return span


def fits(router: Router, sizes: list[int]) -> bool:
    held: list[Chunk] = []
    try:
        for size in sizes:
            chunk = router.route(size)  # clean: near miss, the held ones are released in finally
            if chunk is None:
                return False
            held.append(chunk)
        return True
    finally:
        for chunk in held:
            chunk.release()


def offset_of(router: Router, size: int) -> int:
    chunk = router.route(size)  # leak: only its offset is returned
    return -1 if chunk is None else chunk.offset
