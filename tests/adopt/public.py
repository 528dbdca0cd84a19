"""Adopt in copies of public attention packages and compare what they compute, bit for bit.

    python -m tests.adopt.public --root DIR

DIR holds the unpacked wheels as DIR/torchscale, DIR/ring_attention_pytorch, DIR/sinkhorn_transformer and
DIR/x_transformers, and their own dependencies (einops, einx, beartype, jaxtyping, loguru, fairscale 0.4.0,
local-attention, axial-positional-embedding, product-key-memory) in DIR/deps. Of timm torchscale uses two
functions, which are given here, because timm itself wants torchvision. Nothing below DIR is written.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from reference_modules.mixin import set_memory_pool
from reference_modules.pool import TensorPool
from tests.adopt.twins import identical, importable, module, ran

Build = Callable[[], torch.nn.Module]
Call = Callable[[torch.nn.Module], object]
ADOPTED = {
    "torchscale": ("RetNetDecoder", "Decoder", "BEiT3"),
    "ring_attention_pytorch": ("RingTransformer", "RingAttention"),
    "sinkhorn_transformer": ("SinkhornTransformerLM",),
    "x_transformers": ("PerRowDataDependentAlibi",),
}


def torchscale_cases() -> Iterator[tuple[str, Build, Call]]:
    """A decoder, a retentive network in both of its forms, an encoder of text and images."""
    config = module("torchscale.architecture.config")
    decoder = module("torchscale.architecture.decoder")
    retnet = module("torchscale.architecture.retnet")
    beit = module("torchscale.model.BEiT3")
    small = {"vocab_size": 50, "decoder_layers": 2, "dropout": 0.1}
    tokens = torch.arange(48).reshape(2, 24) % 50
    table = torch.nn.Embedding

    def plain() -> torch.nn.Module:
        given = {**small, "decoder_embed_dim": 32, "decoder_attention_heads": 4, "decoder_ffn_embed_dim": 64}
        return decoder.Decoder(
            config.DecoderConfig(**given), embed_tokens=table(50, 32), is_encoder_decoder=False
        )

    def retentive(**more: object) -> torch.nn.Module:
        given = {
            **small,
            "decoder_embed_dim": 32,
            "decoder_value_embed_dim": 64,
            "decoder_retention_heads": 4,
        }
        made = config.RetNetConfig(**given, decoder_ffn_embed_dim=64, **more)
        return retnet.RetNetDecoder(made, embed_tokens=table(50, 32))

    def multiway() -> torch.nn.Module:
        given = {"encoder_embed_dim": 32, "encoder_attention_heads": 4, "encoder_ffn_embed_dim": 64}
        more = {"encoder_layers": 2, "multiway": True, "vocab_size": 50, "img_size": 32, "patch_size": 8}
        return beit.BEiT3(config.EncoderConfig(**given, **more, no_output_layer=True))

    def see(model: torch.nn.Module) -> object:
        torch.manual_seed(2)
        image, padding = torch.randn(2, 3, 32, 32), torch.zeros(2, 24, dtype=torch.bool)
        return model(textual_tokens=tokens, visual_tokens=image, text_padding_position=padding)["encoder_out"]

    yield "Decoder", plain, lambda model: model(tokens)[0]
    yield "RetNetDecoder, parallel", retentive, lambda model: model(tokens)[0]
    chunks = {"chunkwise_recurrent": True, "recurrent_chunk_size": 8}
    yield "RetNetDecoder, chunkwise", lambda: retentive(**chunks), lambda model: model(tokens)[0]
    yield "BEiT3", multiway, see


def ring_attention_pytorch_cases() -> Iterator[tuple[str, Build, Call]]:
    """A transformer on one process: attention in buckets, and in its plain form, whose mask is pooled."""
    ring = module("ring_attention_pytorch.ring_attention")
    tokens = torch.arange(48).reshape(2, 24) % 50

    def build(**more: object) -> torch.nn.Module:
        given = {"num_tokens": 50, "dim": 32, "depth": 2, "causal": True, "dim_head": 8, "heads": 4}
        return ring.RingTransformer(**given, ring_attn=False, bucket_size=8, **more)

    yield "RingTransformer", build, lambda model: model(tokens)
    regular = {"force_regular_attn": True}
    yield "the same, regular attention", lambda: build(**regular), lambda model: model(tokens)


def sinkhorn_transformer_cases() -> Iterator[tuple[str, Build, Call]]:
    """A causal language model, also with local heads beside those that sort."""
    sinkhorn = module("sinkhorn_transformer.sinkhorn_transformer")
    tokens = torch.arange(64).reshape(2, 32) % 50
    given = {"num_tokens": 50, "dim": 32, "max_seq_len": 32, "depth": 2, "heads": 4, "bucket_size": 8}

    def build(**more: object) -> torch.nn.Module:
        return sinkhorn.SinkhornTransformerLM(**given, causal=True, ff_dropout=0.1, attn_dropout=0.1, **more)

    yield "SinkhornTransformerLM", build, lambda model: model(tokens)
    yield "the same, local heads", lambda: build(n_local_attn_heads=2), lambda model: model(tokens)


def x_transformers_cases() -> Iterator[tuple[str, Build, Call]]:
    """The bias of the forgetting transformer, row by row."""
    bias = module("x_transformers.x_transformers")

    def build() -> torch.nn.Module:
        return bias.PerRowDataDependentAlibi(dim=32, heads=4)

    def call(model: torch.nn.Module) -> object:
        torch.manual_seed(2)
        return model(torch.randn(2, 24, 32))

    yield "PerRowDataDependentAlibi", build, call


def _drop_path(x: torch.Tensor, drop_prob: float = 0.0, training: bool = False) -> torch.Tensor:
    """Whole samples dropped, as stochastic depth has it."""
    if drop_prob == 0.0 or not training:
        return x
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - drop_prob)
    return x * kept / (1 - drop_prob)


def _stand_in_for_timm() -> None:
    layers = ModuleType("timm.models.layers")
    vars(layers).update(drop_path=_drop_path, trunc_normal_=torch.nn.init.trunc_normal_)
    for name in ("timm", "timm.models"):
        sys.modules[name] = ModuleType(name)
    sys.modules["timm.models.layers"] = layers


CASES = {
    "torchscale": torchscale_cases,
    "ring_attention_pytorch": ring_attention_pytorch_cases,
    "sinkhorn_transformer": sinkhorn_transformer_cases,
    "x_transformers": x_transformers_cases,
}


def adopt(root: Path, name: str, at: Path) -> str:
    """Adopt in a copy, by the command; what it said."""
    shutil.copytree(root / name, at / name)
    classes = [word for each in ADOPTED[name] for word in ("--class", each)]
    command = [sys.executable, "-m", "auditor.cli", "adopt", "--isolated", *classes, str(at / name / name)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    again = subprocess.run([*command, "--diff"], capture_output=True, text=True, check=False)
    assert again.stdout == "", f"a second run would change:\n{again.stdout}"
    return first.stderr.replace(str(at), "").replace("../", "")


def measure(name: str, before: Path, after: Path) -> Iterator[str]:
    """Each case built and run in both, in a process that imports only one after the other."""
    for case, (expected, _, _) in _results(name, before, pooled=False).items():
        adopted = _results(name, after, pooled=True)[case]
        off, on, figures = adopted
        same = all(identical(one, other) for one, other in zip(expected, off, strict=True))
        pooled = all(identical(one, other) for one, other in zip(expected, on, strict=True))
        yield f"{case}: {len(expected[0])} outputs and gradients identical off {same}, on {pooled}; {figures}"


Results = dict[str, tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], str]]


def _results(name: str, folder: Path, *, pooled: bool) -> Results:
    _forget(name)
    found: Results = {}
    with importable(folder):
        for case, build, call in CASES[name]():
            torch.manual_seed(0)
            model = build()
            plain = [ran(model, call, train=train) for train in (False, True)]
            pool = TensorPool("cpu", name=name, threshold_mb=0, debug=True)
            users = set_memory_pool(model, pool) if pooled else 0
            used = [ran(model, call, train=train) for train in (False, True)] if pooled else []
            stats = pool.stats()
            told = f"{users} modules, {stats.hits} hits, {stats.misses} misses, {stats.leases} leases out"
            pool.close()
            found[case] = plain, used, told
    return found


def _forget(name: str) -> None:
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    root = parser.parse_args().root.resolve()
    sys.path.append(str(root / "deps"))
    _stand_in_for_timm()
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}\n{adopt(root, name, Path(folder))}")
            for line in measure(name, root / name, Path(folder) / name):
                print(f"  {line}")


if __name__ == "__main__":
    main()
