"""Unreachable, but in a cycle: memory that waits for the collector. And exceptions that hold their frames."""

from __future__ import annotations

import torch
from torch import nn


def dict_in_itself(size):
    def step():
        record = {"scores": torch.zeros(size)}  # leak
        record["self"] = record

    return step


def parent_and_child(size):
    class Child:
        pass

    def step():
        parent, child = nn.Module(), Child()
        parent.register_buffer("table", torch.zeros(size))  # leak
        parent.__dict__["child"], child.parent = child, parent

    return step


def recursive_closure(size):
    def step():
        table = torch.zeros(size)  # leak

        def look_up(depth):
            return table if depth == 0 else look_up(depth - 1)

        look_up(2)

    return step


def bound_method_on_self(size):
    class Layer:
        def __init__(self):
            self.table = torch.zeros(size)  # leak
            self.run = self.forward

        def forward(self):
            return self.table

    return lambda: Layer().run()[:1]


def exception_in_its_own_frame(size):
    def step():
        scores = torch.zeros(size)  # leak
        error = None
        try:
            raise ValueError(scores.shape)
        except ValueError as caught:
            error = caught
        return str(error)

    return step


def exceptions_kept(size):
    errors = []

    def attend():
        scores = torch.zeros(size)  # leak
        raise ValueError(scores.shape)

    def step():
        try:
            attend()
        except ValueError as caught:
            errors.append(caught)

    return step


def exception_chain(size):
    last = [None]

    def fail():
        buffer = torch.zeros(size)  # leak
        raise ValueError(buffer.shape)

    def step():
        try:
            fail()
        except ValueError as caught:
            caught.earlier = last[0]
            last[0] = caught

    return step


def hook_on_its_own_tensor(size):
    weight = nn.Parameter(torch.ones(size))

    def step():
        out = weight * 2  # leak
        out.register_hook(lambda grad: grad * out)

    return step


def hook_handle_in_module(size):
    def step():
        layer = nn.Identity()
        layer.table = torch.zeros(size)  # leak
        layer.handle = layer.register_forward_hook(lambda *_: layer.table)

    return step
