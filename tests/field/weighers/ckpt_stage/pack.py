"""Turning groups of small tensors into blocks."""
import struct

import torch

MAGIC = b"SHD2"


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack_group(arena, tensors):
    """One block with the tensors one after another, and the used length. The block is the caller's."""
    block = arena.checkout()  # clean: handed to the caller
    at = 0
    for tensor in tensors:
        raw = as_bytes(tensor)
        block[at:at + raw.numel()].copy_(raw, non_blocking=True)
        at += raw.numel()
    torch.cuda.current_stream().synchronize()
    return block, at


def pack_header(arena, names, sizes):
    """The header of a shard as bytes; the block is only needed while it is put together."""
    block = arena.checkout()  # clean: given back before the bytes leave
    at = 0
    for piece in (MAGIC, struct.pack("<I", len(names))):
        block[at:at + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        at += len(piece)
    for name, size in zip(names, sizes):
        piece = struct.pack("<HQ", len(name), size) + name.encode()
        if at + len(piece) > arena.block_bytes:
            arena.checkin(block)
            return None
        block[at:at + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        at += len(piece)
    raw = block[:at].numpy().tobytes()
    arena.checkin(block)
    return raw


def quantized(arena, tensor):
    """int8 copy of a tensor as a view of a block; `view._base` is what goes back."""
    scale = float(tensor.abs().max()) / 127.0
    if scale == 0.0:
        return None, 0.0
    block = arena.checkout()  # clean: leaves as the base of the view
    view = block[:tensor.numel()].view(torch.int8)
    view.copy_((tensor.reshape(-1) / scale).round_())
    return view, scale
