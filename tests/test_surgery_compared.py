"""What the proof compares, on modules that answer as they are told: how far answers may be off, and which inputs are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.errors import HeadPruneError
from headprune.surgery import proof
from headprune.surgery.journal import Journal
from headprune.surgery.proof import Reference, _attempt, inputs_for, references
from headprune.surgery.removal import Removal
from tests.support.zoo import bert, gpt2

TOLERANCE, NONE = 1e-4, Removal((), {}, "none", False)


class Told(nn.Module):
    """Answers as it is told."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer, self.weight = answer, nn.Parameter(torch.zeros(1))

    def forward(self, **given: Tensor) -> Any:
        return self.answer(**given)


def compared(
    got: list[Any], masked: list[Any], effect: list[float], tried: set[tuple[str, ...]] | None = None
) -> tuple[float, str]:
    wanted = [torch.as_tensor(m, dtype=torch.float64) for m in masked]
    model = Told(lambda x: tuple(torch.as_tensor(g, dtype=torch.float64) for g in got))
    reference = [Reference({"x": torch.zeros(1)}, wanted, effect, {})]
    return _attempt(model, Journal(), NONE, reference, TOLERANCE, set() if tried is None else tried)


@pytest.mark.parametrize(("off", "effect", "fails"), [
    (0.0, 0.0, False), (1.9e-5, 0.0, False), (2.1e-5, 0.0, True),  # rounding, where the heads change nothing: a fifth of the tolerance
    (5e-5, 1.1e-3, False), (5e-5, 0.9e-3, True),  # a twentieth of what the heads change
    (9.9e-5, math.inf, False), (1.1e-4, math.inf, True), (1.1e-4, 1.0, True), (5e-5, math.nan, False),
])  # fmt: skip
def test_how_far_answers_may_be_off(off: float, effect: float, fails: bool) -> None:
    for size in (1.0, 8.0, 1e-3):  # all of it is a share of the largest answer
        worst, why = compared([[size, size * off]], [[size, 0.0]], [size * effect])
        assert bool(why) is fails
        assert worst == pytest.approx(off, abs=1e-12)
        assert not fails or why == f"its outputs differ from the masked model's by {off:.2g} of their largest value"


def test_the_worst_of_several_outputs_counts() -> None:
    far = [math.inf] * 3
    worst, why = compared([[1, 3e-5], [100, 5e-3], [1, 1e-5]], [[1, 0], [100, 0], [1, 0]], far)
    assert (worst, why) == (pytest.approx(5e-5), "")
    assert compared([[1, 0], [1, 2e-4]], [[1, 0], [1, 0]], far[:2])[1]
    assert compared([[0.0, 0.0]], [[0.0, 0.0]], [0.0]) == (0.0, "")


@pytest.mark.parametrize(("got", "masked", "why"), [
    ([[1.0, 2.0]], [[1.0]], "another shape"), ([[1.0]], [[1.0], [1.0]], "another shape"), ([[1.0], [1.0]], [[1.0]], "another shape"),
    ([[1.0], [1.0, 2.0]], [[1.0], [1.0]], "another shape"), ([[1.0, math.inf]], [[1.0, 2.0]], "not finite where"),
    ([[1.0, 2.0]], [[1.0, math.nan]], "not finite where"), ([[1.0, math.inf]], [[1.0, math.inf]], ""),
    ([[1.0], torch.ones(1, 2, 5)], [[1.0], torch.zeros(1, 3, 5)], ""),  # something for each head
    ([[1.0], torch.ones(1, 2, 5), [2.0]], [[1.0], torch.zeros(1, 3, 5), [1.0]], "by 1 of their largest"),
])  # fmt: skip
def test_outputs_of_another_form(got: list[Any], masked: list[Any], why: str) -> None:
    found = compared(got, masked, [math.inf] * len(masked))[1]
    assert why in found
    assert bool(found) is bool(why)


def test_the_same_changes_are_tried_once() -> None:
    tried: set[tuple[str, ...]] = set()
    assert compared([[1.0]], [[1.0]], [1.0], tried) == (0.0, "")
    assert compared([[1.0]], [[1.0]], [1.0], tried) == (0.0, "tried before")


def test_a_model_that_does_not_run_any_more() -> None:
    def fail(x: Tensor) -> Any:
        raise ValueError("no such head\nand more")

    found = _attempt(Told(fail), Journal(), NONE, [Reference({"x": torch.zeros(1)}, [], [], {})], TOLERANCE, set())
    assert found == (0.0, "the pruned model does not run (ValueError: no such head)")


def ids(length: int) -> dict[str, Tensor]:
    return {"x": torch.ones(1, length)}


def test_the_first_choice_that_a_model_takes_is_used() -> None:
    def up_to_four(x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            raise IndexError("too long")
        return x * 2

    found = references(Told(up_to_four), [[ids(2)], [ids(9), ids(4), ids(3)], [ids(5)], [ids(1)]], {}, [])
    assert [r.batch["x"].shape[1] for r in found] == [2, 4, 1]
    assert all(torch.equal(r.masked[0], 2 * r.batch["x"]) and r.effect == [0.0] and r.seen == {} for r in found)
    with pytest.raises(HeadPruneError, match="does not run on the example: IndexError: too long"):
        references(Told(up_to_four), [[ids(5)], [ids(2)]], {}, [])


def test_answers_of_which_none_is_finite_prove_nothing() -> None:
    for value, fine in ((math.nan, False), (math.inf, False), (1.0, True)):

        def answer(x: Tensor, value: float = value) -> tuple[Tensor, Tensor]:
            return x * value, x * math.nan

        if fine:
            assert len(references(Told(answer), [[ids(2)]], {}, [])) == 1
        else:
            with pytest.raises(HeadPruneError, match="not finite, so a prune cannot be proved"):
                references(Told(answer), [[ids(2)]], {}, [])


def test_indexes_of_derived_inputs_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the example are the user's: a fault there is told as it is."""
    checked: list[int] = []
    seen: list[int] = []

    @contextmanager
    def within(model: nn.Module) -> Iterator[None]:
        checked.append(1)
        yield
        checked.pop()

    def answer(x: Tensor) -> Tensor:
        seen.append(len(checked))
        return x

    monkeypatch.setattr(proof, "within_bounds", within)
    references(Told(answer), [[ids(2)], [ids(3)]], {}, [])
    assert seen == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-8), (torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.2)]
)
def test_layers_outputs_may_be_off_by_ten_tolerances(
    dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(proof, "differing", lambda got, expected, tolerance: asked.append(tolerance) or "")  # type: ignore[func-returns-value]
    model = Told(lambda x: x).to(dtype)
    found = references(model, [[ids(2)]], {}, [])
    _attempt(model, Journal(), NONE, found, proof.tolerance_of(model), set())
    assert asked == [pytest.approx(most)]


def test_the_last_way_that_was_really_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["one", "two", "three", "tried before"])
    undone: list[int] = []
    monkeypatch.setattr(proof, "_attempt", lambda *given: (0.5, next(told)))
    monkeypatch.setattr(Journal, "undo", lambda self: undone.append(1))
    cut = proof.first_exact(nn.Identity(), [NONE] * 4, [], TOLERANCE)
    assert (cut.failure, cut.difference, len(undone)) == ("three", 0.5, 4)
    told = iter(["one", "", "three"])
    cut = proof.first_exact(nn.Identity(), [NONE] * 3, [], TOLERANCE)
    assert (cut.failure, len(undone), next(told)) == ("", 5, "three")


def test_inputs_of_the_proof() -> None:
    model, example = bert()
    given = inputs_for(model, example)
    assert given[0] == [example]
    assert [len(choices) for choices in given[:-1]] == [1] * (len(given) - 1)
    assert all("labels" not in each for choices in given for each in choices)
    prompts = [each for choices in inputs_for(*gpt2()) for each in choices if isinstance(each, proof._Prompt)]
    assert len(prompts) == 1
    assert not any(isinstance(each, proof._Prompt) for choices in given for each in choices)


def test_a_prompt_is_for_models_that_write_text() -> None:
    model, example = gpt2()
    whole = {**example, "decoder_input_ids": torch.ones(1, 1), "labels": torch.ones(1, 1)}
    assert dict(proof._prompt(model, whole) or {}).keys() == {k for k in example if not k.startswith("labels")}
    assert proof._prompt(model, (torch.ones(1, 2),)) is None
    assert proof._prompt(model, {"inputs_embeds": torch.ones(1, 2, 3)}) is None
    assert proof._prompt(bert()[0], example) is None
    assert proof._prompt(nn.Linear(1, 1), example) is None


def test_the_scores_of_three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop without a cache; drawn at random they would differ from call to call."""
    model, example = gpt2()
    model.eval()
    first = example["input_ids"]
    prompt = proof._prompt(model, {"input_ids": first, "attention_mask": torch.ones_like(first)})
    assert prompt is not None
    found = proof._continued(model, prompt)
    given = dict(prompt)
    assert len(found) == 3
    with torch.no_grad():
        for each in found:
            logits = model(**given, use_cache=False).logits[:, -1]
            assert each.dtype == torch.float32
            torch.testing.assert_close(each, logits, rtol=1e-4, atol=1e-5)
            one = torch.ones(len(logits), 1, dtype=torch.long)
            given["input_ids"] = torch.cat([given["input_ids"], logits.argmax(-1, keepdim=True)], 1)
            given["attention_mask"] = torch.cat([given["attention_mask"], one], 1)


def test_a_failing_layer_is_named_and_a_failed_prune_leaves_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = bert()
    first, second, *_ = hp.find_attention(model, example)
    cut = Journal.remove

    def wrong(self: Journal, model: nn.Module, removal: Removal) -> None:
        cut(self, model, removal)
        if any(layer.name == second.name for layer in removal.layers):
            raise RuntimeError("wrong")

    monkeypatch.setattr(Journal, "remove", wrong)
    with pytest.raises(
        hp.PruneError, match=f"The heads of {second.name} cannot be removed exactly: .*RuntimeError: wrong"
    ):
        hp.prune(model, {first.name: [0], second.name: [1]}, example)
    hp.prune(model, {first.name: [0]}, example)
