"""Ablation: replayed against plain forwards, filled heads against changed biases, estimates against all examples."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from scipy.stats import spearmanr
from torch import Tensor, nn

import headprune as hp
from headprune.batches import Rows
from headprune.losses import ExampleLoss
from headprune.running import evaluating, exact_attention
from headprune.scoring import Settings, replay
from headprune.scoring.base import Problem
from headprune.scoring.reliability import split_half
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import inclusion
from tests.support.families import built
from tests.support.problems import per_example_loss, scaled, split
from tests.support.zoo import ZOO, bert, gpt2, labelled, randomise, text

TEXT = ["bert", "gpt2", "llama", "vit", "t5"]


def plain_loop(model: nn.Module, batches: list[Any], layers: list[hp.AttentionLayer]) -> Tensor:
    """The loss of every example without each head, by a mask and a whole forward: ``[heads, examples]``."""
    losses = ExampleLoss(model)
    losses.prepare(batches)
    rows = []
    with torch.no_grad():
        for layer in layers:
            for head in range(layer.num_heads):
                with hp.mask(model, {layer.name: [head]}, layers=layers):
                    rows.append(torch.cat([losses(b) for b in batches]).double())
    return torch.stack(rows)


@pytest.mark.parametrize("name", [n for n in ZOO if n not in ("mha", "torch_transformer")])
def test_replay_gives_the_plain_loops_numbers(name: str) -> None:
    model, example = ZOO[name]()
    batches = split(labelled(model, example), 2)
    layers = hp.find_attention(model, example)
    scores = hp.score(model, batches, "ablation", layers=layers)
    assert scores.details["replayed"] == "every layer"
    losses = ExampleLoss(model)
    losses.prepare(batches)
    with torch.no_grad():
        dense = torch.cat([losses(b) for b in batches]).double()
    expected = plain_loop(model, batches, layers) - dense
    assert (scores.flat() - expected.mean(1)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name", ["albert", "mixtral", "swin", "xlnet", "zamba2", "longformer", "gemma3_text", "bitnet"]
)
def test_replay_of_any_model(name: str) -> None:
    """Layers that run several times, experts, windows: replayed or not, the numbers are a plain forward's."""
    model, example = built(name)
    layers = [a for a in hp.find_attention(model, example) if a.maskable]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        hidden = model(**example)[0]
    target = torch.randn(hidden.shape, generator=generator)

    def loss_fn(out: Any, labels: Tensor) -> Tensor:
        return ((out[0] - labels) ** 2).flatten(1).mean(1)

    scores = hp.score(model, [{**example, "labels": target}], "ablation", loss_fn=loss_fn, layers=layers)
    with torch.no_grad():
        dense = loss_fn(model(**example), target).double()
        for layer in (layers[0], layers[-1]):
            with hp.mask(model, {layer.name: [1]}, layers=layers):
                effect = loss_fn(model(**example), target).double() - dense
            value = scores.values[layer.name][1]
            torch.testing.assert_close(value, effect.mean(), rtol=1e-3, atol=1e-5 * float(dense.mean()))


def problem_of(model: nn.Module, batches: list[Any], **more: Any) -> Problem:
    losses = ExampleLoss(model)
    losses.prepare(batches)
    layers = hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})
    return Problem(
        model, layers, [(b, Rows().size(b)) for b in batches], losses, 0, lambda done, total, note="": None, **more
    )


class Counting(nn.Module):
    """Counts the rows that go through a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.rows += args[0].shape[0]
        return self.inner(*args, **kwargs)


def test_replay_runs_only_what_comes_after_the_gate() -> None:
    model, example = bert()
    encoder = model.bert.encoder
    encoder.layer = nn.ModuleList(Counting(layer) for layer in encoder.layer)
    batch = labelled(model, example)
    with evaluating(model), exact_attention(model):
        problem = problem_of(model, [batch])
        study = Replay(problem)
        with study.of(batch, 3) as recording:
            recording._doubtful = ""  # the comparison with a plain forward runs every block
            for number, layer in enumerate(problem.layers):
                before = [block.rows for block in encoder.layer]
                gates = torch.ones(2, problem.heads)
                gates[0, 4 * number] = gates[1, 4 * number + 1] = 0
                recording.losses(gates)
                ran = [block.rows - b for block, b in zip(encoder.layer, before, strict=True)]
                assert ran == [0] * number + [6] * (len(ran) - number), layer.name
            mixed = torch.ones(1, problem.heads)
            mixed[0, [1, 9]] = 0
            expected = recording._plain(problem.split(mixed[0]))
            torch.testing.assert_close(recording.losses(mixed)[0], expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(recording.losses(torch.ones(2, problem.heads)), recording.dense.expand(2, -1))


def test_tiny_divergences_of_a_model_that_is_sure_are_replayed() -> None:
    """They are rounded like the logits that they are computed from: no relative error of theirs can be asked for."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = randomise(tf.BertForSequenceClassification(tf.BertConfig(vocab_size=100, num_labels=2, **sizes)))
    with torch.no_grad():
        model.classifier.bias += torch.tensor([8.0, 0.0])
    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in torch.randint(1, 100, (12, 24)).split(6)
    ]
    scores = hp.score(model, batches, "ablation", distil=True)
    assert 0 < scores.flat().abs().max() < 0.01
    assert scores.details["replayed"] == "every layer"


class Mixing(nn.Module):
    """Every example sees the whole batch's mean: stacking would mix the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head((out + out.mean(0)).mean(1))


def test_a_model_that_mixes_its_batch_is_computed_plainly() -> None:
    model = randomise(Mixing())
    batch = {"x": torch.randn(4, 5, 16), "labels": torch.tensor([0, 1, 2, 1])}
    scores = hp.score(model, [batch], "ablation")
    assert "plain forwards" in scores.details["replayed"][0]
    layers = hp.find_attention(model, batch["x"])
    losses = ExampleLoss(model)
    losses.prepare([batch])
    with torch.no_grad():
        dense = losses(batch).double()
    torch.testing.assert_close(scores.flat(), (plain_loop(model, [batch], layers) - dense).mean(1))


class Sorting(nn.Module):
    """Puts its examples in the order of their sums while it works, as some pack by length; alone, nothing is amiss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(5))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort(stable=True)
        x = self.first(x[order])
        q, k, v = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head((x + out).mean(1))[order.argsort()]


def test_a_model_that_sorts_its_batch_is_computed_plainly() -> None:
    """The first examples are in order, so that the study sees nothing."""
    model = randomise(Sorting())
    x = torch.randn(12, 5, 16, generator=torch.Generator().manual_seed(0))
    x = x[x.sum((1, 2)).argsort()]
    mixed = torch.cat([x[:4], x[4:][torch.randperm(8, generator=torch.Generator().manual_seed(1))]])
    batch = {"x": mixed, "labels": torch.arange(12) % 3}
    scores = hp.score(model, [batch], "ablation")
    layers = hp.find_attention(model, mixed)
    losses = ExampleLoss(model)
    losses.prepare([batch])
    with torch.no_grad():
        dense = losses(batch).double()
    expected = plain_loop(model, [batch], layers) - dense
    torch.testing.assert_close(scores.flat(), expected.mean(1), rtol=1e-4, atol=1e-6)


def test_memory_that_runs_out_halves_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = bert()
    batch = labelled(model, example)
    expected = hp.score(model, [batch], "ablation").flat()
    original, stacks = replay.Recording._stacked, []

    def greedy(self: Any, gates: Any, first: str) -> Tensor:
        rows = len(next(iter(gates.values())))
        stacks.append(rows)
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, gates, first)

    with evaluating(model), exact_attention(model):
        problem = problem_of(model, [batch])
        study = Replay(problem)
        monkeypatch.setattr(replay.Recording, "_stacked", greedy)
        with study.of(batch, 3) as recording:
            gates = 1 - torch.eye(problem.heads)
            found = torch.cat([recording.losses(g) for g in gates.split(4)]) - recording.dense
    assert stacks[:4] == [4, 2, 1, 1]
    torch.testing.assert_close(found.mean(1), expected, rtol=1e-4, atol=1e-6)

    def never(self: Any, gates: Any, first: str) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(replay.Recording, "_stacked", never)
    with study.of(batch, 3) as recording, pytest.raises(hp.HeadPruneError, match="--batch-size"):
        recording.losses(gates[:4])


def test_a_small_memory_budget_changes_nothing() -> None:
    model, example = gpt2()
    batch = labelled(model, example)
    wide = hp.score(model, [batch], "ablation")
    tight = hp.score(model, [batch], "ablation", settings=Settings(max_memory=1))
    torch.testing.assert_close(wide.flat(), tight.flat(), rtol=1e-4, atol=1e-6)


# -- what comes in a head's place --------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_mean_ablation_is_a_bias(name: str) -> None:
    """A head that gives its mean is a head that is gone, and W_O's bias that holds its mean."""
    model, example = ZOO[name]()
    model.double()
    batch = labelled(model, example)
    rows = split(batch, 1)
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [batch], "mean-ablation", layers=layers)
    layer, head = layers[1], 2
    columns = list(layer.output_projection.features[head])
    seen: list[Tensor] = []
    output = model.get_submodule(layer.output_projection.module)
    handle = output.register_forward_pre_hook(lambda module, args: seen.append(args[0][..., columns]))
    with torch.no_grad():
        dense = torch.stack([per_example_loss(model, r) for r in rows])  # without padding
        handle.remove()
        mean = torch.cat([s.reshape(-1, len(columns)) for s in seen]).mean(0)
        without = scaled(model, layer, head, 0.0)
        other = without.get_submodule(layer.output_projection.module)
        weight = output.weight if isinstance(output, nn.Linear) else output.weight.T
        shift = weight[:, columns] @ mean
        other.register_forward_hook(lambda module, args, out: out + shift)
        effect = torch.stack([per_example_loss(without, r) for r in rows]) - dense
    torch.testing.assert_close(scores.values[layer.name][head], effect.mean(), rtol=1e-6, atol=1e-9)


def test_resampled_heads_say_what_was_said() -> None:
    """Where a head always says the same, resampling changes nothing; elsewhere it does, and repeats from the seed."""
    model, example = bert()
    batch = labelled(model, example)
    layers = hp.find_attention(model, example)
    value = model.bert.encoder.layer[1].attention.self.value
    with torch.no_grad():
        value.weight[8:16] = 0  # head 1 gives its value's bias, whatever it sees
    scores = hp.score(model, [batch], "resample-ablation", layers=layers)
    own = scores.values[layers[1].name]
    assert abs(own[1]) < 1e-6 < own[0].abs()
    assert hp.score(model, [batch], "mean-ablation", layers=layers).values[layers[1].name][1].abs() < 1e-6
    again = hp.score(model, split(batch, 2), "resample-ablation", layers=layers)
    torch.testing.assert_close(again.flat(), scores.flat(), rtol=1e-4, atol=1e-6)
    other = hp.score(model, [batch], "resample-ablation", layers=layers, seed=5)
    assert not torch.allclose(other.flat(), scores.flat())


def test_resample_ablation_against_brute_force() -> None:
    """Draw the tokens here again, and put them into W_O's input by hand, example by example, in float64."""
    model, example = bert()
    model.double()
    batch = labelled(model, example)
    rows = split(batch, 1)
    lengths = batch["attention_mask"].sum(1).tolist()
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [batch], "resample-ablation", layers=layers, seed=3)
    layer, head = layers[1], 2
    columns = list(layer.output_projection.features[head])
    output = model.get_submodule(layer.output_projection.module)
    seen: list[Tensor] = []
    handle = output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        dense = [per_example_loss(model, r) for r in rows]
        handle.remove()
        picked = [int(np.random.default_rng((3, i)).integers(n, size=1)[0]) for i, n in enumerate(lengths)]
        pool = torch.stack([tokens[k] for tokens, k in zip(seen, picked, strict=True)])
        effects = []
        for i, row in enumerate(rows):
            # As many draws as the batch has tokens; those of padding are not looked at.
            drawn = np.random.default_rng((4, i)).integers(len(rows), size=batch["input_ids"].shape[1])[: lengths[i]]

            def put(module: nn.Module, args: Any, drawn: Any = drawn) -> tuple[Tensor]:
                hidden = args[0].clone()
                hidden[0][:, columns] = pool[drawn][:, columns]
                return (hidden,)

            handle = output.register_forward_pre_hook(put)
            effects.append(per_example_loss(model, row) - dense[i])
            handle.remove()
    torch.testing.assert_close(scores.values[layer.name][head], torch.stack(effects).mean(), rtol=1e-6, atol=1e-9)


# -- few examples ------------------------------------------------------------------------------


def test_inclusion_probabilities() -> None:
    size = torch.tensor([1.0, 2, 3, 100], dtype=torch.float64)
    pi = inclusion(size, 2.0)
    torch.testing.assert_close(pi, torch.tensor([1 / 6, 2 / 6, 3 / 6, 1], dtype=torch.float64))
    assert torch.equal(inclusion(size, 4.0), torch.ones(4, dtype=torch.float64))
    small, large = inclusion(size, 1.5), inclusion(size, 2.5)
    assert (large >= small).all()  # a larger sample holds the smaller one


def many(rows: int = 96) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, _ = bert()
    return model, split(labelled(model, text(rows, 8)), 16)


DRAWS = 30  # of examples, for every head


def test_few_examples_estimate_all_of_them() -> None:
    """Over draws the estimate is unbiased, and its interval covers the full-data value."""
    model, batches = many()
    layers = hp.find_attention(model, text())
    full = hp.score(model, batches, "ablation", layers=layers).flat()
    values, covered, spread = [], [], []
    for seed in range(DRAWS):
        s = hp.score(model, batches, "ablation", layers=layers, seed=seed, settings=Settings(examples=24))
        assert 8 < s.details["ablated"] < 48
        error = torch.tensor(s.details["sampling_stderr"], dtype=torch.float64)
        values.append(s.flat())
        covered.append((s.flat() - full).abs() <= 2.07 * error)
        spread.append(error**2)
        assert (s.flat_stderr() >= error).all()
    mean, error = torch.stack(values).mean(0), torch.stack(values).std(0) / DRAWS**0.5
    assert ((mean - full).abs() <= 4 * error).all()
    assert torch.stack(covered).double().mean() >= 0.92
    stated, actual = torch.stack(spread).mean(), torch.stack(values).var(0).mean()
    assert 0.7 <= stated / actual <= 3


def test_few_examples_are_spent_at_the_cut() -> None:
    model, batches = many()
    settings = Settings(examples=24, keep=6)
    s = hp.score(model, batches, "ablation", settings=settings)
    assert s.details["ablated_most"] > 1.05 * s.details["ablated"]
    assert hp.score(model, batches, "ablation", settings=Settings(examples=96)).details.get("ablated") is None  # all


def test_a_time_limit() -> None:
    model, batches = many()
    short = hp.score(model, batches, "ablation", settings=Settings(seconds=0.3))
    assert short.details["ablated"] <= 96
    assert "as many as fitted into 0.3 s here" in short.details["estimated"]
    long = hp.score(model, batches, "ablation", settings=Settings(seconds=1000))
    torch.testing.assert_close(long.flat(), hp.score(model, batches, "ablation").flat(), rtol=1e-4, atol=1e-6)
    assert max(long.details["sampling_stderr"]) == 0


# -- losses ------------------------------------------------------------------------------------


def test_without_labels_the_dense_model_is_the_measure() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [example], "ablation", layers=layers)
    assert "dense model" in scores.details["loss"]
    assert (scores.flat() > -1e-6).all()  # a divergence is never negative
    layer = layers[1]
    with torch.no_grad():
        dense = model(**example).logits.log_softmax(-1)
        with hp.mask(model, {layer.name: [2]}, layers=layers):
            now = model(**example).logits.log_softmax(-1)
    expected = (dense.exp() * (dense - now)).sum(-1).mean().double()
    torch.testing.assert_close(scores.values[layer.name][2], expected, rtol=1e-4, atol=1e-6)
    labelled_ = {**example, "labels": torch.tensor([0, 1, 1])}
    torch.testing.assert_close(hp.score(model, [labelled_], "ablation", distil=True).flat(), scores.flat())
    # To second order the divergence is half the Fisher information: many draws of labels, a head nearly open.
    fisher = hp.score(model, [example] * 300, "fisher", layers=layers).values[layer.name][2]
    with torch.no_grad():
        from headprune.gates import gated

        gate = torch.ones(4)
        gate[2] = 0.97
        with gated(model, layers, {layer.name: gate}):
            near = model(**example).logits.double().log_softmax(-1)
        dense = model(**example).logits.double().log_softmax(-1)
    divergence = (dense.exp() * (dense - near)).sum(-1).mean()
    torch.testing.assert_close(divergence, 0.03**2 / 2 * fisher, rtol=0.15, atol=1e-9)


def test_distilled_tokens_leave_padding_out() -> None:
    model, _ = gpt2()
    example = text(2, 7)
    example["attention_mask"][:] = 1
    padded = {k: F.pad(v, (0, 3), value=0) for k, v in example.items()}
    for method in (
        ("ablation", "integrated-gradients") if "integrated-gradients" in hp.scoring.METHODS else ("ablation",)
    ):
        a, b = hp.score(model, [example], method), hp.score(model, [padded], method)
        torch.testing.assert_close(a.flat(), b.flat(), rtol=1e-3, atol=1e-5)


def test_normalised_scores() -> None:
    model, example = bert()
    batch = labelled(model, example)
    plain, unit = (hp.score(model, [batch], settings=Settings(normalise=flag)) for flag in (False, True))
    for layer in plain.layers:
        norm = plain.values[layer.name].norm()
        torch.testing.assert_close(unit.values[layer.name], plain.values[layer.name] / norm)
        torch.testing.assert_close(unit.stderr[layer.name], plain.stderr[layer.name] / norm)
    assert "L2 norm" in unit.unit


def test_fisher_and_signed_gradient_come_from_one_examples_gradients() -> None:
    model, example = bert()
    batch = labelled(model, example)
    rows = [hp.score(model, [r], "signed-gradient").flat() for r in split(batch, 1)]
    each = torch.stack(rows)
    signed, fisher = hp.score(model, [batch], "signed-gradient"), hp.score(model, [batch], "fisher")
    torch.testing.assert_close(signed.flat(), each.mean(0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(fisher.flat(), (each**2).mean(0), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(fisher.matrix, each.T @ each / 3, rtol=1e-3, atol=1e-6)
    back = hp.HeadScores.from_json(fisher.to_json(), fisher.layers)
    torch.testing.assert_close(back.matrix, fisher.matrix, rtol=1e-6, atol=1e-12)


def test_reliability_is_the_rank_correlation_with_other_examples() -> None:
    """Of heads that differ by noise alone nothing is left (a bootstrap says 0.7); of a known signal, what two samples really share."""
    rng = np.random.default_rng(0)
    for signal in (0.0, 0.1, 0.3):
        truth, told, real = signal * np.linspace(-1, 1, 40), [], []
        for _ in range(10):
            a, b = (truth + rng.standard_t(3, (128, 40)) for _ in range(2))
            told.append(split_half(torch.from_numpy(a)))
            real.append(spearmanr(a.mean(0), b.mean(0)).statistic)
        assert np.mean(told) == pytest.approx(np.mean(real), abs=0.15)


def test_scores_say_how_far_other_examples_would_order_the_heads_alike() -> None:
    model, batches = many()
    for settings in (Settings(), Settings(examples=24)):  # of few examples as of all
        s = hp.score(model, batches, "ablation", settings=settings)
        assert 0 < s.details["reliability"] < 1
        assert f"a Spearman correlation of about {s.details['reliability']:.2f}" in s.stability
    unsure = dataclasses.replace(s, details={"reliability": 0.5})
    assert (
        "for 0.8, score on about 400; signs cancel here: gradient" in unsure.stability
    )  # 4 x 96, by Spearman and Brown
    assert "score" not in dataclasses.replace(s, details={"reliability": 0.9}).stability
    assert "more than" in dataclasses.replace(s, details={"reliability": 0.0}).stability
    assert not hp.score(model, batches, "weight-norm").stability
    assert not hp.score(
        model, batches[:1], "shapley", settings=Settings(permutations=2)
    ).stability  # over orders, not examples
