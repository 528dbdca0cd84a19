"""torch's own modules, each in every scenario."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from auditor.leaktests.support import SCENARIOS, make_step


def _floats(*shape):
    return lambda turn: ((torch.randn(shape[0] + turn, *shape[1:]),), {})


def _twice(*shape):
    def feed(turn):
        x = torch.randn(shape[0] + turn, *shape[1:])
        return (x, torch.randn_like(x)), {}

    return feed


def _thrice(*shape):
    def feed(turn):
        x = torch.randn(shape[0] + turn, *shape[1:])
        return (x, x, x), {}

    return feed


def _numbers(*shape):
    return lambda turn: ((torch.randint(0, 8, (shape[0] + turn, *shape[1:])),), {})


MODULES = {
    "Linear": (lambda: nn.Linear(8, 8), _floats(4, 8)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), _twice(4, 8)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3), _floats(2, 3, 9)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), _floats(2, 3, 9, 9)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), _floats(2, 3, 5, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), _floats(4, 8)),
    "SyncBatchNorm_free": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        _floats(2, 3, 5, 5),
    ),
    "LayerNorm": (lambda: nn.LayerNorm(8), _floats(4, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), _floats(4, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), _floats(4, 8, 3)),
    "Embedding": (lambda: nn.Embedding(8, 4), _numbers(4, 3)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(8, 4), _numbers(4, 3)),
    "Dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), _floats(4, 8)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.5), _floats(4, 8)),
    "GELU": (lambda: nn.GELU(), _floats(4, 8)),
    "PReLU": (lambda: nn.PReLU(), _floats(4, 8)),
    "Softmax": (lambda: nn.Softmax(-1), _floats(4, 8)),
    "AdaptiveLogSoftmax": (lambda: nn.AdaptiveMaxPool1d(3), _floats(2, 3, 9)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), _floats(2, 3, 8, 8)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2.0, mode="bilinear"), _floats(2, 3, 4, 4)),
    "LSTM": (lambda: nn.LSTM(8, 8, num_layers=2), _floats(4, 2, 8)),
    "GRU": (lambda: nn.GRU(8, 8, bidirectional=True), _floats(4, 2, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 8), _floats(4, 8)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), _thrice(2, 5, 8)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        _floats(2, 5, 8),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
        _twice(2, 5, 8),
    ),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), _twice(4, 8)),
    "MSELoss": (lambda: nn.MSELoss(), _twice(4, 8)),
    "HuberLoss": (lambda: nn.HuberLoss(), _twice(4, 8)),
    "LazyLinear": (lambda: nn.LazyLinear(8), _floats(4, 8)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), _floats(4, 8)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), _floats(4, 8)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), _floats(4, 8)),
    "complex": (
        lambda: nn.Linear(8, 8, dtype=torch.float64),
        lambda turn: ((torch.randn(4, 8).double(),), {}),
    ),
}
NOT = {
    "LazyLinear": {"deepcopied", "pickled", "checkpointed", "two_threads"},  # must run once before
    "weight_norm": {"deepcopied", "pickled"},  # torch: parametrised modules cannot be pickled whole
    "spectral_norm": {"deepcopied", "pickled"},
    "orthogonal": {"deepcopied", "pickled", "autocast"},  # the matrix exponential knows no bfloat16
    "complex": {"autocast"},
}


def makers():
    """One maker a module."""
    return {f"torch.{name}": partial(_steps, name) for name in MODULES}


def _steps(name):
    build, feed = MODULES[name]
    return {
        scenario: make_step(build, feed, scenario)
        for scenario in SCENARIOS
        if scenario not in NOT.get(name, ())
    }
