"""Autograd keeps what somebody forgot to cut off."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def loss_summed_with_graph(size):
    weight, total = nn.Parameter(torch.ones(size)), [torch.zeros(())]

    def step():
        loss = weight.exp().sum()  # leak
        total[0] = total[0] + loss

    return step


def recurrent_state(size):
    weight, state = nn.Parameter(torch.ones(size)), [torch.zeros(size)]

    def step():
        state[0] = torch.tanh(state[0] * weight)  # leak

    return step


def outputs_with_graph(size):
    weight, outputs = nn.Parameter(torch.ones(size)), []

    def step():
        outputs.append(weight.exp().mean())  # leak

    return step


def only_the_node(size):
    weight, nodes = nn.Parameter(torch.ones(size)), []
    return lambda: nodes.append(weight.exp().grad_fn)  # leak


def nodes_that_save_nothing(size):
    weight, state = nn.Parameter(torch.ones(size)), [torch.zeros(size)]

    def step():
        state[0] = state[0] + weight  # leak

    return step


def attribute_on_ctx(size):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.out = x * x  # leak
            return ctx.out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.out

    weight = nn.Parameter(torch.ones(size))
    return lambda: Square.apply(weight)


def input_on_ctx_kept(size):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.extra = torch.zeros(size)  # leak
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    weight, outputs = nn.Parameter(torch.ones(1)), []
    return lambda: outputs.append(Double.apply(weight))


def backward_keeps_gradients(size):
    gradients = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            gradients.append(grad * 2)  # leak
            return grad

    weight = nn.Parameter(torch.ones(size))

    def step():
        weight.grad = None
        Keep.apply(weight).sum().backward()

    return step


def create_graph(size):
    def step():
        weight = nn.Parameter(torch.ones(size))  # leak
        (weight**3).sum().backward(create_graph=True)

    return step


def retained_graph(size):
    weight, losses = nn.Parameter(torch.ones(size)), []

    def step():
        loss = weight.exp().sum()  # leak
        loss.backward(retain_graph=True)
        losses.append(loss)

    return step


def packed_by_saved_tensor_hooks(size):
    weight, packed = nn.Parameter(torch.ones(size)), {}

    def pack(tensor):
        packed[len(packed)] = tensor.clone()  # leak
        return len(packed) - 1

    def step():
        weight.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.get):
            loss = weight.exp().sum()
        loss.backward()

    return step


def checkpoint_that_collects(size):
    weight, seen = nn.Parameter(torch.ones(size)), []

    def block(x):
        y = x.exp()
        seen.append(y.detach().clone())  # leak
        return y

    def step():
        weight.grad = None
        checkpoint(block, weight, use_reentrant=False).sum().backward()

    return step


def gradients_collected(size):
    weight, norms = nn.Parameter(torch.ones(size)), []

    def step():
        weight.grad = None
        (weight * 2).sum().backward()  # leak
        norms.append(weight.grad)

    return step


def accumulated_into_a_growing_tensor(size):
    state = [torch.zeros(0)]

    def step():
        state[0] = torch.cat([state[0], torch.zeros(size)])  # leak

    return step


def storage_that_is_resized(size):
    buffer = torch.zeros(size)

    def step():
        buffer.resize_(buffer.numel() + size)  # leak

    return step
