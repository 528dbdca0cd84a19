import os

import torch

from .pieces import read_cast, read_piece, read_scaled, read_transposed


def convert(bank, readers, plan, out_dir, dtype, world, verify=False, want_stats=False):
    """Write each target of the plan as `world` equal parts. Returns the names that did not verify."""
    os.makedirs(out_dir, exist_ok=True)
    failed, stats = [], {}
    for target in plan:
        if not target.pieces:
            continue
        dest = bank.lease(target.numel, dtype)  # clean: near miss, ended on the skip, after a failed check and at the end
        ends = []
        at = 0
        for piece in target.pieces:
            reader = readers.pin(piece.path)  # clean: unpinned in the finally
            try:
                if piece.rows is not None:
                    part = read_transposed(bank, reader, piece, piece.rows)  # clean: near miss, ended flat in its branch
                    dest[at:at + part.numel()].copy_(part.reshape(-1))
                    at += part.numel()
                    bank.end(part.view(-1))
                elif piece.scale is not None:
                    part = read_scaled(bank, reader, piece, piece.scale)  # leak: the finally ends the reader only
                    dest[at:at + part.numel()].copy_(part)
                    at += part.numel()
                else:
                    part = read_cast(bank, reader, piece, dtype)  # clean: ended in its branch
                    dest[at:at + part.numel()].copy_(part)
                    at += part.numel()
                    bank.end(part)
            finally:
                readers.unpin(reader)
            ends.append(at)
        if at != target.numel:
            failed.append(target.name)
            bank.end(dest)
            continue
        if target.padded:
            total = -(-target.numel // world) * world
            full = bank.lease(total, dtype)  # leak: padded, cut into parts and saved as clones, never ended
            full[:target.numel].copy_(dest)
            full[target.numel:].zero_()
            parts = [chunk.clone() for chunk in full.chunk(world)]
        else:
            parts = [chunk.clone() for chunk in dest.chunk(world)]
        for rank, part in enumerate(parts):
            torch.save(part, os.path.join(out_dir, f"{target.name}.{rank:04d}.pt"))
        if want_stats:
            wide = bank.lease(target.numel, torch.float32)  # clean: ended after the three numbers
            wide.copy_(dest)
            stats[target.name] = (wide.mean().item(), wide.std().item(), wide.abs().max().item())
            bank.end(wide)
        if verify:
            low = 0
            for piece, high in zip(target.pieces, ends):
                if piece.rows is not None or piece.scale is not None:
                    low = high
                    continue
                reader = readers.pin(piece.path)  # leak: a mismatch breaks out with the pin held
                again = read_cast(bank, reader, piece, dtype)  # clean: near miss, ended before the branch
                same = torch.equal(again, dest[low:high])
                bank.end(again)
                if not same:
                    failed.append(target.name)
                    break
                readers.unpin(reader)
                low = high
            else:
                stats.setdefault(target.name, None)
        bank.end(dest)
    return failed, stats


def merge_experts(bank, readers, layers, out_dir, count, router_dtype=torch.float32):
    """Stack the expert matrices of each layer, the router beside them; returns the paths written."""
    written = []
    previous = None
    for layer in layers:
        reader = readers.pin(layer.path)  # clean: near miss, unpinned before each continue and at the end of the turn
        experts = [read_piece(bank, reader, p) for p in layer.experts]  # clean: near miss, all ended by the loop below
        if len(experts) < count:
            for part in experts:
                bank.end(part)
            readers.unpin(reader)
            continue
        gate = read_piece(bank, reader, layer.gate)  # leak: only its cast copy is kept, never ended
        router = gate.to(router_dtype, copy=True)
        shared = read_piece(bank, reader, layer.shared) if layer.shared is not None else None  # clean: near miss, same guard
        stacked = torch.stack(experts[:count])
        for part in experts:
            bank.end(part)
        if shared is not None:
            stacked = torch.cat([stacked, shared.unsqueeze(0)])
            bank.end(shared)
        record = {"experts": stacked, "router": router}
        if layer.bias is not None:
            bias = read_cast(bank, reader, layer.bias, router_dtype)  # clean: near miss, ended as previous
            record["bias"] = bias.clone()
            if previous is not None:
                record["bias_shift"] = (bias - previous).norm().item()
                bank.end(previous)
            previous = bias
        path = os.path.join(out_dir, f"{layer.name}.experts.pt")
        torch.save(record, path)
        written.append(path)
        readers.unpin(reader)
    if previous is not None:
        bank.end(previous)
    return written
