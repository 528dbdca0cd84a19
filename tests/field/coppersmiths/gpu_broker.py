"""Hands whole GPUs of a host to jobs. State is module level, one broker per host process."""
import logging
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional

log = logging.getLogger(__name__)

_NUM_DEVICES = 8
_busy_mask = 0
_mask_lock = threading.Lock()
_running: Dict[str, "Job"] = {}
_reserved: List[int] = []


class NoDevice(RuntimeError):
    pass


@dataclass
class Job:
    name: str
    argv: List[str]
    gpus: int = 1
    priority: int = 0
    devices: List[int] = field(default_factory=list)
    proc: Optional[subprocess.Popen] = None


def claim_device() -> Optional[int]:
    """Lowest free ordinal, or None if the host is full."""
    global _busy_mask
    with _mask_lock:
        for i in range(_NUM_DEVICES):
            if not _busy_mask & (1 << i):
                _busy_mask |= 1 << i
                return i
    return None


def yield_device(ordinal: int) -> None:
    global _busy_mask
    with _mask_lock:
        _busy_mask &= ~(1 << ordinal)


def device_health(ordinal: int) -> bool:
    out = subprocess.run(
        ["nvidia-smi", "-i", str(ordinal), "--query-gpu=ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )
    return out.returncode == 0 and out.stdout.strip() in ("0", "[N/A]")


def run_probe(kernel: str) -> Optional[float]:
    dev = claim_device()  # clean: given back in finally
    if dev is None:
        return None
    t0 = time.perf_counter()
    try:
        rc = subprocess.call([kernel], env={"CUDA_VISIBLE_DEVICES": str(dev)})
        if rc != 0:
            return None
        return time.perf_counter() - t0
    finally:
        yield_device(dev)


def healthy_device() -> Optional[int]:
    dev = claim_device()  # leak: unhealthy device is dropped without being yielded
    if dev is None:
        return None
    if not device_health(dev):
        log.warning("device %d reports ecc errors", dev)
        return None
    return dev


def claim_many(n: int) -> Optional[List[int]]:
    got: List[int] = []
    while len(got) < n:
        dev = claim_device()  # clean: near miss, partial claims are yielded before None is returned
        if dev is None:
            for d in got:
                yield_device(d)
            return None
        got.append(dev)
    return got


def claim_pair() -> Optional[tuple]:
    a = claim_device()  # leak: a is lost when no second device is free
    if a is None:
        return None
    b = claim_device()  # clean: returned together with a
    if b is None:
        return None
    return a, b


def submit(job: Job) -> bool:
    if job.name in _running:
        return False
    devs = claim_many(job.gpus)  # clean: moved into job.devices, reap() yields them
    if devs is None:
        return False
    job.devices = devs
    try:
        job.proc = subprocess.Popen(job.argv, env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devs))})
    except OSError:
        for d in job.devices:
            yield_device(d)
        job.devices = []
        return False
    _running[job.name] = job
    return True


def reap() -> int:
    done = [j for j in _running.values() if j.proc is not None and j.proc.poll() is not None]
    for job in done:
        del _running[job.name]
        for d in job.devices:
            yield_device(d)
        job.devices = []
    return len(done)


def grow(job: Job) -> bool:
    """Give one more GPU to an elastic job."""
    extra = claim_device()  # leak: job that already ended makes grow() return with extra still marked busy
    if extra is None:
        return False
    if _running.get(job.name) is not job:
        return False
    job.devices.append(extra)
    return True


def hold_for_maintenance(count: int) -> int:
    for _ in range(count):
        dev = claim_device()  # clean: kept in _reserved, which end_maintenance() empties
        if dev is None:
            break
        _reserved.append(dev)
    return len(_reserved)


def end_maintenance() -> None:
    while _reserved:
        yield_device(_reserved.pop())


def burn_in(kernels: List[str]) -> Dict[str, int]:
    results: Dict[str, int] = {}
    for k in kernels:
        dev = claim_device()  # leak: continue on a timed out kernel skips the yield
        if dev is None:
            break
        try:
            rc = subprocess.call([k], env={"CUDA_VISIBLE_DEVICES": str(dev)}, timeout=600)
        except subprocess.TimeoutExpired:
            results[k] = -1
            continue
        results[k] = rc
        yield_device(dev)
    return results


def wait_for_device(timeout: float) -> int:
    deadline = time.monotonic() + timeout
    dev = claim_device()  # clean: loop is entered only while nothing was claimed
    while dev is None:
        if time.monotonic() > deadline:
            raise NoDevice("timed out")
        time.sleep(0.5)
        dev = claim_device()  # clean: rebinds only a None
    return dev


def best_of_two(argv: List[str]) -> Optional[int]:
    dev = claim_device()  # leak: rebound to the second device when the first one is unhealthy
    if dev is not None and not device_health(dev):
        dev = claim_device()  # clean: yielded below
    if dev is None:
        return None
    try:
        return subprocess.call(argv, env={"CUDA_VISIBLE_DEVICES": str(dev)})
    finally:
        yield_device(dev)
