"""Metrics, intervals and tests against independent computations."""

import math

import numpy as np
import pytest
import torch
import transformers as tf
from scipy.stats import binom
from scipy.stats import t as student

import headprune as hp
from headprune.divergence import Fidelity
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from tests.support.zoo import bert, gpt2, labelled, llama, randomise, text


def measured(correct: np.ndarray) -> Measurement:
    return Measurement({}, 1 - correct.astype(float), correct.astype(float), np.ones(len(correct), dtype=int))


def test_accuracy_and_f1_by_hand() -> None:
    model, _ = bert()
    batch = labelled(model, text(rows=12))
    found = evaluate(model, [{k: v[i : i + 5] for k, v in batch.items()} for i in (0, 5, 10)])
    with torch.no_grad():
        guess = model(**batch).logits.argmax(-1)
    y = batch["labels"]
    assert found.metrics["accuracy"] == pytest.approx((guess == y).float().mean().item())
    by_class = []
    for c in y.unique():
        tp = ((guess == c) & (y == c)).sum().item()
        by_class.append(2 * tp / ((guess == c).sum().item() + (y == c).sum().item()))
    assert found.metrics["f1"] == pytest.approx(sum(by_class) / len(by_class))


def test_perplexity_by_hand() -> None:
    model, _ = gpt2()
    batch = labelled(model, text(rows=4))
    found = evaluate(model, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)])
    with torch.no_grad():
        log = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    nll = [
        -log[i, t, batch["input_ids"][i, t + 1]].item()
        for i in range(4)
        for t in range(8)
        if batch["labels"][i, t + 1] != -100
    ]
    assert found.metrics["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    assert found.tokens.sum() == len(nll)


def flipped(n: int, lost: int, gained: int) -> Change:
    """n examples, all right before or after but for those that changed sides."""
    dense, pruned = np.ones(n), np.ones(n)
    pruned[:lost], dense[lost : lost + gained] = 0, 0
    return compare(measured(dense), measured(pruned), "accuracy")


def test_identical_models_do_not_differ() -> None:
    same = measured(np.random.default_rng(0).random(200) > 0.2)
    change = compare(same, same, "accuracy")
    assert (change.value, change.p_value) == (0, 1)
    assert change.low == -change.high
    assert (
        0.01 < change.high < 0.02
    )  # one more of 200 each way, in t's quantile: some examples might have changed sides
    assert change.verdict == "no measurable change"
    assert compare(same, same, "perplexity").high == 0  # losses equal to the bit are those of one model


def test_four_lost_are_not_more_than_chance() -> None:
    change = flipped(100, 4, 0)
    assert change.verdict == "no measurable change"
    assert change.p_value > 0.05
    assert change.low < 0 < change.high
    assert flipped(100, 8, 0).verdict == "worse"
    assert flipped(100, 0, 8).verdict == "better"


def test_interval_p_and_verdict_never_contradict_one_another() -> None:
    for n in (1, 2, 5, 8, 20, 100, 1500):
        for lost in range(min(n, 14) + 1):
            for gained in range(min(n - lost, 8) + 1):
                c = flipped(n, lost, gained)
                assert (c.verdict == "no measurable change") == (c.p_value >= 0.05) == (c.low <= 0 <= c.high)
                assert -1 <= c.low <= c.value <= c.high <= 1
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 10, 60):
        for shift in (0.0, 0.1, 1.0):
            one, other = (Measurement({}, rng.random(n) + at, np.zeros(n), rng.integers(1, 9, n)) for at in (0, shift))
            for metric in ("perplexity", "loss"):
                c = compare(one, Measurement({}, other.loss, other.correct, one.tokens), metric)
                assert (c.verdict == "no measurable change") == (c.p_value >= 0.05) == (c.low <= 0 <= c.high)
                assert c.low <= c.value <= c.high


def test_the_formula_by_hand() -> None:
    """Two labels and one label an example, one of which is lost: a ratio's residuals, and the largest of them twice more."""
    tokens = np.array([2, 1, 2, 1])
    dense = Measurement({}, np.zeros(4), tokens.astype(float), tokens)
    pruned = Measurement({}, np.zeros(4), np.array([1.0, 1, 2, 1]), tokens)
    change = compare(dense, pruned, "accuracy")
    residuals = [-1 + 2 / 6, 1 / 6, 2 / 6, 1 / 6]
    error = math.sqrt(sum(r * r for r in residuals) + 2 * 1.0) / 6  # one label at least
    assert change.value == pytest.approx(-1 / 6)
    assert change.high - change.value == pytest.approx(student.ppf(0.975, 3) * error)
    assert change.p_value == pytest.approx(2 * student.sf(1 / 6 / error, 3))


@pytest.mark.parametrize("n", [8, 20, 50, 200, 1500])
def test_equal_models_are_said_to_differ_at_most_five_times_in_a_hundred(n: int) -> None:
    """Added up over all outcomes, for flips as rare and as common as they come."""
    for rate in (r for r in (0.005, 0.02, 0.1, 0.3) if n * r <= 30):  # more is the normal case
        wrong, most = 0.0, min(n, int(n * rate + 4 * math.sqrt(n * rate) + 4))
        for flips in range(1, most + 1, 1 + most // 60):
            told = 0  # how few must be lost, of so many flips, for a verdict; the other side is as likely
            while told <= flips // 2 and flipped(n, told, flips - told).verdict != "no measurable change":
                told += 1
            chance = float(binom.pmf(range(flips, min(flips + 1 + most // 60, n + 1)), n, rate).sum())
            wrong += chance * min(1.0, 2 * float(binom.cdf(told - 1, flips, 0.5)))
        assert wrong <= 0.05


def test_perplexity_of_equal_models_is_said_to_differ_at_most_five_times_in_a_hundred() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 8, 20, 50):
        told = 0
        for _ in range(300):
            x = rng.normal(size=n) if rng.random() < 0.5 else rng.choice([-1, 1], n) * (rng.random(n) < 0.1)
            one, other = (Measurement({}, loss, np.zeros(n), np.ones(n, dtype=int)) for loss in (np.zeros(n), x))
            told += compare(one, other, "perplexity").verdict != "no measurable change"
        assert told <= 20  # of 300; the bootstrap's were 30 and more with 8


def test_a_metric_that_has_no_interval_is_refused() -> None:
    some = measured(np.ones(4))
    with pytest.raises(hp.HeadPruneError, match="no interval of 'f1'"):
        compare(some, some, "f1")
    unknown = Measurement({}, np.ones(4), np.full(4, np.nan), np.ones(4, dtype=int))
    with pytest.raises(hp.HeadPruneError, match="not known"):
        interval(unknown, "accuracy")
    with pytest.raises(hp.HeadPruneError, match="different labels"):
        compare(some, Measurement({}, some.loss, some.correct, 2 * some.tokens), "accuracy")


def test_more_loss_is_worse() -> None:
    good, bad = measured(np.ones(50)), measured(np.zeros(50))
    assert compare(good, bad, "loss").verdict == "worse"


@pytest.mark.parametrize(("right", "n"), [(20, 20), (0, 20), (1, 1), (13, 20)])
def test_one_models_interval_is_wilsons(right: int, n: int) -> None:
    low, high = interval(measured(np.r_[np.ones(right), np.zeros(n - right)]), "accuracy")
    assert 0 <= low < high <= 1
    for end in (low, high):  # where the score test just accepts
        if 0 < end < 1:
            assert abs(right / n - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-5)


def test_labels_of_one_example_are_not_independent() -> None:
    """As many labels, in as few examples as they belong to: all of an example are right, or none is."""
    tokens = np.full(40, 25)
    right = np.where(np.arange(40) < 30, 25.0, 0.0)
    whole = interval(Measurement({}, np.zeros(40), right, tokens), "accuracy")
    single = interval(measured(np.arange(40) < 30), "accuracy")
    assert whole == pytest.approx(single)


def test_verdicts() -> None:
    good, bad = measured(np.ones(100)), measured(np.r_[np.ones(80), np.zeros(20)])
    assert compare(good, bad, "accuracy").verdict == "worse"
    assert compare(bad, good, "accuracy").verdict == "better"
    assert compare(good, bad, "perplexity").verdict == "worse"
    assert compare(bad, good, "perplexity").value < 0


def test_the_paired_interval_matches_theory() -> None:
    rng = np.random.default_rng(0)
    before = rng.random(2000) < 0.8
    after = np.where(rng.random(2000) < 0.1, rng.random(2000) < 0.5, before)
    change = compare(measured(before), measured(after), "accuracy")
    difference = after.astype(float) - before
    half = 1.96 * difference.std() / 2000**0.5
    assert change.value == pytest.approx(difference.mean())
    assert change.low == pytest.approx(difference.mean() - half, abs=0.1 * half)
    assert change.high == pytest.approx(difference.mean() + half, abs=0.1 * half)


def test_the_interval_covers() -> None:
    """Of 200 samples from a known truth, about 95 % of the intervals hold it."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = interval(measured(rng.random(150) < 0.7), "accuracy")
        held += low <= 0.7 <= high
    assert 180 <= held <= 198


def test_nothing_to_evaluate() -> None:
    with pytest.raises(hp.HeadPruneError, match="no examples"):
        evaluate(bert()[0], [])


def test_a_loss_that_is_not_finite() -> None:
    model, example = bert()
    with torch.no_grad():
        model.classifier.bias[0] = float("inf")
    with pytest.raises(hp.HeadPruneError, match="loss of example 0"):
        evaluate(model, [labelled(model, example)])


def test_a_models_own_loss_does_not_change_its_perplexity() -> None:
    import transformers as tf

    from tests.support.zoo import randomise, sizes

    config = tf.MixtralConfig(**sizes("sdpa", num_key_value_heads=2, num_local_experts=2, output_router_logits=True))
    config.router_aux_loss_coef = 1.0
    model = randomise(tf.MixtralForCausalLM(config))
    batch = labelled(model, text(rows=4))
    with_router = evaluate(model, [batch]).metrics
    model.config.output_router_logits = False
    without = evaluate(model, [batch]).metrics
    assert with_router["perplexity"] == pytest.approx(without["perplexity"], rel=1e-4)


def test_packed_texts_are_apart_in_every_computation() -> None:
    """transformers keeps packed texts apart (by positions that start again) only without a cache. Scores were of separate texts,
    but measurements and repair were of texts that see each other."""
    model, _ = llama()
    ids = text(rows=2, length=10)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
    packed = {"input_ids": ids, "position_ids": positions, "labels": ids}
    losses = []
    for row, cut in enumerate((4, 7)):
        with (
            torch.no_grad()
        ):  # the first token behind the cut is guessed from the last one before it, as labels are shifted
            parts = [model(input_ids=part[None]).logits[0] for part in (ids[row, :cut], ids[row, cut:])]
        losses.append(torch.nn.functional.cross_entropy(torch.cat(parts)[:-1], ids[row, 1:]).item())
    assert evaluate(model, [packed]).loss == pytest.approx(losses, rel=1e-5)
    scored = hp.score(model, [packed], "gradient").details["mean_loss"]
    assert scored == pytest.approx(sum(losses) / 2, rel=1e-5)
    dense = Fidelity(model, [packed])
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[1:, 7:]).logits[0, -1], model(input_ids=ids[:1, 4:]).logits[0, -1]])
    torch.testing.assert_close(dense._answers[0][[1, 0], -1], expected, rtol=1e-4, atol=1e-4)


def test_padding_is_no_place_for_an_answer() -> None:
    """The model's own loss of a padded text counts padding among the places; so loss, accuracy and scores changed with the batch size."""
    config = tf.BertConfig(
        vocab_size=100, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16
    )
    model = randomise(tf.BertForQuestionAnswering(config)).eval()
    ids = torch.randint(5, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths, starts, ends = (4, 9, 6), torch.tensor([1, 2, 5]), torch.tensor([3, 8, 5])
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    together = [{"input_ids": ids, "attention_mask": mask, "start_positions": starts, "end_positions": ends}]
    alone = [
        {k: v[i : i + 1, : lengths[i]] if v.ndim == 2 else v[i : i + 1] for k, v in together[0].items()}
        for i in range(3)
    ]
    a, b = hp.evaluate(model, together), hp.evaluate(model, alone)
    with torch.no_grad():
        assert b.loss == pytest.approx([float(model(**one).loss) for one in alone], rel=1e-5)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.correct.tolist() == b.correct.tolist()
    assert "f1" not in a.metrics  # of places in texts, which are no classes
    for method in ("ablation", "gradient"):
        scores = [hp.score(model, batches, method).flat().numpy() for batches in (together, alone)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-3, abs=1e-7)


def test_padding_on_the_left_predicts_nothing() -> None:
    """As most causal models are padded: the first token of a text has a label, which only padding would predict."""
    model, _ = llama()
    ids, lengths = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(0)), (4, 9, 6)
    alone = [{"input_ids": ids[i : i + 1, 9 - n :], "labels": ids[i : i + 1, 9 - n :]} for i, n in enumerate(lengths)]
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    together = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    further = {k: torch.nn.functional.pad(v, (5, 0), value=-100 * (k == "labels")) for k, v in together.items()}
    expected = hp.evaluate(model, alone)
    with torch.no_grad():
        assert expected.loss == pytest.approx([float(model(**one).loss) for one in alone], rel=1e-5)
    for batch in (together, further, {**together, "labels": ids}):
        found = hp.evaluate(model, [batch])
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert found.tokens.tolist() == [3, 8, 5]
