"""Ports for worker processes: one set for the whole module, plain functions around it."""
from __future__ import annotations

import asyncio
import logging
import socket

log = logging.getLogger("workers")

_spare_ports: set[int] = set(range(41000, 41128))


def lease_ports(count: int) -> list[int] | None:
    """All of them or None."""
    if len(_spare_ports) < count:
        return None
    return [_spare_ports.pop() for _ in range(count)]


def lease_port() -> int | None:
    ports = lease_ports(1)  # clean: the one of the list is handed on
    return ports[0] if ports else None


def surrender(*ports: int) -> None:
    _spare_ports.update(ports)


def is_bindable(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


class Worker:
    def __init__(self, name: str, ports: list[int], process) -> None:
        self.name = name
        self.ports = ports
        self.process = process

    async def stop(self) -> int:
        self.process.terminate()
        code = await self.process.wait()
        surrender(*self.ports)
        self.ports = []
        return code


class Launcher:
    def __init__(self, binary: str) -> None:
        self.binary = binary
        self.workers: dict[str, Worker] = {}

    async def _spawn(self, *args: str):
        return await asyncio.create_subprocess_exec(self.binary, *args)

    async def start(self, name: str) -> Worker | None:
        if name in self.workers:
            return None
        ports = lease_ports(2)  # clean: near miss, kept in the worker, surrendered in stop
        if ports is None:
            return None
        process = await self._spawn("--rpc", str(ports[0]), "--metrics", str(ports[1]))
        worker = self.workers[name] = Worker(name, ports, process)
        return worker

    async def start_with_debug(self, name: str, debug: bool) -> Worker | None:
        if name in self.workers:
            return None
        rpc, metrics, trace = lease_ports(3) or (None, None, None)  # leak: trace is not in the worker
        if rpc is None:
            return None
        args = ["--rpc", str(rpc), "--metrics", str(metrics)]
        if debug:
            args += ["--trace", str(trace)]
        worker = self.workers[name] = Worker(name, [rpc, metrics], await self._spawn(*args))
        return worker

    async def stop(self, name: str) -> int:
        worker = self.workers.pop(name, None)
        return await worker.stop() if worker is not None else 0

    async def run_once(self, *args: str) -> int:
        port = lease_port()  # clean: surrendered in finally
        if port is None:
            return 75
        try:
            process = await self._spawn("--rpc", str(port), *args)
            return await process.wait()
        finally:
            surrender(port)

    async def run_selftest(self) -> int:
        port = lease_port()  # leak: a port in use by others returns without surrender()
        if port is None:
            return 75
        if not is_bindable(port):
            log.warning("port %d is taken by another program", port)
            return 71
        process = await self._spawn("--selftest", str(port))
        code = await process.wait()
        surrender(port)
        return code

    async def run_benchmark(self) -> int:
        port = lease_port()  # clean: near miss, surrendered whether bindable or not
        if port is None:
            return 75
        code = 71
        if is_bindable(port):
            process = await self._spawn("--benchmark", str(port))
            code = await process.wait()
        surrender(port)
        return code

    async def run_pairs(self, pairs: int) -> list[int]:
        codes: list[int] = []
        for _ in range(pairs):
            server = lease_port()  # clean: near miss, surrendered when there is none for the client
            if server is None:
                break
            client = lease_port()  # clean: surrendered with the server's
            if client is None:
                surrender(server)
                break
            process = await self._spawn("--pair", str(server), str(client))
            codes.append(await process.wait())
            surrender(server, client)
        return codes


def bindable_ports(count: int) -> list[int]:
    """Leased ports that can be bound here; the caller surrenders them."""
    good: list[int] = []
    for _ in range(count):
        port = lease_port()  # clean: near miss, the good ones are handed on, the others surrendered
        if port is None:
            break
        if is_bindable(port):
            good.append(port)
        else:
            surrender(port)
    return good


def print_free(count: int) -> None:
    for port in bindable_ports(count):  # leak: printed and not surrendered
        print(port)


def count_free(count: int) -> int:
    ports = bindable_ports(count)  # clean: near miss, all surrendered after the count
    surrender(*ports)
    return len(ports)


def first_bindable(tries: int) -> int | None:
    port = None
    for _ in range(tries):
        port = lease_port()  # leak: one that is not bindable is replaced by the next
        if port is not None and is_bindable(port):
            return port
    if port is not None:
        surrender(port)
    return None


def bindable_once() -> bool:
    port = first_bindable(4)  # clean: surrendered
    if port is None:
        return False
    surrender(port)
    return True
