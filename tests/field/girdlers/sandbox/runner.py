"""Runs of user code on the host."""
import asyncio
from typing import Awaitable, Callable, Optional

from .resources import PortRange, WorkspaceShelf


class Runner:
    def __init__(self, ports: PortRange, shelf: WorkspaceShelf) -> None:
        self.ports = ports
        self.shelf = shelf
        self.debuggers: dict[str, int] = {}
        self.tunnels: dict[str, tuple[int, asyncio.Task]] = {}

    async def run(self, source: str, execute: Callable[[str, int], Awaitable[int]]) -> Optional[int]:
        path = self.shelf.check_out()  # clean: put back without a port and in finally
        if path is None:
            return None
        port = self.ports.assign("run")  # clean: None-checked, retired in finally
        if port is None:
            self.shelf.put_back(path)
            return None
        try:
            (path / "main.py").write_text(source)
            return await execute(str(path), port)
        finally:
            self.ports.retire(port)
            self.shelf.put_back(path)

    async def dry_run(self, source: str) -> bool:
        path = self.shelf.check_out_empty()  # leak: source that does not compile returns with the workspace
        if path is None:
            return False
        try:
            compile(source, str(path), "exec")
        except SyntaxError:
            return False
        self.shelf.put_back(path)
        return True

    def debug_port(self, run_id: str) -> Optional[int]:
        port = self.debuggers.get(run_id, self.ports.assign("debug"))  # leak: lost for a known run
        if port is not None:
            self.debuggers[run_id] = port
        return port

    def stop_debug(self, run_id: str) -> None:
        port = self.debuggers.pop(run_id, None)
        if port is not None:
            self.ports.retire(port)

    def open_tunnel(self, name: str, pump: Callable[[int], Awaitable[None]]) -> bool:
        if name in self.tunnels:
            return False
        port = self.ports.assign_even("tunnel")  # clean: near miss, the done callback of the task retires it
        if port is None:
            return False
        task = asyncio.ensure_future(pump(port))
        task.add_done_callback(lambda _: self.ports.retire(port))
        self.tunnels[name] = (port, task)
        return True

    def close_tunnel(self, name: str) -> None:
        entry = self.tunnels.pop(name, None)
        if entry is not None:
            entry[1].cancel()
