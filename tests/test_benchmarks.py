"""The benchmarks' own code: methods of others against their definitions, the exercise's documents and model, faults of the machine."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import baselines
import exercise
import exercise_translator as translator
import faithfulness
import faults
import peers_layerwise  # noqa: F401 - its methods register themselves
import peers_learned
import pytest
import torch
from baselines import METHODS, Baseline, applied, rearrange, rescaled
from torch import Tensor, nn

import headprune as hp
from tests.support import zoo
from tests.support.cases import without
from tests.support.checks import hooks
from tests.support.problems import small
from tests.support.textbook import D2LMultiHead
from tests.support.zoo import labelled

# -- benchmarks/baselines.py: public methods against their definitions, computed without headprune's gates ------------

HEADS, WIDTH = 3, 8  # of `small`


def made(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], list[hp.AttentionLayer]]:
    model, example = getattr(zoo, name)()
    batches = [labelled(model, example, seed=seed) for seed in (2, 3)]
    return model, batches, hp.find_attention(model, example)


def bert() -> tuple[nn.Module, list[dict[str, Tensor]], list[hp.AttentionLayer]]:
    model, batches = small(HEADS)
    return model, batches, hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})


def rows(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{k: v[i : i + 1] for k, v in b.items()} for b in batches for i in range(len(b["labels"]))]


def joined(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.cat([e[k] for e in examples]) for k in examples[0]}


def slope(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of a batch's mean loss by a factor on every head's output ``[layers, heads]``, as by transformers' old ``head_mask``."""
    blocks = model.bert.encoder.layer
    factors = torch.ones(len(blocks), HEADS, dtype=torch.float64, requires_grad=True)

    def scaled(place: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        factor = factors[[block.attention.output.dense for block in blocks].index(place)]
        return ((args[0].unflatten(-1, (HEADS, -1)) * factor[:, None]).flatten(-2),)

    handles = [block.attention.output.dense.register_forward_pre_hook(scaled) for block in blocks]
    (found,) = torch.autograd.grad(model(**batch).loss, factors)
    for handle in handles:
        handle.remove()
    return found


def order_of(seed: int, count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def dropped(layers, scores: Tensor, keep: int) -> dict[str, list[int]]:
    """The lowest of ``scores`` [layers, heads]."""
    flat = scores.flatten().argsort()[: scores.numel() - keep].tolist()
    drop = {a.name: sorted(i % HEADS for i in flat if i // HEADS == n) for n, a in enumerate(layers)}
    return {name: heads for name, heads in drop.items() if heads}


def by_layer(scores: Tensor) -> Tensor:
    return scores / scores.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("keep", "seed"), [(1, 0), (2, 5), (4, 0), (5, 5)])
def test_rankings_are_those_of_the_definitions(keep, seed, monkeypatch):
    monkeypatch.setattr(baselines, "KWON_BATCH", 4)
    model, batches, layers = bert()
    examples = rows(batches)
    order = [examples[i] for i in order_of(seed, len(examples))]
    each = torch.stack([slope(model, row) for row in order])
    michel = each.abs().mean(0)
    bertology = each.cumsum(0).abs().sum(0)  # its gradient is never zeroed
    kwon = sum(slope(model, joined(order[i : i + 4])).square() for i in range(0, len(order), 4))
    for name, scores in (
        ("Michel", michel), ("reverse", -michel), ("Michel, layer L2", by_layer(michel)), ("run_bertology", by_layer(bertology)), ("Kwon, Fisher", kwon),
    ):  # fmt: skip
        assert METHODS[name](model, batches, layers, keep, seed).drop == dropped(layers, scores, keep), name
    names = ("Kwon, Fisher", "Kwon, Fisher + swap")  # of every layer as many as before the swap
    one, two = (METHODS[name](model, batches, layers, keep, seed).drop.items() for name in names)
    assert {k: len(v) for k, v in one} == {k: len(v) for k, v in two}
    found = [METHODS["random"](model, batches, layers, 3, seed).drop for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


# -- Kwon's rearrangement ----------------------------------------------------------------------


def greedy(vectors: Tensor, count: int) -> list[int]:
    """As the paper tells it, with gradient vectors ``[units, batches]``: the cost of a set is its sum's squared length."""

    def length(units: list[int]) -> float:
        return vectors[units].sum(0).square().sum().item()

    order = vectors.square().sum(1).argsort().tolist()
    gone = order[:count]
    for unit in order[count:]:
        gone = min(([u for u in [*gone, unit] if u != left] for left in [*gone, unit]), key=length)
    return sorted(gone)


@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_rearrangement_is_greedy_and_never_costs_more(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(12, 1 + seed, generator=generator, dtype=torch.float64)
    vectors *= torch.rand(12, 1, generator=generator, dtype=torch.float64)

    def cost(gone: list[int]) -> float:
        return vectors[gone].sum(0).square().sum().item()

    for count in range(13):
        found = rearrange(vectors @ vectors.T, count)
        assert len(set(found)) == count
        assert cost(found) <= cost(vectors.square().sum(1).argsort().tolist()[:count]) + 1e-9
        assert cost(found) == pytest.approx(cost(greedy(vectors, count)), abs=1e-9)


# -- Kwon's rescaling --------------------------------------------------------------------------


def inside(model: nn.Module, batch: dict[str, Tensor], block: int) -> dict[str, Tensor]:
    """What goes into a block's attention (``residual``), W_O (``heads``), the last linear (``neurons``), both norms (``a``, ``b``)."""
    layer = model.bert.encoder.layer[block]
    seen = {}
    places = {
        "residual": layer.attention.self.query, "heads": layer.attention.output.dense, "a": layer.attention.output.LayerNorm,
        "neurons": layer.output.dense, "b": layer.output.LayerNorm, "middle": layer.intermediate.dense,
    }  # fmt: skip
    handles = [m.register_forward_pre_hook(lambda _, args, k=k: seen.update({k: args[0]})) for k, m in places.items()]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def test_factors_solve_the_stated_least_squares(monkeypatch):
    """Teacher and student as copies with zeroed weights; every system written out, one row a token and output."""
    monkeypatch.setattr(baselines, "damped", lambda gram, moment: torch.linalg.solve(gram, moment))
    monkeypatch.setattr(baselines, "FARTHEST", float("inf"))
    model, batches, layers = bert()
    names = [a.name for a in layers]
    teacher, student = {names[0]: [1]}, {names[0]: [0, 1], names[1]: [2]}
    heads, neurons = rescaled(model, batches, layers, teacher, student)
    assert list(heads) == names[1:]
    theirs, mine = without(model, layers, teacher), without(model, layers, student)
    for i, block in enumerate(mine.bert.encoder.layer):
        if i:
            big, goal = [], []
            for batch in batches:
                a, b, real = inside(theirs, batch, i), inside(mine, batch, i), batch["attention_mask"].bool()
                dense = block.attention.output.dense
                read, columns = b["heads"][real].split(WIDTH, 1), dense.weight.split(WIDTH, 1)
                parts = [read[h] @ columns[h].T for h in (0, 1)]
                big.append(torch.stack([*parts, torch.ones_like(parts[0])], dim=-1).flatten(0, 1))
                goal.append((a["a"] - dense.bias - b["residual"])[real].flatten())
            fitted = torch.linalg.lstsq(torch.cat(big), torch.cat(goal)[:, None]).solution[:, 0]
            torch.testing.assert_close(heads[names[i]][:2].double(), fitted[:2], atol=1e-5, rtol=1e-4)
            with torch.no_grad():
                for h in (0, 1):
                    block.attention.output.dense.weight[:, WIDTH * h : WIDTH * h + WIDTH] *= heads[names[i]][h]
        dense, big, goal = block.output.dense, [], []
        for batch in batches:
            a, b, real = inside(theirs, batch, i), inside(mine, batch, i), batch["attention_mask"].bool()
            if i == 1:  # the classifier reads the first token alone
                real = torch.zeros_like(real)
                real[:, 0] = True
            big.append((b["neurons"][real][:, None] * dense.weight).flatten(0, 1))
            goal.append((a["b"] - dense.bias - b["middle"])[real].flatten())
        fitted = torch.linalg.lstsq(torch.cat(big), torch.cat(goal)[:, None]).solution[:, 0]
        factor = neurons[f"bert.encoder.layer.{i}.output.dense"].double()
        torch.testing.assert_close(factor, fitted, atol=1e-4, rtol=1e-3)
        dense.weight.data *= factor
    with applied(model, layers, Baseline(student, heads, neurons)), torch.no_grad():
        torch.testing.assert_close(model(**batches[0]).logits, mine(**batches[0]).logits, atol=1e-6, rtol=1e-6)
    assert hooks(model) == 0


# -- every method ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_to_the_budget_by_whole_groups(name, method, monkeypatch):
    monkeypatch.setattr(peers_learned, "STEPS", 8)
    model, batches, layers = made(name)
    total = sum(a.num_heads for a in layers)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for keep in (2, total // 4 * 2, total):
        found = METHODS[method](model, batches, layers, keep, 0)
        gone = sum(map(len, found.drop.values()))
        assert total - gone == keep
        for layer in layers:
            lost = set(found.drop.get(layer.name, ()))
            assert all(lost.issuperset(unit) or lost.isdisjoint(unit) for unit in layer.units)
        with applied(model, layers, found), torch.no_grad():
            assert model(**batches[0]).loss.isfinite()
    assert hooks(model) == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_group_is_scored_by_one_gate_for_all_of_its_heads():
    """By the central difference of the loss, the group's columns of W_O made a little larger and smaller."""
    model, example = zoo.llama()
    model = model.double()
    batch = {k: v[:1] for k, v in labelled(model, example).items()}
    layers = hp.find_attention(model, example)
    found = baselines.unit_gradients(model, [batch], layers)
    assert found.shape == (1, sum(len(layer.units) for layer in layers))
    step, expected = 2e-3, []  # its norms work in float32, whatever the weights are
    for layer in layers:
        weight = model.get_submodule(layer.output_projection.module).weight
        for unit in layer.units:
            columns = [c for head in unit for c in layer.output_projection.features[head]]
            losses = []
            with torch.no_grad():
                before = weight.clone()
                for sign in (1, -1):
                    weight[:, columns] = before[:, columns] * (1 + sign * step)
                    logits = model(input_ids=batch["input_ids"]).logits[0, :-1]  # transformers' loss rounds to float32
                    losses.append(torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:]).item())
                weight.copy_(before)
            expected.append((losses[0] - losses[1]) / (2 * step))
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=1e-3)


# -- docs/exercise.md and docs/exercise.zh.md: the same figures in both, and all of them from docs/exercise/figures.json ---

FIGURES = json.loads(exercise.FIGURES.read_text(encoding="utf-8"))
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    return {language: path.read_text(encoding="utf-8") for language, path in exercise.DOCUMENTS.items()}


def numbers_in(text: str) -> Counter[str]:
    """The figures that a reader sees: not those of code, addresses and the names of files."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", " ", text, flags=re.S)
    return Counter(NUMBER.findall(text))


def test_both_languages_have_the_figures_of_the_file(documents):
    assert exercise.rendered(FIGURES) == documents
    english, chinese = (re.split(r"^#+ ", documents[x], flags=re.M) for x in ("en", "zh"))
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


def test_numbers_in_words_and_no_number_has_the_name_of_another():
    assert " ".join(translator.english(9271)) == "nine thousand two hundred seventy one"
    assert " ".join(translator.french(9271)) == "neuf mille deux cent soixante et onze"
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


# -- benchmarks/faithfulness.py: MIB's areas, and the losses that they are of -----------------------------------------


def test_areas_are_the_trapezoids_of_a_plain_loop():
    counts, losses = [0, 1, 3, 4], [3.0, 0.5, 2.0, 1.0]  # with one head it is better than with all
    faithful = [(-loss - -3.0) / (-1.0 - -3.0) for loss in losses]
    steps = [(counts[i + 1] - counts[i]) / 4 for i in range(3)]
    cpr = sum(step * (faithful[i] + faithful[i + 1]) / 2 for i, step in enumerate(steps))
    cmd = sum(step * (abs(1 - faithful[i]) + abs(1 - faithful[i + 1])) / 2 for i, step in enumerate(steps))
    assert faithfulness.areas(counts, losses) == pytest.approx((cpr, cmd))


def test_the_loss_of_few_heads_is_that_without_the_others():
    model, batches = small()
    layers = hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})
    dense = hp.evaluate(model, batches).metrics["loss"]
    with hp.mask(model, {layers[0].name: [1], layers[1].name: [0, 2]}, layers=layers):
        masked = hp.evaluate(model, batches).metrics["loss"]
    assert faithfulness.loss_with(model, layers, [0, 2, 4], batches, {}) == pytest.approx(masked, abs=1e-12)
    fill = faithfulness.mean_fill(model, layers, batches)
    for head, added in enumerate(hp.score(model, batches, "mean-ablation").flat().tolist()):
        others = [i for i in range(6) if i != head]
        without = faithfulness.loss_with(model, layers, others, batches, fill)
        assert without - dense == pytest.approx(added, abs=1e-10)


# -- faults of the machine, a few of each: what benchmarks/faults.py tries, as docs/scale.md has it in full -------------

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_few_faults_of_each_kind(tmp_path: Path) -> None:
    """With other draws each time; a trial that goes wrong names itself, and the seed makes it again."""
    seed = random.SystemRandom().randrange(1 << 30)
    namespace = faults.own_namespace()
    command = [sys.executable, "benchmarks/faults.py", "--quick", "--seed", str(seed), "--work", str(tmp_path)]
    mounts = {faults.MOUNTS: "1"} if namespace else {}
    here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **mounts}
    done = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True, env=here, check=False)
    assert done.returncode == 0, (seed, [line for line in done.stderr.splitlines() if "WRONG" in line] or done.stderr)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["trial"].split()[0] for row in rows} >= {"moment", "rename"}
    assert any("bits" in row for row in rows)
    assert all(row["fine"] for row in rows)
