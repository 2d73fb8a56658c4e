"""A checkpoint cut in its files must be the one that the loaded model gives, byte by byte, and be proved."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import headprune as hp
from headprune import streaming
from headprune.attention import Heads
from headprune.checkpoint import SIDECAR
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.surgery import scratch
from tests.support import zoo
from tests.support.commands import run
from tests.support.documents import opened
from tests.support.folders import common, tokenizer

SHARD = "20KB"


@pytest.fixture(autouse=True)
def _even_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors lie in files, however small the model is."""
    monkeypatch.setattr(scratch, "SMALL", 0)


def saved(name: str, folder: Path, *, shards: bool = True, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A tiny model's folder, as transformers writes it."""
    model, _ = getattr(zoo, name)()
    for field, value in config.items():
        setattr(model.config, field, value)
    model.tie_weights(recompute_mapping=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=SHARD if shards else "1GB")
    assert (folder / "model.safetensors").exists() != shards
    return folder


def dropped(layers: list[hp.AttentionLayer], kind: str) -> Heads:
    """Heads to remove, whole key/value groups: the same number everywhere, different numbers, or all of a layer."""
    if kind == "uniform":
        return {a.name: list(a.units[-1]) for a in layers}
    if kind == "uneven":
        return {a.name: [h for unit in a.units[: 1 + a.index % 2] for h in unit] for a in layers if a.index != 1}
    return {layers[0].name: list(range(layers[0].num_heads)), layers[-1].name: list(layers[-1].units[0])}


def loaded(folder: Path) -> Any:
    config = tf.AutoConfig.from_pretrained(folder)
    return getattr(tf, config.architectures[0]).from_pretrained(folder)


def check_equal(mine: Path, theirs: Path) -> None:
    """Two folders hold the same files with the same bytes."""
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in mine.iterdir()) == names
    for name in names:
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name


def check_cut(folder: Path, kind: str, tmp_path: Path) -> streaming.Streamed:
    """Cut in memory and in the files, and compare."""
    model = loaded(folder)
    plan = dropped(hp.find_attention(model), kind)
    proof = hp.prune(model, plan)
    hp.save(model, tmp_path / "loaded", max_shard_size=SHARD)
    done = hp.cut_checkpoint(folder, plan, tmp_path / "streamed", max_shard_size=SHARD)
    check_equal(tmp_path / "streamed", tmp_path / "loaded")
    assert done.proof == proof
    assert done.reload_difference is not None
    assert done.drop == plan
    assert done.kept == done.total - sum(map(len, plan.values()))
    assert done.files == len(list((tmp_path / "streamed").glob("model*.safetensors")))
    assert done.left < done.weights
    assert {path.name for path in tmp_path.iterdir()} <= {folder.name, "loaded", "streamed"}
    return done


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "emptied"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name in ("bert", "llama", "qwen3", "t5", "gpt2", "vit", "whisper")
            for kind in ("uniform", "uneven", "emptied")
            if (name, kind) != ("gpt2", "emptied")
        ),
    ],
)
def test_the_same_folder_as_of_the_loaded_model(name: str, kind: str, tmp_path: Path) -> None:
    check_cut(saved(name, tmp_path / "dense"), kind, tmp_path)


def test_half_precision_and_tied_weights_in_one_file(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path / "dense", shards=False, dtype=torch.bfloat16, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    done = check_cut(folder, "uneven", tmp_path)
    assert _planned_in_float32(folder, tmp_path / "again") == done.total - 2
    assert done.proof.tolerance == 5e-2  # proved in the type in which it is stored
    with safe_open(next((tmp_path / "streamed").glob("model-*.safetensors")), "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def _planned_in_float32(folder: Path, path: Path) -> int:
    """Heads left by a plan for the model as the command line scores it on a CPU."""
    wide = fingerprint(tf.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32))
    return hp.cut_checkpoint(folder, hp.PruningPlan({"L0": [0, 1]}, model=wide), path).kept


@pytest.mark.slow
def test_a_pruned_folder_is_cut_again(tmp_path: Path) -> None:
    once = hp.cut_checkpoint(
        saved("bert", tmp_path / "dense"), {"L0": [0, 1, 2, 3], "L1": [2]}, tmp_path / "once", max_shard_size=SHARD
    )
    model = hp.load(once.path)
    hp.prune(model, {"L1": [0, 1]})
    hp.save(model, tmp_path / "loaded")
    twice = hp.cut_checkpoint(once.path, {"L1": [0, 1]}, tmp_path / "twice")
    assert (twice.kept, twice.total) == (once.kept - 2, once.kept)
    theirs, mine = (load_file(tmp_path / name / "model.safetensors") for name in ("loaded", "twice"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for name in (SIDECAR, "config.json", "README.md", "modeling_headprune.py"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "loaded" / name).read_bytes(), name


def test_weights_stay_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut is in no memory that the system could not take back: it lies in mapped files, without a name."""
    folder = saved("llama", tmp_path / "dense")
    before = {}
    write = streaming.write

    def looked_at(model: Any, into: Path, **more: Any) -> None:
        for name, tensor in model.state_dict().items():
            before[name] = _mapped_from(tensor)
        write(model, into, **more)

    monkeypatch.setattr(streaming, "write", looked_at)
    done = hp.cut_checkpoint(folder, {"L0": [0, 1], "L2": list(range(6))}, tmp_path / "cut")
    assert done.in_memory is not None
    assert done.in_memory < 1024
    cut = {name: place for name, place in before.items() if "layers.0.self_attn" in name}
    assert len(cut) == 4
    assert all("/.cut-" in place and "(deleted)" in place for place in cut.values())
    rest = [place for name, place in before.items() if name not in cut and "layers.2.self_attn" not in name]
    assert rest
    assert all(Path(place).parent == folder for place in rest)
    assert not any(".cut-" in path.name for path in tmp_path.rglob("*"))


def _mapped_from(tensor: torch.Tensor) -> str:
    """The file that a tensor's first byte lies in; "" for memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, *_, file = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in ends.split("-"))
        if low <= tensor.data_ptr() < high:
            return file if file.startswith("/") else ""
    return ""


def test_placed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
        tensor = (torch.randn(5, 7) * 3).to(dtype).T  # not contiguous
        with scratch.on_disk(tmp_path):
            made = scratch.placed(tensor)
        assert made is not tensor
        assert torch.equal(made, tensor)
        assert made.dtype == dtype
        assert _mapped_from(made).startswith(str(tmp_path))
        assert scratch.placed(tensor) is tensor  # outside
    monkeypatch.setattr(scratch, "SMALL", 1 << 20)
    with scratch.on_disk(tmp_path):
        assert scratch.placed(tensor) is tensor
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changes between the cut and the disk is noticed, and the folder does not appear."""
    folder = saved("bert", tmp_path / "dense")
    complete = streaming.complete

    def damaging(into: Path, processor: Any) -> None:
        complete(into, processor)
        weights = load_file(into / "model.safetensors")
        weights["classifier.weight"][0, 0] += 1
        save_file(weights, into / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(streaming, "complete", damaging)
    with pytest.raises(hp.HeadPruneError, match="are not those that were saved"):
        hp.cut_checkpoint(folder, {"L0": [0]}, tmp_path / "cut")
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("bert", tmp_path_factory.mktemp("models") / "dense")


def _edited(folder: Path, tmp_path: Path, **config: Any) -> Path:
    """A copy with other entries in its config.json, which shares the weights."""
    made = tmp_path / "edited"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    own = json.loads((folder / "config.json").read_text())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(own | config))
    return made


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "is quantised"),
        ({"dtype": "bfloat16"}, "is stored in float32, and its config.json says bfloat16"),
        ({"architectures": ["MyOwnModel"]}, "names no class of transformers"),
        ({"architectures": ["BertForTokenClassification"], "num_labels": 9}, "does not load|no weights for"),
    ],
)
def test_configs_that_cannot_be_streamed(config: dict[str, Any], message: str, dense: Path, tmp_path: Path) -> None:
    folder = _edited(dense, tmp_path, **config)
    with pytest.raises(hp.HeadPruneError, match=message):
        hp.cut_checkpoint(folder, {"L0": [0]}, tmp_path / "cut")
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]


def test_weights_that_cannot_be_streamed(dense: Path, tmp_path: Path) -> None:
    def refused(source: Path, message: str, plan: Any = None, path: Path | None = None) -> None:
        with pytest.raises(hp.HeadPruneError, match=message) as caught:
            hp.cut_checkpoint(source, plan or {"L0": [0]}, path or tmp_path / "cut")
        assert caught.value.hint or "head" in message
        assert not (tmp_path / "cut").exists()

    pickled = _edited(dense, tmp_path)
    for file in pickled.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    refused(pickled, "has its weights in .bin files")
    (pickled / "pytorch_model.bin").unlink()
    refused(pickled, "is missing")
    save_file({"w": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, pickled / "model.safetensors")
    refused(pickled, r"quantised \(F8_E4M3\)")
    (pickled / "model.safetensors").write_bytes(next(dense.glob("model-00001-*")).read_bytes()[:-9])
    refused(pickled, "damaged or cut short")
    refused(tmp_path / "nobody" / "model", "only folders can be streamed")
    refused(dense, "holds the model itself", path=dense)
    refused(dense, "holds the model itself", path=dense.parent)
    refused(dense, "exists", path=pickled)
    refused(dense, "no head 9", {"L0": [9]})
    refused(dense, "for another model", hp.PruningPlan({"L0": [0]}, model="0123456789abcdef"))


def test_weights_that_would_be_converted_in_memory(tmp_path: Path) -> None:
    """Experts are stored one by one and computed with together."""
    sizes = zoo.sizes("sdpa", num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2, num_hidden_layers=1)
    tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)).save_pretrained(tmp_path / "dense")
    with pytest.raises(hp.HeadPruneError, match="in another layout"):
        hp.cut_checkpoint(tmp_path / "dense", {"L0": [0, 1]}, tmp_path / "cut")


def test_too_much_in_memory_is_noticed(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made transformers read the weights: they are looked for where they lie."""
    monkeypatch.setattr(streaming, "IN_MEMORY", 0)
    read = tf.BertForSequenceClassification.from_pretrained

    def copied(*args: Any, **more: Any) -> Any:
        model, info = read(*args, **more)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model, info

    monkeypatch.setattr(tf.BertForSequenceClassification, "from_pretrained", copied)
    with pytest.raises(hp.HeadPruneError, match="of its weights are converted as they load"):
        hp.cut_checkpoint(dense, {"L0": [0]}, tmp_path / "cut")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with its tokenizer, in several files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.randomise(tf.BertForSequenceClassification(tf.BertConfig(**common()))).save_pretrained(
        folder, max_shard_size=SHARD
    )
    tokenizer().save_pretrained(folder)
    return folder


def test_the_command(named: Path, here: Path) -> None:
    hp.PruningPlan({"L0": [0], "L1": [1]}).save(here / "plan.json")
    asked = ["prune", named, "--plan", "plan.json", "--streaming"]
    assert "Would cut 2 heads" in run(*asked, "--dry-run").stdout
    assert not (here / "reports").exists()
    told = run(*asked).stdout
    model = hp.load(here / "reports" / "tiny-1" / "pruned-6")
    assert "proved on 5 inputs" in told.lower()
    assert "loads with AutoModel" in told
    assert "Not repaired" in told
    assert re.search(r"Keeps 6 of 8 heads; [\d.]+ kB of [\d.]+ kB of weights", told)  # it was 8.07e-05 of 8.29e-05 GB
    folder = here / "reports" / "tiny-1"
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "pruned-6", "streamed.json"]
    document = json.loads((folder / "streamed.json").read_text())
    assert document["proof"]["inputs"] == 5
    assert document["proof"]["told"].startswith("proved on 5 inputs")
    plan = hp.PruningPlan.load(folder / "plan.json")
    assert (plan.kept, plan.total) == (6, 8)
    assert all("attention" in name for name in plan.drop)
    twin = loaded(named)
    hp.prune(twin, plan)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    tf.AutoTokenizer.from_pretrained(folder / "pruned-6")


@pytest.mark.slow
def test_the_command_as_json(named: Path, here: Path) -> None:
    """The plan is of the run before, which names the model too; the document is what is on disk."""
    hp.PruningPlan({"L0": [0], "L1": [1]}).save(here / "plan.json")
    document = json.loads(run("prune", named, "--plan", "plan.json", "--streaming", "-o", "made", "--json").stdout)
    assert document.pop("folder") == "made"
    assert document == opened(here / "made" / "streamed.json")
    said = run("prune", named, "--plan", "plan.json", "--streaming", "-o", "made", code=1).stderr
    assert "exists and is not empty" in said
    again = ["prune", "made", "--plan", "made/plan.json", "--streaming", "-o", "again"]  # the pruned model in the run
    assert run(*again).stdout.startswith("Keeps 4 of 6 heads")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "4"], "--keep would have to find one"),
        ([], "--streaming cuts by a plan"),
        (["--plan", "plan.json", "-d", "data"], "--dataset has no use"),
        (["--plan", "plan.json", "--finetune", "1"], "--finetune trains the model"),
        (["--plan", "plan.json", "--device", "cuda"], "--device has no use"),
        (["--plan", "plan.json", "--time", "3"], "--time has no use"),
        (["--plan", "plan.json", "--batch-size", "3"], "--batch-size has no use"),
        (["--plan", "plan.json", "--seed", "0"], "--seed has no use"),
        (["--plan", "searched.json"], "counts on a repair"),
    ],
)
def test_what_streaming_refuses(arguments: list[str], message: str, named: Path, here: Path) -> None:
    hp.PruningPlan({"L0": [0]}).save(here / "plan.json")
    hp.PruningPlan({"L0": [0]}, strategy="compensated").save(here / "searched.json")
    said = run("prune", named, "--streaming", *arguments, code=1).stderr
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (here / "reports").exists()


def test_an_interrupted_cut_leaves_nothing(named: Path, here: Path) -> None:
    """Ctrl-C while the model is written."""
    hp.PruningPlan({"L0": [0]}).save(here / "plan.json")

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "complete", stopped)
        assert "Nothing was written" in run("prune", named, "--plan", "plan.json", "--streaming", code=130).stderr
    assert not (here / "reports" / "tiny-1").exists()


def test_an_index_of_a_hundred_thousand_levels(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(dense, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(HeadPruneError, match=r"index\.json is damaged"):
        streaming.check_source(folder)
