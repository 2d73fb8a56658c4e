"""The proof sees beyond the example's length, every output, and where heads barely count; a right prune of such a model still passes."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support.cases import answer
from tests.support.errors import refuses
from tests.support.plain import HEADS, WIDTH, Attention, Pair, model_of, noise
from tests.support.zoo import TorchEncoder, bert, gpt2, randomise, text

X = noise(2, 8, WIDTH)
IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(4))


class Constants(Attention):
    """Attention with a constant for each head that no trace sees: what is left takes the first heads' constants.

    Args:
        after: Tokens from which on the constants act.
    """

    def __init__(self, after: int = 10**9) -> None:
        super().__init__()
        self.after, self.constants = after, [1.0, -2.0, 3.0, 0.5]

    def joined(self, result: Tensor) -> Tensor:
        constants = torch.tensor(self.constants[: self.num_heads]).to(result)[:, None, None]
        later = torch.arange(result.shape[2])[:, None] >= self.after
        return super().joined(torch.where(later, result * constants, result))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.o(self.attend(x, attn_mask=mask))


class Model(nn.Module):
    """Ids, or features ``[B, L, D]`` or ``[L, B, D]``, with a mask or none."""

    def __init__(self, after: int = 16, gate: float = 1.0, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(50, WIDTH), Constants(after), nn.Linear(WIDTH, 3)
        self.gate, self.batch_first = gate, batch_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        if mask is not None:
            mask = mask.bool()
            mask = mask[:, None, None] if mask.shape[0] == len(x) else mask  # padding [B, L], or pairs [L, L]
        return self.head(x + self.gate * self.attention(x, mask))


@pytest.mark.parametrize("example", [
    IDS, {"x": IDS}, X, (X,), (X, torch.ones(2, 8, dtype=torch.bool)), (IDS, torch.ones(8, 8, dtype=torch.bool).tril()),
    {"x": X, "mask": torch.ones(2, 8, dtype=torch.long)}, X[:1], "tokens first",
])  # fmt: skip
def test_what_acts_on_later_tokens_alone(example: Any) -> None:
    """Such a prune passed, and was wrong by half of its output on 30 tokens."""
    first = isinstance(example, str)
    model, example = randomise(Model(batch_first=not first)), X.transpose(0, 1) if first else example
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, {"attention": [0, 1]}, example)
    hp.prune(model, {"attention": [2, 3]}, example)  # the first heads have their own constants


def faint(kind: str, after: int, dtype: torch.dtype) -> nn.Module:
    model = randomise(Model(after, gate={"gate": 1e-4, "scale": 1e-7}.get(kind, 1.0)))
    with torch.no_grad():
        model.attention.o.weight.mul_({"zero": 0.0, "tiny": 1e-6}.get(kind, 1.0))
        if kind == "biased":
            model.attention.o.bias.fill_(1e5)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gate", "scale", "zero", "tiny", "biased"])
def test_behind_a_faint_gate(kind: str, dtype: torch.dtype) -> None:
    """Behind a gate of 1e-4 (ReZero), LayerScale or a W_O that is zero yet, no output tells a wrong cut from a right one."""
    x = X.to(dtype)
    wrong = faint(kind, 0, dtype)
    before = copy.deepcopy(wrong.state_dict())
    with pytest.raises(hp.PruneError, match="attention"):
        hp.prune(wrong, {"attention": [0]}, x)
    assert all(torch.equal(v, before[k]) for k, v in wrong.state_dict().items())
    dense = faint(kind, 10**9, dtype)
    for drop in ([0], [1, 3], [0, 1, 2, 3]):
        pruned = copy.deepcopy(dense)
        hp.prune(pruned, {"attention": drop}, x)
        with hp.mask(dense, {"attention": drop}, x):
            torch.testing.assert_close(answer(pruned, x), answer(dense, x))


class Outputs(nn.Module):
    """Several outputs, of which one is scaled by the number of heads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.attention, self.way = nn.Linear(WIDTH, WIDTH), Attention(), way

    def forward(self, x: Tensor) -> Any:
        before = self.first(x).relu()
        after = before + self.attention(before) / self.attention.num_heads
        if self.way == "outlier":  # one channel so large that the others hardly count beside it
            return torch.cat([after, torch.full_like(after[..., :1], 3e3)], -1)
        return {"maps": [before, after], "loss": (after.mean() * 0 + 1, after), "none": (None, after)}[self.way]


@pytest.mark.parametrize("way", ["maps", "loss", "none", "outlier"])
def test_the_proof_looks_at_every_output(way: str) -> None:
    """A count that scales an output must not pass because another output hides it."""
    model = randomise(Outputs(way))
    with pytest.raises(hp.PruneError):
        hp.prune(model, {"attention": [1]}, X)
    assert model.attention.num_heads == HEADS


class Growing(Model):
    """Learned positions, of which longer inputs are out of range; and what long inputs made it keep."""

    def __init__(self, most: int, after: int) -> None:
        super().__init__(after)
        self.places, self.kept, self.longest = nn.Embedding(most, WIDTH), nn.Buffer(torch.zeros(1)), 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.kept, self.longest = torch.zeros(x.shape[1]), max(self.longest, x.shape[1])
        return super().forward(self.embed(x) + self.places(torch.arange(x.shape[1])))


@pytest.mark.parametrize(("most", "fails"), [(8, False), (15, False), (16, False), (17, False), (32, True), (64, True)])
def test_learned_positions(most: int, fails: bool) -> None:
    """What is longer than they are is not tried on; what fits is: 8 tokens become 64, 32, 16 or 10. It leaves no traces."""
    model = randomise(Growing(most, 16))
    with pytest.raises(hp.PruneError) if fails else nullcontext():
        hp.prune(model, {"attention": [0]}, IDS)
    assert (model.longest, model.kept.shape) == (0, (1,))


def test_the_proof_stays_cheap_and_generates() -> None:
    """Three passes for each input (dense, masked, pruned) where the first way is right; the longer one has one row."""
    model, example = bert()
    rows: list[tuple[int, ...]] = []
    layers = hp.find_attention(model, example)
    model.register_forward_pre_hook(lambda m, a, k: rows.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    assert hp.prune(model, {layers[0].name: [0]}, example, layers=layers).inputs == 5
    assert (len(rows), rows.count((1, 64))) == (15, 3)
    writer, example = gpt2()
    assert hp.prune(writer, {"transformer.h.0.attn": [1]}, example).inputs == 6  # the sixth generates with a cache


def test_a_failing_layer_is_named_and_an_interrupt_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(nn.Sequential(Attention(), nn.LayerNorm(WIDTH), Constants(0), nn.LayerNorm(WIDTH), Attention()))
    with pytest.raises(hp.PruneError, match=r"The heads of 2 cannot be removed exactly: .* is unchanged") as told:
        hp.prune(model, {"0": [0], "2": [0], "4": [1]}, X)
    assert "Mask them instead" in told.value.hint
    before = {n: id(p) for n, p in model.named_parameters()}

    def stop(*_: object) -> None:
        if model[0].num_heads < HEADS:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        hp.prune(model, {"0": [0]}, X)
    handle.remove()
    assert {n: id(p) for n, p in model.named_parameters()} == before
    hp.prune(model, {"0": [0], "4": [1]}, X)


class Padded(Attention):
    """Zeros at padding, after W_O."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.o(self.attend(x, attn_mask=keep[:, None, None, :])) * keep[..., None]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Padded()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.attention(x, keep)


def test_what_comes_after_the_output_projection_stays() -> None:
    model, full = randomise(Around()), torch.ones(2, 8, dtype=torch.bool)
    part = full & (torch.arange(8) < 6)
    with hp.mask(model, {"attention": [0, 1, 2, 3]}, (X, full)):
        masked = answer(model, (X, part))
    hp.prune(model, {"attention": [0, 1, 2, 3]}, (X, full))
    torch.testing.assert_close(answer(model, (X, part)), masked)


class Scaled(nn.Module):
    """The tutorials' attention, whose softmax is scaled by the model's width; it does not name its embeddings (as CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_size, self.heads = 32, 4
        self.queries, self.keys, self.values, self.fc_out = (nn.Linear(32, 32) for _ in range(4))
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 3)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).reshape(*x.shape[:2], self.heads, 8) for p in (self.queries, self.keys, self.values))
        weights = torch.softmax(torch.einsum("nqhd,nkhd->nhqk", q, k) / self.embed_size**0.5, dim=3)
        return self.head(x + self.fc_out(torch.einsum("nhql,nlhd->nqhd", weights, v).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_that_only_scales_stays(dtype: torch.dtype) -> None:
    """Also where all tokens of the example are alike, so that attention is uniform whatever the scale."""
    model, alike = randomise(Scaled()).to(dtype), {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    dense, layers = copy.deepcopy(model), hp.find_attention(model, alike)
    hp.prune(model, {layers[0].name: [1, 2, 3]}, alike)
    assert model.embed_size == 32
    other = torch.randint(0, 50, (3, 9))
    with hp.mask(dense, {layers[0].name: [1, 2, 3]}, layers=layers):
        exact = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(answer(model, other), answer(dense, other), rtol=exact, atol=2e-2)


def test_nested_tensors_with_padding() -> None:
    """PyTorch's encoder turns padded batches into nested tensors, which only its fused kernel takes."""
    model = randomise(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2))
    padding = torch.arange(8) >= torch.tensor([[4], [8]])
    example, drop = {"src": X, "src_key_padding_mask": padding}, {"layers.1.self_attn": [0, 2]}
    with hp.mask(model, drop, X):
        masked = answer(model, example)
    assert model.use_nested_tensor
    hp.prune(model, drop, X)
    torch.testing.assert_close(answer(model, example)[~padding], masked[~padding], rtol=1e-4, atol=1e-5)


def test_modes_and_training() -> None:
    """New modules take the mode of the old, and learn."""
    model = randomise(TorchEncoder()).train()
    hp.prune(model, {"encoder.layers.0.self_attn": [0]}, X)
    assert all(m.training for m in model.modules())
    writer, example = gpt2()
    hp.prune(writer, {f"transformer.h.{i}.attn": [i] for i in range(3)}, example)
    writer.train()(**example, labels=example["input_ids"]).loss.backward()
    assert all(p.grad is not None for n, p in writer.named_parameters() if "attn" in n)


@pytest.mark.parametrize(("second", "shared"), [([1], True), ([2], False), ([], False), ([0, 1, 2, 3], False)])
def test_shared_weights_stay_shared_where_the_same_heads_go(second: list[int], shared: bool, tmp_path: Any) -> None:
    model, drop = randomise(Pair()), {"first": [1], "second": second}
    with hp.mask(model, drop, X):
        masked = answer(model, X)
    hp.prune(model, drop, X)
    torch.testing.assert_close(answer(model, X), masked, rtol=1e-4, atol=1e-5)
    assert (model.first.o.weight is getattr(getattr(model.second, "o", None), "weight", None)) == shared
    assert torch.equal(answer(hp.load(hp.save(model, tmp_path / "pruned"), Pair()), X), answer(model, X))


def test_mistakes_are_told_in_a_line() -> None:
    model = model_of(Attention)
    layers, x = hp.find_attention(model, X), text()
    hp.prune(model, {}, X)
    hp.prune(model, {"0": [torch.tensor(1).item()]}, X, layers=layers)
    refuses("not as it was traced", hp.prune, model, {"0": [1]}, X, layers=layers)
    for wrong in (torch.zeros(2, 5, 7), x):
        refuses("does not run on the example", hp.prune, model, {"2": [1]}, wrong, layers=layers)
    with pytest.raises(hp.HeadPruneError, match="has no module"), hp.mask(nn.Linear(2, 2), {"0": [1]}, layers=layers):
        pass
    refuses("not finite, so a prune cannot be proved", hp.prune, model, {"2": [1]}, X * torch.nan, layers=layers)
