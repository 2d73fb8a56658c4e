"""The whole path on a device that is not the CPU: a pretended one, that refuses operations which mix devices (`tests.support.otherdevice`).

Numbers are the CPU's there, so every result equals the CPU's to the bit: what differs was made on the wrong device, or not at all.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.memory import free_memory
from headprune.scoring import METHODS, Settings
from tests.support import zoo
from tests.support.commands import run
from tests.support.otherdevice import DEVICE, Pretended, pretended

SETTINGS = Settings(steps=3, permutations=2)
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
        return first[0] if isinstance(first, tuple) else {k: v for k, v in first.items() if k != "labels"}


def _cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="none")


def made(name: str, rows: int = 4) -> Case:
    """A model of a family; its batches have ``rows`` examples, and the last one fewer."""
    model, example = zoo.ZOO[name]()
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
    return Case(model, batches, _cross_entropy if name == "mha" else None)


@pytest.fixture
def there() -> Iterator[Pretended]:
    """A machine with a GPU."""
    with pretended() as found:
        yield found


def on_device(model: nn.Module) -> nn.Module:
    moved = copy.deepcopy(model).to("cuda")
    assert all(p.device == DEVICE for p in moved.parameters())
    return moved


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().cpu() for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def same_tensors(here: nn.Module, there: nn.Module) -> None:
    mine, other = tensors_of(here), tensors_of(there)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name


def searched(case: Case, model: nn.Module) -> list[hp.PruningPlan]:
    *fitted, chosen = case.batches
    return hp.search(model, fitted, keep=["60%", "30%"], choose=[chosen], loss_fn=case.loss_fn)


# -- the device itself -----------------------------------------------------------------------------


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


def test_memory_that_pytorch_holds_unused_counts_as_free(there: Pretended) -> None:
    assert free_memory(DEVICE) == 9 << 30  # 8 by the driver; of 2 that are held, 1 is used


# -- the whole path --------------------------------------------------------------------------------


def whole_path(case: Case, folder: Path) -> None:
    """Search, repair, prune with proof, save, load and evaluate, on both devices."""
    model, moved = copy.deepcopy(case.model), on_device(case.model)
    plans, others = searched(case, model), searched(case, moved)
    assert [p.drop for p in plans] == [p.drop for p in others]
    plan, *fitted = plans[-1], *case.batches[:2]
    mine, other = hp.repair(model, plan, fitted), hp.repair(moved, plan, fitted)
    assert mine == other
    proof = hp.prune(moved, plan, case.example)  # a plan of the copy on the CPU
    assert proof == hp.prune(model, plan, case.example)
    same_tensors(model, moved)
    assert all(p.device == DEVICE for p in moved.parameters())
    change = hp.evaluate(moved, case.batches, loss_fn=case.loss_fn).metrics
    assert change == hp.evaluate(model, case.batches, loss_fn=case.loss_fn).metrics
    if isinstance(model, tf.PreTrainedModel):
        hp.save(moved, folder)
        same_tensors(model, hp.load(folder))
        loaded = hp.load(folder, device="cuda")
        assert all(p.device == DEVICE for p in loaded.parameters())
        same_tensors(model, loaded)


def test_the_whole_path_equals_the_cpus(there: Pretended, tmp_path: Path) -> None:
    whole_path(made("bert"), tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert"])
def test_the_whole_path_equals_the_cpus_in_other_families(name: str, there: Pretended, tmp_path: Path) -> None:
    whole_path(made(name), tmp_path / "saved")


def scores_alike(case: Case, methods: list[str], settings: Settings = SETTINGS) -> None:
    model = on_device(case.model)
    layers = hp.find_attention(model, case.example)
    assert layers == hp.find_attention(case.model, case.example)
    for method in methods:
        mine = hp.score(case.model, case.batches, method, settings=settings, layers=layers, loss_fn=case.loss_fn)
        other = hp.score(model, case.batches, method, settings=settings, layers=layers, loss_fn=case.loss_fn)
        assert torch.equal(mine.flat(), other.flat()), method
        assert other.flat().device.type == "cpu"
        assert mine.details == other.details, method  # replays and all


def test_scores_equal_the_cpus(there: Pretended) -> None:
    scores_alike(made("bert"), ["gradient", "ablation", "entropy", "output-norm", "resample-ablation"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_scores_equal_the_cpus(name: str, there: Pretended) -> None:
    scores_alike(made(name), list(METHODS))
    scores_alike(made(name), ["ablation"], Settings(examples=4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_half_precision_on_a_device(name: str, dtype: torch.dtype, there: Pretended, tmp_path: Path) -> None:
    case = made(name)
    case.model.to(dtype)
    scores_alike(case, ["gradient", "ablation", "output-norm", "mean-ablation"])
    whole_path(case, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_divergence_without_labels(name: str, there: Pretended) -> None:
    case = made(name)
    bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in case.batches]
    model = on_device(case.model)
    for method in ("gradient", "ablation"):
        mine, other = (hp.score(m, bare, method, distil=True) for m in (case.model, model))
        assert torch.equal(mine.flat(), other.flat())
    drops = [[p.drop for p in hp.search(m, bare[:2], keep="50%", choose=bare[2:], distil=True)] for m in (case.model, model)]
    assert drops[0] == drops[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_seen_as_on_the_cpu(name: str, there: Pretended) -> None:
    case = made(name)
    model = on_device(case.model)
    inputs = [case.example]
    mine, other = (hp.attention_weights(m, case.example) for m in (case.model, model))
    assert all(torch.equal(mine[layer].cpu(), other[layer].cpu()) for layer in mine)
    assert hp.profile_heads(case.model, inputs) == hp.profile_heads(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "mha"])
def test_times_and_where_they_go(name: str, there: Pretended) -> None:
    case = made(name)
    dense, pruned = on_device(case.model), on_device(case.model)
    layers = hp.find_attention(dense, case.example)
    plan = {layer.name: list(range(layer.num_heads // 2)) if not layer.groups else list(layer.groups[0]) for layer in layers}
    with hp.mask(dense, plan, case.example):
        hp.evaluate(dense, case.batches, loss_fn=case.loss_fn)
    hp.prune(pruned, plan, case.example)
    row = hp.benchmark({"dense": dense, "pruned": pruned}, case.example, min_runs=2, min_seconds=0.001)
    assert row.speedups["pruned"].ratio > 0


@pytest.mark.slow
def test_the_command_line_on_a_device(there: Pretended, here: Path, bert_folder: Path, data_folder: Path) -> None:
    run("score", bert_folder, "-d", data_folder, "-L", 16, "-b", 8, "--device", "cuda", "-m", "gradient", "-m", "ablation", "-q")
    run("prune", bert_folder, "-d", data_folder, "-L", 16, "-b", 8, "--device", "cuda", "--keep", "50%", "-q")
    (saved,) = (here / "reports").glob("*/pruned-*")
    assert all(p.device.type == "cpu" for p in hp.load(saved).parameters())
