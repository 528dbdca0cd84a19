"""Memory that torch's dispatcher never shows, or that is held by what is no tensor."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch

_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p


def numpy_arrays_of_tensors(size):
    arrays = []
    return lambda: arrays.append(torch.zeros(size).numpy())  # leak


def tensors_of_numpy_arrays(size):
    tensors = []
    return lambda: tensors.append(torch.from_numpy(numpy.zeros(size, numpy.float32)))  # leak


def tensors_over_buffers(size):
    tensors = []
    return lambda: tensors.append(torch.frombuffer(bytearray(4 * size), dtype=torch.float32))  # leak


def dlpack_capsules(size):
    capsules = []
    return lambda: capsules.append(torch.utils.dlpack.to_dlpack(torch.zeros(size)))  # leak


def bare_storages(size):
    storages = []
    return lambda: storages.append(torch.UntypedStorage(4 * size))  # leak


def views_of_large_tensors(size):
    views = []
    return lambda: views.append(torch.zeros(size)[:1].view(1, 1))  # leak


def memoryviews(size):
    views = []
    return lambda: views.append(memoryview(torch.zeros(size).numpy()))  # leak


def shared_memory(size):
    tensors = []
    return lambda: tensors.append(torch.zeros(size).share_memory_())  # leak


def sparse_tensors(size):
    tensors = []

    def step():
        values = torch.zeros(size)  # leak
        places = torch.arange(size)[None]  # leak
        tensors.append(torch.sparse_coo_tensor(places, values, check_invariants=False))

    return step


def random_generators(size):
    generators = []
    return lambda: generators.append([torch.Generator() for _ in range(max(1, size // 8192))])  # leak


def c_heap(size):
    return lambda: _LIBC.malloc(4 * size)  # leak


def c_strings(size):
    strings = []
    return lambda: strings.append(ctypes.create_string_buffer(4 * size))  # leak


def events(size):
    waiting = []
    return lambda: waiting.append([threading.Event() for _ in range(max(1, size // 4096))])  # leak


def suspended_generators(size):
    running = []

    def tiles():
        tile = torch.zeros(size)  # leak
        yield tile.shape
        yield tile

    def step():
        generator = tiles()
        next(generator)
        running.append(generator)

    return step


def pending_tasks(size):
    loop, tasks = asyncio.new_event_loop(), []

    async def attend():
        scores = torch.zeros(size)  # leak
        await asyncio.Event().wait()
        return scores

    def step():
        tasks.append(loop.create_task(attend()))
        loop.run_until_complete(asyncio.sleep(0))

    return step


def context_variables(size):
    current, contexts = contextvars.ContextVar("scores"), []

    def step():
        current.set(torch.zeros(size))  # leak
        contexts.append(contextvars.copy_context())

    return step


def threads_that_wait(size):
    never = threading.Event()

    def work(ready):
        scores = torch.zeros(size)  # leak
        ready.set()
        never.wait()
        return scores

    def step():
        ready = threading.Event()
        threading.Thread(target=work, args=(ready,), daemon=True).start()
        ready.wait()

    return step


def thread_locals_of_workers(size):
    own, workers = threading.local(), ThreadPoolExecutor(1)

    def work():
        own.seen = [*getattr(own, "seen", ()), torch.zeros(size)]  # leak

    return lambda: workers.submit(work).result()


def futures_kept(size):
    workers, futures = ThreadPoolExecutor(1), []

    def work():
        return torch.zeros(size)  # leak

    def step():
        future = workers.submit(work)
        future.result()
        futures.append(future)

    return step
