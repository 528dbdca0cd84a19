"""Something was registered and is never taken back."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import nn


def forward_hooks(size):
    layer = nn.Identity()

    def step():
        table = torch.zeros(size)  # leak
        layer.register_forward_hook(lambda module, args, out: out + table[:1])

    return step


def parameter_hooks(size):
    weight = nn.Parameter(torch.ones(size))

    def step():
        mask = torch.ones(size)  # leak
        weight.register_hook(lambda grad: grad * mask)

    return step


def hook_that_collects(size):
    layer, seen = nn.Identity(), []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.clone()))  # leak
    ones = torch.ones(size)
    return lambda: layer(ones)


def finalizers_of_an_immortal(size):
    class Owner:
        pass

    owner = Owner()

    def step():
        finalizer = weakref.finalize(owner, len, torch.zeros(size))  # leak
        finalizer.atexit = False

    return step


def partials_registered(size):
    listeners = []
    return lambda: listeners.append(functools.partial(torch.add, torch.zeros(size)))  # leak


def weak_cache_with_strong_values(size):
    cache = weakref.WeakKeyDictionary()

    class Key:
        pass

    def step():
        key = Key()
        cache[key] = (key, torch.zeros(size))  # leak

    return step


def weak_values_also_listed(size):
    cache, recent = weakref.WeakValueDictionary(), []

    def step():
        table = torch.zeros(size)  # leak
        cache[len(recent)] = table
        recent.append(table)

    return step


def state_dict_hooks(size):
    layer = nn.Linear(1, 1)

    def step():
        extra = torch.zeros(size)  # leak
        layer._register_state_dict_hook(lambda module, state, prefix, metadata: state.update(extra=extra))

    return step


def parameters_registered(size):
    module = nn.Module()

    def step():
        number = len(list(module.parameters()))
        module.register_parameter(f"w{number}", nn.Parameter(torch.zeros(size)))  # leak

    return step


def buffers_registered(size):
    module = nn.Module()

    def step():
        module.register_buffer(f"b{len(list(module.buffers()))}", torch.zeros(size))  # leak

    return step


def submodules_added(size):
    layers = nn.ModuleList()

    def step():
        layer = nn.Module()
        layer.register_buffer("table", torch.zeros(size))  # leak
        layers.append(layer)

    return step


def parameter_groups_added(size):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(size))]})  # leak


def optimizer_state_by_step(size):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        state = optimizer.state[weight]
        state[len(state)] = torch.zeros(size)  # leak

    return step
