"""Attention weights on any traced model, and what they add up to: against transformers' own and against loops over numbers."""

import base64
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from PIL import Image
from torch import Tensor, nn

import headprune as hp
from headprune.app.pictures import figures_of
from tests.support import odd
from tests.support.commands import run
from tests.support.documents import METRICS
from tests.support.errors import refuses
from tests.support.folders import common, tokenizer
from tests.support.plain import HEADS, SIZE, WIDTH, Attention, noise
from tests.support.reports import reported
from tests.support.stays import sliding
from tests.support.zoo import ZOO, randomise, sizes, swin, t5, text, whisper

SOME_WEIGHTS = "headprune.seeing.maps._MOST"  # that are computed at once


def gpt_oss(attention: str = "eager") -> tuple[nn.Module, Any]:
    some = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    config = tf.GptOssConfig(**sizes(attention, num_local_experts=2, num_experts_per_tok=1) | some)
    return randomise(tf.GptOssForCausalLM(config)), text()


MODELS = {n: ZOO[n] for n in ("bert", "distilbert", "gpt2", "llama", "vit", "t5")} | {"gpt_oss": gpt_oss, "sliding": sliding, "whisper": whisper}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_eager_attention_returns(name: str) -> None:
    """The model computes them in a fused kernel, and was not asked for them."""
    model, example = MODELS[name]() if name == "gpt_oss" else MODELS[name]("sdpa")
    eager, _ = MODELS[name]("eager")
    eager.load_state_dict(model.state_dict())
    out = eager(**example, output_attentions=True)
    kinds = {layer.name: layer.kind for layer in hp.find_attention(model, example)}
    left = {kind: iter(out.get(f"{kind}_attentions", out.get("attentions"))) for kind in kinds.values()}
    for layer, weights in hp.attention_weights(model, example).items():
        whole = next(left[kinds[layer]])
        real, rows = example.get("attention_mask"), torch.ones(len(weights), weights.shape[2], dtype=torch.bool)
        if real is not None and real.shape[1] == weights.shape[2]:
            rows = real == 1  # queries that are padding may look anywhere
        a, b = (w.movedim(2, 1)[rows] for w in (weights[..., : whole.shape[-1]], whole))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        total = weights.movedim(2, 1)[rows].sum(-1)  # with the sink, where there is one
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=1e-5)
    assert all(next(left[kind], None) is None for kind in kinds.values())


@pytest.mark.parametrize("name", ["mha", "torch_transformer"])
def test_weights_of_plain_modules(name: str) -> None:
    """Those of `nn.MultiheadAttention` are what it returns itself, head by head."""
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    result = hp.attention_weights(model, example, layers)
    expected: dict[str, Tensor] = {}
    ask = {"need_weights": True, "average_attn_weights": False}
    for layer in layers:
        module = model.get_submodule(layer.module)
        module.register_forward_pre_hook(lambda m, args, kw: (args, kw | ask), with_kwargs=True)
        module.register_forward_hook(lambda m, args, out, n=layer.name: expected.update({n: out[1].detach()}))
    with torch.enable_grad():  # the fast path would not call the module
        model(*example)
    torch.testing.assert_close(dict(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "tokens"), [(2, 8), (HEADS, 8), (3, HEADS), (2, 3)])
@pytest.mark.parametrize("kind", [odd.HeadsFirst, odd.EagerHeadsFirst, odd.Folded, odd.HeadsThird, odd.AsManyWindows])
def test_weights_of_heads_in_any_dimension(kind: type[Attention], rows: int, tokens: int) -> None:
    """Also with as many examples, tokens or windows as heads, and with fewer tokens."""
    windows, tokens = (HEADS, 2 * HEADS) if kind is odd.AsManyWindows else (1, tokens)
    model, x = nn.Sequential(randomise(kind())), noise(rows, tokens, WIDTH)
    q, k, _ = (t.unflatten(2, (windows, -1)) for t in Attention.split(model[0], x))
    scale = 3 if kind in (odd.EagerHeadsFirst, odd.HeadsThird) else SIZE**0.5
    expected = (q @ k.mT / scale).softmax(-1).flatten(2, 3).detach()
    torch.testing.assert_close(hp.attention_weights(model, x)["0"], expected, rtol=1e-4, atol=1e-5)
    entropies = [head.entropy for head in hp.profile_heads(model, [(x, None)])["0"]]
    assert entropies == pytest.approx(torch.special.entr(expected).sum(-1).mean((0, 2)).tolist(), rel=1e-4)


@pytest.mark.parametrize(("kind", "order", "scale"), [
    (odd.GroupsApart, [0, 0, 1, 1], 3.0), (odd.GroupsLast, [0, 1, 0, 1], SIZE**0.5),
])  # fmt: skip
def test_weights_of_heads_in_groups_apart(kind: type[odd.KeyValueGroups], order: list[int], scale: float) -> None:
    model, x = nn.Sequential(randomise(kind())), noise(3, HEADS, WIDTH)
    q, k = (p(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (model[0].qkv, model[0].k))
    expected = (q @ k[:, order].mT / scale).softmax(-1).detach()
    torch.testing.assert_close(hp.attention_weights(model, x)["0"], expected, rtol=1e-4, atol=1e-5)


def test_windows_stand_one_behind_the_other_and_are_grids() -> None:
    model, example = swin()
    # Of the last layer: [images * windows, heads, queries, keys].
    expected = swin("eager")[0](**example, output_attentions=True).attentions[0].view(2, 4, 4, 16, 16)
    first, *_, last = hp.attention_weights(model, example).values()
    torch.testing.assert_close(last, expected.transpose(1, 2).flatten(2, 3), rtol=1e-4, atol=1e-5)
    at = torch.tensor([divmod(i, 4) for i in range(16)]).float()
    for h, profile in enumerate(next(iter(hp.profile_heads(model, [example]).values()))):
        far = first.unflatten(2, (4, 16))[:, h] * torch.cdist(at, at)
        assert profile.distance == pytest.approx(float(far.sum(-1).mean()), rel=1e-4)
        assert (profile.first, profile.queries) == (None, 128)


@pytest.mark.parametrize("name", ["bert", "gpt_oss", "sliding", "t5", "swin"])
def test_blocks_add_up_to_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of one query, sums over weights are as at once."""
    model, example = swin() if name == "swin" else MODELS[name]()
    layers = hp.find_attention(model, example)
    at_once = hp.profile_heads(model, [example], layers)
    monkeypatch.setattr(SOME_WEIGHTS, 1)
    for layer, heads in hp.profile_heads(model, [example], layers).items():
        for a, b in zip(at_once[layer], heads, strict=True):
            assert figures(a) == pytest.approx(figures(b), rel=1e-4, abs=1e-6)


def figures(profile: hp.HeadProfile) -> dict[str, float]:
    """Every figure that the profile has."""
    return {k: v for k, v in vars(profile).items() if isinstance(v, float | int)}


def by_hand(
    weights: Any, ids: Any, real: Any, separators: set[int], common: Counter[int], causal: bool
) -> dict[str, float]:
    """The figures of one head from nested lists, one number after the other.

    Args:
        weights: [examples][queries][keys].
        ids, real: [examples][positions].
    """
    sums: dict[str, list[float]] = {}

    def note(figure: str, value: float) -> None:
        sums.setdefault(figure, []).append(value)

    far, mass = 0.0, 0.0
    for table, tokens, there in zip(weights, ids, real, strict=True):
        positions = [j for j, r in enumerate(there) if r]
        ranked = sorted(common[tokens[j]] for j in positions)
        rare = [j for j in positions if common[tokens[j]] <= ranked[1]]
        for i in positions:
            row = table[i]
            sight = [j for j in positions if row[j] > 0]
            if len(sight) < 2:
                continue
            entropy = -sum(row[j] * math.log(row[j]) for j in sight)
            note("entropy", entropy)
            note("evenness", entropy / math.log(len(sight)))
            note("largest", max(row))
            note("itself", row[i])
            note("first", row[positions[0]])
            if i - 1 in sight:
                note("previous", row[i - 1])
            if i + 1 in sight and not causal:
                note("next", row[i + 1])
            if marks := [j for j in sight if tokens[j] in separators]:
                note("separator", sum(row[j] for j in marks))
            if same := [j for j in sight if tokens[j] == tokens[i] and j != i]:
                note("same", sum(row[j] for j in same))
            note("even", sum(abs(i - j) for j in sight) / len(sight))
            far, mass = far + sum(row[j] * abs(i - j) for j in sight), mass + sum(row[j] for j in sight)
            top = max(range(len(row)), key=lambda j: row[j])
            if not causal:
                note("rare", float(top in rare))
                note("rare_chance", len(rare) / len(positions))
            note(f"at {top - i}", 1.0)
    count = len(sums["entropy"])
    means = {k: sum(v) / len(v) for k, v in sums.items() if not k.startswith("at ") and (k != "same" or len(v) >= 20)}
    at = {int(k[3:]): len(v) / count for k, v in sums.items() if k.startswith("at ") and abs(int(k[3:])) <= 8}
    distance = {"distance": far / mass, "reach": far / mass / means.pop("even")}
    return means | distance | {"queries": count, "pointing": max(at.values())}


def repeated_text(left: bool = False) -> dict[str, Tensor]:
    """Few different tokens, so that they come again, with separators, and rows of different length."""
    ids = torch.randint(10, 16, (4, 14), generator=torch.Generator().manual_seed(0))
    ids[:, 5], ids[:, 13] = 3, 3
    ids[1, 2], ids[2, 4] = 17, 18  # rare ones
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[3, 3:] = 0
    return {k: t.flip(1) if left else t for k, t in (("input_ids", ids), ("attention_mask", mask))}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_figures_are_those_of_a_loop(name: str, left: bool) -> None:
    """Padding counts neither as a query nor as a key, wherever it stands, and batches do not matter."""
    model, batch = MODELS[name]()[0], repeated_text(left)
    layers = hp.find_attention(model, batch)
    singly = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
    runs = [hp.profile_heads(model, batches, layers, separators=[3]) for batches in ([batch], singly)]
    weights = hp.attention_weights(model, batch, layers)
    ids, real = batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    counts = Counter(batch["input_ids"][batch["attention_mask"] == 1].tolist())
    for layer in layers:
        for h in range(layer.num_heads):
            table = weights[layer.name][:, h].double().tolist()
            expected = by_hand(table, ids, real, {3}, counts, layer.kind == "decoder")
            for profiles in runs:
                profile = profiles[layer.name][h]
                assert {k: figures(profile)[k] for k in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
                assert (profile.next is None, profile.rare is None) == (layer.kind == "decoder",) * 2


def test_what_a_sink_takes() -> None:
    """GPT-OSS's softmax has a column more, which is no token: shares are of the whole, distances of what tokens get."""
    model, batch = gpt_oss()[0], repeated_text()
    weights, counted = hp.attention_weights(model, batch), batch["attention_mask"] == 1
    for name, heads in hp.profile_heads(model, [batch]).items():
        for h, profile in enumerate(heads):
            table = weights[name][:, h][counted]
            assert profile.sink == pytest.approx(float(table[:, -1].mean()), abs=1e-5)
            assert profile.queries == len(table)  # the first token, too, has a choice: itself or the sink


class Looks(nn.Module):
    """One layer whose heads look where a bias on their scores sends them: ``[heads, queries, keys]``."""

    def __init__(self, biases: Tensor) -> None:
        super().__init__()
        self.biases = biases
        width = 4 * len(biases)
        self.embed, self.q, self.k = nn.Embedding(100, width), nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.config = tf.PretrainedConfig()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def bias(self, input_ids: Tensor) -> Tensor:
        return self.biases[None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q * 0.01, k, v, self.bias(input_ids))
        return self.o(out.transpose(1, 2).flatten(2))


def test_planted_roles_are_recognised() -> None:
    """Each head was built to look at one place; the role says so, and for which figure."""
    at = torch.arange(48)
    away = at - at[:, None]
    ids = torch.randint(10, 14, (1, 48), generator=torch.Generator().manual_seed(0))
    ids[0, 24], ids[0, 4] = 3, 50
    same = (ids[0][:, None] == ids[0]) & (away != 0)
    planted = {
        "previous token": away == -1, "next token": away == 1, "itself": away == 0, "relative position": away == 3,
        "first token": (at == 0).expand(48, -1), "separator": (ids[0] == 3).expand(48, -1), "same token": same,
        "rare words": (ids[0] == 50).expand(48, -1), "near": away.abs() <= 3, "broad": away > 48,
    }  # fmt: skip
    most_often = (away == 0) * math.log(0.4 / 0.6 * 47)  # 40 % on the position itself: not half, but the largest
    model = randomise(Looks(torch.stack([*(m * 12.0 for m in planted.values()), most_often])), seed=1)
    (heads,) = hp.profile_heads(model, [{"input_ids": ids}], separators=[3]).values()
    assert [p.role for p in heads] == [*planted, "relative position"]
    assert all(p.because and "%" in p.because for p in heads)
    assert heads[3].because.startswith("its largest weight is 3 tokens on for ")
    assert heads[-1].because.startswith("its largest weight is on the position itself for ")


@pytest.mark.parametrize("positions", [24, 80])
def test_induction_and_duplicate_token_heads(positions: int) -> None:
    """By Olsson's definition: on random tokens that come twice, the share of what followed the first time."""

    class Copies(Looks):
        """Head 0 looks at what followed the token before, head 1 at the token before."""

        def bias(self, input_ids: Tensor) -> Tensor:
            before, tokens = F.pad(input_ids[:, :-1], (1, 0), value=-1), input_ids.shape[1]
            hits = [input_ids[:, :, None] == other[:, None] for other in (before, input_ids)]
            bias = (torch.stack(hits, 1) & ~torch.eye(tokens, dtype=torch.bool)) * 20.0
            return bias.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))

    model = Copies(torch.zeros(2, 1, 1))
    model.config = tf.PretrainedConfig(max_position_embeddings=positions)
    batch = {"input_ids": torch.randint(10, 90, (3, 9), generator=torch.Generator().manual_seed(0))}
    profiles = hp.profile_heads(randomise(model), [batch])
    ((first, second),) = profiles.values()
    assert (profiles.repeated, first.role, second.role) == (4, "induction", "duplicate token")
    assert min(first.induction or 0, second.duplicate or 0) > 0.95
    assert max(first.duplicate or 0, second.induction or 0) < 0.05


def test_induction_where_positions_begin_behind_the_padding() -> None:
    """RoBERTa has two rows of positions that no token uses."""
    config = tf.RobertaConfig(**common(vocab_size=100, pad_token_id=1, max_position_embeddings=24, is_decoder=True))
    profiles = hp.profile_heads(randomise(tf.RobertaForCausalLM(config)), [{"input_ids": torch.arange(5, 19)[None]}])
    assert profiles.repeated == 4


def test_the_grid_of_an_image() -> None:
    """Distances are between patches, in both directions; [CLS] has no place; text's figures are not there."""
    config = tf.ViTConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=48, image_size=(8, 12), patch_size=4,
        num_channels=1,
    )  # fmt: skip
    model = randomise(tf.ViTForImageClassification(config))
    batch = {"pixel_values": torch.randn(2, 1, 8, 12, generator=torch.Generator().manual_seed(0))}
    profiles = hp.profile_heads(model, [batch])
    assert profiles.grid is not None
    assert (profiles.grid.rows, profiles.grid.columns, profiles.grid.before) == (2, 3, 1)
    (heads,), (weights,) = profiles.values(), hp.attention_weights(model, batch).values()
    at = torch.tensor([divmod(i, 3) for i in range(6)]).float()
    for h, profile in enumerate(heads):
        among = weights[:, h, 1:, 1:]
        assert profile.distance == pytest.approx(float((among * torch.cdist(at, at)).sum() / among.sum()), rel=1e-5)
        assert profile.first == pytest.approx(float(weights[:, h, :, 0].mean()), rel=1e-5)
        assert (profile.previous, profile.next, profile.same, profile.position) == (None,) * 4


def test_cross_attention_has_no_previous_token() -> None:
    """Its keys are the source's: the source's first token and padding, and no places."""
    model, example = t5()
    weights, profiles = hp.attention_weights(model, example), hp.profile_heads(model, [example], separators=[])
    by_kind = {layer.kind: layer.name for layer in hp.find_attention(model, example)}
    for h, profile in enumerate(profiles[by_kind["cross"]]):
        table = weights[by_kind["cross"]][:, h]
        assert profile.queries == 15
        assert profile.first == pytest.approx(float(table[..., 0].mean()), rel=1e-4)
        assert profile.largest == pytest.approx(float(table.amax(-1).mean()), rel=1e-4)
        assert (profile.previous, profile.itself, profile.distance, profile.position) == (None,) * 4
    decoder = profiles[by_kind["decoder"]][0]
    assert decoder.previous is not None
    assert decoder.induction is None  # of models that are decoders only


def test_odd_inputs() -> None:
    """One token has no choice; nobody looks at a plain module's padding; CLIP, of two vocabularies, raised NotImplementedError."""
    model = randomise(Looks(torch.zeros(4, 1, 1)))
    (heads,) = hp.profile_heads(model, [{"input_ids": torch.tensor([[12]])}]).values()
    assert {(p.role, p.queries) for p in heads} == {("unknown", 0)}
    model, example = ZOO["mha"]()
    assert hp.profile_heads(model, [(example, None)])["encoder.layers.0.self_attn"][0].queries == 16  # 2 are padding
    part = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
    vision = {**part, "image_size": 16, "patch_size": 8}
    config = tf.CLIPConfig(text_config={**part, "vocab_size": 300}, vision_config=vision, projection_dim=16)
    batch = {"input_ids": torch.arange(5, 19).view(2, 7), "pixel_values": torch.randn(2, 3, 16, 16)}
    assert [len(heads) for heads in hp.profile_heads(randomise(tf.CLIPModel(config)), [batch]).values()] == [4, 4]


def test_never_a_whole_matrix_of_a_long_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 tokens, blocks of about 20,000 weights are computed, not 1.4 million."""
    model, _ = ZOO["llama"]()
    layers, counts = hp.find_attention(model, text()), []
    monkeypatch.setattr(SOME_WEIGHTS, 20_000)
    softmax = Tensor.softmax
    monkeypatch.setattr(Tensor, "softmax", lambda *a, **k: counts.append((out := softmax(*a, **k)).numel()) or out)
    batch = {"input_ids": torch.randint(3, 90, (1, 600), generator=torch.Generator().manual_seed(0))}
    hp.profile_heads(model, [batch], layers[:1])
    assert max(counts) <= 20_000
    assert sum(counts) >= 600 * 600 * 6


def test_counts_are_written_in_full() -> None:
    """1,088 queries were 1.09e+03."""
    model, example = ZOO["bert"]()
    (_, profile), *_ = hp.profile_heads(model, [example]).top(1)
    assert figures_of(replace(profile, queries=1088)).plain.startswith("queries 1,088, entropy ")


def test_mistakes_and_layers_that_cannot_be_seen() -> None:
    model, example = ZOO["bert"]()
    layers = hp.find_attention(model, example)
    refuses("no examples to look at", hp.profile_heads, model, [])
    refuses("not a list of batches", hp.profile_heads, model, example)
    refuses("does not run", hp.attention_weights, model, {"input_ids": torch.tensor([[1000]])}, layers)
    other = hp.AttentionLayer("classifier", 9, "encoder", 4, 4, 8)
    refuses("cannot be seen", hp.profile_heads, model, [example], [other])
    model.train()
    profiles = hp.profile_heads(model, [example], [*layers, other])
    assert model.training  # it is left as it was
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(repr(profiles)) < 300  # the repr of 72 heads had 43,000 characters
    (_, best), *_ = profiles.top(1)
    assert best.clarity == max(p.clarity for heads in profiles.values() for p in heads)
    assert f"HeadProfile({best.role}: " in repr(best)
    assert profiles._repr_html_().count("<tr>") == 10
    assert profiles["classifier"] == []
    assert "cannot be seen" in profiles.unseen["classifier"]
    assert all(len(profiles[layer.name]) == 4 for layer in layers)


# -- headprune show, heads.json, its pictures and its section of the report -------------------------

NASTY = "good [bold]film[/] $x$ \x1b[31m <b> |a|"
LABELS = ("[bold]", "$x", "$y_{", "<b>", "|a|")


def shown(*arguments: Any) -> dict[str, Any]:
    """The document that a command prints."""
    document: dict[str, Any] = json.loads(run("show", *arguments, "--json", "-q").stdout)
    return document


@pytest.mark.drawn
def test_a_text_and_one_head_of_it(bert_folder: Path, tmp_path: Path) -> None:
    """All heads, and what they do; of one head, for each token the largest weights first, as shares."""
    pictures = tmp_path / "all.png", tmp_path / "one.png"
    everything = run("show", bert_folder, "--text", "good film", "-o", pictures[0], "-q").stdout
    assert all(text in everything for text in ("L0", "H3", "Roles on 1 example, 4 tokens"))
    one = run("show", bert_folder, "--text", "good dull fun", "--head", "l1.h2", "-o", pictures[1], "-q").stdout
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    weights = list(hp.attention_weights(model, dict(tokenizer()("good dull fun", return_tensors="pt"))).values())
    tokens = ["[CLS]", "good", "dull", "fun", "[SEP]"]
    lines = [line.split() for line in one.splitlines()]
    for token, row in zip(tokens, weights[1][0, 2], strict=True):
        best = int(row.argmax())
        line = next(line for line in lines if line[:1] == [token] and line[2:])
        assert line[1] == tokens[best]
        assert abs(float(line[2].rstrip("%")) - 100 * float(row[best])) < 0.8
    assert all(Image.open(picture).size[0] > 100 for picture in pictures)
    for head, message in (("L9.H1", "is no head"), ("L1.H9", "has no head 9")):
        assert message in run("show", bert_folder, "--text", "good", "--head", head, code=1).stderr


def test_the_document(bert_folder: Path, data_folder: Path) -> None:
    """Profiles over data, samples within 1/510 of the weights, small."""
    heads = shown(bert_folder, "-d", data_folder)
    assert heads["examples"] > 20
    assert [len(layer["heads"]) for layer in heads["layers"]] == [4, 4]
    assert all(p["role"] and p["because"] for layer in heads["layers"] for p in layer["heads"])
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    for sample in heads["samples"]:
        ids = torch.tensor([tokenizer().convert_tokens_to_ids(sample["positions"]["input"]["labels"])])
        weights = hp.attention_weights(model, {"input_ids": ids}).values()
        for layer, whole in zip(sample["layers"], weights, strict=True):
            held = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(layer["shape"])
            assert np.abs(held / 255 * layer["scale"] - whole[0].numpy()).max() <= 1 / 510 + 1e-5
    assert len(json.dumps(heads)) < 100_000


@pytest.mark.drawn
def test_a_text_is_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it steer the terminal, the picture's formulas or the report's tables."""
    folder, words = tmp_path / "nasty", tokenizer()
    words.add_tokens(list(LABELS))
    randomise(tf.BertForSequenceClassification(tf.BertConfig(**common()))).save_pretrained(folder)
    words.save_pretrained(folder)
    for head in ([], ["--head", "L0.H1"]):
        assert "\x1b" not in run("show", folder, "--text", NASTY, "-q", "-o", tmp_path / "a.png", *head).stdout
    document = shown(folder, "--text", f"{' '.join(LABELS)} \u202e")
    assert document["samples"][0]["positions"]["input"]["labels"][1 : 1 + len(LABELS)] == list(LABELS)
    document["samples"][0]["title"] = NASTY
    heads = {k: v for k, v in document.items() if k not in ("kind", "schema")}
    heads["layers"] = heads["layers"][:1]  # as many as the run has
    written = reported(tmp_path / "r", METRICS, heads=heads)
    assert "one example (`good [bold]film[/] $x$ �[31m <b> |a|`)" in written
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for head in ([], ["--head", "L0.H1"]):
        coloured = run("show", folder, "--text", " ".join(LABELS), "-q", *head).stdout
        assert "\x1b[38;2;" in coloured
        plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
        assert "\x1b" not in plain
        assert all(label in plain for label in LABELS)


@pytest.mark.drawn
@pytest.mark.parametrize(("side", "rows"), [(8, None), (32, 6)])
def test_an_image(side: int, rows: int | None, tmp_path: Path) -> None:
    """A grid of patches behind [CLS]; rows of a large one are held for a few patches only."""
    folder, file, patches = tmp_path / "vit", tmp_path / "image.png", (side // 4) ** 2
    config = tf.ViTConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, image_size=side, patch_size=4,
        num_channels=3, num_labels=2,
    )  # fmt: skip
    randomise(tf.ViTForImageClassification(config)).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file)
    for head in ([], ["--head", "L0.H1"]):
        run("show", folder, "--image", file, "-o", tmp_path / "a.png", "-q", *head)
    document = shown(folder, "--image", file)
    (sample,) = document["samples"]
    assert sample["positions"]["input"]["grid"] == [side // 4, side // 4]
    assert sample["positions"]["input"]["image"].startswith("data:image/png;base64,")
    assert len(sample["positions"]["input"]["labels"]) == 1 + patches
    assert sample["layers"][0]["shape"] == [2, rows or 1 + patches, 1 + patches]
    assert document["unit"] == "patches"
    assert "No such file" in run("show", folder, "--image", tmp_path / "b.png", code=1).stderr
    file.write_text("no image")
    assert "cannot be read as an image" in run("show", folder, "--image", file, code=1).stderr


def test_encoder_and_decoder(tmp_path: Path) -> None:
    """The decoder reads the model's own answer; cross-attention goes from it to the text."""
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "d_ff": 16}
    config = tf.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=29)
    randomise(tf.T5ForConditionalGeneration(config)).save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    (sample,) = shown(tmp_path / "t5", "--text", "good dull fun")["samples"]
    assert set(sample["positions"]) == {"source", "target"}
    expected = [("source", "source"), ("target", "target"), ("target", "source")]
    assert [(a["queries"], a["keys"]) for a in sample["layers"]] == expected


@pytest.mark.drawn
def test_a_run_says_what_the_heads_do(scored: Path) -> None:
    """`score` writes heads.json, its picture and the section; `report` writes the same again."""
    heads, report = json.loads((scored / "heads.json").read_text()), scored / "report.md"
    assert [len(layer["heads"]) for layer in heads["layers"]] == [4, 4]
    assert (scored / "heads.png").exists()
    text = report.read_text()
    assert "## What the heads do" in text
    run("report", scored)
    assert report.read_text() == text
    (scored / "heads.json").unlink()
    run("report", scored)
    assert "What the heads do" not in report.read_text()
