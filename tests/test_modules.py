"""The stand-in for nn.MultiheadAttention returns what PyTorch's own returns."""

import itertools

import pytest
import torch
from torch import nn

from headprune.pruned import MultiheadAttention
from tests.support.zoo import randomise

FLAGS = list(itertools.product([True, False], repeat=4))


@pytest.mark.parametrize(("batch_first", "add_bias_kv", "add_zero_attn", "need_weights"), FLAGS)
@pytest.mark.parametrize("masked", ["none", "padding", "causal", "per head"])
@torch.no_grad()
def test_same_as_torch(
    batch_first: bool, add_bias_kv: bool, add_zero_attn: bool, need_weights: bool, masked: str
) -> None:
    own = nn.MultiheadAttention(
        16, 4, batch_first=batch_first, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, kdim=12, vdim=20
    )
    randomise(own)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, t, w, generator=generator) for t, w in ((5, 16), (5, 12), (5, 20)))
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    options: dict[str, object] = {"need_weights": need_weights}
    if masked == "padding":
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    elif masked == "causal":
        options |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True}
    elif masked == "per head":
        options["attn_mask"] = torch.rand(12, 5, 5, generator=generator) > 0.7
        options["attn_mask"][:, :, 0] = False  # type: ignore[index]
    got, weights = MultiheadAttention(own)(q, k, v, **options)
    expected, expected_weights = own(q, k, v, **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-5)
    else:
        assert weights is None


@torch.no_grad()
def test_unbatched_and_unaveraged() -> None:
    own = nn.MultiheadAttention(16, 4)
    randomise(own)
    x = torch.randn(5, 16)
    for options in ({}, {"average_attn_weights": False}):
        got, expected = MultiheadAttention(own)(x, x, x, **options), own(x, x, x, **options)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_weights_are_shared_not_copied() -> None:
    own = nn.MultiheadAttention(16, 4)
    stand_in = MultiheadAttention(own)
    assert stand_in.q_proj.weight.data_ptr() == own.in_proj_weight.data_ptr()
    assert stand_in.out_proj.weight.data_ptr() == own.out_proj.weight.data_ptr()
