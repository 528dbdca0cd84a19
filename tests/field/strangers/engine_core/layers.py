from . import helpers
from .helpers import done, done_if, zeroed_like


def residual(x, fn):
    buf = zeroed_like(x)  # clean: near miss, given back by a helper with star arguments
    buf[: x.numel()].copy_(x.view(-1))
    y = fn(x)
    out = y + buf[: x.numel()].view_as(x)
    done(buf)
    return out


def gate(x, threshold):
    hidden = helpers.scratch_like(x)  # leak: small inputs return before done
    if float(x.abs().max()) < threshold:
        return x
    hidden[: x.numel()].copy_(x.view(-1).sigmoid())
    out = x * hidden[: x.numel()].view_as(x)
    helpers.done(hidden)
    return out


def mix(x, y, alpha):
    a = zeroed_like(x)  # clean: near miss, done(a, b)
    b = zeroed_like(y)  # clean: near miss, done(a, b)
    a[: x.numel()].copy_(x.view(-1))
    b[: y.numel()].copy_(y.view(-1))
    total = float((a[: x.numel()] * alpha).sum() + b[: y.numel()].sum())
    done(a, b)
    return total


def mix_three(x, y, z):
    a = zeroed_like(x)  # clean: in the done call
    b = zeroed_like(y)  # leak: c is named twice in done, b never
    c = zeroed_like(z)  # clean: in the done call
    total = float(a.sum() + b.sum() + c.sum())
    done(a, c)
    return total


def maybe_bias(x, bias):
    tmp = None
    if bias is not None:
        tmp = helpers.scratch_like(bias)  # clean: near miss, done_if gives it back where it was made
        tmp[: bias.numel()].copy_(bias.view(-1))
        x = x + tmp[: bias.numel()].view_as(bias)
    done_if(tmp)
    return x


def dropout_mask(x, p):
    mask = zeroed_like(x)  # leak: deleted, not given back
    mask.bernoulli_(1 - p)
    out = x.view(-1) * mask[: x.numel()]
    del mask
    return out.view_as(x)
