"""Read before anything was written. Written in our own words after the bug reports that each names."""

import math

import numpy as np
import torch


def stimulate(weights, regions, amplitude):
    """After neuronumba PR 34: with one region the array is used as it came."""
    stimulus = np.empty(regions)
    current = weights @ stimulus
    return current * amplitude


def stimulate_fixed(weights, regions, amplitude):
    stimulus = np.empty(regions)
    stimulus.fill(amplitude)
    return weights @ stimulus


def propagate(steps, modes, gain):
    """After pyfiberamp issue 5: the estimate is added to before it is set."""
    power = np.empty((steps, modes))
    power += gain
    return power


def propagate_fixed(steps, modes, gain):
    power = np.zeros((steps, modes))
    power += gain
    return power


def defuzzify(universe, memberships):
    """After scikit-fuzzy PR 103: a maximum with what happened to be there."""
    aggregated = np.empty_like(universe)
    for membership in memberships:
        aggregated = np.fmax(aggregated, membership)
    return aggregated


def defuzzify_fixed(universe, memberships):
    aggregated = np.empty_like(universe)
    aggregated[:] = 0.0
    for membership in memberships:
        aggregated = np.fmax(aggregated, membership)
    return aggregated


def surrogate(horizon, ratio):
    """After OpenAI baselines PR 412: a factor of the loss is never given a value."""
    advantage = np.empty(horizon, "float32")
    return (ratio * advantage).mean()


def surrogate_fixed(horizon, ratio, rewards):
    advantage = np.empty(horizon, "float32")
    for step in reversed(range(horizon)):
        advantage[step] = rewards[step]
    return (ratio * advantage).mean()


def squared(targets):
    """After ML-From-Scratch PR 60: predictions start from the heap."""
    predictions = np.empty(np.shape(targets))
    residual = targets - predictions
    return residual**2


def log_starts(n):
    """After pomegranate PR 1121: minus infinity from whatever it was, which may be a NaN or an infinity."""
    return torch.empty(n) - float("inf")


def log_starts_fixed(n):
    return torch.full((n,), -math.inf)


def log_starts_sized(template):
    return torch.empty(template.shape[0]).size(0)


def cache_scores(keys, query):
    """After Wan2GP PR 1628: a cache whose tail nobody wrote, masked by adding minus infinity."""
    cache = torch.empty(keys.shape)
    scores = cache @ query
    return scores.masked_fill(torch.isinf(scores), -math.inf)


def cache_scores_fixed(keys, query):
    cache = torch.empty(keys.shape)
    cache.copy_(keys)
    return cache @ query


def grouped_gemm(tokens, weights, sizes):
    """After grouped_gemm issue 36: without tokens for any expert nothing is written, and the sum is taken."""
    output = torch.empty(tokens.shape[0], weights.shape[-1])
    if sizes.sum() > 0:
        torch.matmul(tokens, weights[0], out=output)
    return output.sum()


def grouped_gemm_fixed(tokens, weights, sizes):
    output = torch.empty(tokens.shape[0], weights.shape[-1])
    if sizes.sum() > 0:
        torch.matmul(tokens, weights[0], out=output)
    else:
        output.zero_()
    return output.sum()


@torch.no_grad()
def accumulate_gradient(buffer_pool, gradients):
    """After Megatron-LM PR 4609: a buffer with another use's values in it, added to."""
    main_grad = buffer_pool.allocate(gradients[0].shape)
    for gradient in gradients:
        main_grad.add_(gradient)
    total = main_grad.norm()
    buffer_pool.deallocate(main_grad)
    return total


@torch.no_grad()
def accumulate_gradient_fixed(buffer_pool, gradients):
    main_grad = buffer_pool.allocate(gradients[0].shape)
    main_grad.zero_()
    for gradient in gradients:
        main_grad.add_(gradient)
    total = main_grad.norm()
    buffer_pool.deallocate(main_grad)
    return total


def quantize(tensor):
    """After torchao PR 1157: a scale that is multiplied in before it is computed."""
    scale = torch.empty(1)
    scaled = tensor * scale
    scale.copy_(tensor.abs().max())
    return scaled


def quantize_fixed(tensor):
    scale = torch.empty(1)
    scale.copy_(tensor.abs().max())
    return tensor * scale


def allocated_elsewhere(kernel, tensor):
    output = torch.empty_like(tensor)
    kernel(tensor, output)
    return output.sum()


def received(group, shape):
    buffer = torch.empty(shape)
    torch.distributed.recv(buffer, 0, group)
    return buffer * 2
