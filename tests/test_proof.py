"""The proof sees beyond the example's length, and where heads barely count; a right prune of such a model still passes."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.inputs import call
from headprune.longer import _Bounds, longer, position_limit
from headprune.surgery import answers, proof
from headprune.surgery.removal import ways
from tests.support.zoo import ZOO, bert, gpt2, randomise, text

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Attention with a constant for each head that no trace sees: what is left takes the first heads' constants.

    Args:
        after: Tokens from which on the constants act.
    """

    def __init__(self, after: int = 10**9) -> None:
        super().__init__()
        self.num_heads, self.after = HEADS, after
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.constants = [1.0, -2.0, 3.0, 0.5]

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        constants = torch.tensor(self.constants[: self.num_heads]).to(q)[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, mask)
        later = torch.arange(x.shape[1])[:, None] >= self.after
        return torch.where(later, out * constants, out).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.o(self.attend(x, mask))


class Model(nn.Module):
    """Ids, or features ``[B, L, D]`` or ``[L, B, D]``, with a mask or none."""

    def __init__(self, after: int = 16, gate: float = 1.0, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(50, WIDTH), Attention(after), nn.Linear(WIDTH, 3)
        self.gate, self.batch_first = gate, batch_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        if mask is not None:
            mask = mask.bool()
            mask = mask[:, None, None] if mask.shape[0] == len(x) else mask  # padding [B, L], or pairs [L, L]
        return self.head(x + self.gate * self.attention(x, mask))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(4))
EXAMPLES = {
    "ids": IDS,
    "dict": {"x": IDS},
    "features": noise(2, 8, WIDTH),
    "tuple": (noise(2, 8, WIDTH),),
    "padding": (noise(2, 8, WIDTH), torch.ones(2, 8, dtype=torch.bool)),
    "pairs": (IDS, torch.ones(8, 8, dtype=torch.bool).tril()),
    "dict with mask": {"x": noise(2, 8, WIDTH), "mask": torch.ones(2, 8, dtype=torch.long)},
    "one row": noise(1, 8, WIDTH),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_acts_on_later_tokens_alone(name: str) -> None:
    """Such a prune passed, and was wrong by half of its output on 30 tokens."""
    model = randomise(Model())
    layers = hp.find_attention(model, EXAMPLES[name])
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, {layers[0].name: [0, 1]}, EXAMPLES[name], layers=layers)
    hp.prune(model, {layers[0].name: [2, 3]}, EXAMPLES[name], layers=layers)  # the first heads have their own constants


def test_tokens_first() -> None:
    model, x = randomise(Model(batch_first=False)), noise(8, 2, WIDTH)
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, {"attention": [0]}, x)
    hp.prune(model, {"attention": [3]}, x)


def faint(kind: str, after: int) -> nn.Module:
    model = randomise(Model(after, gate={"gate": 1e-4, "scale": 1e-7}.get(kind, 1.0)))
    with torch.no_grad():
        if kind == "zero":
            model.attention.o.weight.zero_()
        elif kind == "tiny":
            model.attention.o.weight.mul_(1e-6)
        elif kind == "biased":
            model.attention.o.bias.fill_(1e5)
    return model


KINDS = ["gate", "scale", "zero", "tiny", "biased"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_prune_behind_a_faint_gate(kind: str, dtype: torch.dtype) -> None:
    """Behind a gate of 1e-4 (ReZero), LayerScale or a W_O that is zero yet, no output tells a wrong cut from a right one."""
    model, x = faint(kind, 0).to(dtype), noise(2, 8, WIDTH).to(dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hp.PruneError, match="attention"):
        hp.prune(model, {"attention": [0]}, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop", [[0], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_prune_behind_a_faint_gate(kind: str, drop: list[int], dtype: torch.dtype) -> None:
    model, x = faint(kind, 10**9).to(dtype), noise(2, 8, WIDTH).to(dtype)
    dense = copy.deepcopy(model)
    hp.prune(model, {"attention": drop}, x)
    with torch.no_grad(), hp.mask(dense, {"attention": drop}, x):
        torch.testing.assert_close(model(x), dense(x))


def test_dead_heads_can_go() -> None:
    model, example = bert()
    self_attention = model.bert.encoder.layer[1].attention
    with torch.no_grad():
        self_attention.output.dense.weight[:, 8:16] = 0  # W_O's columns of one head, and another's values
        for p in (self_attention.self.value.weight, self_attention.self.value.bias):
            p[16:24] = 0
    hp.prune(model, {"bert.encoder.layer.1.attention.self": [1, 2]}, example)
    hp.prune(model, {"bert.encoder.layer.1.attention.self": [0]}, example)


@pytest.mark.parametrize(("dtype", "off", "fails"), [
    (torch.float32, 1e-5, False), (torch.float32, 5e-5, True), (torch.float16, 5e-3, False), (torch.bfloat16, 0.02, False),
    (torch.bfloat16, 0.06, True),
])  # fmt: skip
def test_rounding_where_the_heads_count_for_nothing(dtype: torch.dtype, off: float, fails: bool) -> None:
    """As after a repair, whose removed heads' columns are zero: 30 layers in bfloat16 round by more than a hundredth."""
    model, example = ZOO["bert"]()
    model.to(dtype)
    layers = hp.find_attention(model, example)
    drop = {layers[0].name: [1]}
    place = layers[0].output_projection
    assert place is not None
    with torch.no_grad():
        model.get_submodule(place.module).weight[:, list(place.features[1])] = 0
    (exact,) = proof.references(model, [[example]], drop, layers)
    rounded = replace(exact, masked=[t + off * t.abs().max() for t in exact.masked])
    cut = proof.first_exact(model, ways([layers[0]], drop), [rounded], proof.tolerance_of(model))
    assert bool(cut.failure) == fails, cut.failure


def test_a_wrong_cut_of_dead_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole layer gives nothing, the wrong rows could go unnoticed."""
    from headprune.surgery import journal

    model, example = bert()
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight.zero_()
    real = journal.surviving
    monkeypatch.setattr(journal, "surviving", lambda part, kept: real(part, [(h + 1) % 4 for h in kept]))
    with pytest.raises(hp.PruneError, match="differs from the masked model's"):
        hp.prune(model, {"bert.encoder.layer.0.attention.self": [2, 3]}, example)


class Growing(Model):
    """Keeps what long inputs made it make, as sinusoidal positions and dynamic frequencies do."""

    def __init__(self) -> None:
        super().__init__(after=10**9)
        self.register_buffer("positions", noise(10, WIDTH), persistent=False)
        self.seen = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[1] > len(self.positions):
            self.positions = noise(x.shape[1], WIDTH)
        self.seen = max(self.seen, x.shape[1])
        return super().forward(x + self.positions[: x.shape[1]], mask)


def test_a_proof_leaves_no_traces() -> None:
    model, x = randomise(Growing()), noise(2, 8, WIDTH)
    hp.prune(model, {"attention": [1]}, x)
    assert len(model.positions) == 10
    assert model.seen == 0


class Placed(nn.Module):
    """Learned positions: longer inputs are out of range."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.model, self.places = Model(after=16), nn.Embedding(most, WIDTH)
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.model(self.model.embed(x) + self.places(torch.arange(x.shape[1], device=x.device)))


@pytest.mark.parametrize(("most", "fails"), [(8, False), (15, False), (16, False), (17, True), (32, True), (64, True)])
def test_learned_positions(most: int, fails: bool) -> None:
    """What is longer than they are is not tried on; what fits is: 8 tokens become 64, 32, 16 or 10."""
    model = randomise(Placed(most))
    if fails and most != 17:
        with pytest.raises(hp.PruneError):
            hp.prune(model, {"model.attention": [0]}, IDS)
    else:
        hp.prune(model, {"model.attention": [0]}, IDS)


def test_the_config_says_how_long() -> None:
    model, example = bert()
    assert position_limit(model) == model.config.max_position_embeddings
    assert position_limit(Model()) is None
    for limit in (9, 10, 20, 1000):
        lengths = {c["input_ids"].shape[1] for choices in longer(example, limit) for c in choices}
        assert not lengths or max(lengths) == min(limit, 64)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "mha", "torch_transformer"])
def test_the_zoo_takes_longer_inputs(name: str) -> None:
    model, example = ZOO[name]()
    with torch.no_grad():
        call(model, longer(example, position_limit(model))[0][0])


def test_shapes() -> None:
    example = {
        **text(3, 9, decoder=5), "pairs_mask": torch.ones(3, 1, 9, 9), "pixel_values": torch.ones(3, 3, 9, 9),
        "labels": torch.ones(3), "flag": True,
    }  # fmt: skip
    (choices,) = longer(example)
    first = choices[0]
    assert {k: tuple(v.shape) for k, v in first.items() if isinstance(v, Tensor)} == {
        "input_ids": (1, 64), "attention_mask": (1, 64), "decoder_input_ids": (1, 64), "pairs_mask": (1, 1, 64, 64),
        "pixel_values": (1, 3, 9, 9), "labels": (1,),
    }  # fmt: skip
    assert first["attention_mask"].all()
    assert first["flag"] is True
    assert torch.equal(first["input_ids"][:, 9:18], example["input_ids"][:1])
    (choices,) = longer({"input_ids": torch.ones(2, 300, dtype=torch.long)})
    assert choices[0]["input_ids"].shape == (1, 600)
    assert longer(torch.ones(2, 3, 8, 8)) == longer({"pixel_values": torch.ones(2, 3, 8, 8)}) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda t, i: F.embedding(i, t),
        lambda t, i: t[i],
        lambda t, i: t[:, i[:, 0]],
        lambda t, i: t.index_select(0, i[0]),
        lambda t, i: t.gather(0, i),
    ],
)
def test_an_index_out_of_range_never_reaches_a_gpu(use: Any) -> None:
    table = torch.randn(5, 5)
    with _Bounds():
        use(table, torch.tensor([[4, 0]]))
        for wrong in ([[5, 0]], [[-6, 0]]):
            with pytest.raises(IndexError, match="out of range for 5 entries"):
                use(table, torch.tensor(wrong))
        assert torch.equal(table[table > 0], table[table > 0])


def test_the_proof_stays_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes for each input (dense, masked, pruned) where the first way is right; the longer one has one row."""
    model, example = bert()
    rows: list[tuple[int, ...]] = []
    layers = hp.find_attention(model, example)
    model.register_forward_pre_hook(lambda m, a, k: rows.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    hp.prune(model, {layers[0].name: [0]}, example, layers=layers)
    counted = {shape: len(list(group)) for shape, group in itertools.groupby(sorted(rows))}
    assert len(rows) == 15
    assert counted[1, 64] == 3


def test_generators_are_compared_too() -> None:
    model, example = gpt2()
    assert isinstance(model, tf.GPT2LMHeadModel)
    proof = hp.prune(model, {hp.find_attention(model, example)[0].name: [1]}, example)
    assert proof.inputs == 6
    assert proof.difference < 1e-4
    assert len(answers(call(model, example)))
