"""Runs a function on several gloo ranks on this machine and brings back what each returned or raised."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = timedelta(seconds=10)
HARD_LIMIT = 100.0  # seconds for everything, the start of the processes included


def _main(
    rank: int, ranks: int, port: int, results: Any, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=GROUP_TIMEOUT)
    try:
        results.put((rank, "returned", body(rank, ranks, *arguments)))
    except Exception as error:
        results.put((rank, type(error).__name__, f"{error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    if rank == 0:
        time.sleep(0.5)  # it hosts the store the others may still need
    os._exit(0)  # a group with a dead member has no orderly end


def run(
    ranks: int, body: Callable[..., Any], *arguments: Any, answers: int | None = None
) -> dict[int, tuple[str, Any]]:
    """{rank: (kind, value)} from `answers` ranks (all, unless some are meant to die); never hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context(
        "forkserver"
    )  # clean children, and torch is imported once instead of once a rank
    context.set_forkserver_preload(["torch", "reference_modules.attention", "reference_modules.pool"])
    results = context.Queue()
    started = [
        context.Process(target=_main, args=(rank, ranks, port, results, body, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    found: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + HARD_LIMIT
    try:
        for _ in range(ranks if answers is None else answers):
            rank, kind, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            found[rank] = (kind, value)
    finally:
        for process in started:
            process.join(timeout=3)
            if process.is_alive():
                process.kill()
                process.join()
    return found


def all_returned(found: dict[int, tuple[str, Any]]) -> list[Any]:
    """What the ranks returned, in rank order; fails with the first traceback otherwise."""
    for rank, (kind, value) in sorted(found.items()):
        assert kind == "returned", f"rank {rank}: {kind}: {value}"
    return [value for _, (_, value) in sorted(found.items())]
