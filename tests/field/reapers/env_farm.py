"""Sandboxed environments for tool-use RL: ports, sandboxes, warm pools and the thread that reaps."""
import logging
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Optional

logger = logging.getLogger("env_farm")


class NoPort(Exception): ...
class BootError(Exception): ...
class ResetFailed(Exception): ...


def bindable(port: int) -> bool:
    with socket.socket() as s:  # clean: closed by the with statement
        return s.connect_ex(("127.0.0.1", port)) != 0


@dataclass
class PortBook:
    first: int = 20000
    count: int = 512
    _free: list = field(init=False)
    _cooling: list = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self._free = list(range(self.first, self.first + self.count))
        random.shuffle(self._free)

    def reserve(self) -> int:
        with self._lock:
            self._thaw()
            while self._free:
                port = self._free.pop()  # clean: near miss, a busy port is put on the cooling list, which _thaw() returns
                if bindable(port):
                    return port
                self._cooling.append((time.monotonic() + 30, port))
        raise NoPort

    def reserve_range(self, n: int) -> list:
        """n ports, not necessarily adjacent."""
        with self._lock:
            got = []
            while len(got) < n and self._free:
                port = self._free.pop()  # leak: a port that is busy at the moment is skipped for good
                if not bindable(port):
                    continue
                got.append(port)
            if len(got) < n:
                self._free.extend(got)
                raise NoPort(n)
            return got

    def _thaw(self):
        now = time.monotonic()
        self._free += [p for t, p in self._cooling if t <= now]
        self._cooling = [(t, p) for t, p in self._cooling if t > now]

    def free(self, *ports: int) -> None:
        with self._lock:
            self._free.extend(ports)


@dataclass
class Sandbox:
    sid: str
    image: str
    port: int
    proc: object = None
    wedged: bool = False
    tracing: bool = False
    trace_port: Optional[int] = None
    last_used: float = field(default_factory=time.monotonic)
    generation: int = 0

    def reset(self, seed: int) -> dict:
        obs = self.proc.call("reset", seed)
        if "error" in obs:
            raise ResetFailed(obs["error"])
        self.last_used = time.monotonic()
        return obs

    def step(self, action: str) -> dict:
        self.last_used = time.monotonic()
        return self.proc.call("step", action)


class Farm:
    def __init__(self, driver, ports: PortBook):
        self.driver, self.ports = driver, ports
        self.side_ports: list = []
        self._n = 0

    def boot(self, image: str, attempts: int = 3) -> Sandbox:
        for i in range(attempts):
            port = self.ports.reserve()  # leak: a boot that fails tries again with another port
            try:
                proc = self.driver.start(image, port)
            except BootError as exc:
                logger.warning("boot %s on %d: %s (attempt %d)", image, port, exc, i)
                continue
            self._n += 1
            return Sandbox(f"{image}-{self._n}", image, port, proc)
        raise BootError(f"{image}: gave up after {attempts}")

    def start_trace(self, sb: Sandbox) -> None:
        if sb.trace_port is None:
            sb.trace_port = self.ports.reserve()  # leak: retire() asks the tracing flag, which stop_trace() has cleared
        sb.tracing = True
        sb.proc.call("trace", sb.trace_port)

    def stop_trace(self, sb: Sandbox) -> None:
        sb.tracing = False
        sb.proc.call("trace", 0)

    def retire(self, sb: Sandbox) -> None:
        sb.proc.stop()
        if sb.tracing:
            self.ports.free(sb.trace_port)
        self.ports.free(sb.port)

    def expose_dashboard(self) -> int:
        port = self.ports.reserve()  # clean: near miss, kept in side_ports and freed by close()
        self.side_ports.append(port)
        self.driver.forward(port)
        return port

    def healthcheck(self) -> bool:
        try:
            port = self.ports.reserve()  # clean: freed in finally
        except NoPort:
            return False
        try:
            self.driver.ping(port)
            return True
        except ConnectionError:
            return False
        finally:
            self.ports.free(port)

    def mesh(self, sandboxes: list) -> bool:
        ports = self.ports.reserve_range(len(sandboxes))  # clean: freed after the links are up, or when one refuses
        for sb, port in zip(sandboxes, ports):
            if not sb.proc.call("link", port).get("ok"):
                self.ports.free(*ports)
                return False
        self.ports.free(*ports)
        return True

    def close(self):
        self.ports.free(*self.side_ports)
        self.side_ports.clear()


class WarmPool:
    def __init__(self, farm: Farm, per_image: int = 4):
        self.farm, self.per_image = farm, per_image
        self._idle: dict = {}
        self._lock = threading.Lock()
        self.generation = 0

    def take(self, image: str) -> Sandbox:
        with self._lock:
            stack = self._idle.get(image)
            if stack:
                return stack.pop()  # clean: the sandbox goes to the caller
        sb = self.farm.boot(image)  # clean: the new sandbox goes to the caller
        sb.generation = self.generation
        return sb

    def put(self, sb: Sandbox) -> None:
        with self._lock:
            stack = self._idle.setdefault(sb.image, [])
            if not sb.wedged and len(stack) < self.per_image:
                stack.append(sb)
                return
        self.farm.retire(sb)

    def prefill(self, image: str) -> None:
        for _ in range(self.per_image):
            sb = self.farm.boot(image)  # leak: the reaper takes wedged sandboxes out of the stack without retiring them
            with self._lock:
                self._idle.setdefault(image, []).append(sb)

    def reap(self, max_idle: float) -> int:
        now, old = time.monotonic(), []
        with self._lock:
            for image, stack in self._idle.items():
                stack[:] = [sb for sb in stack if not sb.wedged]
                old += [sb for sb in stack if now - sb.last_used > max_idle]
                stack[:] = [sb for sb in stack if now - sb.last_used <= max_idle]
        for sb in old:
            self.farm.retire(sb)
        return len(old)


class Reaper(threading.Thread):
    def __init__(self, pool: WarmPool, every: float = 10.0):
        super().__init__(daemon=True)
        self.pool, self.every = pool, every
        self.stop = threading.Event()

    def run(self):
        while not self.stop.wait(self.every):
            n = self.pool.reap(300.0)
            if n:
                logger.info("reaped %d sandboxes", n)
            for stack in self.pool._idle.values():
                for sb in stack:
                    sb.wedged = not sb.proc.alive()


@dataclass
class Runner:
    pool: WarmPool
    policy: Callable
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def _play(self, sb: Sandbox, seed: int) -> float:
        total = 0.0
        try:
            obs = sb.reset(seed)
            while not obs.get("done"):
                obs = sb.step(self.policy(obs))
                total += obs.get("reward", 0.0)
        except ResetFailed:
            sb.wedged = True
        finally:
            self.pool.put(sb)
        return total

    def launch(self, image: str, seeds: list) -> list:
        futures = []
        for seed in seeds:
            sb = self.pool.take(image)  # clean: near miss, the task on the executor puts it back
            futures.append(self.executor.submit(self._play, sb, seed))
        return [f.result() for f in futures]

    def play_fresh(self, image: str, seed: int) -> float:
        sb = self.pool.take(image)  # leak: one of an old generation is rebound without put
        if sb.generation != self.pool.generation:
            sb = self.pool.take(image)  # clean: _play() puts it back in finally
        return self._play(sb, seed)

    def peek(self, image: str, seed: int) -> Optional[dict]:
        sb = self.pool.take(image)  # leak: the handler of a failed reset returns None and keeps the sandbox
        try:
            obs = sb.reset(seed)
        except ResetFailed:
            return None
        self.pool.put(sb)
        return obs
