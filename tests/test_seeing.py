"""Attention weights on any traced model, and what they add up to: against transformers' own and against loops over numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.seeing import maps
from headprune.seeing.profiles import Profiler
from headprune.seeing.roles import RULES, with_role
from tests.support.zoo import ZOO, randomise, sizes, text


def gpt_oss(attention: str = "eager") -> tuple[nn.Module, Any]:
    config = tf.GptOssConfig(
        **sizes(
            attention,
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
        | {"sliding_window": 4}
    )
    return randomise(tf.GptOssForCausalLM(config)), text()


def mistral(attention: str = "sdpa") -> tuple[nn.Module, Any]:
    """A window of 3 tokens."""
    config = tf.MistralConfig(**sizes(attention, num_hidden_layers=2, num_key_value_heads=2, sliding_window=3))
    return randomise(tf.MistralForCausalLM(config)), text()


def bart(attention: str = "sdpa") -> tuple[nn.Module, Any]:
    config = tf.BartConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40, attn_implementation=attention,
    )  # fmt: skip
    return randomise(tf.BartForConditionalGeneration(config)), text(decoder=5)


MODELS = {
    **{n: ZOO[n] for n in ("bert", "distilbert", "gpt2", "llama", "vit", "t5")}, "gpt_oss": gpt_oss, "mistral": mistral, "bart": bart,
}  # fmt: skip


def returned(model: nn.Module, example: Any) -> dict[str, list[Tensor]]:
    """What an eager transformers model returns: by kind of layer, in the order of layers."""
    with torch.no_grad():
        out = model(**example, output_attentions=True)
    if not hasattr(out, "cross_attentions") or out.get("encoder_attentions") is None:
        return {"self": list(out.attentions)}
    return {
        "encoder": list(out.encoder_attentions), "decoder": list(out.decoder_attentions), "cross": list(out.cross_attentions),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_eager_attention_returns(name: str) -> None:
    """The model computes them in a fused kernel, and was not asked for them."""
    make = MODELS[name]
    model, example = make() if name == "gpt_oss" else make("sdpa")
    eager, _ = make("eager")
    eager.load_state_dict(model.state_dict())
    expected = returned(eager, example)
    found = hp.attention_weights(model, example)
    kinds = {layer.name: layer.kind if len(expected) > 1 else "self" for layer in hp.find_attention(model, example)}
    at: Counter[str] = Counter()
    for layer, weights in found.items():
        kind = kinds[layer]
        whole = expected[kind][at[kind]]
        at[kind] += 1
        real = example.get("attention_mask")
        rows = torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool)
        if real is not None and real.shape[1] == weights.shape[2]:
            rows = real == 1  # queries that are padding may look anywhere
        a, b = (w.movedim(2, 1)[rows] for w in (weights[..., : whole.shape[-1]], whole))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        total = weights.movedim(2, 1)[rows].sum(-1)  # with the sink, where there is one
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=1e-5)
    assert at == {kind: len(layers) for kind, layers in expected.items()}


@pytest.mark.parametrize("name", ["mha", "torch_transformer"])
def test_weights_of_plain_modules(name: str) -> None:
    """Those of `nn.MultiheadAttention` are what it returns itself when it is asked, head by head."""
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    found = hp.attention_weights(model, example, layers)
    asked: dict[str, Tensor] = {}

    def ask(layer: hp.AttentionLayer) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

        def after(module: nn.Module, args: Any, output: Any) -> None:
            asked[layer.name] = output[1].detach()

        module = model.get_submodule(layer.module)
        return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)

    with torch.enable_grad():  # the fast path would not call the module
        hooks = [hook for layer in layers for hook in ask(layer)]
        model(*example)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        torch.testing.assert_close(found[layer.name], asked[layer.name], rtol=1e-4, atol=1e-5)


def swin(attention: str = "sdpa") -> tuple[nn.Module, Any]:
    config = tf.SwinConfig(
        image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[2], num_heads=[4], window_size=4, num_labels=3,
        attn_implementation=attention,
    )  # fmt: skip
    pixels = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return randomise(tf.SwinForImageClassification(config)), {"pixel_values": pixels}


def test_windows_stand_one_behind_the_other() -> None:
    model, example = swin()
    eager, _ = swin("eager")
    with torch.no_grad():
        expected = eager(**example, output_attentions=True).attentions[
            0
        ]  # of the last layer: [images * windows, heads, queries, keys]
    found = list(hp.attention_weights(model, example).values())[-1]
    assert found.shape == (2, 4, 64, 16)
    torch.testing.assert_close(
        found, expected.view(2, 4, 4, 16, 16).transpose(1, 2).flatten(2, 3), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["bert", "gpt_oss", "mistral", "t5", "swin"])
def test_blocks_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one query, everything is as at once: weights, and sums over them."""
    model, example = swin() if name == "swin" else MODELS[name]()
    layers = hp.find_attention(model, example)
    whole = hp.attention_weights(model, example, layers)

    def parts(weights: maps.Weights) -> Tensor:
        blocks = list(weights.blocks(1))
        assert [start for start, _ in blocks] == list(range(0, weights.shape[2], blocks[0][1].shape[2]))
        found = torch.cat([some for _, some in blocks], dim=2)
        assert tuple(found.shape) == weights.shape
        return found

    size = 1 if name == "swin" else 3
    one = {k: v[:size] for k, v in example.items()}
    with torch.no_grad(), maps.attention_maps(model, layers, size, parts) as found:
        model(**one)
    for layer in layers:
        torch.testing.assert_close(found[layer.name][-1], whole[layer.name][:size], rtol=1e-5, atol=1e-6)
    at_once = hp.profile_heads(model, [example], layers)
    monkeypatch.setattr(maps, "_MOST", 1)
    for layer in layers:
        for a, b in zip(at_once[layer.name], hp.profile_heads(model, [example], layers)[layer.name], strict=True):
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
            marks = [j for j in sight if tokens[j] in separators]
            if marks:
                note("separator", sum(row[j] for j in marks))
            same = [j for j in sight if tokens[j] == tokens[i] and j != i]
            if same:
                note("same", sum(row[j] for j in same))
            note("distance", sum(row[j] * abs(i - j) for j in sight))
            note("even", sum(abs(i - j) for j in sight) / len(sight))
            far, mass = far + sum(row[j] * abs(i - j) for j in sight), mass + sum(row[j] for j in sight)
            top = max(range(len(row)), key=lambda j: row[j])
            if not causal:
                note("rare", float(top in rare))
                note("rare_chance", len(rare) / len(positions))
            note(f"at {top - i}", 1.0)
    count = len(sums["entropy"])
    found = {k: sum(v) / len(v) for k, v in sums.items() if not k.startswith("at ") and (k != "same" or len(v) >= 20)}
    found["distance"] = far / mass
    found["reach"] = found["distance"] / found.pop("even")
    at = {int(k[3:]): len(v) / count for k, v in sums.items() if k.startswith("at ") and abs(int(k[3:])) <= 8}
    found["queries"] = count
    found["pointing"] = max(at.values())
    return found


def repeated_text(left: bool = False) -> dict[str, Tensor]:
    """Few different tokens, so that they come again, with separators, and rows of different length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 16, (4, 14), generator=generator)
    ids[:, 5], ids[:, 13] = 3, 3
    ids[1, 2], ids[2, 4] = 17, 18  # rare ones
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[3, 3:] = 0
    return (
        {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
        if left
        else {"input_ids": ids, "attention_mask": mask}
    )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_figures_are_those_of_a_loop(name: str, left: bool) -> None:
    """Padding counts neither as a query nor as a key, wherever it stands, and batches do not matter."""
    model, _ = MODELS[name]()
    batch = repeated_text(left)
    layers = hp.find_attention(model, batch)
    found = hp.profile_heads(model, [batch], layers, separators=[3])
    parts = hp.profile_heads(
        model, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)], layers, separators=[3]
    )
    weights = hp.attention_weights(model, batch, layers)
    real = batch["attention_mask"].tolist()
    counts = Counter(batch["input_ids"][batch["attention_mask"] == 1].tolist())
    for layer in layers:
        for h, profile in enumerate(found[layer.name]):
            table = weights[layer.name][:, h].double()
            expected = by_hand(table.tolist(), batch["input_ids"].tolist(), real, {3}, counts, layer.kind == "decoder")
            got = figures(profile)
            assert {k: got[k] for k in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert (profile.next is None, profile.rare is None) == (layer.kind == "decoder",) * 2
            one = figures(parts[layer.name][h])
            assert {k: one[k] for k in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_what_a_sink_takes() -> None:
    """GPT-OSS's softmax has a column more, which is no token: shares are of the whole, distances of what tokens get."""
    model, _ = gpt_oss()
    batch = repeated_text()
    layers = hp.find_attention(model, batch)
    found, weights = hp.profile_heads(model, [batch], layers), hp.attention_weights(model, batch, layers)
    for layer in layers:
        counted = (batch["attention_mask"] == 1)[:, None].expand(-1, 4, -1)
        for h, profile in enumerate(found[layer.name]):
            table = weights[layer.name][:, h][counted[:, h]]
            assert profile.sink == pytest.approx(float(table[:, -1].mean()), abs=1e-5)
            assert profile.queries == len(table)  # the first token, too, has a choice: itself or the sink


class Looks(nn.Module):
    """One layer whose heads look where they are told: each adds a bias to its scores."""

    def __init__(self, biases: Tensor) -> None:
        super().__init__()
        self.biases = biases  # [heads, queries, keys]
        width = 4 * len(biases)
        self.embed, self.q, self.k = nn.Embedding(100, width), nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q * 0.01, k, v, self.biases[None])
        return self.o(out.transpose(1, 2).flatten(2))


def planted(length: int = 48) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """Heads with a role each."""
    at = torch.arange(length)
    away = at - at[:, None]
    ids = torch.randint(10, 14, (1, length), generator=torch.Generator().manual_seed(0))
    ids[0, length // 2] = 3
    ids[0, 4] = 50
    same = (ids[0][:, None] == ids[0]) & (away != 0)
    wanted = {
        "previous token": away == -1, "next token": away == 1, "itself": away == 0, "relative position": away == 3,
        "first token": (at == 0).expand(length, -1), "separator": (ids[0] == 3).expand(length, -1), "same token": same,
        "rare words": (ids[0] == 50).expand(length, -1), "near": away.abs() <= 3, "broad": torch.zeros(length, length) == 1,
    }  # fmt: skip
    model = randomise(Looks(torch.stack([m * 12.0 for m in wanted.values()])))
    return model, {"input_ids": ids}, list(wanted)


def test_planted_roles_are_found() -> None:
    """Each head was told where to look; the role says so, and for which figure."""
    model, batch, wanted = planted()
    (found,) = hp.profile_heads(model, [batch], separators=[3]).values()
    assert [p.role for p in found] == wanted
    assert all(p.because and "%" in p.because for p in found)
    for rule in RULES:
        assert rule.source
        assert 0 < len(rule.short) <= 5


def test_a_model_of_two_vocabularies() -> None:
    """Asked for its input embeddings, CLIP raises NotImplementedError, so there was no profile at all."""
    part = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
    seen = {**part, "image_size": 16, "patch_size": 8}
    config = tf.CLIPConfig(text_config={**part, "vocab_size": 300}, vision_config=seen, projection_dim=16)
    ids = torch.randint(5, 290, (2, 7), generator=torch.Generator().manual_seed(0))
    found = hp.profile_heads(
        randomise(tf.CLIPModel(config)), [{"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}]
    )
    assert [len(heads) for heads in found.values()] == [4, 4]


def test_one_token() -> None:
    """Nobody has a choice, so nothing is said."""
    model, batch = randomise(Looks(torch.zeros(4, 1, 1))), {"input_ids": torch.tensor([[12]])}
    (found,) = hp.profile_heads(model, [batch]).values()
    assert {p.role for p in found} == {"unknown"}
    assert {p.queries for p in found} == {0}


def copying(length: int) -> nn.Module:
    """A causal language model of one layer: head 0 looks at what followed the token before, head 1 at the token before."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.v, self.o = nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
            self.config = tf.PretrainedConfig(max_position_embeddings=2 * length)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x, tokens = self.embed(input_ids), input_ids.shape[1]
            before = F.pad(input_ids[:, :-1], (1, 0), value=-1)
            hits = torch.stack(
                [input_ids[:, :, None] == before[:, None], input_ids[:, :, None] == input_ids[:, None]], 1
            )
            itself = torch.eye(tokens, dtype=torch.bool)
            bias = (hits & ~itself) * 20.0
            bias = bias.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
            q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
            out = F.scaled_dot_product_attention(q * 0.01, k, v, bias)
            return self.o(out.transpose(1, 2).flatten(2))

    return randomise(Copies())


@pytest.mark.parametrize("length", [12, 40])
def test_induction_and_duplicate_token_heads(length: int) -> None:
    """By Olsson's definition: on random tokens that come twice, the share of what followed the first time."""
    model = copying(length)
    batch = {"input_ids": torch.randint(10, 90, (3, 9), generator=torch.Generator().manual_seed(0))}
    profiler = Profiler(model, [batch])
    (found,) = profiler.profiles().values()
    assert profiler.repeated == 4
    assert [p.role for p in found] == ["induction", "duplicate token"]
    first, second = found
    assert first.induction is not None and first.induction > 0.95  # noqa: PT018
    assert second.duplicate is not None and second.duplicate > 0.95  # noqa: PT018
    assert (first.duplicate or 0) < 0.05
    assert (second.induction or 0) < 0.05


def test_the_grid_of_an_image() -> None:
    """Distances are between patches, in both directions; [CLS] has no place; text's figures are not there."""
    config = tf.ViTConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=48, image_size=(8, 12), patch_size=4,
        num_channels=1,
    )  # fmt: skip
    model = randomise(tf.ViTForImageClassification(config))
    batch = {"pixel_values": torch.randn(2, 1, 8, 12, generator=torch.Generator().manual_seed(0))}
    profiler = Profiler(model, [batch])
    (found,) = profiler.profiles().values()
    assert profiler.grid is not None
    assert (profiler.grid.rows, profiler.grid.columns, profiler.grid.before) == (2, 3, 1)
    (weights,) = hp.attention_weights(model, batch).values()
    for h, profile in enumerate(found):
        far = mass = 0.0
        for table in weights[:, h].tolist():
            for i in range(1, 7):
                for j in range(1, 7):
                    (a, b), (c, d) = divmod(i - 1, 3), divmod(j - 1, 3)
                    far, mass = far + table[i][j] * math.hypot(a - c, b - d), mass + table[i][j]
        assert profile.distance == pytest.approx(far / mass, rel=1e-5)
        assert profile.first == pytest.approx(float(weights[:, h, :, 0].mean()), rel=1e-5)
        assert (profile.previous, profile.next, profile.same, profile.position) == (None,) * 4


def test_windows_are_grids() -> None:
    model, example = swin()
    profiler = Profiler(model, [example])
    found = next(iter(profiler.profiles().values()))
    weights = next(iter(hp.attention_weights(model, example).values())).unflatten(
        2, (4, 16)
    )  # images, heads, windows, …
    at = torch.tensor([divmod(i, 4) for i in range(16)]).float()
    far = torch.cdist(at, at)
    for h, profile in enumerate(found):
        assert profile.distance == pytest.approx(float((weights[:, h] * far).sum(-1).mean()), rel=1e-4)
        assert profile.first is None
        assert profile.queries == 128


def test_cross_attention_has_no_previous_token() -> None:
    """Its keys are the source's: the source's first token and padding, and no places."""
    model, example = bart()
    layers = hp.find_attention(model, example)
    found, weights = (
        hp.profile_heads(model, [example], layers, separators=[]),
        hp.attention_weights(model, example, layers),
    )
    cross = next(layer for layer in layers if layer.kind == "cross")
    for h, profile in enumerate(found[cross.name]):
        table = weights[cross.name][:, h]
        assert profile.queries == 15
        assert profile.first == pytest.approx(float(table[..., 0].mean()), rel=1e-4)
        assert profile.largest == pytest.approx(float(table.amax(-1).mean()), rel=1e-4)
        assert (profile.previous, profile.itself, profile.distance, profile.position) == (None,) * 4
    decoder = next(layer for layer in layers if layer.kind == "decoder")
    assert found[decoder.name][0].previous is not None
    assert found[decoder.name][0].induction is None  # of decoders alone


def test_padding_of_a_plain_module_is_what_nobody_looks_at() -> None:
    model, example = ZOO["mha"]()
    found = next(iter(hp.profile_heads(model, [(example, None)]).values()))
    assert found[0].queries == 16  # 18 less the 2 that are padding


def test_the_model_is_left_as_it_was() -> None:
    model, example = ZOO["llama"]()
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hp.profile_heads(model, [example])
    hp.attention_weights(model, example)
    assert model.training
    assert model.config.use_cache
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_never_a_whole_matrix_of_a_long_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 tokens, parts of about 20,000 weights are made, not 1.4 million."""
    model, _ = ZOO["llama"]()
    monkeypatch.setattr(maps, "_MOST", 20_000)
    sizes_: list[int] = []
    original = maps._fused
    monkeypatch.setattr(maps, "_fused", lambda *a, **k: sizes_.append((out := original(*a, **k)).numel()) or out)
    layers = hp.find_attention(model, text())
    batch = {"input_ids": torch.randint(3, 90, (1, 600), generator=torch.Generator().manual_seed(0))}
    hp.profile_heads(model, [batch], layers[:1])
    assert max(sizes_) <= 20_000
    assert sum(sizes_) >= 600 * 600 * 6


def test_mistakes() -> None:
    model, example = ZOO["bert"]()
    with pytest.raises(hp.HeadPruneError, match="no examples to look at"):
        hp.profile_heads(model, [])
    with pytest.raises(hp.HeadPruneError, match="not a list of batches"):
        hp.profile_heads(model, example)
    layers = hp.find_attention(model, example)
    with pytest.raises(hp.HeadPruneError, match="does not run"):
        hp.attention_weights(model, {"input_ids": torch.tensor([[1000]])}, layers)


def test_a_layer_that_cannot_be_seen_has_no_profile() -> None:
    """The others have."""
    model, example = ZOO["bert"]()
    layers = hp.find_attention(model, example)
    other = hp.AttentionLayer("classifier", 9, "encoder", 4, 4, 8)
    profiler = Profiler(model, [example], [*layers, other])
    found = profiler.profiles()
    assert found["classifier"] == []
    assert "cannot be seen" in profiler.unseen["classifier"]
    assert all(len(found[layer.name]) == 4 for layer in layers)


def test_a_head_without_figures_is_mixed() -> None:
    assert with_role(hp.HeadProfile(5, 1.0, largest=0.4)).role == "mixed"


def test_a_head_whose_largest_weight_is_on_the_position_itself() -> None:
    from headprune.seeing import HeadProfile
    from headprune.seeing.roles import _elsewhere

    def told(position: int) -> str:
        found = _elsewhere(HeadProfile(90, 1.25, position=position, pointing=0.95))
        assert found is not None
        return found[1]

    assert told(0) == "its largest weight is on the position itself for 95 % of queries"
    assert told(-3).startswith("its largest weight is 3 tokens back")


def test_profiles_print_short() -> None:
    """The repr of 72 heads' profiles had 43,000 characters."""
    model, example = ZOO["bert"]()
    profiles = hp.profile_heads(model, [example])
    assert len(repr(profiles)) < 300
    assert "12 heads in 3 layers" in repr(profiles)
    assert profiles == dict(profiles)
    label, best = profiles.top(1)[0]
    assert best.clarity == max(p.clarity for heads in profiles.values() for p in heads)
    assert label.startswith("L")
    assert f"HeadProfile({best.role}: " in repr(best)
    assert profiles._repr_html_().count("<tr>") == 10
    assert profiles.plot().axes[0].get_xlabel() == "heads"
