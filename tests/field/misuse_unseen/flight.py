"""Released while something is under way. In our own words after the reports named."""

import torch
import torch.distributed as dist


def broadcast_requests(message_pool, payload, next_rank):
    """After TensorRT-LLM PR 3688: a local buffer is sent and forgotten."""
    message = message_pool.allocate(payload.shape)
    message.copy_(payload)
    handle = dist.isend(message, next_rank)
    requests = message.tolist()
    message_pool.deallocate(message)
    return requests, handle


def broadcast_requests_fixed(message_pool, payload, next_rank):
    message = message_pool.allocate(payload.shape)
    message.copy_(payload)
    handle = dist.isend(message, next_rank)
    requests = message.tolist()
    handle.wait()
    message_pool.deallocate(message)
    return requests


def broadcast_requests_blocking(message_pool, payload, next_rank):
    message = message_pool.allocate(payload.shape)
    message.copy_(payload)
    dist.send(message, next_rank)
    message_pool.deallocate(message)


def compute_offloaded(weight_pool, cpu_weight, x, offload_stream):
    """After ComfyUI PR 10501: freed on the offload stream while the compute stream has not used it."""
    with torch.cuda.stream(offload_stream):
        weight = weight_pool.allocate(cpu_weight.shape)
        weight.copy_(cpu_weight, non_blocking=True)
    with torch.no_grad():
        out = x @ weight
    weight_pool.deallocate(weight)
    return out


def compute_offloaded_fixed(weight_pool, cpu_weight, x, offload_stream):
    with torch.cuda.stream(offload_stream):
        weight = weight_pool.allocate(cpu_weight.shape)
        weight.copy_(cpu_weight, non_blocking=True)
    torch.cuda.current_stream().wait_stream(offload_stream)
    with torch.no_grad():
        out = x @ weight
    offload_stream.wait_stream(torch.cuda.current_stream())
    weight_pool.deallocate(weight)
    return out


class InputBatch:
    """After vllm-ascend PR 16428: host buffers are filled for the next batch while the last one is copied."""

    def __init__(self, host_pool, device):
        self.host_pool = host_pool
        self.device = device

    def prepare(self, positions):
        staged = self.host_pool.allocate(positions.shape)
        staged.copy_(positions)
        on_device = staged.to(device=self.device, non_blocking=True)
        self.host_pool.deallocate(staged)
        return on_device

    def prepare_snapshot(self, positions):
        staged = self.host_pool.allocate(positions.shape)
        staged.copy_(positions)
        on_device = staged.clone().to(device=self.device, non_blocking=True)
        self.host_pool.deallocate(staged)
        return on_device

    def prepare_and_wait(self, positions):
        staged = self.host_pool.allocate(positions.shape)
        staged.copy_(positions)
        on_device = staged.to(device=self.device, non_blocking=True)
        torch.cuda.synchronize()
        self.host_pool.deallocate(staged)
        return on_device


def store_blocks(staging_pool, blocks, host, transfer_stream):
    """After LMCache PR 5248: blocks of a preempted request are freed while they are still copied out."""
    staged = staging_pool.allocate(blocks.shape)
    staged.copy_(blocks)
    transfer_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(transfer_stream):
        host.copy_(staged, non_blocking=True)
    staging_pool.deallocate(staged)


def store_blocks_fixed(staging_pool, blocks, host, transfer_stream):
    staged = staging_pool.allocate(blocks.shape)
    staged.copy_(blocks)
    transfer_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(transfer_stream):
        host.copy_(staged, non_blocking=True)
    torch.cuda.current_stream().wait_stream(transfer_stream)
    staging_pool.deallocate(staged)


def exchange(halo_pool, edges, left, right):
    """After dolfinx PR 4328: two sends are posted, and the function returns their buffer."""
    outgoing = halo_pool.allocate(edges.shape)
    outgoing.copy_(edges)
    requests = []
    requests.append(dist.isend(outgoing, left))
    requests.append(dist.isend(outgoing, right))
    halo_pool.deallocate(outgoing)
    return requests


def exchange_fixed(halo_pool, edges, left, right):
    outgoing = halo_pool.allocate(edges.shape)
    outgoing.copy_(edges)
    requests = [dist.isend(outgoing, left), dist.isend(outgoing, right)]
    for request in requests:
        request.wait()
    halo_pool.deallocate(outgoing)


def exchange_first_only(halo_pool, edges, left, right):
    """After mpi4py issue 233: one request is kept and waited for, the other is discarded."""
    outgoing = halo_pool.allocate(edges.shape)
    outgoing.copy_(edges)
    request = dist.isend(outgoing, left)
    dist.isend(outgoing, right)
    request.wait()
    halo_pool.deallocate(outgoing)


def prefetch(gather_pool, shard, group, x):
    """After Megatron-LM PR 6407: a buffer that is gathered into goes back before that has ended."""
    gathered = gather_pool.allocate((shard.numel() * 8,))
    work = dist.all_gather_into_tensor(gathered, shard, group=group, async_op=True)
    if x is None:
        gather_pool.deallocate(gathered)
        return None
    work.wait()
    with torch.no_grad():
        out = x * gathered
    gather_pool.deallocate(gathered)
    return out


def rescale(bucket_pool, gradients, world):
    """After OpenNMT-py issue 2295: divided and given back while the reduction may still run."""
    bucket = bucket_pool.allocate(gradients.shape)
    bucket.copy_(gradients)
    dist.all_reduce(bucket, async_op=True)
    bucket.div_(world)
    gradients.copy_(bucket)
    bucket_pool.deallocate(bucket)


def rescale_fixed(bucket_pool, gradients, world):
    bucket = bucket_pool.allocate(gradients.shape)
    bucket.copy_(gradients)
    dist.all_reduce(bucket)
    bucket.div_(world)
    gradients.copy_(bucket)
    bucket_pool.deallocate(bucket)
