"""Released too early, and to the wrong owner. Written in our own words after the bug reports named."""

import time

import torch
import torch.distributed as dist


def send_and_free(buffer_pool, activation, next_rank):
    """After Megatron-LM PR 4047: isend reads the buffer while it goes back to its pool."""
    output = buffer_pool.allocate(activation.shape)
    output.copy_(activation)
    dist.isend(output, next_rank)
    buffer_pool.deallocate(output)


def send_and_free_fixed(buffer_pool, activation, next_rank):
    output = buffer_pool.allocate(activation.shape)
    output.copy_(activation)
    handle = dist.isend(output, next_rank)
    handle.wait()
    buffer_pool.deallocate(output)


def send_in_overlap(buffer_pool, activation, next_rank, previous):
    """The same, and the wait is for the send before this one, as in the report."""
    output = buffer_pool.allocate(activation.shape)
    output.copy_(activation)
    handle = dist.isend(output, next_rank)
    if previous is not None:
        previous.wait()
    buffer_pool.deallocate(output)
    return handle


def log_loss(staging_pool, loss, side_stream):
    """After nvalchemi-toolkit issue 171: a copy on a side stream, and the source is given back here."""
    snapshot = staging_pool.allocate(loss.shape)
    snapshot.copy_(loss)
    with torch.cuda.stream(side_stream):
        host = snapshot.to("cpu", non_blocking=True)
    staging_pool.deallocate(snapshot)
    return host


def log_loss_fixed(staging_pool, loss, side_stream):
    snapshot = staging_pool.allocate(loss.shape)
    snapshot.copy_(loss)
    with torch.cuda.stream(side_stream):
        host = snapshot.to("cpu", non_blocking=True)
    side_stream.synchronize()
    staging_pool.deallocate(snapshot)
    return host


def log_loss_recorded(staging_pool, loss, side_stream):
    snapshot = staging_pool.allocate(loss.shape)
    snapshot.copy_(loss)
    with torch.cuda.stream(side_stream):
        host = snapshot.to("cpu", non_blocking=True)
    snapshot.record_stream(side_stream)
    staging_pool.deallocate(snapshot)
    return host


def offload_gradient(buffer_pool, gradient, host, all_reduce_stream):
    """After PyTorch PR 180665: reduced on one stream, copied out on another, freed on the first."""
    reduced = buffer_pool.allocate(gradient.shape)
    dist.reduce_scatter_tensor(reduced, gradient)
    with torch.cuda.stream(all_reduce_stream):
        host.copy_(reduced, non_blocking=True)
    buffer_pool.deallocate(reduced)


def upload_embeddings(pinned_pool, table, device_table):
    """After TensorRT-LLM issue 19172: pinned memory goes back while the copy to the device reads it."""
    pinned = pinned_pool.allocate(table.shape)
    pinned.copy_(table)
    device_table.copy_(pinned, non_blocking=True)
    pinned_pool.deallocate(pinned)


def upload_embeddings_fixed(pinned_pool, table, device_table):
    pinned = pinned_pool.allocate(table.shape)
    pinned.copy_(table)
    device_table.copy_(pinned, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned_pool.deallocate(pinned)


def upload_embeddings_with_event(pinned_pool, table, device_table):
    pinned = pinned_pool.allocate(table.shape)
    pinned.copy_(table)
    device_table.copy_(pinned, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    pinned_pool.deallocate(pinned)


def reduce_bucket(buffer_pool, gradients, reduction_stream):
    """After DeepSpeed PR 7965: the bucket is reduced on another stream and goes back here."""
    bucket = buffer_pool.allocate(gradients.shape)
    bucket.copy_(gradients)
    handle = dist.all_reduce(bucket, async_op=True)
    buffer_pool.deallocate(bucket)
    return handle


def reduce_bucket_fixed(buffer_pool, gradients):
    bucket = buffer_pool.allocate(gradients.shape)
    bucket.copy_(gradients)
    handle = dist.all_reduce(bucket, async_op=True)
    handle.wait()
    buffer_pool.deallocate(bucket)


def gather_all(buffer_pool, shards, group):
    """After DeepSpeed PR 8539: many gathers are started, only the last is waited for."""
    first = buffer_pool.allocate(shards[0].shape)
    second = buffer_pool.allocate(shards[1].shape)
    handles = [
        dist.all_gather_into_tensor(first, shards[0], group=group, async_op=True),
        dist.all_gather_into_tensor(second, shards[1], group=group, async_op=True),
    ]
    handles[-1].wait()
    buffer_pool.deallocate(first)
    buffer_pool.deallocate(second)


def gather_all_fixed(buffer_pool, shards, group):
    first = buffer_pool.allocate(shards[0].shape)
    second = buffer_pool.allocate(shards[1].shape)
    handles = [
        dist.all_gather_into_tensor(first, shards[0], group=group, async_op=True),
        dist.all_gather_into_tensor(second, shards[1], group=group, async_op=True),
    ]
    for handle in handles:
        handle.wait()
    buffer_pool.deallocate(first)
    buffer_pool.deallocate(second)


def push_blocks(buffer_pool, peer, blocks, deadline):
    """After vllm-rbln PR 1024: the wait gives up after a while, and the source goes back all the same."""
    staged = buffer_pool.allocate(blocks.shape)
    staged.copy_(blocks)
    handle = dist.isend(staged, peer)
    while not handle.is_completed():
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    buffer_pool.deallocate(staged)


def offload_weights(weight_pool, weight, host):
    """After diffusers PR 14657: the weight goes back while the copy out of it runs."""
    resident = weight_pool.allocate(weight.shape)
    resident.copy_(weight)
    host.copy_(resident, non_blocking=True)
    weight_pool.deallocate(resident)


def offload_weights_fixed(weight_pool, weight, host):
    resident = weight_pool.allocate(weight.shape)
    resident.copy_(weight)
    host.copy_(resident)
    weight_pool.deallocate(resident)


def project(chunk_pool, weight, x):
    """After Elixir PR 12: what autograd saved is a block that the next chunk writes into."""
    block = chunk_pool.allocate(weight.shape)
    block.copy_(weight)
    y = x @ block.t()
    chunk_pool.deallocate(block)
    return y


def project_for_inference(chunk_pool, weight, x):
    block = chunk_pool.allocate(weight.shape)
    block.copy_(weight)
    with torch.no_grad():
        y = x @ block.t()
    chunk_pool.deallocate(block)
    return y


def normalise(tensor_pool, x, weight):
    """After AiDotNet.Tensors PR 906: statistics that the backward pass reads go back to the pool."""
    variance = tensor_pool.allocate(x.shape[:-1])
    variance.copy_(x.pow(2).mean(-1))
    normed = x * torch.rsqrt(variance + 1e-6).unsqueeze(-1) * weight
    scale = weight * variance.unsqueeze(-1)
    tensor_pool.deallocate(variance)
    return normed + scale


def normalise_fixed(tensor_pool, x, weight):
    variance = tensor_pool.allocate(x.shape[:-1])
    variance.copy_(x.pow(2).mean(-1))
    scale = weight * variance.clone().unsqueeze(-1)
    tensor_pool.deallocate(variance)
    return scale


def attention_scores(scratch_pool, q, k, v):
    """After AiDotNet.Tensors issue 338, the attention weights among them."""
    scores = scratch_pool.allocate((q.shape[0], k.shape[0]))
    scores.copy_(torch.softmax(q @ k.t(), -1))
    out = scores @ v
    scratch_pool.deallocate(scores)
    return out


def evict_window(full_allocator, swa_allocator, tokens):
    """After SGLang PR 38519: indices of the full pool are freed into the one of the window."""
    full_indices = full_allocator.alloc(tokens)
    swa_indices = swa_allocator.alloc(tokens)
    swa_allocator.free(full_indices)
    full_allocator.free(swa_indices)


def evict_window_fixed(full_allocator, swa_allocator, tokens):
    full_indices = full_allocator.alloc(tokens)
    swa_indices = swa_allocator.alloc(tokens)
    swa_allocator.free(swa_indices)
    full_allocator.free(full_indices)


class Buffers:
    """After cumo PR 173: the switch is asked again at the release, and may say something else by then."""

    def __init__(self, memory_pool, plain_pool, enabled):
        self.memory_pool, self.plain_pool, self.enabled = memory_pool, plain_pool, enabled

    def scratch(self, shape, work):
        buffer = self.memory_pool.allocate(shape)
        work(buffer)
        self.plain_pool.deallocate(buffer)

    def scratch_fixed(self, shape, work):
        pool = self.memory_pool if self.enabled else self.plain_pool
        buffer = pool.allocate(shape)
        work(buffer)
        pool.deallocate(buffer)


class Replicas:
    """After redis-py PR 3514: a connection of the writer's pool is released to the reader's."""

    def __init__(self, write_connection_pool, read_connection_pool):
        self.write_connection_pool = write_connection_pool
        self.read_connection_pool = read_connection_pool

    def copy(self, key):
        writer = self.write_connection_pool.get_conn()
        reader = self.read_connection_pool.get_conn()
        writer.set(key, reader.get(key))
        self.read_connection_pool.put_conn(writer)
        self.write_connection_pool.put_conn(reader)

    def copy_fixed(self, key):
        writer = self.write_connection_pool.get_conn()
        reader = self.read_connection_pool.get_conn()
        writer.set(key, reader.get(key))
        self.read_connection_pool.put_conn(reader)
        self.write_connection_pool.put_conn(writer)
