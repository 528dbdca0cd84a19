"""Something is put into a container that lives on, and never taken out."""

from __future__ import annotations

import collections
import functools
import io
import logging
import queue

import torch
from torch import nn

_EVERYTHING: list[torch.Tensor] = []


class _Scale(nn.Module):
    every: list[torch.Tensor] = []  # noqa: RUF012 - the leak

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kept: object = None


def list_attribute(size):
    module = _Scale()
    module.kept = []

    def step():
        module.kept.append(torch.zeros(size))  # leak

    return step


def dict_attribute(size):
    module = _Scale()
    module.kept = {}

    def step():
        module.kept[len(module.kept)] = torch.zeros(size)  # leak

    return step


def set_attribute(size):
    module = _Scale()
    module.kept = set()
    return lambda: module.kept.add(torch.zeros(size))  # leak


def deque_without_limit(size):
    history = collections.deque()
    return lambda: history.append(torch.zeros(size))  # leak


def nested_containers(size):
    tables = collections.defaultdict(lambda: collections.defaultdict(list))
    return lambda: tables["layer"]["scores"].append((1, torch.zeros(size)))  # leak


def global_list(size):
    return lambda: _EVERYTHING.append(torch.zeros(size))  # leak


def class_attribute(size):
    return lambda: _Scale.every.append(torch.zeros(size))  # leak


def closure_cell(size):
    held = ()

    def step():
        nonlocal held
        held = (torch.zeros(size), held)  # leak

    return step


def default_argument(size):
    def step(history=[]):  # noqa: B006 - the leak
        history.append(torch.zeros(size))  # leak

    return step


def function_attribute(size):
    def step():
        step.calls = [*getattr(step, "calls", []), torch.zeros(size)]  # leak

    return step


def queue_never_read(size):
    waiting = queue.Queue()
    return lambda: waiting.put(torch.zeros(size))  # leak


def cache_by_shape(size):
    cache = {}

    def step():
        shape = (size, len(cache) + 1)
        if shape not in cache:
            cache[shape] = torch.zeros(size)  # leak

    return step


def lru_cache_of_numbers(size):
    @functools.cache
    def positions(length):
        return torch.zeros(size)  # leak

    def step():
        positions(positions.cache_info().currsize)

    return step


def cached_method_with_module(size):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(size))  # leak

        @functools.cache  # noqa: B019 - the leak
        def forward(self):
            return None

    return lambda: Cached()()


def log_records(size):
    class Keeping(logging.Handler):
        def __init__(self):
            super().__init__()
            self.records = []

        def emit(self, record):
            self.records.append(record)

    logger = logging.Logger("zoo")
    logger.addHandler(Keeping())
    return lambda: logger.warning("scores %s", torch.zeros(size))  # leak


def snapshots_of_weights(size):
    layer = nn.Linear(size, 1, bias=False)
    snapshots = []

    def step():
        snapshots.append({name: value.clone() for name, value in layer.state_dict().items()})  # leak

    return step


def iterators_teed(size):
    import itertools

    source, behind = itertools.tee(torch.zeros(size) for _ in itertools.count())  # leak
    return lambda: (next(source), behind)[0]


def files_in_memory(size):
    files = []
    return lambda: files.append(io.BytesIO(bytes(4 * size)))  # leak


def python_objects(size):
    objects = []
    return lambda: objects.append(bytearray(4 * size))  # leak
