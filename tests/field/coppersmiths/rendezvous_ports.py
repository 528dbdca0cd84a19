"""Port blocks for torch.distributed rendezvous on shared hosts. Blocks are lines of a small state file plus a local mirror."""
import contextlib
import json
import os
import socket
from typing import Dict, Iterator, List, NamedTuple, Optional

BASE = 29500
BLOCK = 16


class PortBlock(NamedTuple):
    start: int
    size: int


_unclaimed: List[int] = [BASE + i * BLOCK for i in range(64)]
_by_job: Dict[str, PortBlock] = {}
_gang: Dict[str, List[PortBlock]] = {}


def _bindable(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def rent_block() -> PortBlock:
    if not _unclaimed:
        raise RuntimeError("no port blocks left")
    return PortBlock(_unclaimed.pop(), BLOCK)


def surrender(block: PortBlock) -> None:
    _unclaimed.append(block.start)


def rent_bindable(tries: int = 8) -> Optional[PortBlock]:
    rejected: List[PortBlock] = []
    try:
        for _ in range(tries):
            block = rent_block()  # clean: rejected blocks are surrendered in finally
            if _bindable(block.start):
                return block
            rejected.append(block)
        return None
    finally:
        for b in rejected:
            surrender(b)


def rent_first_bindable(tries: int = 8) -> Optional[PortBlock]:
    for _ in range(tries):
        start = _unclaimed.pop()  # leak: a start that cannot be bound is popped and forgotten
        if _bindable(start):
            return PortBlock(start, BLOCK)
    return None


def block_for(job: str) -> PortBlock:
    if job not in _by_job:
        _by_job[job] = rent_block()  # clean: near miss, rented once per job, end_job() surrenders
    return _by_job[job]


def end_job(job: str) -> None:
    block = _by_job.pop(job, None)
    if block is not None:
        surrender(block)


def write_env(path: str, rank: int, world: int) -> Optional[PortBlock]:
    block = rent_block()  # leak: OSError is swallowed and the block not surrendered
    try:
        with open(path, "w") as f:
            json.dump({"MASTER_PORT": block.start, "RANK": rank, "WORLD_SIZE": world}, f)
    except OSError:
        return None
    return block


def write_env_atomic(path: str, rank: int, world: int) -> Optional[PortBlock]:
    block = rent_block()  # clean: surrendered when the write fails
    tmp = path + ".tmp"
    try:
        with open(tmp, "w") as f:
            json.dump({"MASTER_PORT": block.start, "RANK": rank, "WORLD_SIZE": world}, f)
        os.replace(tmp, path)
    except OSError:
        surrender(block)
        return None
    return block


def rent_gang(name: str, n: int) -> bool:
    blocks: List[PortBlock] = []
    try:
        for _ in range(n):
            blocks.append(rent_block())  # clean: near miss, rolled back when the pool runs dry, else kept in _gang
    except RuntimeError:
        for b in blocks:
            surrender(b)
        return False
    for old in _gang.pop(name, []):
        surrender(old)
    _gang[name] = blocks
    return True


def shrink_gang(name: str, n: int) -> int:
    blocks = _gang[name]
    while len(blocks) > n:
        surrender(blocks.pop())
    return len(blocks)


def halve_gang(name: str) -> int:
    blocks = _gang.pop(name)  # leak: the upper half is cut off by the slice and not surrendered
    _gang[name] = blocks[:len(blocks) // 2]
    return len(_gang[name])


def disband(name: str) -> None:
    for b in _gang.pop(name, []):
        surrender(b)


@contextlib.contextmanager
def temporary_block() -> Iterator[PortBlock]:
    block = rent_block()  # clean: surrendered in finally
    try:
        yield block
    finally:
        surrender(block)


@contextlib.contextmanager
def probe_block() -> Iterator[Optional[PortBlock]]:
    block = rent_block()  # leak: unbindable block yields None and returns without surrender
    if not _bindable(block.start):
        yield None
        return
    try:
        yield block
    finally:
        surrender(block)


def store_address(host: str, job: Optional[str] = None) -> str:
    if job is None:
        with temporary_block() as block:  # clean: with statement
            return f"{host}:{block.start}"
    return f"{host}:{block_for(job).start}"  # clean: block stays in _by_job for end_job()


def free_port() -> int:
    return rent_block().start  # leak: only the number survives, callers do not hold a block to surrender
