"""A loaded model is the one that was saved, or load says what differs."""

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.checkpoint import probe
from headprune.input_specs import build as made
from headprune.input_specs import of_config as guesses
from headprune.input_specs import pack as packed
from headprune.input_specs import recorded as remembered
from headprune.input_specs import unpack as unpacked
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import pruned
from tests.support.documents import opened
from tests.support.folders import tokenizer
from tests.support.zoo import ZOO, TorchEncoder, bert, gpt2, llama, randomise, text


@pytest.fixture
def calm() -> Iterator[None]:
    """Warnings are failures."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        yield


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes", [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"is_decoder": True}]
)
def test_an_edited_config(changes: dict[str, Any], tmp_path: Path) -> None:
    """It loaded silently, and the outputs were off by 1.07."""
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    edit(folder, **changes)
    with pytest.raises(hp.HeadPruneError, match=rf"{next(iter(changes))} in config.json is .*, saved"):
        hp.load(folder)


def test_an_edit_that_changes_little_is_told(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    edit(folder, layer_norm_eps=1e-9)
    with pytest.warns(UserWarning, match=r"layer_norm_eps in config.json is 1e-09, saved 1e-12"):
        hp.load(folder)


@pytest.mark.usefixtures("calm")
def test_names_of_labels_may_be_edited(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    edit(folder, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
    assert hp.load(folder).config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 48}, {"hidden_act": "nonsense"}, {"num_attention_heads": 5}, {"num_hidden_layers": 2}]
)
def test_an_edit_that_does_not_build_is_named(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    edit(folder, **changes)
    with pytest.raises(hp.HeadPruneError, match=rf"{next(iter(changes))} in config\.json is"):
        hp.load(folder)


class Encoder(nn.Module):
    """The activation is a module of its own; the scale a plain number."""

    def __init__(self, activation: nn.Module, scale: float = 1.0, width: int = 32) -> None:
        super().__init__()
        self.body, self.activation, self.scale, self.head = TorchEncoder(), activation, scale, nn.Linear(3, width)
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.scale)


@pytest.mark.parametrize("cut", [True, False])
def test_another_class_or_number(cut: bool, tmp_path: Path) -> None:
    """model= was believed."""
    model, x = randomise(Encoder(nn.GELU())).eval(), torch.randn(2, 5, 32)
    if cut:
        hp.prune(model, {"body.encoder.layers.0.self_attn": [1]}, x)
        hp.save(model, tmp_path / "m")
    else:
        hp.save(model, tmp_path / "m", example=x)
    again = hp.load(tmp_path / "m", model=Encoder(nn.GELU()))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    with pytest.raises(hp.HeadPruneError, match="activation is ReLU, saved GELU"):
        hp.load(tmp_path / "m", model=Encoder(nn.ReLU()))
    with pytest.raises(hp.HeadPruneError, match=r"scale is 2\.0, saved 1\.0"):
        hp.load(tmp_path / "m", model=Encoder(nn.GELU(), 2.0))
    other = Encoder(nn.GELU())
    other.body.encoder.layers[1].activation = torch.tanh  # PyTorch's fused layer does not notice
    with pytest.warns(UserWarning, match=r"layers.1.activation is tanh\(\), saved relu\(\)"):
        hp.load(tmp_path / "m", model=other)


def test_a_class_that_is_told_nowhere(tmp_path: Path) -> None:
    """Nothing that is noted differs; the answers do."""

    class Other(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    Other.__name__ = "Encoder"
    model = randomise(Encoder(nn.GELU())).eval()
    hp.save(model, tmp_path / "m", example=torch.randn(2, 5, 32))
    with pytest.raises(hp.HeadPruneError, match=r"does not answer as the saved one did.*saved with torch"):
        hp.load(tmp_path / "m", model=Other(nn.GELU()))


@pytest.mark.usefixtures("calm")
def test_buffers_come_back(tmp_path: Path) -> None:
    """Buffers that no weights' file holds were built anew: with other frequencies outputs were off by 5.42."""
    model, example = llama()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(3.0)
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)
    plain, x = randomise(Encoder(nn.GELU())).eval(), torch.randn(2, 5, 32)
    plain.shift += 2.0
    hp.prune(plain, {"body.encoder.layers.0.self_attn": [1]}, x)
    again = hp.load(hp.save(plain, tmp_path / "n"), model=Encoder(nn.GELU()))
    with torch.no_grad():
        assert torch.equal(again(x), plain(x))
    assert "shift" not in again.state_dict()


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("gpt2", torch.bfloat16), ("t5", torch.bfloat16),
        ("llama", torch.float16), ("vit", torch.float64),
    ],
)  # fmt: skip
def test_a_cast_model_comes_back_bit_by_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """model.bfloat16() rounds frequencies in memory; what was loaded had whole ones."""
    model, example = ZOO[name]()
    model.to(dtype)
    if "pixel_values" in example:
        example = {"pixel_values": example["pixel_values"].to(dtype)}
    layer = hp.find_attention(model, example)[0]
    hp.prune(model, {layer.name: list(layer.units[0])}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    assert {n: b.dtype for n, b in again.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}
    with torch.no_grad():
        for x, y in zip(answers(call(model, example)), answers(call(again, example)), strict=True):
            assert torch.equal(x, y)


def test_tied_and_equal_buffers(tmp_path: Path) -> None:
    """Equal ones are stored once, but only those that were one tensor come back as one."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, mask = nn.Linear(4, 4), torch.ones(4)
            for name, buffer in {"a": mask, "b": mask, "c": mask.clone()}.items():
                self.register_buffer(name, buffer, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * self.a * self.c

    hp.save(Masks(), tmp_path / "m", example=torch.randn(2, 4))
    again = hp.load(tmp_path / "m", model=Masks())
    again.a += 1
    assert again.b.eq(2).all()
    assert again.c.eq(1).all()


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5"])
def test_dense_models_have_a_probe_too(name: str, tmp_path: Path) -> None:
    model, _ = ZOO[name]()
    folder = hp.save(model, tmp_path / "m")
    about, _ = probe._read(folder)
    assert about is not None
    assert about["form"] is not None, about["why"]
    assert (folder / probe.FILE).stat().st_size < 500_000
    again = hp.load(folder)
    assert remembered(again)
    with torch.no_grad():  # fine-tuned since: a new probe
        next(p for n, p in again.named_parameters() if p.ndim > 1).mul_(1.5)
    hp.load(hp.save(again, tmp_path / "n"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("WhisperForConditionalGeneration", lambda: tf.WhisperConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=100, max_source_positions=50, pad_token_id=1,
            bos_token_id=2, eos_token_id=3, decoder_start_token_id=4)),
        ("Wav2Vec2ForSequenceClassification", lambda: tf.Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=[8] * 7,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, classifier_proj_size=8)),
        ("CLIPVisionModel", lambda: tf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16)),
        ("CLIPModel", lambda: tf.CLIPConfig(
            vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "image_size": 32, "patch_size": 16},
            text_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "vocab_size": 99, "eos_token_id": 98, "bos_token_id": 97, "pad_token_id": 1})),
    ],
)  # fmt: skip
def test_what_is_seen_and_heard(name: str, config: Any, tmp_path: Path) -> None:
    model = randomise(getattr(tf, name)(config()))
    folder = hp.save(model, tmp_path / "m")
    about, _ = probe._read(folder)
    assert about is not None
    if name != "CLIPModel":  # it takes two inputs that its main one says nothing of
        assert about["form"] is not None, about["why"]
        edit(folder, **({"hidden_act": "relu"} if "Whisper" not in name else {"activation_function": "relu"}))
        with pytest.raises(hp.HeadPruneError, match=r"in config\.json is 'relu'"):
            hp.load(folder)


def test_nothing_of_the_example_is_stored(tmp_path: Path) -> None:
    """A checkpoint goes elsewhere; what it was pruned with need not."""
    model, example = gpt2()
    example = {**example, "input_ids": torch.randint(40, 90, (2, 30)), "attention_mask": torch.ones(2, 30).long()}
    layer = hp.find_attention(model, example)[0]
    hp.prune(model, {layer.name: [0]}, example)
    small, whole = (made(form) for form in remembered(model))
    assert small["input_ids"].shape == (2, 16)
    assert whole["input_ids"].shape == (2, 30)
    assert (whole["input_ids"] == example["input_ids"]).float().mean() < 0.2
    assert whole["input_ids"].max() <= example["input_ids"].max()
    images, pixels = ZOO["vit"]()
    hp.prune(images, {hp.find_attention(images, pixels)[0].name: [0]}, pixels)
    noise = made(remembered(images)[0])["pixel_values"]
    real = pixels["pixel_values"][:2]
    assert noise.shape == real.shape
    assert abs(torch.corrcoef(torch.stack([noise.flatten(), real.flatten()]))[0, 1]) < 0.1
    assert abs(noise.std() / real.std() - 1) < 0.1


def test_forms_survive_json() -> None:
    from headprune.input_specs import record

    model = nn.Linear(2, 2)
    mask = torch.zeros(2, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    record(model, (torch.randn(2, 4, 8), [torch.tensor([3, 4]), True, None], {"mask": mask, "k": 0.5, "odd": object()}))
    form = remembered(model)[-1]
    stored: dict[str, Tensor] = {}
    again = made(unpacked(json.loads(json.dumps(packed(form, stored), allow_nan=False)), stored))
    first, (lengths, flag, none), rest = made(form)
    assert torch.equal(again[0], first)
    assert torch.equal(again[1][0], lengths)
    assert again[1][1:] == [flag, none] == [True, None]
    assert torch.equal(again[2]["mask"], mask)
    assert rest.keys() == {"mask", "k"}


def test_special_tokens_stay() -> None:
    """A token that marks an image's place must stay where it is."""
    from headprune.input_specs import record

    model = bert()[0]
    model.config.image_token_id = 77
    ids = torch.randint(5, 70, (2, 12))
    ids[:, 3], ids[0, 0] = 77, 98
    record(model, {"input_ids": ids})
    got = made(remembered(model)[0])["input_ids"]
    assert (got[:, 3] == 77).all()
    assert (got == 77).sum() == 2


def test_older_folders_load(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    (folder / probe.FILE).unlink()
    with pytest.warns(UserWarning, match="saved without a probe"):
        hp.load(folder)


def test_a_model_that_takes_no_one_knows_what(tmp_path: Path) -> None:
    hp.save(nn.Linear(3, 3), tmp_path / "m")
    with pytest.warns(UserWarning, match="holds no answers to compare with"):
        hp.load(tmp_path / "m", model=nn.Linear(3, 3))
    assert guesses(nn.Linear(3, 3)) == []


def test_noise_in_evaluation_tells_nothing(tmp_path: Path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), torch.rand(3)

    hp.save(Noisy(3, 3), tmp_path / "m", example=torch.randn(2, 3))
    about, _stored = probe._read(tmp_path / "m")
    assert about is not None
    assert about["answers"] == [[2, 3], None]
    hp.load(tmp_path / "m", model=Noisy(3, 3))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    model, _example = ZOO["bert"]()
    model.train()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hp.save(model, tmp_path / "m")
    assert model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_damaged(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    (folder / probe.FILE).write_bytes(b"12345678" * 9)
    with pytest.raises(hp.HeadPruneError, match="is damaged"):
        hp.load(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights": "../other.safetensors"}, "names '../other.safetensors' as its weights"),
        ({"class": "transformers.models.bert.modeling_bert.logger"}, "has no transformers"),
        ({"class": "transformers.models.bert.tokenization_bert.BertTokenizer"}, "has no transformers"),
        ({"class": "transformers.utils.logging.get_logger"}, "cannot build"),
        ({"class": "os.system"}, "cannot build"),
        ({"attention": "kernels-community/flash-attn"}, "code that would run here"),
    ],
)
def test_a_sidecar_from_elsewhere(change: dict[str, str], told: str, tmp_path: Path) -> None:
    """What a folder says is data: no file outside it is read, nothing but a model is built, no kernel is fetched."""
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    path = folder / "headprune.json"
    path.write_text(json.dumps(opened(path) | change))
    with pytest.raises(hp.HeadPruneError, match=told):
        hp.load(folder)


def test_a_config_that_brings_code(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(folder, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(hp.HeadPruneError, match=r"config\.json does not load"):
        hp.load(folder)
    assert not (tmp_path / "ran").exists()


def test_text_of_the_zoo_runs() -> None:
    assert made(guesses(bert()[0])[0]).keys() == text().keys()


def test_the_command_line_tells_too() -> None:
    """It silences libraries' warnings, but not these."""
    from headprune.cli.session import quieten

    with warnings.catch_warnings(record=True) as told:
        quieten(False)
        warnings.warn("a library's", stacklevel=1)
        probe._warn("a folder was edited")
    assert [str(w.message) for w in told] == ["headprune: a folder was edited."]


def test_a_flipped_bit_in_a_buffer_is_an_error(tmp_path: Path) -> None:
    """At positions that the made-up input does not reach, the answers stay as they were."""
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    file = folder / probe.FILE
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x01
    file.write_bytes(bytes(content))
    with pytest.raises(hp.HeadPruneError, match=r"headprune.safetensors is damaged: it is not what was saved"):
        hp.load(folder)


def test_a_changed_tokenizer_is_told(tmp_path: Path) -> None:
    """It changes every measurement, but not the model's answers to token ids."""
    folder = hp.save(pruned("bert")[0], tmp_path / "m", processor=tokenizer())
    hp.load(folder, as_saved=True)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"good"', '"goof"', 1))
    with pytest.warns(UserWarning, match=r"not as saved: tokenizer.json"):
        hp.load(folder)
    with pytest.raises(hp.HeadPruneError, match=r"tokenizer.json is damaged"):
        hp.load(folder, as_saved=True)
    (folder / "README.md").write_text("mine")
    path.unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        hp.load(folder)  # a model without its tokenizer, and with a card of its own


def test_checksums_lead_nowhere_else(tmp_path: Path) -> None:
    folder = hp.save(pruned("bert")[0], tmp_path / "m")
    path = folder / "headprune.json"
    (tmp_path / "secret").write_text("x")
    path.write_text(json.dumps(opened(path) | {"files": {"../secret": "0", "/etc/passwd": "0"}}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headprune")
        hp.load(folder)
    path.write_text(json.dumps(opened(path) | {"files": ["x"]}))
    with pytest.raises(hp.HeadPruneError, match="files is"):
        hp.load(folder)
