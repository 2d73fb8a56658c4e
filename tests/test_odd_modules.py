"""Plain modules that once fooled the trace, a mask or the proof. Each was silently wrong, or left something behind."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from headprune.inputs import call
from headprune.repairing import repair
from headprune.surgery import answers
from tests.support.plain import HEADS, WIDTH, Attention, Pair, model_of, noise
from tests.support.zoo import randomise


class OwnWeight(Attention):
    """W_O is a parameter of the attention module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.o = None
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.attend(x), self.weight)


class OutputTwice(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(x)) + self.o(x)


class SharedDropout(Attention):
    """One dropout for the attention and the residual; a norm of all heads before W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.o(self.norm(self.drop(self.attend(x)))))


class Watched(Attention):
    """A module that looks at the probabilities, beside the way to W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.watch, self.norm = nn.Identity(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / 3).softmax(-1)
        self.watch(weights)
        return self.o(self.norm(self.joined(weights @ v)))


class NormBefore(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.attend(x)))


class LoRA(nn.Module):
    """As PEFT wraps a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Adapted(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.o = LoRA(self.o)


class HeadsLast(Attention):
    """Scores ``[batch, query, key, head]``, a softmax over the third dimension."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in self.qkv(x).chunk(3, -1))
        weights = (torch.einsum("bihd,bjhd->bijh", q, k) / 3).softmax(2)
        return self.o(self.joined(torch.einsum("bijh,bjhd->bhid", weights, v)))


class ConvAttention(Attention):
    """Convolutions one wide, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (self.num_heads, -1)).mT for t in self.qkv(x.mT).chunk(3, 1))
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v)).mT).mT


ALL = [OwnWeight, OutputTwice, SharedDropout, Watched, NormBefore, Adapted, HeadsLast, ConvAttention]


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_a_mask_is_right_or_refused(kind: type[Attention]) -> None:
    model, x = model_of(kind).eval(), noise(2, 5, WIDTH)
    layers = hp.find_attention(model, x)
    assert [layer.maskable for layer in layers] == [kind not in (OwnWeight, OutputTwice)] * 2
    for layer in layers:
        if not layer.maskable:
            assert layer.reason
            continue
        with hp.mask(model, {layer.name: [1]}, layers=layers):
            masked = model(x)
        brute = copy.deepcopy(model)
        brute.get_submodule(layer.name).kill = 1
        torch.testing.assert_close(masked, brute(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [HeadsLast, ConvAttention])
@torch.no_grad()
def test_a_prune_is_right_elsewhere_too(kind: type[Attention]) -> None:
    model, x, other = model_of(kind).eval(), noise(2, 5, WIDTH), noise(3, 9, WIDTH)
    layers = hp.find_attention(model, x)
    with hp.mask(model, {"0": [1], "2": [0, 3]}, layers=layers):
        masked = model(other)
    hp.prune(model, {"0": [1], "2": [0, 3]}, x)
    torch.testing.assert_close(model(other), masked, rtol=1e-4, atol=1e-4)
    hp.prune(model, {"0": [0, 1, 2]}, x)
    assert model(other).shape == masked.shape


class DividedByHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.num_heads


class Outputs(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.attention, self.way = nn.Linear(WIDTH, WIDTH), DividedByHeads(), way

    def forward(self, x: Tensor) -> Any:
        before = self.first(x).relu()
        after = before + self.attention(before)
        if self.way == "outlier":  # one channel so large that the others hardly count beside it
            return torch.cat([after, torch.full_like(after[..., :1], 3e3)], -1)
        return {"maps": [before, after], "loss": (after.mean() * 0 + 1, after), "none": (None, after)}[self.way]


@pytest.mark.parametrize("way", ["maps", "loss", "none", "outlier"])
def test_the_proof_looks_at_every_output(way: str) -> None:
    """A count that scales the output must not pass because another output hides it."""
    model, x = randomise(Outputs(way)), noise(2, 5, WIDTH)
    with torch.no_grad(), hp.mask(model, {"attention": [1]}, x):
        masked = answers(model(x))
    try:
        hp.prune(model, {"attention": [1]}, x)
    except hp.PruneError:
        assert model.attention.num_heads == HEADS
    else:
        with torch.no_grad():
            for got, expected in zip(answers(model(x)), masked, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Windowed(Attention):
    """nanoGPT's split by the width, and a window that happens to be as long as the model is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd, self.window = WIDTH, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        i = torch.arange(x.shape[1])
        near = (i[:, None] - i[None, :]).abs() < self.window
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=near).transpose(1, 2).flatten(2))


@torch.no_grad()
def test_a_length_is_no_width() -> None:
    model, short, long = model_of(Windowed), noise(2, 6, WIDTH), noise(2, 50, WIDTH)
    with hp.mask(model, {"0": [1]}, short):
        masked = model(long)
    hp.prune(model, {"0": [1]}, short)
    assert model[0].window == WIDTH
    torch.testing.assert_close(model(long), masked, rtol=1e-4, atol=1e-4)


class Padded(Attention):
    """Zeros at padding, after W_O."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.o(self.attend(x, attn_mask=keep[:, None, None, :])) * keep[..., None]


@torch.no_grad()
def test_what_comes_after_the_output_projection_stays() -> None:
    model, x = randomise(Padded()), noise(2, 6, WIDTH)
    full, part = torch.ones(2, 6, dtype=torch.bool), torch.tensor([[True] * 4 + [False] * 2] * 2)
    wrapped = nn.ModuleDict({"attention": model})
    wrapped.forward = lambda x, keep: model(x, keep)  # type: ignore[method-assign]
    with hp.mask(wrapped, {"attention": [0, 1, 2, 3]}, (x, full)):
        masked = wrapped(x, part)
    hp.prune(wrapped, {"attention": [0, 1, 2, 3]}, (x, full))
    wrapped.forward = lambda x, keep: wrapped["attention"](x, keep)  # type: ignore[method-assign]
    torch.testing.assert_close(wrapped(x, part), masked)


class Remembering(Attention):
    """Writes into a buffer, replaces one, and appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.last, self.maps = nn.Buffer(torch.zeros(4, HEADS, 16, 8)), nn.Buffer(torch.zeros(1)), []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.cache[: len(x), :, : x.shape[1]] = k
        self.last = k.mean(2)
        self.maps.append(q)
        return self.o(
            F.scaled_dot_product_attention(q, self.cache[: len(x), :, : x.shape[1]], v).transpose(1, 2).flatten(2)
        )


def test_a_trace_leaves_buffers_and_lists_alone() -> None:
    model = model_of(Remembering)
    held = [model[0].cache, model[0].last]
    layers = hp.find_attention(model, noise(2, 5, WIDTH))
    assert len(layers) == 2
    assert [id(model[0].cache), id(model[0].last)] == [id(t) for t in held]
    assert not any(t.requires_grad or t.any() for t in held)
    assert model[0].maps == []
    copy.deepcopy(model)


def test_inference_mode() -> None:
    model, x = model_of(Attention), noise(2, 5, WIDTH)
    with torch.inference_mode():
        layers = hp.find_attention(model, x + 1)
        hp.prune(model, {"0": [1]}, x + 1)
    assert [layer.prunable for layer in layers] == [True, True]
    assert model[0].o.weight.shape == (WIDTH, 24)


def test_weights_made_in_inference_mode() -> None:
    """Autograd refuses them, so headprune says so: it blamed the example, or ended in a traceback."""
    with torch.inference_mode():
        model = model_of(Attention)
    x = noise(2, 5, WIDTH)
    layers = hp.find_attention(copy.deepcopy(model), x)
    batches = [(x, torch.zeros(2))]
    for inside in (False, True):
        with torch.inference_mode(inside):
            for attempt in (
                lambda: hp.find_attention(model, x),
                lambda: hp.prune(model, {"0": [1]}, x),
                lambda: hp.score(model, batches, loss_fn=lambda out, _: out.sum((1, 2)), layers=layers),
                lambda: repair(model, {"0": [1]}, batches, layers=layers),
            ):
                with pytest.raises(hp.HeadPruneError, match="made in torch"):
                    attempt()
    hp.prune(model, {"0": [1]}, x, layers=layers)  # which takes no derivatives
    with torch.no_grad():
        assert model(x).isfinite().all()


class OwnMultihead(nn.MultiheadAttention):
    pass


@torch.no_grad()
def test_subclasses_of_torch_attention() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    layer.self_attn = OwnMultihead(WIDTH, HEADS, batch_first=True)
    model, x = randomise(nn.Sequential(layer)).eval(), noise(2, 5, WIDTH)
    (found,) = hp.find_attention(model, x)
    assert found.prunable
    with hp.mask(model, {found.name: [2]}, x):
        masked = model(x)
    hp.prune(model, {found.name: [2]}, x)
    torch.testing.assert_close(model(x), masked, rtol=1e-4, atol=1e-5)


def test_attention_that_hides_in_torch_is_told() -> None:
    class Pool(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            out, _ = F.multi_head_attention_forward(
                x,
                x,
                x,
                WIDTH,
                HEADS,
                self.qkv.weight,
                self.qkv.bias,
                None,
                None,
                False,
                0.0,
                self.o.weight,
                self.o.bias,
            )
            return out.transpose(0, 1)

    (layer, other) = hp.find_attention(nn.Sequential(Pool(), Attention()), noise(2, 5, WIDTH))
    assert not layer.maskable
    assert "declare a stand-in" in layer.reason
    assert other.prunable


@pytest.mark.parametrize("heads", [[True], ["1"], [1.0], 7.5])
def test_what_is_no_head(heads: Any) -> None:
    with pytest.raises(hp.HeadPruneError, match="no list of heads"):
        hp.prune(model_of(Attention), {"0": heads}, noise(2, 5, WIDTH))


def test_mistakes_are_told_in_a_line() -> None:
    model, x = model_of(Attention), noise(2, 5, WIDTH)
    layers = hp.find_attention(model, x)
    hp.prune(model, {"0": [torch.tensor(1).item()]}, x, layers=layers)
    with pytest.raises(hp.HeadPruneError, match="does not run on the example"):
        hp.prune(model, {"2": [1]}, torch.zeros(2, 5, 7), layers=layers)
    with pytest.raises(hp.HeadPruneError, match="has no module"), hp.mask(nn.Linear(2, 2), {"0": [1]}, layers=layers):
        pass
    with torch.no_grad():
        assert torch.isfinite(call(model, x)).all()


@pytest.mark.parametrize(("second", "shared"), [([1], True), ([2], False), ([], False), ([0, 1, 2, 3], False)])
def test_shared_weights_stay_shared_where_the_same_heads_go(second: list[int], shared: bool, tmp_path: Path) -> None:
    model = randomise(Pair())
    x = torch.randn(2, 6, WIDTH)
    drop = {"first": [1], "second": second}
    with hp.mask(model, drop, x):
        expected = model(x)
    hp.prune(model, drop, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert (model.first.o.weight is getattr(getattr(model.second, "o", None), "weight", None)) == shared
    hp.save(model, tmp_path / "pruned")
    again = hp.load(tmp_path / "pruned", Pair())
    torch.testing.assert_close(again(x), model(x))


class RMSNormBefore(Attention):
    """As BitNet: a norm that leaves zeros zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.attend(x)))


def test_a_norm_over_all_heads_before_the_output_projection() -> None:
    model = randomise(RMSNormBefore())
    x = torch.randn(2, 6, WIDTH)
    for heads, left in (([0, 2], 16), ([1], 8)):
        with hp.mask(model, {"": heads}, x):
            expected = model(x)
        hp.prune(model, {"": heads}, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert model.o.weight.shape == (WIDTH, left)
    # A mean over all heads would give the removed ones something: only masked, and the reason says so.
    other = randomise(NormBefore())
    with pytest.raises(hp.HeadPruneError, match="mixed before the output projection"):
        hp.prune(other, {"": [0]}, x)


class Bare(Attention):
    """Heads side by side, without an output projection."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Residual(nn.Module):
    """Its last attention has no W_O, and no norm comes before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.classifier = Attention(), Bare(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.classifier(x + self.last(x))


def test_what_reads_a_residual_is_no_output_projection() -> None:
    """The classifier's input holds the residual too: masking there would take it away with the head."""
    model = randomise(Residual())
    x = noise(4, 6, WIDTH)
    layers = hp.find_attention(model, x)
    assert [a.concatenates for a in layers] == [False, True]
    heads = layers[1].num_heads
    features = list(range(WIDTH // heads, 2 * WIDTH // heads))  # of head 1

    def without(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.index_fill(-1, torch.tensor(features), 0.0)

    handle = model.last.register_forward_hook(without)
    expected = model(x)
    handle.remove()
    with hp.mask(model, {"last": [1]}, layers=layers):
        assert torch.allclose(model(x), expected, atol=1e-6)
    with pytest.raises(hp.PruneError, match="The heads of last cannot be removed exactly"):
        hp.prune(model, {"last": [1]}, x)  # the residual is as wide as it was
