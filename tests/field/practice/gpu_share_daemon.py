#!/usr/bin/env python3
"""Daemon that shares GPUs between short jobs on one host.  Single process, line protocol."""
import argparse
import json
import logging
import socket
import sys
import time
from dataclasses import dataclass, asdict
from typing import Dict, List, Optional, Set

logger = logging.getLogger("gpushare")


class NoCapacity(Exception):
    pass


@dataclass
class Grant:
    gid: int
    device: int
    mem_mb: int
    expires: float


class DeviceLedger:
    def __init__(self, devices: Dict[int, int]):
        self.remaining = dict(devices)
        self.grants: Dict[int, Grant] = {}
        self._next = 0

    def lease(self, mem_mb: int, ttl: float = 60.0) -> Grant:
        for dev, left in sorted(self.remaining.items(), key=lambda kv: -kv[1]):
            if left >= mem_mb:
                self._next += 1
                self.remaining[dev] -= mem_mb
                g = Grant(self._next, dev, mem_mb, time.time() + ttl)
                self.grants[g.gid] = g
                return g
        raise NoCapacity(mem_mb)

    def unlease(self, g: Grant) -> None:
        del self.grants[g.gid]
        self.remaining[g.device] += g.mem_mb


class PortAllocator:
    def __init__(self, lo: int, hi: int):
        self.free: Set[int] = set(range(lo, hi))

    def take_port(self) -> Optional[int]:
        return self.free.pop() if self.free else None

    def return_port(self, port: int) -> None:
        self.free.add(port)


class Job:
    def __init__(self, name: str, grants: List[Grant], port: Optional[int]):
        self.name = name
        self.grants = grants
        self.port = port


class Daemon:
    def __init__(self, ledger: DeviceLedger, ports: PortAllocator):
        self.ledger = ledger
        self.ports = ports
        self.jobs: Dict[str, Job] = {}
        self.waiting: List[dict] = []

    def start(self, msg: dict) -> str:
        if msg["name"] in self.jobs:
            return "duplicate"
        grants: List[Grant] = []
        try:
            for _ in range(msg.get("gpus", 1)):
                grants.append(self.ledger.lease(msg["mem"]))  # clean: near miss, the handler gives back what was gathered
        except NoCapacity:
            for g in grants:
                self.ledger.unlease(g)
            self.waiting.append(msg)
            return "queued"
        port = self.ports.take_port()  # clean: stored with the job, stop() returns it
        self.jobs[msg["name"]] = Job(msg["name"], grants, port)
        return "ok"

    def stop(self, name: str) -> str:
        job = self.jobs.pop(name, None)
        if job is None:
            return "unknown"
        for g in job.grants:
            self.ledger.unlease(g)
        if job.port is not None:
            self.ports.return_port(job.port)
        return "ok"

    def probe(self, msg: dict) -> str:
        try:
            g = self.ledger.lease(msg["mem"])  # leak: a successful probe never gives the grant back
        except NoCapacity:
            return "no"
        return f"yes on {g.device}"

    def dry_run(self, msg: dict) -> str:
        port = self.ports.take_port()  # leak: without capacity the port stays taken
        if port is None:
            return "no port"
        try:
            g = self.ledger.lease(msg["mem"])  # clean: nothing leased in the handler
        except NoCapacity:
            return "no memory"
        self.ledger.unlease(g)
        self.ports.return_port(port)
        return "ok"

    def migrate(self, name: str) -> str:
        job = self.jobs.get(name)
        if job is None:
            return "unknown"
        moved = []
        try:
            for g in job.grants:
                moved.append(self.ledger.lease(g.mem_mb))  # clean: near miss, rolled back in the handler, else it replaces the old grants
        except NoCapacity:
            while moved:
                self.ledger.unlease(moved.pop())
            return "full"
        for g in job.grants:
            self.ledger.unlease(g)
        job.grants = moved
        return "ok"

    def resize(self, name: str, mem: int) -> str:
        job = self.jobs.get(name)
        if job is None or not job.grants:
            return "unknown"
        bigger = self.ledger.lease(mem)  # leak: refused on another device without unlease
        if bigger.device != job.grants[0].device:
            return "would move"
        self.ledger.unlease(job.grants[0])
        job.grants[0] = bigger
        return "ok"

    def reset_ports(self, n: int) -> List[int]:
        picked = []
        for _ in range(n):
            p = self.ports.take_port()  # leak: odd ports are neither picked nor returned
            if p is None:
                break
            if p % 2:
                continue
            picked.append(p)
        for p in picked:
            self.ports.return_port(p)
        return picked

    def expire(self) -> int:
        now = time.time()
        dead = [j.name for j in self.jobs.values() if any(g.expires < now for g in j.grants)]
        for name in dead:
            self.stop(name)
        return len(dead)


def serve(path: str, daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        while True:
            msg = json.loads(sock.recv(65536))
            fn = getattr(daemon, msg.pop("op"))
            logger.info("%s", fn(msg))
            daemon.expire()


def load_config(path: str) -> dict:
    fh = open(path)  # clean: closed in finally
    try:
        return json.load(fh)
    finally:
        fh.close()


def main(argv=None) -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", required=True)
    args = ap.parse_args(argv)
    log = open("gpushare.pid", "w")  # leak: a config without devices exits before close
    cfg = load_config(args.config)
    if not cfg.get("devices"):
        return 2
    log.write(json.dumps(asdict(Grant(0, 0, 0, 0.0))))
    log.close()
    ledger = DeviceLedger({int(k): v for k, v in cfg["devices"].items()})
    serve(cfg["socket"], Daemon(ledger, PortAllocator(9000, 9100)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
