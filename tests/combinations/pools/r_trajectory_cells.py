# take: traj_cell()
# give: traj_cell_free(X)
# gets: value
# Trajectory cells come in slabs; a slab is added when all are full.
SLAB = 64

slab_mem = []     # slab -> bytearray
slab_used = []    # slab -> list of SLAB flags
slab_left = []    # slab -> free cells


def _slab_add():
    slab_mem.append(bytearray(SLAB * 128))
    slab_used.append([0] * SLAB)
    slab_left.append(SLAB)
    return len(slab_mem) - 1


def traj_cell():
    for s in range(len(slab_left)):
        if slab_left[s]:
            break
    else:
        s = _slab_add()
    c = slab_used[s].index(0)
    slab_used[s][c] = 1
    slab_left[s] -= 1
    return s, c


def traj_cell_free(cell):
    s, c = cell
    if not slab_used[s][c]:
        raise RuntimeError("free of free cell %d:%d" % (s, c))
    slab_used[s][c] = 0
    slab_left[s] += 1
