"""What of a batch is per example: the same scores whichever dimensions happen to be as long as the batch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from tests.support import plain
from tests.support.plain import WIDTH
from tests.support.problems import quick, unlabelled
from tests.support.zoo import bert, randomise, sizes, text

CLASSES = 3
cross_entropy = partial(F.cross_entropy, reduction="none")


class Attention(plain.Attention):
    """Batch first; ``mask`` [tokens, tokens] says what a token may look at."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.o(self.attend(x, attn_mask=None if mask is None else mask != 0))


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
        return self.o(self.attend(x.transpose(0, 1)).transpose(0, 1))


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
        out = self.layer.attend(x).transpose(0, 1)
        hidden = x.transpose(0, 1) + self.layer.o(out.flatten(0, 1)).view_as(out)
        return self.head(hidden[0])


def drawn(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.long).tril()


Inputs = Callable[[Tensor], Any]
"""From examples ``[rows, tokens, width]`` to what a model takes."""
Case = tuple[nn.Module, list[Any], list[Any], Any]
"""A model, batches, the same examples one by one (cut by hand), and the loss function."""


def case(model: nn.Module, inputs: Inputs, rows: int, length: int, loss_fn: Any = cross_entropy) -> Case:
    """Pairs, or dicts without a loss function. With as many examples as tokens a smaller batch says which is which."""
    batches, ones = [], []
    for number, size in enumerate((rows, rows - 1) if rows == length else (rows,)):
        x, y = drawn(size, length, seed=number)
        parts = [(x, y), *((x[i : i + 1], y[i : i + 1]) for i in range(size))]
        made = [(inputs(x), y) if loss_fn else {**inputs(x), "labels": y} for x, y in parts]
        batches.append(made[0])
        ones += made[1:]
    return randomise(model).double(), batches, ones, loss_fn


def with_mask(x: Tensor) -> dict[str, Tensor]:
    return {"x": x, "attention_mask": causal(x.shape[1])}


def tokens_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


CASES: dict[str, Callable[[int, int], Case]] = {
    "a shared mask in a dict": lambda rows, length: case(Masked(), with_mask, rows, length, None),
    "a shared mask in a pair": lambda rows, length: case(Masked(reads=-1), with_mask, rows, length),
    "tokens first": lambda rows, length: case(TokensFirst(), tokens_first, rows, length),
    # One layer of which one token is read: gates of the wrong rows would not be seen to matter.
    "tokens first, the first read": lambda rows, length: case(TokensFirst(0, layers=1), tokens_first, rows, length),
    "tokens first, the last read": lambda rows, length: case(TokensFirst(-1, layers=1), tokens_first, rows, length),
    "interleaved": lambda rows, length: case(Interleaved(), lambda x: x, rows, length),
}
# Also few ablated examples: rows that are cut out of the batch; the same are drawn when every example comes alone.
# What does not see single examples: it draws (learned gates, orders), or looks at no data.
METHODS = [
    "ablation", "ablation:time=1e6", "ablation:examples=2", "mean-ablation", "gradient", "signed-gradient", "fisher", "integrated-gradients", "entropy", "confidence", "output-norm",
]  # fmt: skip


def layers_of(model: nn.Module, batches: list[Any]) -> list[hp.AttentionLayer]:
    return hp.find_attention(model, batches[0][0] if isinstance(batches[0], tuple) else unlabelled(batches)[0])


def in_all_sizes(test: Any) -> Any:
    """As many examples as tokens for every model, and a few other numbers of both."""
    for name in CASES:
        test = example(name=name, rows=4, length=4)(test)
    drawn_ = given(name=st.sampled_from(list(CASES)), rows=st.integers(2, 5), length=st.integers(2, 5))
    return settings(max_examples=2, deadline=None)(drawn_(test))


@pytest.mark.parametrize("method", METHODS)
@in_all_sizes
def test_scores_are_those_one_by_one(method: str, name: str, rows: int, length: int) -> None:
    model, batches, ones, loss_fn = CASES[name](rows, length)
    given_ = {"loss_fn": loss_fn, "layers": layers_of(model, batches)}
    method = method if ":" in method else quick(method, "steps=4")
    found, expected = (hp.score(model, b, method, **given_) for b in (batches, ones))
    assert found.examples == expected.examples == len(ones)
    torch.testing.assert_close(found.flat(), expected.flat(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.flat_stderr(), expected.flat_stderr(), rtol=1e-6, atol=1e-10)


@in_all_sizes
def test_repair(name: str, rows: int, length: int) -> None:
    model, batches, ones, _ = CASES[name](rows, length)
    layers = layers_of(model, batches)
    repaired = [copy.deepcopy(model) for _ in range(2)]
    for each, given_ in zip(repaired, (batches, ones), strict=True):
        hp.repair(each, {layers[-1].name: [0]}, given_, layers=layers)
    for (key, value), other in zip(repaired[0].state_dict().items(), repaired[1].state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7, msg=key)


class Tagger(Masked):
    """An answer for every token."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(x + self.second(x + self.first(x, attention_mask), attention_mask))


class Positions(Masked):
    """Positions, of which the module takes as many rows as there are: cut to one, it would be spread over all tokens."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + table[: x.shape[1]]
        return self.head((x + self.first(x)).mean(1))


class Mixing(Masked):
    """Examples of a batch see one another, so its answers say nothing about what is whose."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x + x.mean(0, keepdim=True) ** 2, attention_mask)


@pytest.mark.parametrize(("kind", "method"), [
    (Masked, "gradient"), (Masked, "output-norm"), (Masked, "ablation"), (Tagger, "fisher"), (Tagger, "ablation"), (Positions, "gradient"),
    (Positions, "ablation"),
])  # fmt: skip
def test_what_all_examples_share_is_not_cut(kind: type[Masked], method: str) -> None:
    """A causal mask by the name of a padding mask, and a table that could be cut without an error: the same scores as one by one."""
    model, labels = randomise(kind()).double(), kind is not Tagger
    shared = {"table": drawn(1, 4, seed=5)[0][0]} if kind is Positions else {"attention_mask": causal(4)}
    x, y = drawn(4, 4)
    parts = [(x, y), *((x[i : i + 1], y[i : i + 1]) for i in range(4))]
    whole, *ones = ({"x": x, **shared, **({"labels": y} if labels else {})} for x, y in parts)
    smaller = {**whole, "x": x[:3], **({"labels": y[:3]} if labels else {})}
    found, expected = (hp.score(model, b, method).flat() for b in ([whole, smaller], [*ones, *ones[:3]]))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["a mask", "a table", "tokens first", "mixed examples"])
def test_what_the_sizes_do_not_tell_is_tried_and_refused(name: str) -> None:
    """As many tokens as examples in every batch: a shared tensor is never cut as if it were the examples'."""
    x, y = drawn(4, 4)
    model, inputs = {
        "a mask": (Masked(), {"x": x, "attention_mask": causal(4)}),
        "a table": (Positions(), {"x": x, "table": drawn(1, 4, seed=5)[0][0]}),
        "tokens first": (TokensFirst(), {"x": x.transpose(0, 1)}),
        "mixed examples": (Mixing(), {"x": x, "attention_mask": causal(4)}),
    }[name]
    with pytest.raises(hp.HeadPruneError, match=r"Which dimension of x \[4, 4, 32\].* counts") as error:
        hp.score(randomise(model).double(), [{**inputs, "labels": y}], "ablation")
    assert "Give batches of different sizes" in error.value.hint


def test_transformers_names_need_no_trial() -> None:
    """An argument that nothing is known of, beside them, is tried."""
    config = tf.BertConfig(**sizes("sdpa", num_hidden_layers=1, intermediate_size=8))
    model = randomise(tf.BertForSequenceClassification(config))
    batch = {**text(4, 4), "labels": torch.tensor([0, 1, 1, 0])}
    ones = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
    rows = []
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    expected = hp.evaluate(model, [batch])
    assert max(rows) == 4
    shared = {"position_ids": torch.arange(4)[None]}
    assert hp.evaluate(model, [{**batch, **shared}]).loss == pytest.approx(expected.loss)
    scores = [hp.score(model, b, "ablation").flat() for b in ([{**batch, **shared}], ones)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-6)


def test_labels_of_a_pair_count_the_examples_whatever_the_loss() -> None:
    """A loss that depends on an example's place in its batch, as one with noise does: labels were taken for something all examples share."""
    model, example = bert()

    def noisy(output: Any, labels: torch.Tensor) -> torch.Tensor:
        each = output.logits.expand(len(labels), -1) if len(labels) % len(output.logits) else output.logits
        return (each - torch.randn(each.shape, generator=torch.Generator().manual_seed(0))).square().mean(1)

    pairs = [(example, torch.arange(len(example["input_ids"])))] * 2
    assert hp.score(model, pairs, "gradient", loss_fn=noisy).examples == 2 * len(example["input_ids"])
