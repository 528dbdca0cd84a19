"""Tensors read before they were written, or needed after they went home. After the reports named."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn


def share(counts, totals):
    """After NumPy issue 25953: what `where` leaves out is never written, and the mean is taken over all."""
    ratio = np.divide(counts, totals, where=totals != 0)
    return ratio.mean()


def share_fixed(counts, totals):
    ratio = np.divide(counts, totals, out=np.zeros_like(counts), where=totals != 0)
    return ratio.mean()


def share_of_all(counts, totals):
    ratio = np.divide(counts, totals)
    return ratio.mean()


def orthogonality(model):
    """After pytorch-goodies issue 8: a loss is added to what was found in memory."""
    loss = torch.FloatTensor(1)
    for weight in model.parameters():
        loss = loss + (weight @ weight.t()).norm()
    return loss


def orthogonality_fixed(model):
    loss = torch.zeros(1)
    for weight in model.parameters():
        loss = loss + (weight @ weight.t()).norm()
    return loss


def orthogonality_given(values, model):
    loss = torch.FloatTensor([0.0, values])
    for weight in model.parameters():
        loss = loss + (weight @ weight.t()).norm()
    return loss


def blend(matrix, other):
    """After PyTorch issue 1347: times zero, but a NaN times zero is one."""
    output = matrix.new_empty(matrix.shape[0], other.shape[1])
    return torch.addmm(output, matrix, other, beta=0.5)


def blend_fixed(matrix, other):
    output = matrix.new_zeros(matrix.shape[0], other.shape[1])
    return torch.addmm(output, matrix, other, beta=0.5)


def blend_out(matrix, other):
    output = matrix.new_empty(matrix.shape[0], other.shape[1])
    torch.mm(matrix, other, out=output)
    return output * 2


def transform_boxes(count, padding):
    """After YOEO PR 114: boxes of a picture without any are transformed as they came."""
    boxes = np.empty((count, 5))
    boxes[:, 1:3] *= padding
    return boxes


def transform_boxes_fixed(count, padding):
    boxes = np.zeros((count, 5))
    boxes[:, 1:3] *= padding
    return boxes


def loudness(bands, steps):
    """After sottek-hearing-model issue 9: only some bands are set, all are summed."""
    specific = np.empty((steps, bands))
    total = np.sum(specific, axis=1)
    specific[:, 0] = 1.0
    return total


def loudness_fixed(bands, steps):
    specific = np.empty((steps, bands))
    for band in range(bands):
        specific[:, band] = band
    return np.sum(specific, axis=1)


@torch.no_grad()
def quantized_scale(decode_pool, kernel, query, lengths):
    """After vLLM PR 37442: rows of padding are not written, the scale is taken over all rows."""
    output = decode_pool.allocate(query.shape)
    for row in range(query.shape[0]):
        if lengths[row] > 0:
            output[row] = kernel(query[row])
    scale = output.abs().max()
    decode_pool.deallocate(output)
    return scale


@torch.no_grad()
def quantized_scale_fixed(decode_pool, kernel, query, lengths):
    output = decode_pool.allocate(query.shape)
    output.zero_()
    for row in range(query.shape[0]):
        if lengths[row] > 0:
            output[row] = kernel(query[row])
    scale = output.abs().max()
    decode_pool.deallocate(output)
    return scale


@torch.no_grad()
def value_cache(cache_pool, weights, values):
    """After text-generation-inference PR 11: weights of zero do not help against a cache with NaNs."""
    cache = cache_pool.allocate(values.shape)
    context = torch.matmul(weights, cache)
    cache.copy_(values)
    cache_pool.deallocate(cache)
    return context


@torch.no_grad()
def value_cache_fixed(cache_pool, weights, values):
    cache = cache_pool.allocate(values.shape)
    cache.copy_(values)
    context = torch.matmul(weights, cache)
    cache_pool.deallocate(cache)
    return context


def scatter_rows(source, index):
    """After PyTorch PR 70662: without an index nothing is copied, and the output is what it was."""
    result = torch.empty_like(source)
    if index.numel() > 0:
        result.copy_(source)
        result.scatter_(0, index, 0.0)
    return result.sum()


def scatter_rows_fixed(source, index):
    result = torch.empty_like(source)
    result.copy_(source)
    if index.numel() > 0:
        result.scatter_(0, index, 0.0)
    return result.sum()


class StreamedLinear(nn.Module):
    """After bitsandbytes issue 2034: a streamed weight's slot is filled anew before backward."""

    def __init__(self, slot_pool, store):
        super().__init__()
        self.slot_pool = slot_pool
        self.store = store

    def forward(self, x):
        weight = self.slot_pool.acquire(self.store.shape)
        weight.copy_(self.store)
        out = functional.linear(x, weight)
        self.slot_pool.release(weight)
        return out

    @torch.inference_mode()
    def generate(self, x):
        weight = self.slot_pool.acquire(self.store.shape)
        weight.copy_(self.store)
        out = functional.linear(x, weight)
        self.slot_pool.release(weight)
        return out

    def forward_detached(self, x):
        weight = self.slot_pool.acquire(self.store.shape)
        weight.copy_(self.store)
        out = functional.linear(x.detach(), weight).detach()
        self.slot_pool.release(weight)
        return out


class Stage(nn.Module):
    """After PyTorch issue 185331: what was received enters the stage, and is received into again."""

    def __init__(self, receive_pool, width):
        super().__init__()
        self.receive_pool = receive_pool
        self.projection = nn.Linear(width, width)

    def forward(self, shape, previous):
        received = self.receive_pool.allocate(shape)
        dist.recv(received, previous)
        hidden = self.projection(received)
        self.receive_pool.deallocate(received)
        return hidden

    def forward_cloned(self, shape, previous):
        received = self.receive_pool.allocate(shape)
        dist.recv(received, previous)
        hidden = self.projection(received.clone())
        self.receive_pool.deallocate(received)
        return hidden


def chain(gradient_pool, x, weight):
    """After ggml issue 1501: an intermediate of the graph is handed out again while later nodes need it."""
    middle = gradient_pool.allocate(x.shape)
    middle.copy_(x * weight)
    activated = middle.sigmoid() * middle
    gradient_pool.deallocate(middle)
    return activated.sum()


def chain_to_the_end(gradient_pool, x, weight):
    middle = gradient_pool.allocate(x.shape)
    middle.copy_(x * weight)
    loss = (middle.sigmoid() * middle).sum()
    loss.backward()
    gradient_pool.deallocate(middle)
    return loss.detach()


def chain_of_sums(gradient_pool, x, weight):
    middle = gradient_pool.allocate(x.shape)
    middle.copy_(x)
    shifted = weight + middle
    gradient_pool.deallocate(middle)
    return shifted.sum()


class CapturedGraph:
    """After TransformerEngine PR 2018: the input of one microbatch is reused before its backward has run."""

    def __init__(self, static_pool, layer_weight):
        self.static_pool = static_pool
        self.layer_weight = layer_weight

    def capture(self, batches):
        outputs = []
        for batch in batches:
            static_input = self.static_pool.allocate(batch.shape)
            static_input.copy_(batch)
            outputs.append(static_input @ self.layer_weight)
            self.static_pool.deallocate(static_input)
        return outputs

    def capture_in_order(self, batches):
        for batch in batches:
            static_input = self.static_pool.allocate(batch.shape)
            static_input.copy_(batch)
            (static_input @ self.layer_weight).sum().backward()
            self.static_pool.deallocate(static_input)


class Recurrent(nn.Module):
    """After AiDotNet.Tensors PR 925: a transposed view of a parameter goes to the pool of temporaries."""

    def __init__(self, scratch_pool, width):
        super().__init__()
        self.scratch_pool = scratch_pool
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        flipped = self.weight.t()
        product = x @ flipped
        self.scratch_pool.deallocate(flipped)
        return product

    @torch.no_grad()
    def step(self, x):
        flipped = self.scratch_pool.allocate(self.weight.t().shape)
        flipped.copy_(self.weight.t())
        product = x @ flipped
        self.scratch_pool.deallocate(flipped)
        return product
