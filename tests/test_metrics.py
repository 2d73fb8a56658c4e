"""Metrics by name: the libraries' own figures, the jackknife by brute force, and what cannot be measured."""

import re
from collections.abc import Callable
from typing import Any

import jiwer
import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from seqeval.metrics import f1_score as entity_f1
from sklearn import metrics as sk
from torch import Tensor, nn

import headprune as hp
from headprune.evaluation import interval
from headprune.metrics import metric_named
from tests.support.brute import squad

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
Losses = Callable[[Tensor, Tensor], Tensor]
KINDS: dict[str, Losses] = {
    "labels": nn.functional.cross_entropy,
    "tags": lambda logits, labels: nn.functional.cross_entropy(logits.transpose(1, 2), labels),
    "numbers": lambda logits, labels: ((logits.flatten() - labels) ** 2).mean(),
    "several": nn.functional.binary_cross_entropy_with_logits,
}


class Given(nn.Module):
    """A model whose logits are its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.loss, self.weight = KINDS[kind], nn.Parameter(torch.zeros(1))
        self.config: Any = type("Config", (), {"id2label": dict(enumerate(TAGS))})

    def forward(self, logits: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        return {"logits": logits, "loss": None if labels is None else self.loss(logits, labels)}


def drawn(kind: str, count: int, seed: int = 0, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits and labels, which belong together the more the less ``noise`` there is."""
    rng = torch.Generator().manual_seed(7)
    shape = {"labels": (count, 3), "tags": (count, 6, len(TAGS)), "numbers": (count, 1), "several": (count, 4)}[kind]
    truth = torch.randn(shape, generator=rng)
    logits = truth + noise * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    labels = {"numbers": truth[:, 0], "several": (truth > 0).float()}.get(kind)
    return logits, truth.argmax(-1) if labels is None else labels


def measured(kind: str, logits: Tensor, labels: Tensor, *metrics: Any, size: int = 16) -> hp.Measurement:
    pairs = zip(logits.split(size), labels.split(size), strict=True)
    return hp.evaluate(Given(kind), [{"logits": x, "labels": y} for x, y in pairs], metrics=metrics)


def probabilities(x: Tensor) -> np.ndarray:
    return x.double().softmax(-1).numpy()


FIGURES: dict[str, dict[str, Callable[[Tensor, Tensor], float]]] = {
    "labels": {
        "matthews_corrcoef": lambda x, y: sk.matthews_corrcoef(y, x.argmax(1)),
        "f1_weighted": lambda x, y: sk.f1_score(y, x.argmax(1), average="weighted"),
        "balanced_accuracy": lambda x, y: sk.balanced_accuracy_score(y, x.argmax(1)),
        "roc_auc_ovr": lambda x, y: sk.roc_auc_score(y, probabilities(x), multi_class="ovr"),
        "neg_log_loss": lambda x, y: -sk.log_loss(y, probabilities(x)),
        "roc_auc_ovo": lambda x, y: sk.roc_auc_score(y, probabilities(x), multi_class="ovo"),
    },
    "tags": {
        "f1_macro": lambda x, y: sk.f1_score(y.flatten(), x.argmax(2).flatten(), average="macro"),
        "seqeval": lambda x, y: entity_f1(*([[TAGS[i] for i in row] for row in t] for t in (y, x.argmax(2)))),
    },
    "numbers": {
        "spearman": lambda x, y: stats.spearmanr(x[:, 0], y).statistic,
        "pearson": lambda x, y: stats.pearsonr(x[:, 0].double(), y.double()).statistic,
        "r2": lambda x, y: sk.r2_score(y, x[:, 0]),
        "neg_root_mean_squared_error": lambda x, y: -sk.root_mean_squared_error(y, x[:, 0]),
    },
    "several": {
        "f1_samples": lambda x, y: sk.f1_score(y, x > 0, average="samples"),
        "average_precision": lambda x, y: sk.average_precision_score(y, x.double().sigmoid()),
    },
}
UNBOUNDED, CORRELATIONS = ("neg", "r2"), ("spearman", "pearson", "matthews_corrcoef")
CASES = [(kind, name) for kind, names in FIGURES.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_values_are_the_librarys_and_errors_the_jackknifes(kind: str, name: str) -> None:
    """On the whole set, whatever the batches; and the error from as many evaluations as there are examples."""
    x, y = drawn(kind, 20, noise=2.0)
    one, two = (measured(kind, x, y, name, size=size) for size in (20, 7))
    assert (
        one.metrics[name]
        == two.metrics[name]
        == pytest.approx(FIGURES[kind][name](x.double(), y.double() if kind == "numbers" else y), abs=1e-12)
    )
    rest = [[i for i in range(20) if i != gone] for gone in range(20)]
    without = np.array([measured(kind, x[rows], y[rows], name).metrics[name] for rows in rest])
    moves = 19 * (without.mean() - without)
    half = stats.t.ppf(0.975, 19) * np.sqrt((moves**2).sum() + 2 * (moves**2).max()) / 20
    ends = np.array([one.metrics[name] - half, one.metrics[name] + half])
    low = -np.inf if name.startswith(UNBOUNDED) else -1 if name in CORRELATIONS else 0
    ends = ends.clip(low, 0 if name.startswith("neg") else 1)
    assert interval(one, name) == pytest.approx(tuple(ends), abs=1e-9)


@pytest.mark.parametrize("kind", ["labels", "several", "tags"])
def test_f1_macro_is_the_same_unasked(kind: str) -> None:
    """Of several labels at once it was the mean of the ones' and the zeros'."""
    x, y = drawn(kind, 20)
    name = "f1_macro"
    assert measured(kind, x, y, size=7).metrics[name] == measured(kind, x, y, name).metrics[name]


@pytest.mark.parametrize(
    ("name", "level"), [("roc_auc", 0.5), ("roc_auc_ovr_weighted", 0.5), ("r2", 0.0), ("f1", None)]
)
def test_what_a_model_that_knows_nothing_has(name: str, level: float | None) -> None:
    assert metric_named(name).chance == level


@pytest.mark.parametrize("name", ["r2", "explained_variance", "d2_absolute_error_score", "neg_mean_squared_error"])
def test_no_interval_goes_beyond_a_perfect_model(name: str) -> None:
    """Where one example is far off, the jackknife's error is large: R² was given up to 1.09."""
    y = torch.linspace(-1, 1, 30)
    x = (y + 0.01)[:, None]
    x[7] += 1.5
    low, high = interval(measured("numbers", x, y, name), name)
    assert low < high == (0 if name.startswith("neg") else 1)


@pytest.mark.parametrize("name", ["exact_match", "bleu"])
def test_one_example_says_next_to_nothing(name: str) -> None:
    """Its interval was NaN."""
    one = spoken(["a cat on a mat"], ["a cat on a mat"], name)
    assert interval(one, name) == pytest.approx((0, one.metrics[name]))
    assert hp.compare(one, one, name).verdict == "no measurable change"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_interval_p_and_verdict_agree(kind: str, name: str) -> None:
    x, y = drawn(kind, 60)
    dense = measured(kind, x, y, name)
    for seed, noise in ((0, 1.0), (1, 1.0), (2, 20.0)):
        change = hp.compare(dense, measured(kind, drawn(kind, 60, seed, noise)[0], y, name), name)
        assert (
            (change.p_value < 0.05)
            == (change.verdict != "no measurable change")
            == (not change.low <= 0 <= change.high)
        )
    assert change.verdict == "worse"
    same = hp.compare(dense, dense, name)
    assert same.value == 0
    assert (same.low < 0 < same.high) != name.startswith(UNBOUNDED)  # no answer changed: one more example still might


def test_more_examples_than_groups() -> None:
    """Where each value costs as much as all examples, every 400th is left out together."""
    x, y = drawn("numbers", 1000)
    rest = [[i for i in range(1000) if i % 400 != group] for group in range(400)]
    without = np.array([stats.spearmanr(x[rows, 0], y[rows]).statistic for rows in rest])
    result = measured("numbers", x, y, "spearman", size=500)
    assert result.jackknife["spearman"].without == pytest.approx(without, abs=1e-12)


def test_equal_answers_are_left_out_once() -> None:
    """Without either of two examples with equal labels and predictions the value is the same."""
    x, y = drawn("labels", 1000)
    result = measured("labels", x, y, "matthews_corrcoef", size=500).jackknife["matthews_corrcoef"].without
    for gone in (0, 500, 999):
        rows = [i for i in range(1000) if i != gone]
        assert result[gone] == sk.matthews_corrcoef(y[rows], x[rows].argmax(1))


def test_models_with_other_answers_have_the_same_groups() -> None:
    """Of many classes one model may predict nearly all, and another only one."""
    labels = torch.arange(900) % 300
    good, bad = nn.functional.one_hot(labels, 300).float(), torch.eye(300)[torch.zeros(900, dtype=torch.long)]
    good[:450] = good[:450].roll(1, 0)
    assert (
        hp.compare(*(measured("labels", x, labels, "f1_macro", size=300) for x in (good, bad)), "f1_macro").verdict
        == "worse"
    )


def test_a_function_is_a_metric() -> None:
    def rightness(predictions: Any, references: Any) -> float:
        return float(np.mean([p == r for p, r in zip(predictions, references, strict=True)]))

    error = hp.Metric("error", (), lambda a: 1 - rightness(a.predictions, a.references), higher=False)
    _, y = drawn("labels", 50)
    dense, pruned = (measured("labels", drawn("labels", 50, 0, n)[0], y, rightness, error) for n in (1.0, 9.0))
    assert dense.metrics["rightness"] == dense.metrics["accuracy"]
    assert hp.compare(dense, pruned, "rightness").verdict == hp.compare(dense, pruned, "error").verdict == "worse"


@pytest.mark.parametrize("name", ["matthews_corrcoef", "roc_auc_ovr"])
def test_examples_without_a_label_count_nowhere(name: str) -> None:
    """They ended in a TypeError."""
    x, y = drawn("labels", 40)
    some = y.clone()
    some[::4] = -100
    one, other = measured("labels", x, some, name), measured("labels", x[some >= 0], y[some >= 0], name)
    assert one.metrics == pytest.approx(other.metrics)
    assert interval(one, name) == pytest.approx(interval(other, name))
    assert hp.compare(one, one, name).high > 0


@pytest.mark.parametrize("name", ["f1", "roc_auc", "average_precision", "matthews_corrcoef"])
def test_one_label_that_is_there_or_not_is_two_classes(name: str) -> None:
    x, y = (values[:, :1] for values in drawn("several", 40))
    two = torch.cat([torch.zeros_like(x), x], 1)
    assert measured("several", x, y, name).metrics[name] == measured("labels", two, y[:, 0].long(), name).metrics[name]


# -- texts ------------------------------------------------------------------------------------------------

WORDS = ["the", "a", "cat", "Cat,", "sat.", "on", "mat", "mats", "1", "2"]
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
PAIRS = st.lists(st.tuples(texts, texts.filter(bool)), min_size=2, max_size=6)


def spoken(predictions: list[str], references: list[Any], *metrics: str) -> hp.Measurement:
    class Texts:
        def __init__(self) -> None:
            self.references = references

        def read(self, model: nn.Module, batch: Any, first: int) -> list[str]:
            return predictions[first : first + len(batch["labels"])]

    x, y = drawn("labels", len(predictions))
    pairs = zip(x.split(2), y.split(2), strict=True)
    batches = [{"logits": a, "labels": b} for a, b in pairs]
    return hp.evaluate(Given("labels"), batches, metrics=metrics, texts=Texts())


@settings(max_examples=15, deadline=None)
@given(PAIRS)
def test_texts_are_measured_as_by_their_libraries(pairs: list[tuple[str, str]]) -> None:
    hypotheses, references = map(list, zip(*pairs, strict=True))
    rouge = RougeScorer(["rougeL"])
    wanted = {
        "wer": jiwer.wer(references, hypotheses),
        "wer_normalised": jiwer.wer(*([re.sub("[,.]", "", t.lower()) for t in ts] for ts in (references, hypotheses))), "cer": jiwer.cer(references, hypotheses),
        "bleu": sacrebleu.corpus_bleu(hypotheses, [references]).score,
        "chrf": sacrebleu.corpus_chrf(hypotheses, [references]).score,
        "rouge_l": np.mean([rouge.score(r, h)["rougeL"].fmeasure for h, r in pairs]),
        "exact_match": np.mean([squad(h, r)[0] for h, r in pairs]),
        "squad_f1": np.mean([squad(h, r)[1] for h, r in pairs]),
    }  # fmt: skip
    result = spoken(hypotheses, references, *wanted)
    for name, value in wanted.items():
        assert result.metrics[name] == pytest.approx(value, abs=1e-12)
        rest = [
            spoken(hypotheses[:i] + hypotheses[i + 1 :], references[:i] + references[i + 1 :], name) for i in (0, 1)
        ]
        assert result.jackknife[name].without[:2] == pytest.approx([r.metrics[name] for r in rest], abs=1e-9)


def test_the_best_of_several_references_counts() -> None:
    result = spoken(
        ["a cat", "mat"], [["dog", "the cat"], ["mats", "mat", "on"]], "exact_match", "squad_f1", "bleu", "chrf"
    )
    assert result.metrics["exact_match"] == result.metrics["squad_f1"] == 1
    streams = [["dog", "mats"], ["the cat", "mat"], ["dog", "on"]]
    assert result.metrics["bleu"] == sacrebleu.corpus_bleu(["a cat", "mat"], streams).score
    assert result.metrics["chrf"] == sacrebleu.corpus_chrf(["a cat", "mat"], streams).score


def test_fewer_errors_are_better() -> None:
    right = ["the cat sat.", "on a mat"] * 20
    dense, pruned = spoken(right, right, "wer"), spoken(["the mat sat.", "on mat"] * 20, right, "wer")
    change = hp.compare(dense, pruned, "wer")
    assert (change.value, change.verdict) == (pytest.approx(1 / 3), "worse")
    assert hp.compare(pruned, dense, "wer").verdict == "better"
    assert hp.compare(dense, dense, "wer").high > 0


# -- what cannot be measured --------------------------------------------------------------------------------


def accuracy(predictions: Any, references: Any) -> float:
    """One that is not headprune's, which was given under its name."""
    return -1.0


X, Y = drawn("labels", 12)
PROBLEMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "no such name": ("There is no metric 'f2'", lambda: measured("labels", X, Y, "f2")),
    "of texts": ("wer compares texts, but this model's answers are a label", lambda: measured("labels", X, Y, "wer")),
    "of numbers": ("r2 compares numbers", lambda: measured("labels", X, Y, "r2")),
    "no classes": ("answers have no accuracy", lambda: measured("numbers", *drawn("numbers", 9), "accuracy")),
    "of labels": ("f1 compares a label", lambda: measured("numbers", *drawn("numbers", 9), "f1")),
    "one class": ("all have the label 1", lambda: measured("labels", X, torch.ones_like(Y), "matthews_corrcoef")),
    "more than two classes": ("Target is multiclass", lambda: measured("labels", X, Y, "f1")),
    "constant numbers": ("it is nan", lambda: measured("numbers", torch.ones(9, 1), drawn("numbers", 9)[1], "spearman")),
    "no names of entities": ("not named as in B-PER", lambda: measured("tags", *drawn("tags", 9), "seqeval")),
    "empty references": ("it is nan", lambda: spoken(["a", "b"], ["", ""], "wer")),
    "no labels": ("No example has a label", lambda: measured("labels", X, torch.full_like(Y, -100))),
    "headprune's own name": (
        "Two metrics are called accuracy, and one is headprune's own",
        lambda: measured("labels", X, Y, accuracy),
    ),
    "twice": ("Two metrics are called <lambda>.", lambda: measured("labels", X, Y, lambda p, r: 0.0, lambda p, r: 1.0)),
    "several references": ("several references", lambda: spoken(["a"], [["a", "b"]], "wer")),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_cannot_be_measured_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "no names of entities":
        monkeypatch.setattr("tests.test_metrics.TAGS", ["a", "b", "c", "d", "e"])
    said, make = PROBLEMS[name]
    with pytest.raises(hp.HeadPruneError, match=re.escape(said)):
        make()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jiwer", None)
    with pytest.raises(hp.HeadPruneError, match="An error rate needs jiwer") as caught:
        spoken(["a"], ["a"], "wer")
    assert caught.value.hint == 'pip install "headprune[metrics]"'
