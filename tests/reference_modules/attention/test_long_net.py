"""LongNet: causal to the bit, generation, padding, configuration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from reference_modules.attention import LongNet, LongNetConfig, create_long_net

SMALL = LongNetConfig(
    vocab_size=17, embed_dim=32, num_heads=4, depth=2, segment_lengths=(8, 16), dilation_rates=(1, 2)
)


def model(**changes: object) -> LongNet:
    torch.manual_seed(0)
    return LongNet(dataclasses.replace(SMALL, **changes)).eval()


def test_the_last_token_changes_no_earlier_logits() -> None:
    net = model()
    tokens = torch.randint(17, (2, 37))
    before = net(tokens)
    tokens[:, -1] = (tokens[:, -1] + 1) % 17
    assert torch.equal(before[:, :-1], net(tokens)[:, :-1])


def test_greedy_generation_repeats_the_argmax_of_a_forward() -> None:
    net = model()
    start = torch.randint(17, (2, 5))
    found = net.generate(start, 6)
    assert torch.equal(found[:, :5], start)
    for n in range(5, 11):
        assert torch.equal(net(found[:, :n])[:, -1].argmax(-1), found[:, n])


def test_generation_stops_at_the_end_token_and_restores_the_mode() -> None:
    net = model().train()
    start = torch.randint(17, (1, 5))
    first = int(net.eval().generate(start, 1)[0, -1])
    net.train()
    assert net.generate(start, 9, end_token=first).shape == (1, 6)
    assert net.training


def test_sampling_follows_its_generator_and_top_k() -> None:
    net = model()
    start = torch.randint(17, (3, 5))
    draws = [
        net.generate(start, 8, temperature=1.0, generator=torch.Generator().manual_seed(4)) for _ in range(2)
    ]
    assert torch.equal(*draws)
    assert torch.equal(net.generate(start, 4, temperature=1.0, top_k=1), net.generate(start, 4))


def test_it_learns_a_repeated_sequence() -> None:
    net = model().train()
    tokens = torch.arange(34).remainder(17).unsqueeze(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    assert torch.equal(net.generate(tokens[:, :5], 5), tokens[:, :10])


def test_padding_at_the_end_changes_nothing_before_it() -> None:
    net = model(is_causal=False)
    tokens = torch.randint(17, (1, 30))
    padded = torch.cat([tokens, torch.zeros(1, 7, dtype=torch.long)], 1)
    mask = torch.arange(37).unsqueeze(0) >= 30
    torch.testing.assert_close(net(padded, mask)[:, :30], net(tokens), atol=1e-5, rtol=0)


def test_config_checks_and_rebuilds_itself() -> None:
    assert LongNetConfig(**SMALL.to_dict()) == SMALL
    assert create_long_net(17, depth=1).config.depth == 1
    with pytest.raises(ValueError, match="depth is 0; it must be an int of at least 1"):
        dataclasses.replace(SMALL, depth=0)
    with pytest.raises(ValueError, match="dilation 9 is larger than its segment of 8"):
        dataclasses.replace(SMALL, dilation_rates=(9, 2))
    with pytest.raises(ValueError, match="embed_dim is 33; it must be even"):
        dataclasses.replace(SMALL, embed_dim=33)
    with pytest.raises(ValueError, match="both a config and depth"):
        LongNet(SMALL, depth=3)


def test_wrong_calls_are_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"tokens have shape \(5,\)"):
        net(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="top_k is 18; it must be within 1 and vocab_size 17"):
        net.generate(torch.zeros(1, 1, dtype=torch.long), 1, top_k=18)
    with pytest.raises(ValueError, match="generate needs is_causal=True"):
        model(is_causal=False).generate(torch.zeros(1, 1, dtype=torch.long), 1)
