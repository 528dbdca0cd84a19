"""Background checkpoint writer. Disk bandwidth is shared by tokens; shards are written by a thread pool."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

log = logging.getLogger("train.ckpt")


class DiskFull(OSError):
    pass


class CorruptShard(ValueError):
    pass


@dataclass
class IoToken:
    lane: int
    taken_by: str = ""


@dataclass
class ShardPlan:
    step: int
    rank: int
    path: pathlib.Path
    tensors: Mapping[str, Any]
    size: int


@dataclass
class WriterStats:
    written: int = 0
    failed: int = 0
    waited: float = 0.0
    by_lane: dict[int, int] = field(default_factory=dict)


class IoBudget:
    """One token per disk lane. begin_io() waits for one, end_io() puts it back."""

    def __init__(self, lanes: int):
        self._tokens = [IoToken(n) for n in range(lanes)]
        self._cond = threading.Condition()
        self.stats = WriterStats()

    def begin_io(self, who: str, timeout: float = 300.0) -> IoToken:
        begun = time.monotonic()
        with self._cond:
            if not self._cond.wait_for(lambda: self._tokens, timeout):
                raise TimeoutError(f"{who}: no lane within {timeout:.0f}s")
            token = self._tokens.pop()  # clean: returned to the caller
            self.stats.waited += time.monotonic() - begun
        token.taken_by = who
        return token

    def poll_io(self, who: str) -> IoToken | None:
        with self._cond:
            token = self._tokens.pop() if self._tokens else None  # clean: near miss, returned when there is one
        if token is not None:
            token.taken_by = who
        return token

    def end_io(self, token: IoToken) -> None:
        with self._cond:
            self.stats.by_lane[token.lane] = self.stats.by_lane.get(token.lane, 0) + 1
            self._tokens.append(token)
            self._cond.notify()


class io_lane:
    """with io_lane(budget, "name") as token: ..."""

    def __init__(self, budget: IoBudget, who: str):
        self.budget, self.who = budget, who
        self.token: IoToken | None = None

    def __enter__(self) -> IoToken:
        self.token = self.budget.begin_io(self.who)  # clean: put back by __exit__
        return self.token

    def __exit__(self, *exc) -> None:
        self.budget.end_io(self.token)
        self.token = None


class CheckpointWriter:
    def __init__(self, root: pathlib.Path, budget: IoBudget, workers: int = 4, keep: int = 3):
        self.root, self.budget, self.keep = root, budget, keep
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ckpt")
        self._open_steps: dict[int, list[Future]] = {}
        self._reserved: dict[int, IoToken] = {}
        self._listeners: list[Callable[[int], None]] = []

    def on_step_done(self, listener: Callable[[int], None]) -> None:
        self._listeners.append(listener)

    def _ensure_space(self, size: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < size * 1.1:
            raise DiskFull(f"{size} bytes wanted, {free} free")

    def write_shard(self, plan: ShardPlan) -> pathlib.Path:
        """Blocking; for the trainer's own shard at exit."""
        token = self.budget.begin_io(f"rank{plan.rank}")  # leak: DiskFull from _ensure_space comes before the try
        self._ensure_space(plan.size)
        try:
            return self._serialize(plan)
        finally:
            self.budget.end_io(token)

    def _serialize(self, plan: ShardPlan) -> pathlib.Path:
        plan.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = plan.path.with_suffix(".part")
        with open(scratch, "wb") as out:
            for name, tensor in plan.tensors.items():
                raw = tensor.detach().cpu().numpy().tobytes()
                head = json.dumps({"name": name, "bytes": len(raw), "dtype": str(tensor.dtype)}).encode()
                out.write(len(head).to_bytes(4, "little") + head + raw)
            os.fsync(out.fileno())
        scratch.rename(plan.path)
        self.budget.stats.written += 1
        return plan.path

    def submit(self, plan: ShardPlan) -> Future:
        token = self.budget.begin_io(f"step{plan.step}/{plan.rank}")  # clean: near miss, put back by the done callback of the future
        future = self._pool.submit(self._serialize, plan)
        future.add_done_callback(lambda _f: self.budget.end_io(token))
        self._open_steps.setdefault(plan.step, []).append(future)
        return future

    def submit_if_idle(self, plan: ShardPlan, then: Callable[[pathlib.Path], None]) -> bool:
        """Opportunistic snapshots: skipped when the disk is in use."""
        token = self.budget.poll_io(f"snap{plan.step}")  # leak: _snapped() returns early for a failed shard
        if token is None:
            return False
        future = self._pool.submit(self._serialize, plan)
        future.add_done_callback(lambda f: self._snapped(f, token, then))
        return True

    def _snapped(self, future: Future, token: IoToken, then: Callable[[pathlib.Path], None]) -> None:
        if future.exception() is not None:
            self.budget.stats.failed += 1
            log.warning("snapshot failed: %s", future.exception())
            return
        self.budget.end_io(token)
        then(future.result())

    # Two-phase steps: the coordinator reserves a lane for the manifest before the shards are on their way.

    def open_step(self, step: int) -> None:
        self._reserved[step] = self.budget.begin_io(f"manifest{step}")  # leak: discard_step() removes the entry of an abandoned step without end_io

    def close_step(self, step: int) -> None:
        for future in self._open_steps.pop(step, []):
            future.result()
        token = self._reserved.pop(step)
        try:
            (self.root / f"step-{step}" / "manifest.json").write_text(json.dumps({"step": step, "at": time.time()}))
        finally:
            self.budget.end_io(token)
        for listener in self._listeners:
            listener(step)
        self._prune()

    def discard_step(self, step: int) -> None:
        for future in self._open_steps.pop(step, []):
            future.cancel()
        if self._reserved.pop(step, None) is not None:
            log.info("step %d discarded", step)
        shutil.rmtree(self.root / f"step-{step}", ignore_errors=True)

    def _prune(self) -> None:
        steps = sorted(self.root.glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
        for old in steps[:-self.keep]:
            with io_lane(self.budget, f"prune {old.name}"):  # clean: context manager
                shutil.rmtree(old, ignore_errors=True)

    def verify(self, path: pathlib.Path, digest: str) -> bool:
        token = self.budget.begin_io(f"verify {path.name}")  # clean: near miss, CorruptShard is raised and caught inside the try with the finally
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                raise CorruptShard(path.name)
            return True
        except CorruptShard as exc:
            log.error("corrupt: %s", exc)
            return False
        finally:
            self.budget.end_io(token)

    def mirror(self, paths: list[pathlib.Path], target: pathlib.Path) -> int:
        """Copy to the second disk, changing the lane after each gigabyte."""
        copied, since = 0, 0
        token = self.budget.begin_io("mirror")  # clean: near miss, put back before the change of lanes or at the end
        for path in paths:
            if since > 1 << 30:
                self.budget.end_io(token)
                token = self.budget.begin_io("mirror")  # clean: near miss, the lane before it was put back
                since = 0
            shutil.copy2(path, target / path.name)
            since += path.stat().st_size
            copied += 1
        self.budget.end_io(token)
        return copied

    def restore(self, plans: list[ShardPlan], load: Callable[[int, bytes], None]) -> list[int]:
        """Read shards back; gives the ranks whose shard is not there."""
        missing = []
        for plan in plans:
            token = self.budget.begin_io(f"read{plan.rank}")  # leak: the continue for a missing shard
            if not plan.path.exists():
                log.warning("shard of rank %d is missing at step %d", plan.rank, plan.step)
                missing.append(plan.rank)
                continue
            load(plan.rank, plan.path.read_bytes())
            self.budget.end_io(token)
        return missing

    def migrate(self, src: pathlib.Path, dst: pathlib.Path) -> bool:
        reading = self.budget.begin_io("migrate/read")  # leak: the handler for the timeout of the second token returns without it
        try:
            writing = self.budget.begin_io("migrate/write", timeout=5.0)  # clean: put back in the finally
        except TimeoutError:
            log.info("no second lane, %s stays", src)
            return False
        try:
            shutil.move(src, dst)
        finally:
            self.budget.end_io(writing)
            self.budget.end_io(reading)
        return True
