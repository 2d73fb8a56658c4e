"""A loaded model is the one that was saved, or the load says by how much, where and why it differs."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import headprune as hp
from tests.support.commands import run
from tests.support.errors import refuses
from tests.support.families import built
from tests.support.folders import tokenizer
from tests.support.stays import changed, edit, logits
from tests.support.zoo import ZOO, TorchEncoder, bert, gpt2, llama, randomise

CALM = pytest.mark.filterwarnings("error:headprune")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hp.save(changed("bert", "uneven")[0], tmp_path / "m", processor=tokenizer())


# -- configs --------------------------------------------------------------------------------------

# An entry of config.json, and what a load does: it refuses for other answers, or since it cannot be built; it warns; it says nothing.
EDITS: list[tuple[dict[str, Any], str]] = [
    ({"layer_norm_eps": 0.5}, "answer"), ({"hidden_act": "relu"}, "answer"), ({"hidden_act": "gelu_new"}, "answer"),
    ({"is_decoder": True}, "answer"), ({"hidden_size": 48}, "build"), ({"hidden_act": "nonsense"}, "build"),
    ({"num_attention_heads": 5}, "build"), ({"num_hidden_layers": 2}, "build"), ({"layer_norm_eps": 1e-9}, "warn"),
    ({"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}, "calm"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "effect"), EDITS, ids=str)
@CALM
def test_an_edited_config(changes: dict[str, Any], effect: str, folder: Path) -> None:
    """It loaded silently, and the outputs were off by 1.07."""
    edit(folder / "config.json", **changes)
    told = rf"{next(iter(changes))} in config\.json is .*, saved"
    if effect == "calm":
        assert hp.load(folder).config.id2label == {0: "no", 1: "yes"}
    elif effect == "warn":
        with pytest.warns(UserWarning, match=told):
            hp.load(folder)
        with pytest.warns(UserWarning, match=told):  # the command line silences other libraries' warnings
            run("inspect", folder)
    else:
        where = r"by [\d.e+-]+ of the largest value, first at bert\S+ \(\w+(, saved \w+)?\) "
        refuses(f"{where * (effect == 'answer')}.*{told}", hp.load, folder)


DENSE = ("bert", "gpt2", "vit", "t5", "whisper", "wav2vec2", "clip", "clip_vision_model")


@pytest.mark.parametrize("name", DENSE)
@CALM
def test_dense_models_have_answers_too(name: str, tmp_path: Path) -> None:
    """To an input that their config says; after a fine-tuning, others."""
    model: Any = (ZOO[name] if name in ZOO else partial(built, name))()[0]
    folder = hp.save(model, tmp_path / "m")
    assert (folder / "headprune.safetensors").stat().st_size < 500_000
    again = hp.load(folder)  # which would warn if there were none
    next(p for p in again.parameters() if p.ndim > 1).data *= 1.5
    hp.load(hp.save(again, tmp_path / "n"))
    key = next((k for k in ("hidden_act", "activation_function", "feed_forward_proj") if hasattr(model.config, k)), "")
    if key:
        edit(folder / "config.json", **{key: "relu" if getattr(model.config, key) != "relu" else "gated-gelu"})
        refuses(rf"{key} in config\.json is", hp.load, folder)


# -- classes of one's own -------------------------------------------------------------------------


class Encoder(nn.Module):
    """The activation is a module of its own; the scale a plain number."""

    def __init__(self, activation: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.activation, self.scale, self.head = TorchEncoder(), activation, scale, nn.Linear(3, 32)
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.scale)


class Negative(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.parametrize("cut", [True, False])
@CALM
def test_another_class_or_number(cut: bool, tmp_path: Path) -> None:
    """model= was believed. The error names the first module whose output is another one."""
    model, x = randomise(Encoder(nn.GELU())).eval(), torch.randn(2, 5, 32)
    model.shift += 2.0  # a buffer that no file of weights holds
    if cut:
        hp.prune(model, {"body.encoder.layers.0.self_attn": [1]}, x)
    hp.save(model, tmp_path / "m", example=None if cut else x)
    again = hp.load(tmp_path / "m", model=Encoder(nn.GELU()))
    assert "shift" not in again.state_dict()
    assert torch.equal(again(x), model(x))
    for other, told in (
        (Encoder(nn.ReLU()), r"first at activation \(ReLU, saved GELU\)"),
        (Encoder(nn.GELU(), 2.0), r"first at head \(Linear\)"),
        (Negative(nn.GELU()), r"first at its own output \(Negative, saved Encoder\).*saved with torch"),
    ):
        refuses(told, hp.load, tmp_path / "m", model=other)
    other = Negative(nn.GELU())
    other.activate, other.forward = nn.functional.gelu, lambda x: other.head(other.activate(other.body(x) + 2.1))
    del other.activation
    refuses(r"first at activation \(which is not there, saved GELU\)", hp.load, tmp_path / "m", model=other)
    refuses(r"do not fit Linear", hp.load, tmp_path / "m", model=nn.Linear(3, 3))


class Nested(nn.Linear):
    """Takes a tensor, and a list and a dict with all kinds of values."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor, more: list[Any], named: dict[str, Any]) -> Tensor:
        lengths, flag, none = more
        assert (flag, none, named["k"]) == (True, None, 0.5)
        scores = super().forward(x) @ x.transpose(1, 2) + named["mask"]
        return scores.softmax(-1) * lengths[: len(x), None, None]


@CALM
def test_inputs_of_any_form(tmp_path: Path) -> None:
    mask = torch.zeros(2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    example = (torch.randn(2, 4, 8), [torch.tensor([3, 4]), True, None], {"mask": mask, "k": 0.5, "odd": object()})
    hp.save(Nested(), tmp_path / "m", example=example)
    hp.load(tmp_path / "m", model=Nested())  # which would warn if the input were not known


class Masks(nn.Module):
    """Two names of one buffer, and one that is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.head, mask = nn.Linear(4, 4), torch.ones(4)
        for name, buffer in {"a": mask, "b": mask, "c": mask.clone()}.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.a * self.c


def test_tied_and_equal_buffers(tmp_path: Path) -> None:
    """Equal ones are stored once, but only those that were one tensor come back as one."""
    hp.save(Masks(), tmp_path / "m", example=torch.randn(2, 4))
    again = hp.load(tmp_path / "m", model=Masks())
    again.a += 1
    assert again.b.eq(2).all()
    assert again.c.eq(1).all()


@CALM
def test_rotary_frequencies_come_back(tmp_path: Path) -> None:
    """Buffers that no weights' file holds were built anew: with other frequencies outputs were off by 5.42."""
    model, example = llama()
    model.model.rotary_emb.inv_freq *= 3.0
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(logits(again, example), logits(model, example))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.rand(3)


def test_noise_in_evaluation_tells_nothing(tmp_path: Path) -> None:
    hp.save(Noisy(3, 3), tmp_path / "m", example=torch.randn(2, 3))
    hp.load(tmp_path / "m", model=Noisy(3, 3))


# -- what is stored -------------------------------------------------------------------------------


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The form of the made-up input, and its tensors."""
    with safe_open(folder / "headprune.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["probe"])["form"], {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118


def test_nothing_of_the_example_is_stored(tmp_path: Path) -> None:
    """A checkpoint goes elsewhere; what it was pruned with need not. Tokens that control a model stay where they are."""
    model, _ = gpt2()
    model.config.image_token_id = 77
    ids = torch.randint(40, 70, (5, 30), generator=torch.Generator().manual_seed(0))
    ids[:, 3] = 77
    example = {"input_ids": ids, "attention_mask": torch.ones(5, 30).long()}
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0]}, example)
    form, tensors = stored(hp.save(model, tmp_path / "m"))
    made = tensors[form["dict"]["input_ids"]["tensor"]]
    assert made.shape == (2, 16)
    assert made.max() <= ids.max()
    assert torch.equal(made == 77, ids[:2, :16] == 77)
    assert (made == ids[:2, :16]).float().mean() < 0.2
    images, pixels = ZOO["vit"]()
    hp.prune(images, {hp.find_attention(images, pixels)[0].name: [0]}, pixels)
    form, tensors = stored(hp.save(images, tmp_path / "n"))
    noise = form["dict"]["pixel_values"]
    assert noise["noise"] == [2, *pixels["pixel_values"].shape[1:]]
    assert abs(noise["std"] / pixels["pixel_values"].std() - 1) < 0.2
    assert pixels["pixel_values"].numel() not in [t.numel() for n, t in tensors.items() if n.startswith("input")]


def test_folders_without_answers(folder: Path, tmp_path: Path) -> None:
    edit(folder / "headprune.json", files={})
    (folder / "headprune.safetensors").unlink()
    with pytest.warns(UserWarning, match="saved without a probe"):
        hp.load(folder)
    hp.save(nn.Linear(3, 3), tmp_path / "unknown")
    with pytest.warns(UserWarning, match=r"holds no answers to compare with.*pass example= to headprune.save"):
        hp.load(tmp_path / "unknown", model=nn.Linear(3, 3))


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "told"), [
    ("headprune.safetensors", "is damaged: it is not what was saved"), ("model.safetensors", "are not those that were saved"),
])  # fmt: skip
def test_a_bit_is_noticed(file: str, told: str, folder: Path) -> None:
    """In a buffer that no input reaches, too. More damage is in `tests.support.bad_files`."""
    content = bytearray((folder / file).read_bytes())
    content[-3] ^= 0x01
    (folder / file).write_bytes(bytes(content))
    refuses(told, hp.load, folder)


def test_a_changed_tokenizer_is_told(folder: Path) -> None:
    """It changes every measurement, but not the model's answers to token ids."""
    hp.load(folder, as_saved=True)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"good"', '"goof"', 1))
    with pytest.warns(UserWarning, match=r"not as saved: tokenizer.json"):
        hp.load(folder)
    refuses(r"tokenizer.json is damaged", hp.load, folder, as_saved=True)
    (folder / "README.md").write_text("mine")
    path.unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        hp.load(folder)  # a model without its tokenizer, and with a card of its own


def test_every_number_of_the_weights_counts(tmp_path: Path) -> None:
    """For `score`, too: scores and plans are of one model. A part of a tensor does not stand for all of it."""
    model, example = bert()
    batch = [{**example, "labels": torch.tensor([0, 1, 0])}]
    whole = torch.arange(6.0)
    model.register_buffer("first", whole[:2])
    model.register_buffer("whole", whole)
    for tensor in (model.classifier.weight.data, whole):
        plan = hp.plan(hp.score(model, batch, "random"), keep=6)
        tensor.view(-1)[-1] += 1e-3
        refuses("another model", hp.prune, model, plan, example)
