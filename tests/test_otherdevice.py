"""The whole path on a device that is not the CPU: a pretended one, that refuses operations which mix devices (`tests.support.otherdevice`).

Numbers are the CPU's there, so every result equals the CPU's to the bit: what differs was made on the wrong device, or not at all.
With ``HEADPRUNE_TEST_DEVICE=cuda`` the same tests run on a real GPU, and results equal the CPU's up to rounding.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.fingerprint import fingerprint
from tests.support import problems, zoo
from tests.support.commands import run
from tests.support.otherdevice import DEVICE, Pretended, pretended

FAMILIES = ("bert", "gpt2", "llama", "t5", "vit", "mha")


@dataclasses.dataclass
class Case:
    """A tiny model, batches to fit to and to choose by, and the loss where they hold none."""

    model: nn.Module
    batches: list[Any]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None

    @property
    def example(self) -> Any:
        """A batch as the model takes it."""
        first = self.batches[0]
        if isinstance(first, tuple):
            return first[0]
        inputs = {k: v for k, v in first.items() if k != "labels"}
        if isinstance(self.model, tf.T5ForConditionalGeneration):
            inputs["decoder_input_ids"] = first["input_ids"][:, :5]
        return inputs


def made(name: str, rows: int = 4) -> Case:
    """A model of a family; its batches have ``rows`` examples, and the last one fewer."""
    model, _ = zoo.ZOO[name]()
    generator = torch.Generator().manual_seed(7)
    batches = []
    for i, count in enumerate((rows, rows, 2)):
        if name == "mha":
            x = torch.randn(count, 6, 32, generator=generator)
            padding = torch.zeros(count, 6, dtype=torch.bool)
            padding[0, 4:] = True
            batches.append(((x, padding), torch.randint(0, 3, (count,), generator=generator)))
        elif name == "vit":
            images = {"pixel_values": torch.randn(count, 1, 8, 8, generator=generator)}
            batches.append(zoo.labelled(model, images, seed=i))
        else:
            batches.append(zoo.labelled(model, zoo.text(count, 7, seed=i), seed=i))
    return Case(model, batches, problems.cross_entropy if name == "mha" else None)


REAL = os.environ.get("HEADPRUNE_TEST_DEVICE") == "cuda"
PLACE = torch.device("cuda:0") if REAL else DEVICE
only_pretended = pytest.mark.skipif(REAL, reason="this is about the pretended device")


@contextmanager
def a_device() -> Iterator[Pretended | None]:
    """A machine with a GPU. What the CPU gives is computed outside: the pretended device looks at every operation."""
    with nullcontext() if REAL else pretended() as found:
        yield found


@pytest.fixture
def there() -> Iterator[Pretended | None]:
    with a_device() as found:
        yield found


def alike(mine: Any, other: Any, dtype: torch.dtype = torch.float32) -> None:
    """Equal to the bit where the device is pretended; else up to rounding, of the largest value."""
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            alike(mine[key], other[key], dtype)
        return
    mine, other = (torch.as_tensor(x).detach().cpu().double() for x in (mine, other))
    most = {torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype] if REAL else 0.0
    assert ((mine - other).abs() <= most * mine.abs().max()).all() or torch.equal(mine, other)


def all_there(model: nn.Module) -> bool:
    return {p.device for p in model.parameters()} == {PLACE}


def on_device(model: nn.Module) -> nn.Module:
    moved = copy.deepcopy(model).to("cuda")
    assert all_there(moved)
    return moved


def same_tensors(here: nn.Module, there: nn.Module) -> None:
    mine, other = (dict(model.state_dict()) for model in (here, there))
    torch.testing.assert_close(mine, other, rtol=0, atol=0, check_device=False)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def searched(case: Case, model: nn.Module) -> hp.PruningPlan:
    *fitted, chosen = case.batches
    return hp.search(model, fitted, keep="40%", choose=[chosen], loss_fn=case.loss_fn)[0]


# -- the device itself -----------------------------------------------------------------------------


@only_pretended
def test_the_pretended_device_refuses_what_a_gpu_refuses(there: Pretended) -> None:
    x, here = torch.ones(2, 3, device="cuda"), torch.ones(2, 3)
    mixed: list[Callable[[], Any]] = [
        lambda: x + here, lambda: here.add_(x[0, 0]), lambda: x @ here.T, lambda: torch.cat([x, here]),
        lambda: here[torch.zeros(1, dtype=torch.long, device="cuda")], lambda: torch.stack([x[0, 0], here[0, 0]]),
        lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        lambda: torch.where(x > 0, x, here),
    ]  # fmt: skip
    for operation in mixed:
        with pytest.raises(RuntimeError, match=r"same device|generator"):
            operation()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert (x * torch.tensor(2.0)).device == x[torch.tensor([0])].device == DEVICE
    assert here.to(x).device == here.new_tensor([1.0], device="cuda").device == DEVICE
    assert x.cpu().device.type == x.to("cpu").device.type == "cpu"


# -- how numbers are multiplied --------------------------------------------------------------------


@pytest.mark.parametrize("before", [("highest", True), ("high", True), ("tf32", "ieee")])
def test_no_tf32_where_answers_are_compared(before: tuple[str, Any]) -> None:
    """A pruned model would not equal the masked one to 1e-4, nor would replayed losses.

    The settings of PyTorch 2.9 and the older ones may not be mixed.
    """
    case, newer = made("bert"), before[0] == "tf32"
    matmul, conv, found = torch.backends.cuda.matmul, torch.backends.cudnn.conv, set[Any]()
    layers = hp.find_attention(case.model, case.example)
    plan = {layers[0].name: [0]}

    def precisions() -> tuple[str, Any]:
        if newer:
            return matmul.fp32_precision, conv.fp32_precision
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def ask(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() or not scoring:  # what a model's own loss is like is asked before
            found.add(precisions())

    case.model.get_submodule("bert.encoder.layer.0").register_forward_pre_hook(ask)
    defaults = matmul.fp32_precision, conv.fp32_precision
    try:
        if newer:
            matmul.fp32_precision, conv.fp32_precision = before
        else:
            torch.set_float32_matmul_precision(before[0])
        scoring = True
        hp.score(case.model, case.batches, "gradient", layers=layers)
        scoring = False
        hp.repair(case.model, plan, case.batches, layers=layers)
        hp.prune(case.model, plan, case.example, layers=layers)
        assert found == {("ieee", "ieee") if newer else ("highest", False)}
        assert precisions() == before
    finally:
        matmul.fp32_precision, conv.fp32_precision = defaults
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


# -- the whole path --------------------------------------------------------------------------------


def whole_path(case: Case, folder: Path, plan: hp.PruningPlan | dict[str, list[int]] | None = None) -> None:
    """Search (or a plan that is given), repair, prune with proof, save, load and evaluate, on both devices."""

    def work(model: nn.Module, plan: Any) -> tuple[Any, ...]:
        done, proof = hp.repair(model, plan, case.batches[:2]), hp.prune(model, plan, case.example)
        return done, proof, hp.evaluate(model, case.batches, loss_fn=case.loss_fn).metrics

    model, known = copy.deepcopy(case.model), plan or searched(case, case.model)
    mine = work(model, known)
    with a_device():
        moved, dtype = on_device(case.model), dtype_of(case.model)
        if plan is None:
            found = searched(case, moved)
            assert REAL or found.drop == known.drop  # rounding may rank two heads otherwise
        other = work(moved, known)
        assert all_there(moved)
        if REAL:
            assert other[1].difference <= other[1].tolerance
        else:
            assert mine == other
            same_tensors(model, moved)
        if isinstance(model, tf.PreTrainedModel):
            hp.save(moved, folder)
            same_tensors(moved, hp.load(folder))
            loaded = hp.load(folder, device="cuda")
            assert all_there(loaded)
            alike(*(hp.evaluate(each, case.batches).metrics["loss"] for each in (moved, loaded)), dtype)


def small() -> Case:
    """A BERT of one layer."""
    model, batches = problems.small(heads=4, layers=1)
    return Case(model.float(), batches)


def test_a_layer_is_repaired_pruned_and_saved_as_on_the_cpu(tmp_path: Path) -> None:
    whole_path(small(), tmp_path / "saved", {"bert.encoder.layer.0.attention.self": [0, 2]})


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_whole_path_equals_the_cpus(name: str, tmp_path: Path) -> None:
    whole_path(made(name), tmp_path / "saved")


def scores_alike(case: Case, methods: list[str]) -> None:
    layers = hp.find_attention(case.model, case.example)

    def work(model: nn.Module) -> list[hp.HeadScores]:
        return [hp.score(model, case.batches, method, layers=layers, loss_fn=case.loss_fn) for method in methods]

    known = work(case.model)
    with a_device():
        model = on_device(case.model)
        assert layers == hp.find_attention(model, case.example)
        for mine, other in zip(known, work(model), strict=True):
            assert other.flat().device.type == "cpu"
            alike(mine.flat(), other.flat(), dtype_of(model))
            assert REAL or mine.details == other.details, other.method  # replays and all


def test_scores_equal_the_cpus() -> None:
    scores_alike(small(), ["ablation", "resample-ablation", "entropy"])


def test_large_weights_have_one_fingerprint_everywhere() -> None:
    """A GPU's weights are hashed in parts of 64 MiB."""
    model = nn.Linear(4200, 4200, bias=False)
    with a_device():
        assert fingerprint(copy.deepcopy(model).to(PLACE)) == fingerprint(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_scores_equal_the_cpus(name: str) -> None:
    # The gates that these train get their slopes on the CPU: within a backward pass the pretended device can't tell that from a cast.
    every = [method["name"] for method in json.loads(run("methods", "--json").stdout)["methods"]]
    others = [problems.quick(each, "steps=3", "permutations=2") for each in every if each not in ("l0", "dsp")]
    scores_alike(made(name), [*others, "ablation:examples=4"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("bert", torch.float16), ("llama", torch.bfloat16), ("bert", torch.float64)]
)
def test_another_precision_on_a_device(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = made(name)
    case.model.to(dtype)
    scores_alike(case, ["gradient", "ablation", "output-norm", "mean-ablation"])
    whole_path(case, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_else_there_is_to_do_on_a_device(name: str) -> None:
    """Heads are seen as on the CPU, answers are compared without labels, models are masked and timed."""
    case = made(name)
    bare = problems.unlabelled(case.batches) if name in ("bert", "llama") else []

    def work(model: nn.Module) -> tuple[Any, ...]:
        scores = [hp.score(model, bare, method, distil=True).flat() for method in ("gradient", "ablation") if bare]
        plans = hp.search(model, bare[:2], keep="50%", choose=bare[2:], distil=True) if name == "llama" else []
        profiles = str(hp.profile_heads(model, [case.example]))
        return hp.attention_weights(model, case.example), scores, [plan.drop for plan in plans], profiles

    weights, scores, plans, profiles = work(case.model)
    with a_device():
        model = on_device(case.model)
        found = work(model)
        alike(weights, found[0])
        for pair in zip(scores, found[1], strict=True):
            alike(*pair)
        assert REAL or (plans, profiles) == found[2:]
        pruned, layers = copy.deepcopy(model), hp.find_attention(model, case.example)
        plan = {layer.name: list(layer.units[0]) for layer in layers}
        with hp.mask(model, plan, case.example):
            hp.evaluate(model, case.batches, loss_fn=case.loss_fn)
        hp.prune(pruned, plan, case.example)
        row = hp.benchmark({"dense": model, "pruned": pruned}, case.example, min_runs=2, min_seconds=0.001)
        assert row.speedups["pruned"].ratio > 0


def crossings(there: Pretended, heads: int, tokens: int, batches: int, work: str) -> int:
    """How often some work takes numbers from the device to the CPU."""
    config = tf.BertConfig(**zoo.sizes("sdpa", hidden_size=8 * heads, num_attention_heads=heads, num_hidden_layers=1))
    model = zoo.randomise(tf.BertForSequenceClassification(config)).to("cuda")
    made = [zoo.labelled(model, zoo.text(4, tokens, seed=i), seed=i) for i in range(batches)]
    layers = hp.find_attention(model, problems.unlabelled(made)[0])
    there.crossings.clear()
    if work == "repair":
        hp.repair(model, {layers[0].name: [0]}, made, layers=layers)
    elif work == "search":
        choose = [zoo.labelled(model, zoo.text(4, tokens, seed=99))]
        hp.search(model, made, keep="50%", choose=choose, strategy="compensated", layers=layers)
    else:
        hp.score(model, made, work, layers=layers)
    return there.crossings.total()


@only_pretended
@pytest.mark.parametrize(
    "work",
    ["entropy", *(pytest.param(w, marks=pytest.mark.slow) for w in ("gradient", "output-norm", "search", "repair"))],
)
def test_heads_and_tokens_are_not_copied_one_by_one(work: str, there: Pretended) -> None:
    """Every copy to the CPU waits for the GPU. A batch may take some, whatever its size."""
    base = crossings(there, 4, 7, 2, work)
    # A few rounds of a repair or a search may be tried more or less.
    spare = 0.1 if work in ("repair", "search") else 0.0
    assert crossings(there, 8, 14, 2, work) <= base * (1 + spare)
    if work not in ("repair", "search"):
        assert (crossings(there, 4, 7, 4, work) - base) / 2 < 30  # the model itself asks about its mask


@pytest.mark.slow
def test_the_command_line_on_a_device(there: Pretended, here: Path, bert_folder: Path, data_folder: Path) -> None:
    common = [bert_folder, "-d", data_folder, "-L", 16, "-b", 8, "--device", "cuda", "-q"]
    run("score", *common, "-m", "gradient", "-m", "ablation")
    run("prune", *common, "--keep", "50%")
    (saved,) = (here / "reports").glob("*/pruned-*")
    assert all(p.device.type == "cpu" for p in hp.load(saved).parameters())
