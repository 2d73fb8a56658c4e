"""docs/exercise.md and docs/exercise.zh.md: the same figures in both, and all of them from docs/exercise/figures.json."""

from __future__ import annotations

import json
import re
from collections import Counter

import exercise
import exercise_translator as translator
import pytest
import torch

import headprune as hp
from tests.support.textbook import D2LMultiHead

FIGURES = json.loads(exercise.FIGURES.read_text(encoding="utf-8"))
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    return {language: path.read_text(encoding="utf-8") for language, path in exercise.DOCUMENTS.items()}


def numbers_in(text: str) -> Counter[str]:
    """The figures that a reader sees: not those of code, addresses and the names of files."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", " ", text, flags=re.S)
    return Counter(NUMBER.findall(text))


def sections_of(text: str) -> list[str]:
    return re.split(r"^#+ ", text, flags=re.M)


def test_both_languages_have_the_figures_of_the_file(documents):
    assert exercise.rendered(FIGURES) == documents
    english, chinese = (sections_of(documents[language]) for language in ("en", "zh"))
    assert len(english) == len(chinese)
    for ours, theirs in zip(english, chinese, strict=True):
        assert numbers_in(ours) == numbers_in(theirs), ours.splitlines()[0]
    assert sum(numbers_in(documents["en"]).values()) > 200
    changed = json.loads(json.dumps(FIGURES))
    changed["bert"]["dense"]["accuracy"] = 0.12345
    again = exercise.rendered(changed)
    assert all(again[language] != text and "12.3 %" in again[language] for language, text in documents.items())


def test_claims_hold_and_can_fail():
    """What the prose says without a figure."""
    assert all(exercise.claims(FIGURES).values())
    upside_down = json.loads(json.dumps(FIGURES))
    for model in ("d2l", "bert"):
        for row in upside_down[model]["methods"]:
            row["rho"] = -row["rho"]
            row["masked"]["accuracy"] = 1 - row["masked"]["accuracy"]
    assert not all(exercise.claims(upside_down).values())


# -- the model ---------------------------------------------------------------------------------------


WORDS = """1: one: un
17: seventeen: dix sept
21: twenty one: vingt et un
71: seventy one: soixante et onze
80: eighty: quatre vingt
81: eighty one: quatre vingt un
91: ninety one: quatre vingt onze
1161: one thousand one hundred sixty one: mille cent soixante et un
9277: nine thousand two hundred seventy seven: neuf mille deux cent soixante dix sept"""


def test_numbers_in_words_and_no_number_has_the_name_of_another():
    for line in WORDS.splitlines():
        number, *words = line.split(": ")
        assert [" ".join(say(int(number))) for say in (translator.english, translator.french)] == words
    every = range(1, translator.LARGEST + 1)
    for say in (translator.english, translator.french):
        assert len({tuple(say(n)) for n in every}) == len(every)
    parts = list(translator.parts().values())
    assert sorted(n for part in parts for n in part) == list(every)


@pytest.mark.parametrize("lens", [None, torch.tensor([3, 6]), torch.tensor([[1, 2, 3, 4, 5, 6], [2, 2, 2, 6, 6, 6]])])
def test_attention_is_that_of_the_textbook(lens):
    torch.manual_seed(0)
    theirs, ours = D2LMultiHead().eval(), translator.MultiHeadAttention(32, 4, dropout=0.1).eval()
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    torch.testing.assert_close(ours(x, y, y, lens), theirs(x, y, y, lens))


def test_the_translator_is_pruned_exactly_and_sees_no_word_ahead():
    torch.manual_seed(0)
    model = translator.Translator(len(translator.WORDS)).eval()
    batch = translator.example(exercise.NUMBER)
    example = exercise.without_labels(batch)
    layers = hp.find_attention(model, example)
    assert [layer.kind for layer in layers] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    shorter = {**example, "target": example["target"][:, :3]}
    torch.testing.assert_close(model(**example)["logits"][:, :3], model(**shorter)["logits"])
    weights = hp.attention_weights(model, example)
    kept = [block.attention.attention.attention_weights for block in model.encoder]  # as the book shows them
    for layer, book in zip(layers, kept, strict=False):
        torch.testing.assert_close(weights[layer.name][0], book)
    proof = hp.prune(model, {layer.name: [0, 2] for layer in layers}, example)
    assert proof.difference <= proof.tolerance


def test_a_number_counts_as_right_if_all_its_words_are():
    torch.manual_seed(0)
    model = translator.Translator(len(translator.WORDS)).eval()
    batches = translator.batches([3, 20, 7394])
    measured = exercise.whole_numbers(hp.evaluate(model, batches))
    for i, batch in enumerate(batches):
        right = bool((model(**exercise.without_labels(batch))["logits"].argmax(-1) == batch["labels"]).all())
        assert measured.correct[i] == right
