"""Tile encoder helpers. Function style: the pool is a plain dict made by make_pool()."""
from functools import partial, reduce

import torch
import torch.nn.functional as F


def make_pool(n, size):
    return {"idle": [torch.empty(3, size, size) for _ in range(n)], "busy": 0, "size": size}


def rent_tile(pool):
    pool["busy"] += 1
    return pool["idle"].pop()


def unrent_tile(pool, tile):
    pool["busy"] -= 1
    pool["idle"].append(tile)


def with_tile(pool, fn):
    tile = rent_tile(pool)  # clean: finally
    try:
        return fn(tile)
    finally:
        unrent_tile(pool, tile)


def crop(pool, image, y, x):
    tile = rent_tile(pool)  # clean: given to the caller
    s = pool["size"]
    tile.zero_()
    part = image[:, y : y + s, x : x + s]
    tile[:, : part.shape[1], : part.shape[2]] = part
    return tile


def grid(pool, image):
    s = pool["size"]
    return [
        crop(pool, image, y, x)  # clean: list of tiles belongs to the caller
        for y in range(0, image.shape[1], s)
        for x in range(0, image.shape[2], s)
    ]


def encode_grid(pool, image, encoder):
    tiles = grid(pool, image)  # clean: near miss, features are new tensors, every tile is unrented
    feats = torch.stack([encoder(t) for t in tiles])
    for t in tiles:
        unrent_tile(pool, t)
    return feats


def encode_nonblank(pool, image, encoder):
    tiles = [t for t in grid(pool, image) if t.any()]  # leak: blank tiles fall out of the comprehension
    feats = [encoder(t) for t in tiles]
    for t in tiles:
        unrent_tile(pool, t)
    return feats


def encode_split(pool, image, encoder):
    keep, skip = [], []
    for t in grid(pool, image):  # clean: near miss, each tile is in one of the two lists, both are unrented
        (keep if t.any() else skip).append(t)
    feats = [encoder(t) for t in keep]
    for t in keep + skip:
        unrent_tile(pool, t)
    return feats


def thumbnail(pool, image, scale):
    tile = rent_tile(pool)  # leak: the normalising step rebinds tile
    tile.copy_(F.interpolate(image[None], size=(pool["size"], pool["size"]))[0])
    tile = (tile - tile.mean()) / tile.std().clamp_min(1e-6)
    out = F.avg_pool2d(tile[None], scale)[0]
    unrent_tile(pool, tile)
    return out


def thumbnail_inplace(pool, image, scale):
    tile = rent_tile(pool)  # clean: near miss, sub_ and div_ return the same tensor
    tile.copy_(F.interpolate(image[None], size=(pool["size"], pool["size"]))[0])
    tile = tile.sub_(tile.mean()).div_(tile.std().clamp_min(1e-6))
    out = F.avg_pool2d(tile[None], scale)[0]
    unrent_tile(pool, tile)
    return out


def mean_tile(pool, image):
    tiles = grid(pool, image)  # leak: the first tile, used as accumulator, is not in the slice that is unrented
    total = reduce(torch.add, tiles[1:], tiles[0])
    for t in tiles[1:]:
        unrent_tile(pool, t)
    return total / len(tiles)


def brightness(pool, images):
    def one(image, tile):
        s = pool["size"]
        tile.copy_(image[:, :s, :s])
        return float(tile.mean())

    return [with_tile(pool, partial(one, im)) for im in images]  # clean: with_tile takes its tile back itself


def first_bright(pool, image, thr):
    for t in grid(pool, image):  # leak: the rest of the list is dropped when a bright tile is found
        if float(t.mean()) > thr:
            mean = float(t.mean())
            unrent_tile(pool, t)
            return mean
        unrent_tile(pool, t)
    return None


def compare_tiles(pool, a, b):
    ta = crop(pool, a, 0, 0)  # clean: unrented with tb
    tb = crop(pool, b, 0, 0)  # clean: unrented with ta
    d = float((ta - tb).abs().mean())
    for t in (ta, tb):
        unrent_tile(pool, t)
    return d


def corner_stats(pool, image, want_std=False):
    t = crop(pool, image, 0, 0)  # leak: the want_std branch returns without unrenting
    if want_std:
        return float(t.mean()), float(t.std())
    m = float(t.mean())
    unrent_tile(pool, t)
    return m, None


def sharpness(pool, image):
    return crop(pool, image, 0, 0).diff(dim=-1).abs().mean().item()  # leak: the tile is an unnamed temporary
