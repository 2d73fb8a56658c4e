"""The public names, as somebody uses them who knows nothing else: on transformers' models and on plain modules."""

import contextlib
import copy
import inspect
import math
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support import brute
from tests.support.cases import answer
from tests.support.checks import hooks, same, state
from tests.support.commands import parts_of_a_run, run
from tests.support.plans import refitted
from tests.support.problems import small, unlabelled
from tests.support.zoo import TorchEncoder, labelled, llama, randomise, sizes, text

ROOT = Path(__file__).parent.parent
cross_entropy = partial(F.cross_entropy, reduction="none")


@dataclass
class Subject:
    """A dense model and what it is called with.

    Attributes:
        batches, others, reported: To fit to, to choose by, and to report on.
        example: Without labels.
        given: What every function takes that runs on labels.
        fresh: Another instance, to load into; None where none is needed.
    """

    model: nn.Module
    batches: list[Any]
    others: list[Any]
    reported: list[Any]
    example: Any
    given: dict[str, Any]
    fresh: Callable[[], nn.Module] | None = None


def of_transformers(model: nn.Module) -> Subject:
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(6)]
    example = {k: v for k, v in batches[0].items() if k != "labels"}
    return Subject(model, batches[:3], batches[3:4], batches[4:], example, {})


def bert() -> Subject:
    return of_transformers(small(4, 2)[0])


def grouped() -> Subject:
    return of_transformers(llama()[0].double())


def plain() -> Subject:
    """PyTorch's own attention, with pairs of inputs and labels."""
    torch.manual_seed(3)
    pairs = [(torch.randn(6, 5, 32).double(), torch.randint(0, 3, (6,))) for _ in range(6)]
    model, given = randomise(TorchEncoder()).double(), {"loss_fn": cross_entropy}
    return Subject(model, pairs[:3], pairs[3:4], pairs[4:], pairs[0][0], given, lambda: TorchEncoder().double())


SUBJECTS: dict[str, Callable[[], Subject]] = {"bert": bert, "grouped": grouped, "plain": plain}
EACH = pytest.mark.parametrize("name", SUBJECTS)


def once(batches: list[Any]) -> Iterator[Any]:
    """What gives its batches only once."""
    yield from batches


def copied(batch: Any) -> Any:
    """A batch whose tensors are made here and now."""
    return {k: v.clone() for k, v in batch.items()} if isinstance(batch, dict) else tuple(t.clone() for t in batch)


def answers(model: nn.Module, example: Any) -> Tensor:
    return answer(model.eval(), example)


# -- the way through -----------------------------------------------------------------------------


@pytest.mark.slow
@EACH
def test_search_repair_prune_measure_save_load(name: str, tmp_path: Path) -> None:
    s = SUBJECTS[name]()
    s.model.train()
    dense, before = copy.deepcopy(s.model), state(s.model)
    plans = hp.search(s.model, once(s.batches), keep=[5, "25%"], choose=once(s.others), **s.given)

    # Searching leaves the model as it was.
    assert same(s.model, before)
    assert hooks(s.model) == 0
    assert all(m.training for m in s.model.modules())

    # Plans hold their budgets and are nested.
    layers = hp.find_attention(s.model, s.example)
    total = sum(layer.num_heads for layer in layers)
    assert [p.asked for p in plans] == [5, total // 4]
    for plan in plans:
        assert isinstance(plan, hp.PruningPlan)
        assert plan.total == total
        assert plan.kept == total - sum(map(len, plan.drop.values())) <= plan.asked
    more, fewer = ({(a, h) for a, heads in p.drop.items() for h in heads} for p in plans)
    assert more <= fewer

    # What is pruned answers as what was repaired and masked.
    done = hp.repair(s.model, plans[0], once(s.batches))
    assert done.trials
    assert all(math.isfinite(t.gain) and t.gain == t.before - t.after for t in done.trials)
    assert all(t.gain > 0 for t in done.trials if t.kept)
    with hp.mask(s.model, plans[0], s.example):
        masked = answers(s.model, s.example)
        by_mask = hp.evaluate(s.model, s.reported, **s.given)
    proof = hp.prune(s.model, plans[0], s.example)
    assert proof.difference <= proof.tolerance
    torch.testing.assert_close(answers(s.model, s.example), masked)
    assert not torch.allclose(masked, answers(dense, s.example))
    left = {a.name: a.num_heads for a in hp.find_attention(s.model, s.example)}
    for layer in layers:
        if layer.name in left and layer.name not in proof.ghosts:
            assert left[layer.name] == layer.num_heads - len(plans[0].drop.get(layer.name, ()))

    # Measuring takes what is consumed once, too.
    was, now = (hp.evaluate(m, once(s.reported), **s.given) for m in (dense, s.model))
    assert now.metrics == pytest.approx(by_mask.metrics)
    change = hp.compare(was, now)
    assert change.value == pytest.approx(now.metrics[change.metric] - was.metrics[change.metric])

    hp.save(s.model, tmp_path / "smaller")
    loaded = hp.load(tmp_path / "smaller", model=s.fresh() if s.fresh else None)
    torch.testing.assert_close(answers(loaded, s.example), answers(s.model, s.example))


def test_evaluate_and_compare_agree_with_hand_computation() -> None:
    s = bert()
    other = copy.deepcopy(s.model)
    other.classifier.weight.data.mul_(-1)
    labels, found, accuracies, losses = torch.cat([b["labels"] for b in s.reported]), [], [], []
    for model in (s.model, other):
        each = [answers(model, {k: v for k, v in b.items() if k != "labels"}) for b in s.reported]
        logits = torch.cat(each)
        accuracies.append(float((logits.argmax(-1) == labels).double().mean()))
        losses.append(float(-logits.log_softmax(-1)[torch.arange(len(labels)), labels].mean()))
        found.append(hp.evaluate(model, s.reported))
        right = {c: float(((logits.argmax(-1) == c) & (labels == c)).sum()) for c in labels.unique().tolist()}
        f1 = [2 * n / float((logits.argmax(-1) == c).sum() + (labels == c).sum()) for c, n in right.items()]
        expected = {"accuracy": accuracies[-1], "loss": losses[-1], "perplexity": math.exp(losses[-1])}
        expected["f1_macro"] = sum(f1) / len(f1)
        assert {name: found[-1].metrics[name] for name in expected} == pytest.approx(expected)
    change = hp.compare(*found)
    assert (change.metric, change.examples) == ("accuracy", len(labels))
    assert change.value == pytest.approx(accuracies[1] - accuracies[0])
    assert hp.compare(*found, metric="loss").value == pytest.approx(losses[1] - losses[0])
    assert hp.compare(*found, metric="perplexity").value == pytest.approx(math.exp(losses[1] - losses[0]) - 1)
    del found[1].metrics["accuracy"]
    assert hp.compare(*found).metric == hp.compare(*found[::-1]).metric == "perplexity"

    p = plain()
    given = hp.evaluate(p.model, p.reported, **p.given)
    by_hand = torch.cat([cross_entropy(answers(p.model, x), y) for x, y in p.reported])
    assert given.metrics == {"loss": pytest.approx(float(by_hand.mean()))}
    assert hp.compare(given, given).metric == "loss"
    with pytest.raises(hp.HeadPruneError, match="cannot be paired"):
        hp.compare(given, hp.evaluate(p.model, p.reported[:1], **p.given))


# -- one search ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_search_finds_what_prune_prunes(bert_folder: Path, data_folder: Path, tmp_path: Path, brief: None) -> None:
    seeded = ("-L", 24, "-b", 8, "--seed", 5, "-k", 5, "-k", "25%", "--protect", "L1.H0")
    run("prune", bert_folder, "-d", data_folder, *seeded, "-m", "gradient", "-o", tmp_path / "run", "-q")
    paths = [tmp_path / "run" / "plan.json", *(tmp_path / "run").glob("plan-*.json")]

    model, fitted_to, choose = parts_of_a_run(bert_folder, data_folder, limit=24, batch_size=8, seed=5)
    plans = hp.search(model, fitted_to, keep=[5, "25%"], choose=choose, protect="L1.H0", seed=5)
    assert plans == [hp.PruningPlan.load(path) for path in paths]
    assert all(0 not in p.drop.get(hp.find_attention(model)[1].name, []) for p in plans)

    hp.repair(model, plans[0], fitted_to, choose=choose)
    hp.prune(model, plans[0])
    saved = hp.load(tmp_path / "run" / "pruned-5")
    example = {k: v for k, v in fitted_to[0].items() if k != "labels"}
    torch.testing.assert_close(answers(model, example), answers(saved, example))


@pytest.mark.slow
def test_the_plan_is_of_the_order_whose_plans_are_nearest_to_the_dense_model() -> None:
    """Of all that `auto` tries: each strategy alone finds no plan that is nearer on what chooses, repaired."""
    s = bert()

    (others,) = unlabelled(s.others)

    def distance(plan: hp.PruningPlan) -> float:
        with refitted(s.model, s.batches, plan.drop) as model, hp.mask(model, plan, s.example):
            return brute.kl(*(answers(m, others) for m in (s.model, model)))

    (found,) = hp.search(s.model, s.batches, keep=3, choose=s.others)
    scores = hp.score(s.model, s.batches)
    tried = [
        hp.search(s.model, s.batches, keep=3, choose=s.others, strategy=strategy, scores=given)[0]
        for strategy, given in (("compensated", None), ("re-scored", None), ("one-shot", scores), ("per-layer", scores))
    ]
    assert len({repr(p.drop) for p in tried}) > 1
    assert found.drop in [p.drop for p in tried]
    assert distance(found) == pytest.approx(min(map(distance, tried)))


def test_strategies_that_measure_losses_take_a_loss_fn() -> None:
    """Greedy asked a plain module's batches for labels by name."""
    s = plain()
    (plan,) = hp.search(s.model, s.batches, keep=4, strategy="greedy", **s.given)
    assert (plan.kept, plan.strategy) == (4, "greedy")


def test_a_quarter_chooses_where_nothing_else_is_given() -> None:
    s = bert()
    batches = [*s.batches, *s.others]
    assert hp.search(s.model, batches, keep=3) == hp.search(s.model, s.batches, keep=3, choose=s.others)
    (alone,) = hp.search(s.model, batches[:1], keep=3, strategy="compensated")  # nothing to choose between
    assert alone.kept == 3


@pytest.mark.parametrize("name", ["bert", "plain"])
def test_under_inference_mode(name: str) -> None:
    """Where autograd is off: scoring said that the loss depends on no head."""
    s = SUBJECTS[name]()
    expected = hp.search(s.model, s.batches, keep=3, choose=s.others, **s.given)
    with torch.inference_mode():
        made_here = [copied(b) for b in s.batches]
        assert hp.search(s.model, made_here, keep=3, choose=s.others, **s.given) == expected
        hp.repair(s.model, expected[0], made_here)
        hp.prune(s.model, expected[0])


def test_scores_and_layers_that_are_given_are_used() -> None:
    s = bert()
    layers, scores = hp.find_attention(s.model, s.example), hp.score(s.model, s.batches, method="ablation")
    given = hp.search(s.model, s.batches, keep=3, strategy="one-shot", scores=scores, layers=layers)
    assert given[0].drop == hp.plan(scores, 3).drop
    assert given[0].method == "ablation"
    heard: list[str] = []
    hp.search(s.model, s.batches, keep=3, choose=s.others, progress=lambda done, total, note="": heard.append(note))
    assert any("re-scored" in note for note in heard)


# -- arguments -----------------------------------------------------------------------------------

# An instance to fill; several numbers at once, and scores by several methods; a strategy that needs no model.
OTHERWISE = {("load", "model"), ("search", "keep"), ("search", "scores"), ("plan", "strategy")}


def test_the_same_argument_is_the_same_everywhere() -> None:
    """Of one type, but that some functions can do without; and of one default."""
    types: dict[str, set[str]] = {}
    defaults: dict[str, set[str]] = {}
    for name in hp.__all__:
        function = getattr(hp, name)
        for p in inspect.signature(function).parameters.values() if inspect.isfunction(function) else ():
            if (name, p.name) in OTHERWISE:
                continue
            types.setdefault(p.name, set()).add(p.annotation.removesuffix(" | None"))
            if p.default is not p.empty:
                defaults.setdefault(p.name, set()).add(repr(p.default))
    assert {"model", "batches", "layers", "example", "plan", "loss_fn", "seed", "progress"} <= types.keys()
    assert {name: found for name, found in (*types.items(), *defaults.items()) if len(found) > 1} == {}


def mistakes() -> dict[str, tuple[Callable[[Subject], Any], str]]:
    def twice(s: Subject) -> Any:
        same_one = once(s.batches)
        return hp.search(s.model, same_one, keep=3, choose=same_one)

    def again(s: Subject) -> Any:
        (plan,) = hp.search(s.model, s.batches, keep=3, choose=s.others, strategy="compensated")
        hp.repair(s.model, plan, s.batches)
        return hp.repair(s.model, plan, s.batches)

    def other_heads(s: Subject) -> Any:
        plans = hp.search(s.model, s.batches, keep=[5, 3], choose=s.others, strategy="compensated")
        hp.repair(s.model, plans[0], s.batches)
        return hp.prune(s.model, plans[1], s.example)

    def stock(s: Subject) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            s.model.save_pretrained(folder)
            return hp.load(folder)

    return {
        "a batch, not batches": (lambda s: hp.search(s.model, s.batches[0], keep=3), "batches is a dict"),
        "a batch to repair on": (lambda s: hp.repair(s.model, {"L0": [0]}, s.batches[0]), "batches is a dict"),
        "a tensor": (lambda s: hp.evaluate(s.model, s.batches[0]["input_ids"]), "batches is a Tensor"),
        "no examples": (lambda s: hp.search(s.model, [], keep=3), "no examples to search with"),
        "the same to choose by": (lambda s: hp.search(s.model, s.batches, keep=3, choose=s.batches[1:2]), "Batch 0 of choose= is one of"),
        "a stock folder": (stock, "Load it by transformers' BertForSequenceClassification.from_pretrained"),
        "a generator twice": (twice, "gives its batches only once"),
        "nothing to choose by": (lambda s: hp.search(s.model, s.batches[:1], keep=3), "no examples to choose between"),
        "a strategy": (lambda s: hp.search(s.model, s.batches, keep=3, strategy="best"), "no strategy 'best'"),
        "no scores": (lambda s: hp.search(s.model, s.batches, keep=3, strategy="one-shot", scores=()), "needs scores"),
        "a layer": (lambda s: hp.search(s.model, s.batches, keep=3, protect="L9"), "no attention layer named 'L9'"),
        "plan cannot": (lambda s: hp.plan(hp.score(s.model, s.batches), 3, "auto"), "headprune.search"),
        "for other heads": (other_heads, "repaired for other heads"),
        "repaired twice": (again, "as it was before it was repaired"),
        "no example": (lambda s: hp.prune(TorchEncoder(), {"L0": [0]}), "an example batch is needed"),
    }  # fmt: skip


@pytest.mark.parametrize("name", mistakes())
def test_a_mistake_is_told_in_a_line(name: str) -> None:
    wrong, says = mistakes()[name]
    with pytest.raises(hp.HeadPruneError) as told:
        wrong(bert())
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    assert told.value.hint


def test_an_example_is_made_up_where_it_can_be() -> None:
    s = bert()
    assert hp.find_attention(s.model) == hp.find_attention(s.model, s.example)
    with hp.mask(s.model, {"L0": [1]}):
        masked = answers(s.model, s.example)
    proof = hp.prune(s.model, {"L0": [1]})
    assert proof.difference <= proof.tolerance
    torch.testing.assert_close(answers(s.model, s.example), masked)
    p = plain()
    hp.repair(p.model, {"L0": [1]}, p.batches)  # has seen what the model takes
    assert hp.prune(p.model, {"L0": [1]}).difference < 1e-9


def test_a_plan_still_applies_to_the_model_that_was_repaired_for_it() -> None:
    s = bert()
    (plan,) = hp.search(s.model, s.batches, keep=3, choose=s.others, strategy="compensated")
    hp.repair(s.model, plan, s.batches)
    copied = copy.deepcopy(s.model)
    hp.prune(copied, plan, s.example)
    with torch.no_grad():
        s.model.classifier.weight.add_(1.0)  # trained since, say
    with pytest.raises(hp.HeadPruneError, match="another model"):
        hp.prune(s.model, plan, s.example)


# -- what is written -----------------------------------------------------------------------------


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "README.md").read_text().split("\n## Python\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    config = tf.BertConfig(**{**sizes("sdpa"), "hidden_size": 24, "num_attention_heads": 12, "num_hidden_layers": 6})
    model = randomise(tf.BertForSequenceClassification(config))
    batches = [labelled(model, text(4, 6, seed=s), seed=s) for s in range(6)]
    examples = {"example": text(2, 6), "batches": batches[:3], "other_batches": batches[3:5]}
    names = {"model": model, "report_batches": batches[5:], **examples}
    exec(code, names)
    plans: Any = names["plans"]
    assert [p.kept for p in plans] == [36, 18]
    assert sum(a.num_heads for a in hp.find_attention(names["model"], names["example"])) == 36


def test_the_reference_is_what_the_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "docs" / "make_api.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    runpy.run_path(str(script), run_name="__main__")  # which exits where they differ
    written = (ROOT / "docs" / "api.md").read_text()
    for name in hp.__all__:
        assert name == "__version__" or f"\n### {name}\n" in written


TAKE_A_MODEL = [
    name for name in hp.__all__ if inspect.isfunction(f := getattr(hp, name)) and "model" in inspect.signature(f).parameters
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TAKE_A_MODEL if name != "load"])
def test_what_is_no_model_is_said(name: str, tmp_path: Path) -> None:
    """A path, a tokenizer or a pipeline, given to any public function: one line, not an AttributeError."""
    function, batch = getattr(hp, name), {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    known = {"batches": [batch], "example": batch, "plan": {"L0": [0]}, "heads": {"L0": [0]}, "path": tmp_path / "new"}
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    given = {name: known.get(name) for name in required if name != "model"}
    pipeline = SimpleNamespace(model=nn.Linear(1, 1))  # as transformers' pipelines are: the model is in it
    for wrong, says in (("gpt2", "The model is a str.*from_pretrained"), (pipeline, "pipeline.model")):
        with pytest.raises(hp.HeadPruneError, match=says), contextlib.ExitStack() as stack:
            stack.enter_context(function(wrong, **given))  # only a mask would be one, and none comes so far


@pytest.mark.parametrize("place", ["batches", "choose"])
@pytest.mark.parametrize("name", ["repair", "search", "evaluate"])
def test_the_batch_that_a_model_does_not_run_on_is_named(name: str, place: str) -> None:
    subject = bert()
    bad = {k: v.clone() for k, v in subject.others[0].items()}
    bad["input_ids"][1, 2] = 10**6  # a token that it does not have
    given = {"batches": subject.batches[:2], "choose": subject.others}
    given[place] = [*given[place], bad]
    number, before = len(given[place]) - 1, state(subject.model)
    calls: dict[str, Callable[[], Any]] = {
        "repair": lambda: hp.repair(subject.model, {"L0": [1]}, given["batches"], choose=given["choose"]),
        "search": lambda: hp.search(subject.model, given["batches"], [4], choose=given["choose"], scores=()),
        "evaluate": lambda: hp.evaluate(subject.model, given[place]),
    }
    of = "batches" if name == "evaluate" else place
    with pytest.raises(hp.HeadPruneError, match=f"does not run on batch {number} of {of}="):
        calls[name]()
    assert same(subject.model, before)
