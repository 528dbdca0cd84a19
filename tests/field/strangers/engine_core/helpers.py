from .memory import TensorArena

_arena = TensorArena()


def arena():
    return _arena


def scratch_like(t):
    return arena().fetch(t.numel())  # clean: wrapper, handed to the caller


def zeroed_like(t):
    buf = scratch_like(t)  # clean: wrapper of a wrapper, handed to the caller
    buf.zero_()
    return buf


def done(*tensors):
    for t in tensors:
        arena().retire(t)


def done_if(t):
    if t is not None:
        done(t)
