"""Serial buses shared by reference count, and the turn on a bus."""
from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Optional

log = logging.getLogger("modbus.bus")


class SerialBus:
    def __init__(self, device: str, port) -> None:
        self.device = device
        self.port = port
        self.users = 0
        self._turn = threading.Semaphore(1)
        self.last_turn = 0.0

    def take_turn(self, timeout: float) -> bool:
        if not self._turn.acquire(timeout=timeout):  # clean: end_turn releases it for whoever got True
            return False
        pause = 0.00175 - (time.monotonic() - self.last_turn)
        if pause > 0:
            time.sleep(pause)
        return True

    def end_turn(self) -> None:
        self.last_turn = time.monotonic()
        self._turn.release()

    def exchange(self, frame: bytes, size: int) -> bytes:
        self.port.write(frame)
        return self.port.read(size)


class BusRegistry:
    """attach() opens a device for the first user; detach() closes it after the last."""

    def __init__(self, opener: Callable[[str], object]) -> None:
        self._opener = opener
        self._buses: dict[str, SerialBus] = {}
        self._lock = threading.Lock()

    def attach(self, device: str) -> SerialBus:
        with self._lock:
            bus = self._buses.get(device)
            if bus is None:
                bus = SerialBus(device, self._opener(device))
                self._buses[device] = bus
            bus.users += 1
            return bus

    def detach(self, bus: SerialBus) -> None:
        with self._lock:
            bus.users -= 1
            if bus.users == 0:
                del self._buses[bus.device]
                bus.port.close()

    def attach_first(self, devices: list[str], probe: Callable[[SerialBus], bool]) -> Optional[SerialBus]:
        for device in devices:
            bus = self.attach(device)  # clean: near miss, returned or detached before the next
            if probe(bus):
                return bus
            self.detach(bus)
        return None


class BusHandle:
    """Attachment with a turn taken; close() ends both."""

    def __init__(self, registry: BusRegistry, device: str, wait: float) -> None:
        self.registry = registry
        self.bus = registry.attach(device)  # clean: near miss, close() detaches
        self.in_turn = self.bus.take_turn(wait)  # clean: near miss, close() ends it under the flag

    def __enter__(self) -> "BusHandle":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        if self.in_turn:
            self.in_turn = False
            self.bus.end_turn()
        self.registry.detach(self.bus)
