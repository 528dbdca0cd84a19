"""What careful code does and a careless test would take for a leak: caches that fill, lazy tables, state
that is replaced, buffers that are emptied now and then.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def _cache_by_few_shapes():
    cache, turn = {}, [0]

    def step():
        turn[0] += 1
        shape = (turn[0] % 7 + 1, 4)
        if shape not in cache:
            cache[shape] = torch.zeros(shape)

    return step


def _lru_cache_of_eight():
    @functools.lru_cache(maxsize=8)
    def table(length):
        return torch.arange(length)

    turn = [0]

    def step():
        turn[0] += 1
        table(16)
        table(turn[0] % 20)

    return step


def _rotary_table_that_grows_once():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.zeros(0, 4)

        def forward(self, x):
            if len(self.table) < len(x):
                self.table = torch.outer(torch.arange(2.0 * len(x)), torch.ones(4))
            return x * self.table[: len(x)].cos()

    rotary, turn = Rotary(), [0]

    def step():
        turn[0] = min(turn[0] + 1, 8)
        rotary(torch.randn(turn[0], 4))

    return step


def _module_made_at_the_fifth_call():
    owner, turn = nn.Module(), [0]

    def step():
        turn[0] += 1
        if turn[0] == 5:
            owner.late = nn.Linear(4, 4)
        if turn[0] >= 5:
            owner.late(torch.randn(2, 4))

    return step


def _bounded_history():
    history = collections.deque(maxlen=10)
    return lambda: history.append(torch.randn(4))


def _buffer_flushed_every_five():
    waiting = []

    def step():
        waiting.append(torch.randn(4))
        if len(waiting) == 5:
            torch.stack(waiting).mean()
            waiting.clear()

    return step


def _gradients_accumulated_over_three():
    model, turn = nn.Linear(4, 4), [0]

    def step():
        turn[0] += 1
        model(torch.randn(2, 4)).sum().backward()
        if turn[0] % 3 == 0:
            model.zero_grad(set_to_none=True)

    return step


def _running_mean():
    mean = [torch.zeros(4)]

    def step():
        mean[0] = 0.9 * mean[0] + 0.1 * torch.randn(4)

    return step


def _moving_average_of_weights():
    model = nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(model)

    def step():
        model(torch.randn(2, 4)).sum().backward()
        average.update_parameters(model)

    return step


def _truncated_recurrence():
    cell, state = nn.GRUCell(4, 4), [torch.zeros(2, 4)]

    def step():
        state[0] = cell(torch.randn(2, 4), state[0].detach())
        state[0].sum().backward()

    return step


def _ring_of_keys_and_values():
    ring, turn = torch.zeros(8, 4), [0]

    def step():
        ring[turn[0] % 8] = torch.randn(4)
        turn[0] += 1
        return ring.softmax(0)

    return step


def _two_buffers_in_turn():
    buffers = [torch.zeros(4), torch.zeros(4)]

    def step():
        buffers.reverse()
        buffers[0] = buffers[1] + 1

    return step


def _states_of_random_numbers():
    kept = {}

    def step():
        kept["state"] = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            torch.randn(4)
        torch.set_rng_state(kept["state"])

    return step


def _optimizer(make):
    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = make(model.parameters())

        def step():
            def closure():
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

        return step

    return build


def _scheduler_and_clipping():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return step


def _checkpoint(reentrant):
    def build():
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def step():
            x = torch.randn(2, 4, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.sum().backward()

        return step

    return build


def _saved_tensors_on_the_side():
    weight = nn.Parameter(torch.ones(4))

    def step():
        weight.grad = None
        with torch.autograd.graph.save_on_cpu():
            loss = weight.exp().sum()
        loss.backward()

    return step


def _second_derivatives():
    weight = nn.Parameter(torch.ones(4))

    def step():
        (slope,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        weight.grad = None
        slope.sum().backward()

    return step


def _functional_gradients():
    model = nn.Linear(4, 1)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    return lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(3, 4))


def _hooks_taken_back():
    model = nn.Linear(4, 4)

    def step():
        handle = model.register_forward_hook(lambda module, args, out: out * 2)
        model(torch.randn(2, 4))
        handle.remove()

    return step


def _weak_cache():
    cache = weakref.WeakValueDictionary()

    def step():
        table = torch.randn(4)
        cache["table"] = table

    return step


def _exceptions_dealt_with():
    def fail():
        scores = torch.randn(4)
        raise ValueError(scores.shape)

    def step():
        try:
            fail()
        except ValueError as error:
            str(error)

    return step


def _last_exception_kept():
    kept = [None]

    def fail():
        scores = torch.randn(4)
        raise ValueError(scores.shape)

    def step():
        try:
            fail()
        except ValueError as error:
            kept[0] = error

    return step


def _threads_that_end():
    def step():
        thread = threading.Thread(target=lambda: torch.randn(4).sum())
        thread.start()
        thread.join()

    return step


def _workers_that_stay():
    workers = ThreadPoolExecutor(1)
    return lambda: workers.submit(lambda: torch.randn(4).sum()).result()


def _generators_closed():
    def tiles():
        while True:
            yield torch.randn(4)

    def step():
        source = tiles()
        next(source)
        source.close()

    return step


def _data_loader():
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))

    def step():
        for (_batch,) in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            pass

    return step


def _scripted():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    traced = torch.jit.trace(Scale(), torch.randn(4))
    return lambda: traced(torch.randn(4))


def _autocast_with_cached_weights():
    model = nn.Linear(4, 4)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(torch.randn(2, 4)) + model(torch.randn(2, 4))).float().sum()
        loss.backward()

    return step


def _inference_mode():
    model = nn.Linear(4, 4)

    def step():
        with torch.inference_mode():
            model(torch.randn(2, 4))

    return step


def _sparse_gradients():
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step():
        optimizer.zero_grad()
        table(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()

    return step


def _state_saved_and_loaded():
    model, saved = nn.Linear(4, 4), {}

    def step():
        saved["state"] = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(saved["state"])

    return step


def _numpy_and_back():
    return lambda: torch.from_numpy((torch.randn(4) + 1).numpy()).sum()


HABITS = {
    name.removeprefix("_"): value
    for name, value in globals().items()
    if name.startswith("_") and name[1:2].islower() and getattr(value, "__module__", "") == __name__
    if name not in ("_optimizer", "_checkpoint")
} | {
    "SGD with momentum": _optimizer(lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9)),
    "Adam": _optimizer(torch.optim.Adam),
    "Adam, foreach": _optimizer(lambda parameters: torch.optim.Adam(parameters, foreach=True)),
    "RMSprop": _optimizer(torch.optim.RMSprop),
    "Adagrad": _optimizer(torch.optim.Adagrad),
    "LBFGS": _optimizer(lambda parameters: torch.optim.LBFGS(parameters, 0.01, max_iter=2, history_size=3)),
    "checkpoint": _checkpoint(False),
    "reentrant checkpoint": _checkpoint(True),
}


def makers():
    """One maker a habit; there is one scenario."""
    return {f"habit.{name}": lambda build=build: {"as it is": build()} for name, build in HABITS.items()}
