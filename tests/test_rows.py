"""What of a batch is per example: the same scores whichever dimensions happen to be as long as the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.batches import Rows, by_names, find_rows
from headprune.latency import shaped
from headprune.losses import ExampleLoss
from headprune.scoring import METHODS, Settings
from headprune.scoring.gradient import separate
from tests.support.problems import problem
from tests.support.repairs import refit_of
from tests.support.zoo import randomise, text

HEADS, WIDTH, CLASSES = 2, 8, 3


class Attention(nn.Module):
    """Batch first; ``mask`` [tokens, tokens] says what a token may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask != 0)
        return self.o(out.transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """Takes a causal mask that all examples share."""

    def __init__(self, reads: int | None = None) -> None:
        super().__init__()
        self.first, self.second, self.head = Attention(), Attention(), nn.Linear(WIDTH, CLASSES)
        self.reads = reads

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = x + self.first(x, attention_mask)
        x = x + self.second(x, attention_mask)
        return self.head(x.mean(1) if self.reads is None else x[:, self.reads])


class AttentionTokensFirst(Attention):
    """``[tokens, batch, width]``, as nn.MultiheadAttention has it; W_O sees that shape too."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))


class TokensFirst(nn.Module):
    def __init__(self, reads: int | None = None, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AttentionTokensFirst() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(0) if self.reads is None else x[self.reads])


class Interleaved(nn.Module):
    """Tokens first and flattened: W_O sees ``[tokens * batch, width]``, and one token is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Attention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
        out = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        hidden = x.transpose(0, 1) + layer.o(out.flatten(0, 1)).view_as(out)
        return self.head(hidden[0])


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels, reduction="none")


def drawn(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.long).tril()


Case = tuple[nn.Module, list[Any], list[Any], Any]
"""A model, a batch in a list, the same examples one by one (cut by hand), and the loss function."""


def masked_dict(rows: int, length: int) -> Case:
    x, y = drawn(rows, length)
    mask = causal(length)
    ones = [{"x": x[i : i + 1], "attention_mask": mask, "labels": y[i : i + 1]} for i in range(rows)]
    return randomise(Masked()).double(), [{"x": x, "attention_mask": mask, "labels": y}], ones, None


def masked_pair(rows: int, length: int) -> Case:
    x, y = drawn(rows, length)
    inputs = {"attention_mask": causal(length)}
    ones = [({"x": x[i : i + 1], **inputs}, y[i : i + 1]) for i in range(rows)]
    return randomise(Masked(reads=-1)).double(), [({"x": x, **inputs}, y)], ones, cross_entropy


def tokens_first(rows: int, length: int) -> Case:
    x, y = drawn(rows, length)
    ones = [(x[i : i + 1].transpose(0, 1), y[i : i + 1]) for i in range(rows)]
    return randomise(TokensFirst()).double(), [(x.transpose(0, 1), y)], ones, cross_entropy


def first_token(rows: int, length: int) -> Case:
    """One layer of which one token is read: gates of the wrong rows would not be seen to matter."""
    x, y = drawn(rows, length)
    ones = [(x[i : i + 1].transpose(0, 1), y[i : i + 1]) for i in range(rows)]
    return randomise(TokensFirst(reads=0, layers=1)).double(), [(x.transpose(0, 1), y)], ones, cross_entropy


def last_token(rows: int, length: int) -> Case:
    x, y = drawn(rows, length)
    ones = [(x[i : i + 1].transpose(0, 1), y[i : i + 1]) for i in range(rows)]
    return randomise(TokensFirst(reads=-1, layers=1)).double(), [(x.transpose(0, 1), y)], ones, cross_entropy


def interleaved(rows: int, length: int) -> Case:
    x, y = drawn(rows, length)
    ones = [(x[i : i + 1], y[i : i + 1]) for i in range(rows)]
    return randomise(Interleaved()).double(), [(x, y)], ones, cross_entropy


CASES = [masked_dict, masked_pair, tokens_first, first_token, last_token, interleaved]
# What does not see single examples: it draws (learned gates, orders), or looks at no data.
METHODS_BY_EXAMPLE = sorted(METHODS.keys() - {"random", "weight-norm", "l0", "dsp", "shapley", "resample-ablation"})


def in_all_sizes(test: Any) -> Any:
    """As many examples as tokens for every model, and a few other numbers of both."""
    for make in CASES:
        test = example(make=make, rows=4, length=4)(test)
    drawn_ = given(make=st.sampled_from(CASES), rows=st.integers(2, 5), length=st.integers(2, 5))
    return settings(max_examples=3, deadline=None)(drawn_(test))


@pytest.mark.parametrize("method", METHODS_BY_EXAMPLE)
@in_all_sizes
def test_scores_are_those_one_by_one(method: str, make: Any, rows: int, length: int) -> None:
    model, batch, ones, loss_fn = make(rows, length)
    told = Settings(steps=4)
    found = hp.score(model, batch, method, loss_fn=loss_fn, settings=told)
    expected = hp.score(model, ones, method, loss_fn=loss_fn, settings=told)
    assert found.examples == expected.examples == rows
    torch.testing.assert_close(found.flat(), expected.flat(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.flat_stderr(), expected.flat_stderr(), rtol=1e-6, atol=1e-10)


@in_all_sizes
def test_ablation_by_hand(make: Any, rows: int, length: int) -> None:
    """Against the model with W_O's columns set to zero, one example at a time."""
    model, batch, ones, loss_fn = make(rows, length)
    scores = hp.score(model, batch, "ablation", loss_fn=loss_fn)

    def mean_loss() -> Tensor:
        each = []
        for one in ones:
            inputs, label = one if loss_fn else ({k: v for k, v in one.items() if k != "labels"}, one["labels"])
            out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            each.append(cross_entropy(out, label))
        return torch.cat(each).mean()

    with torch.no_grad():
        dense = mean_loss()
        for layer in scores.layers:
            weight = model.get_submodule(layer.output_projection.module).weight
            for head, columns in enumerate(layer.output_projection.features):
                kept = weight.clone()
                weight[:, list(columns)] = 0
                torch.testing.assert_close(scores.values[layer.name][head], mean_loss() - dense, rtol=1e-7, atol=1e-9)
                weight.copy_(kept)


@in_all_sizes
def test_few_ablated_examples(make: Any, rows: int, length: int) -> None:
    """Rows that are cut out of the batch; the same are drawn when every example comes alone."""
    model, batch, ones, loss_fn = make(rows, length)
    for told in (Settings(seconds=1e6), Settings(examples=2)):
        found, expected = (hp.score(model, b, "ablation", loss_fn=loss_fn, settings=told) for b in (batch, ones))
        torch.testing.assert_close(found.flat(), expected.flat(), rtol=1e-7, atol=1e-9)


@in_all_sizes
def test_repair(make: Any, rows: int, length: int) -> None:
    model, batch, ones, _ = make(rows, length)
    layers = hp.find_attention(model, batch[0][0] if isinstance(batch[0], tuple) else _unlabelled(batch[0]))
    drop = {layers[-1].name: [0]}
    found, wanted = (refit_of(model, layers, b, ridge=0.1).fitted(drop) for b in (batch, ones))
    assert found.by_module.keys() == wanted.by_module.keys() != set()
    for name, (weight, bias) in found.by_module.items():
        torch.testing.assert_close(weight, wanted.by_module[name][0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(bias, wanted.by_module[name][1], rtol=1e-6, atol=1e-8)


def _unlabelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k != "labels"}


@pytest.mark.parametrize("method", ["gradient", "output-norm", "ablation"])
def test_padding_is_known_by_its_rows(method: str) -> None:
    """A causal mask under the name of a padding mask, with fewer examples than tokens."""
    model, batch, ones, _ = masked_dict(2, 4)
    found, expected = (hp.score(model, b, method).flat() for b in (batch, ones))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["fisher", "ablation"])
def test_divergence_counts_every_token_under_a_causal_mask(method: str) -> None:
    class Tagger(Masked):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(x + self.second(x + self.first(x, attention_mask), attention_mask))

    _, (batch,), ones, _ = masked_dict(4, 4)
    model = randomise(Tagger()).double()
    found = hp.score(model, [_unlabelled(batch)], method)
    expected = hp.score(model, [_unlabelled(one) for one in ones], method)
    torch.testing.assert_close(found.flat(), expected.flat(), rtol=1e-9, atol=1e-12)


# -- the door ----------------------------------------------------------------------------------


def rows_of_pairs(model: nn.Module, batches: list[Any]) -> Rows:
    losses = ExampleLoss(model, cross_entropy)
    losses.prepare(batches)
    return losses.rows


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), length=st.integers(1, 5), data=st.data())
def test_any_sizes(sizes: list[int], length: int, data: st.DataObject) -> None:
    """Cut as one would by hand, whatever is as long as what."""
    first = data.draw(st.booleans())
    model = randomise(TokensFirst() if first else Masked()).double()
    batches: list[Any] = []
    for rows in sizes:
        x, y = drawn(rows, length, seed=rows)
        inputs = x.transpose(0, 1) if first else {"x": x, "attention_mask": causal(length)}
        batches.append((inputs, y))
    rows = rows_of_pairs(model, batches)
    for (inputs, y), size in zip(batches, sizes, strict=True):
        assert rows.size((inputs, y)) == size
        index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
        taken, labels = rows.take((inputs, y), index)
        assert torch.equal(labels, y[index])
        if first:
            assert torch.equal(taken, inputs[:, index])
        else:
            assert torch.equal(taken["x"], inputs["x"][index])
            assert torch.equal(taken["attention_mask"], causal(length)) or size == length == 1


def test_a_table_that_is_cut_without_an_error() -> None:
    """Positions, of which the module takes as many rows as there are: cut to one, it would be spread over all tokens."""

    class Positions(Masked):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            x = x + table[: x.shape[1]]
            return self.head((x + self.first(x)).mean(1))

    model = randomise(Positions()).double()
    x, y = drawn(4, 4)
    table = drawn(1, 4, seed=5)[0][0]
    ones = [{"x": x[i : i + 1], "table": table, "labels": y[i : i + 1]} for i in range(4)]
    for method in ("gradient", "ablation"):
        found = hp.score(model, [{"x": x, "table": table, "labels": y}], method)
        torch.testing.assert_close(found.flat(), hp.score(model, ones, method).flat(), rtol=1e-9, atol=1e-12)


class Mixing(Masked):
    """Examples of a batch see one another, so its answers say nothing about what is whose."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x + x.mean(0, keepdim=True) ** 2, attention_mask)


def test_what_stays_open_is_an_error() -> None:
    x, y = drawn(4, 4)
    batch = {"x": x, "attention_mask": causal(4), "labels": y}
    model = randomise(Mixing()).double()
    with pytest.raises(
        hp.HeadPruneError, match=r"dimension of x \[4, 4, 8\] and attention_mask \[4, 4\] counts"
    ) as error:
        hp.score(model, [batch], "ablation")
    assert "different sizes" in str(error.value)
    other = {"x": x[:3, :2], "attention_mask": causal(2), "labels": y[:3]}
    hp.score(model, [{**batch, "x": x[:, :3], "attention_mask": causal(3)}, other], "ablation")
    with pytest.raises(hp.HeadPruneError, match="not known whether x has one part"):
        Rows().take({"x": x}, [0])


def test_transformers_names_need_no_forward_pass() -> None:
    model = randomise(tf.BertForSequenceClassification(tf.BertConfig(
        vocab_size=100, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=8,
    )))  # fmt: skip
    batch = {**text(4, 4), "labels": torch.zeros(4, dtype=torch.long)}

    def answers(batch: Any) -> list[Tensor]:
        raise AssertionError("the model was run")

    assert find_rows(model, [batch], answers).take(batch, [1, 3])["attention_mask"].shape == (2, 4)
    # An argument that nothing is known of, beside them, is tried.
    shared = {**batch, "position_ids": torch.arange(4)[None]}
    rows = find_rows(model, [shared, shared], lambda b: [model(**_unlabelled(b)).logits])
    assert rows.take(shared, [1, 3])["position_ids"].shape == (1, 4)


def test_timing_repeats_examples_alone() -> None:
    inputs = {**text(2, 6), "position_ids": torch.arange(6)[None], "shared": torch.eye(6)}
    made = shaped(inputs, 5)
    assert made["input_ids"].shape == (5, 6)
    assert made["position_ids"].shape == (1, 6)
    assert torch.equal(made["shared"], torch.eye(6))
    with pytest.raises(hp.HeadPruneError, match=r"dimension of shared \[2, 2\]"):
        by_names({**text(2, 6), "shared": torch.eye(2)})


@pytest.mark.parametrize("make", [first_token, last_token, interleaved])
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(2, 4), length=st.integers(2, 6))
def test_rows_in_another_order_are_noticed(make: Any, rows: int, length: int) -> None:
    model, batch, _, loss_fn = make(rows, length)
    assert len(separate(problem(model, batch, loss_fn=loss_fn))) == rows
