"""Models larger than a device: dispatched by Accelerate, weights on the CPU or on disk; statistics block by block; long texts; memory that runs out."""

import copy
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from accelerate import dispatch_model
from accelerate.utils import OffloadedWeightsLoader
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headprune as hp
from headprune import running
from headprune.app.sources import placed
from headprune.batches import free_memory, halving
from headprune.checkpoint import load_call
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.inputs import without_labels
from headprune.offload import Offloaded, copied, is_offloaded, put
from headprune.repairing import calibrate
from headprune.running import attributes_kept, blocks_of, restorer
from headprune.scoring import gradient
from headprune.seeing import maps
from headprune.surgery import evidence, proof
from tests.support import zoo
from tests.support.commands import run, stderr_of
from tests.support.otherdevice import DEVICE, pretended


def made(name: str, batches: int = 3) -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Tensor]]:
    """A tiny model, batches with labels, and an example."""
    model = zoo.ZOO[name]()[0].eval()
    given = [zoo.labelled(model, zoo.text(4, 7, seed=i), seed=i) for i in range(batches)]
    return model, given, without_labels(model, given[0])


def on_disk(model: nn.Module, folder: Path, **others: str) -> nn.Module:
    """A copy with all of its weights on disk, but for modules that are elsewhere."""
    places = {name: "disk" for name, _ in model.named_children()} | others
    found: nn.Module = dispatch_model(copy.deepcopy(model), places, main_device="cpu", offload_dir=folder)
    assert others or all(p.is_meta for p in found.parameters())
    return found


def same_weights(mine: nn.Module, other: nn.Module) -> None:
    ours, theirs = Offloaded(mine), Offloaded(other)
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name].cpu(), theirs[name].cpu()), name
    assert fingerprint(mine) == fingerprint(other)


def whole_path(
    mine: nn.Module, other: nn.Module, batches: list[Any], example: Any, folder: Path,
    methods: tuple[str, ...] = ("gradient",), drop: dict[str, list[int]] | None = None,
) -> None:  # fmt: skip
    """Trace, score, search, repair, prune, evaluate, save and load: to the bit as the model that is in memory."""
    layers = hp.find_attention(mine, example)
    assert layers == hp.find_attention(other, example)
    same_weights(mine, other)
    for method in methods:
        a, b = (hp.score(m, batches, method, layers=layers) for m in (mine, other))
        assert torch.equal(a.flat(), b.flat())
        assert (a.model, a.details) == (b.model, b.details)
    assert all(p.requires_grad for p in other.parameters())
    fitted, choose = batches[:-1], batches[-1:]
    if drop is None:
        plans = [hp.search(m, fitted, keep="50%", choose=choose, layers=layers)[0].drop for m in (mine, other)]
        assert plans[0] == plans[1]
        drop = dict(plans[0])
    assert hp.repair(mine, drop, fitted, layers=layers) == hp.repair(other, drop, fitted, layers=layers)
    same_weights(mine, other)
    assert hp.prune(mine, drop, example, layers=layers) == hp.prune(other, drop, example, layers=layers)
    same_weights(mine, other)
    assert hp.evaluate(mine, batches).metrics == hp.evaluate(other, batches).metrics
    hp.save(other, folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    loaded = hp.load(folder)
    same_weights(mine, loaded)
    assert hp.evaluate(loaded, batches).metrics == hp.evaluate(mine, batches).metrics


# -- to the bit ------------------------------------------------------------------------------------


def test_a_model_on_disk_does_all_that_one_in_memory_does(tmp_path: Path) -> None:
    model, batches, example = made("llama")
    spread = on_disk(model, tmp_path / "disk")
    before = {p.name: p.read_bytes() for p in (tmp_path / "disk").glob("*.dat")}
    layers = hp.find_attention(model, example)
    groups = layers[0].groups[0] if layers[0].groups else [0]
    drop = {layers[0].name: list(groups), layers[2].name: list(range(layers[2].num_heads))}
    whole_path(model, spread, batches, example, tmp_path / "saved", ("gradient", "weight-norm"), drop)
    assert is_offloaded(spread)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "disk").glob("*.dat")}  # the user's files
    places = {"model": "disk", "lm_head": "cpu"}
    again = hp.load(tmp_path / "saved", device_map=places, offload_folder=tmp_path)
    assert sum(p.is_meta for p in again.parameters()) > 20
    same_weights(model, again)
    assert hp.evaluate(again, batches).metrics == hp.evaluate(model, batches).metrics


def test_from_pretrained_with_a_device_map(tmp_path: Path) -> None:
    """Weights are then read from the checkpoint itself, tied ones too."""
    config = tf.GPT2Config(**zoo.sizes("sdpa", num_hidden_layers=2))
    model = zoo.randomise(tf.GPT2LMHeadModel(config)).eval()
    model.save_pretrained(tmp_path / "dense")
    parts = {"wte": "disk", "wpe": "cpu", "h.0": "disk", "h.1": "cpu", "ln_f": "cpu"}
    places = {"lm_head": "disk", **{f"transformer.{name}": place for name, place in parts.items()}}
    spread = tf.GPT2LMHeadModel.from_pretrained(tmp_path / "dense", device_map=places, offload_folder=tmp_path)
    assert is_offloaded(spread)
    batches = [zoo.labelled(model, zoo.text(3, 6, seed=i), seed=i) for i in range(2)]
    drop = {f"transformer.h.{i}.attn": [0, 3] for i in range(2)}
    whole_path(model, spread, batches, without_labels(model, batches[0]), tmp_path / "saved", ("output-norm",), drop)
    again = hp.load(tmp_path / "saved", device_map=places)
    same_weights(model, again)
    assert hp.evaluate(again, batches).metrics == hp.evaluate(model, batches).metrics
    with pytest.raises(HeadPruneError, match="own weights are read from"):
        hp.save(again, tmp_path / "saved", overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["the CPU's memory", "two devices"])
def test_a_pretended_gpu_and_the_cpu(kind: str, tmp_path: Path) -> None:
    """Every second block is kept in the CPU's memory and computed on the device; or the blocks are computed on two devices."""
    model, batches, example = made("llama")
    names = [*blocks_of(model), "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: ("cpu", "cuda:0")[i % 2] for i, name in enumerate(names)}
    with pretended():
        main = {"main_device": "cpu"} if kind == "two devices" else {}
        spread = dispatch_model(copy.deepcopy(model), places, **main)
        assert is_offloaded(spread) == (kind != "two devices")
        layers = hp.find_attention(model, example)
        whole_path(
            model, spread, batches, example, tmp_path / "saved",
            # Within a backward pass the pretended device can't tell where a gate's slope belongs.
            ("entropy", "mean-ablation") if kind == "two devices" else ("gradient", "ablation"),
            {layers[1].name: list(layers[1].groups[0] if layers[1].groups else [0])},
        )  # fmt: skip


# -- what stays as it was --------------------------------------------------------------------------


def test_a_prune_that_fails_leaves_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, example = made("bert", 1)
    spread = on_disk(model, tmp_path)
    before = fingerprint(spread)
    monkeypatch.setattr(proof, "differing", lambda *_: "this is a test")
    with pytest.raises(HeadPruneError, match="cannot be removed exactly"):
        hp.prune(spread, {"bert.encoder.layer.0.attention.self": [0]}, example)
    assert fingerprint(spread) == before == fingerprint(model)
    assert not list(tmp_path.glob("headprune-*"))  # files of its own are gone


def test_a_copy_shares_weights_and_can_be_cut(tmp_path: Path) -> None:
    model, batches, example = made("bert", 1)
    places = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": "disk"}
    places |= {"bert.encoder.layer.2": "disk", "bert.pooler": "cpu", "classifier": "cpu"}
    spread = dispatch_model(copy.deepcopy(model), places, main_device="cpu", offload_dir=tmp_path)
    other = copied(spread, ["bert.encoder.layer.0.attention.output.dense"])
    shared, own = (f"bert.encoder.layer.0.attention.{end}.weight" for end in ("self.query", "output.dense"))
    assert spread.get_parameter(shared).data_ptr() == other.get_parameter(shared).data_ptr()
    assert spread.get_parameter(own).data_ptr() != other.get_parameter(own).data_ptr()
    hp.prune(other, {f"bert.encoder.layer.{i}.attention.self": [1] for i in range(2)}, example)
    same_weights(model, spread)
    assert hp.evaluate(spread, batches).metrics == hp.evaluate(model, batches).metrics
    hp.prune(model, {f"bert.encoder.layer.{i}.attention.self": [1] for i in range(2)}, example)
    same_weights(model, other)


def test_a_model_that_ran_in_inference_mode(tmp_path: Path) -> None:
    """Its placeholders were made there, too, and could not be differentiated."""
    model, batches, example = made("bert", 1)
    spread = on_disk(model, tmp_path)
    with torch.inference_mode():
        spread(**example)
    assert torch.equal(hp.score(model, batches).flat(), hp.score(spread, batches).flat())


def test_frozen_weights_stay_frozen(tmp_path: Path) -> None:
    model, batches, example = made("bert", 1)
    model.bert.embeddings.requires_grad_(False)
    spread = on_disk(model, tmp_path)
    hp.score(spread, batches, layers=hp.find_attention(spread, example))
    frozen, expected = ({n for n, p in m.named_parameters() if not p.requires_grad} for m in (spread, model))
    assert frozen == expected


def test_tensors_without_entries_are_not_one_tensor(tmp_path: Path) -> None:
    """Memory of no bytes has no address: two layers that lost all their heads were taken for one, and saved once."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    found: nn.Module = dispatch_model(model, {"0": "disk", "1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    for layer in found.children():
        put(layer, "weight", torch.zeros(3, 0), in_memory=True)
    stored = Offloaded(found)
    assert stored.place("0.weight") != stored.place("1.weight")


def test_several_processes_do_not_go_with_a_device_map(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.app.workflow.scene.current", lambda: SimpleNamespace(size=2))
    said = stderr_of("score", "m", "-d", data_folder, "--device-map", "auto", "-m", "random", code=1)
    assert "several processes would each do" in said


def test_a_module_that_needs_a_stand_in_is_refused(tmp_path: Path) -> None:
    model, example = zoo.ZOO["mha"]()
    spread = on_disk(model, tmp_path)
    with pytest.raises(HeadPruneError, match=r"\(MultiheadAttention\) is replaced by a stand-in"):
        hp.find_attention(spread, example)


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each weight was loaded."""
    found: Counter[str] = Counter()
    plain = OffloadedWeightsLoader.__getitem__

    def counted(self: OffloadedWeightsLoader, key: str) -> Any:
        found[key] += 1
        return plain(self, key)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", counted)
    return found


@pytest.mark.parametrize("batches", [2, 5])
def test_statistics_of_a_model_on_disk(batches: int, tmp_path: Path, reads: Counter[str]) -> None:
    """The same to the bit. As docs/scale.md says, the weights of blocks are loaded 3 times for every batch, those of values and W_O 6 times,
    and some times more to see what can be refitted, what the model makes of mixtures, and what need not run again."""
    model, given, example = made("llama", batches)
    spread = on_disk(model, tmp_path)
    layers = hp.find_attention(model, example)
    known = calibrate(model, layers, given).statistics
    calibration = calibrate(spread, layers, given)
    reads.clear()
    found = calibration.statistics
    assert {n for name, n in reads.items() if "layers" in name} == {3 * batches + 7, 6 * batches + 10}
    assert set(reads) == {name for name, _ in model.named_parameters()}
    assert all(p.is_meta for p in spread.parameters())
    for name, moments in known.moments.items():
        mine = found.moments[name]
        assert torch.equal(mine.xx, moments.xx)
        assert torch.equal(mine.xy, moments.xy)
        assert torch.equal(mine.yy, moments.yy)
        assert torch.equal(found.directions.along[name], known.directions.along[name])
    assert found.passes == known.passes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "repaired", "others"), [("llama", True, {"lm_head": "cpu"}), ("t5", False, {})])
def test_a_stock_folder_is_one_wherever_the_weights_are(name: str, repaired: bool, others: Any, tmp_path: Path) -> None:
    """It always needed code, as if no stock class could represent the model. T5's class has a part of its table, Llama's biases that are new."""
    model, given, example = made(name)
    spread = on_disk(model, tmp_path / "offloaded", **others)
    layers = hp.find_attention(model, example)
    drop = {a.name: [h for unit in a.units[::2] for h in unit] for a in layers}
    for each, folder in ((model, tmp_path / "memory"), (spread, tmp_path / "disk")):
        if repaired:
            hp.repair(each, drop, given, ridge=1.0, values=False, mixtures=False)
        hp.prune(each, drop, example)
        hp.save(each, folder)
    assert all(p.is_meta for n, p in spread.named_parameters() if not n.startswith("lm_head"))
    assert load_call(tmp_path / "disk") == load_call(tmp_path / "memory")
    for file in ("model.safetensors", "config.json", "README.md"):
        assert (tmp_path / "disk" / file).read_bytes() == (tmp_path / "memory" / file).read_bytes()
    assert not (tmp_path / "disk" / "modeling_headprune.py").exists()
    assert hp.load(tmp_path / "disk", device_map={"": "cpu"}) is not None  # which compares answers


def test_checkpoints_where_memory_runs_out_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one example; from there on for all batches. The scores are the same."""
    model, given, _ = made("bert", 3)
    known = hp.score(model, given).flat()
    tried: list[bool] = []
    plain = gradient.slopes

    def short(problem: Any, batch: Any, size: int, at: float = 1.0) -> Any:
        tried.append(problem.checkpoints)
        if not tried[-1]:
            raise RuntimeError("CUDA out of memory")
        return plain(problem, batch, size, at)

    monkeypatch.setattr(gradient, "slopes", short)
    assert torch.equal(hp.score(model, given).flat(), known)
    assert tried == [False] * 3 + [True] * 3  # of four examples, two, and one; then all of each batch
    monkeypatch.setattr(running, "blocks_of", lambda model: pytest.fail("not needed any more"))
    monkeypatch.setattr(gradient, "slopes", plain)
    assert torch.equal(hp.score(model, given).flat(), known)


class _Largest(TorchDispatchMode):
    """The memory of the largest tensor that any operation gives, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for part in found if isinstance(found, tuple | list) else (found,):
            if isinstance(part, Tensor) and not part.is_meta and part.untyped_storage().nbytes() > self.most:
                self.most, self.by = part.untyped_storage().nbytes(), f"{func} {tuple(part.shape)}"
        return found


LONG: dict[str, Callable[..., Any]] = {
    "gradient": lambda model, batches, layers: hp.score(model, batches, layers=layers),
    "entropy": lambda model, batches, layers: hp.score(model, batches, "entropy", layers=layers),
    "repair": lambda model, batches, layers: hp.repair(model, {"L0": [0]}, batches, layers=layers),
    "prune": lambda model, batches, layers: hp.prune(model, {"L0": [0]}, batches[0], layers=layers),
}


@pytest.mark.parametrize("what", LONG)
def test_memory_grows_with_the_tokens_and_not_with_their_square(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_MOST", 2**15)  # weights that are looked at at once
    monkeypatch.setattr(evidence, "LONG", 128)
    sizes_ = zoo.sizes("sdpa", num_hidden_layers=1, num_key_value_heads=4, max_position_embeddings=4096)
    model = zoo.randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes_))).eval()
    layers = hp.find_attention(model, zoo.text(2, 6))
    sizes = []
    for tokens in (384, 768):
        ids = torch.randint(5, 100, (1, tokens), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        with _Largest() as seen:
            LONG[what](copy.deepcopy(model), [batch, batch], layers)
        sizes.append((seen.most, seen.by))
    assert sizes[1][0] <= 2.05 * sizes[0][0], sizes


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_a_device_map(here: Path, bert_folder: Path, data_folder: Path) -> None:
    """Part of the model stays on disk; every figure but the times is that of a run in memory."""
    common = ["prune", bert_folder, "-d", data_folder, "-L", 40, "-b", 8, "--keep", "50%", "-q", "-s", "one-shot"]
    run(*common, "-m", "gradient", "-o", "plain")
    run(*common, "-m", "gradient", "-o", "spread", "--device-map", "auto", "--device-memory", "cpu=60KB")
    found = [json.loads(Path(name, "metrics.json").read_text()) for name in ("plain", "spread")]
    for name in ("dense", "curve", "planning"):
        assert found[0][name] == found[1][name]
    pairs = zip(*(each["budgets"] for each in found), strict=True)
    for mine, other in pairs:
        assert all(mine[k] == other[k] for k in ("drop", "pruned", "repair", "proof", "weights"))


def test_a_device_map_may_name_a_parameter() -> None:
    """Accelerate splits a module that fits no device down to its own parameters; to say where they are was a traceback."""
    model, _ = zoo.vit()
    table = model.vit.embeddings.position_embeddings
    model.hf_device_map = {"vit.embeddings.position_embeddings": "cpu", "vit.layers": "disk"}
    rest = sum(p.numel() for p in model.vit.layers.parameters())
    assert placed(model) == f"cpu ({table.numel() * 4 / 2**20:,.0f} MiB), disk ({rest * 4 / 2**20:,.0f} MiB)"
    model.hf_device_map = {"": "disk"}
    assert placed(model).startswith("disk (")


# -- stacks that are halved where memory runs out ---------------------------------------------------

SAID = [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
]  # fmt: skip


@mock.patch("headprune.batches.clear_device_cache", new=mock.Mock())  # it looks through all libraries, each time
@given(st.integers(0, 30), st.integers(1, 12), st.data())
def test_every_item_is_done_once_whatever_fits(count: int, size: int, data: st.DataObject) -> None:
    """Memory may get less while the work goes on."""
    done: list[int] = []
    for part in halving(range(count), size):
        with part as items:
            if len(items) > data.draw(st.integers(1, size)):
                raise data.draw(st.sampled_from(SAID))
            done += items
    assert done == list(range(count))


@pytest.mark.parametrize(("error", "told"), [
    (MemoryError(), "Memory ran out even with the smallest stack"), (ZeroDivisionError("by zero"), "^by zero$"),
    (RuntimeError("an illegal memory access was encountered"), "^an illegal memory access"),
])  # fmt: skip
def test_one_item_that_does_not_fit_is_told_and_other_errors_stay(error: Exception, told: str) -> None:
    with pytest.raises((hp.HeadPruneError, type(error)), match=told):  # noqa: PT012
        for part in halving(range(4), 4):
            with part:
                raise error


def test_there_is_memory() -> None:
    """What PyTorch holds unused on a GPU counts as free."""
    assert 1 << 20 < free_memory(torch.device("cpu")) < 1 << 50
    with pretended():
        assert free_memory(DEVICE) == 9 << 30  # 8 by the driver; of 2 that are held, 1 is used


# -- a model is given back as it was ----------------------------------------------------------------


def test_a_model_is_left_as_it_was_without_an_object_for_each_of_its_dicts() -> None:
    """24 callbacks for every module let Python collect its garbage at each answer of a proof: 200 ms for a model of 444 modules."""
    model = nn.Sequential(*(nn.Identity() for _ in range(100)))
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        with attributes_kept(model):
            made = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert made < 60 * len(model)


class Interrupting(dict[str, int]):
    """Is interrupted once, when it is empty."""

    again = False

    def clear(self) -> None:
        super().clear()
        if not self.again:
            self.again = True
            raise KeyboardInterrupt


def test_an_interrupt_while_a_model_is_given_back_leaves_no_module_empty() -> None:
    parts: list[Any] = [{"a": 1}, Interrupting(b=2), {"c"}]
    restore = restorer(parts)
    for part in parts:
        part.clear() if part is not parts[1] else part.pop("b")
    with pytest.raises(KeyboardInterrupt):
        restore()
    assert parts == [{"a": 1}, {"b": 2}, {"c"}]
