"""The farm: idle environments by image, ports for the ones it starts."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict

log = logging.getLogger(__name__)


class PortRange:
    def __init__(self, lo: int, hi: int):
        self._free = list(range(hi - 1, lo - 1, -1))

    def next_port(self) -> int | None:
        return self._free.pop() if self._free else None  # clean: returned to the caller

    def free_port(self, port: int) -> None:
        self._free.append(port)


class Env:
    def __init__(self, image: str, port: int, container):
        self.image = image
        self.port = port
        self.container = container
        self.busy = False

    def reset(self, seed: int) -> dict | None:
        return self.container.rpc("reset", seed)

    def step(self, action: str) -> tuple[dict, float, bool]:
        return self.container.rpc("step", action)

    def healthy(self) -> bool:
        return self.container.rpc("health", None) == "ok"


class EnvFarm:
    def __init__(self, runtime, ports: PortRange, max_idle: int = 8):
        self.runtime = runtime
        self.ports = ports
        self.max_idle = max_idle
        self._idle: OrderedDict[int, Env] = OrderedDict()
        self._mu = threading.RLock()

    def check_out(self, image: str) -> Env | None:
        """An idle environment of the image, or a new one; None when ports are out."""
        with self._mu:
            for port, env in self._idle.items():
                if env.image == image:
                    del self._idle[port]
                    return env
            return self._start(image)  # clean: returned to the caller

    def _start(self, image: str) -> Env | None:
        port = self.ports.next_port()  # leak: not freed when the container does not come up
        if port is None:
            return None
        container = self.runtime.run(image, port)
        if not container.wait_ready(30):
            log.warning("image %s did not come up on %d", image, port)
            container.kill()
            return None
        return Env(image, port, container)

    def prestart(self, image: str, n: int) -> int:
        made = 0
        with self._mu:
            while made < n and len(self._idle) < self.max_idle:
                port = self.ports.next_port()  # clean: freed when the container fails, else kept by an idle environment
                if port is None:
                    break
                container = self.runtime.run(image, port)
                if not container.wait_ready(30):
                    container.kill()
                    self.ports.free_port(port)
                    break
                self._idle[port] = Env(image, port, container)
                made += 1
        return made

    def check_in(self, env: Env) -> None:
        with self._mu:
            env.busy = False
            self._idle[env.port] = env
            while len(self._idle) > self.max_idle:
                _, old = self._idle.popitem(last=False)
                self.scrap(old)

    def scrap(self, env: Env) -> None:
        env.container.kill()
        self.ports.free_port(env.port)
