"""The proof and the cut: their small parts by numbers that are known, and models on which they must refuse or get it right."""

import copy
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.pruned.hooks import HeadArgument
from headprune.surgery import layers_that_run, removal
from headprune.surgery.evidence import ROWS, Bounds, _by_head, _sampled, differing, longer, position_limit
from headprune.surgery.proof import TOLERANCE, Reference, _compare, _is_distribution, _sure, answers, tolerance_of
from headprune.surgery.removal import Removal, count_changes, groups_left, ways
from tests.support.cases import answer
from tests.support.errors import refuses
from tests.support.plain import HEADS, WIDTH, Attention, Pair, model_of, noise
from tests.support.zoo import TorchEncoder, bert, gpt2, randomise, sizes, text

INF, NAN = math.inf, math.nan
PLAIN = hp.AttentionLayer("a", 0, "encoder", 12, 12, 64)
GROUPED = hp.AttentionLayer("a", 0, "decoder", 12, 4, 64, tuple(tuple(range(3 * g, 3 * g + 3)) for g in range(4)))


def t(*values: float) -> Tensor:
    return torch.tensor(values)


# -- what the proof compares ----------------------------------------------------------------------


class Answering(nn.Module):
    """Gives the same answers whatever it is asked."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers = tuple(torch.as_tensor(a, dtype=torch.float64) for a in answers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.answers


def compared(got: list[Any], masked: list[Any], effect: float) -> tuple[float, str]:
    expected = [torch.as_tensor(m, dtype=torch.float64) for m in masked]
    reference = Reference({"x": t(0)}, expected, [effect] * len(masked), {})
    return _compare(Answering(*got), Removal((), {}), [reference], 1e-4, 2e-5, set())


@pytest.mark.parametrize(("off", "effect", "fails"), [
    (0.0, 0.0, False), (1.9e-5, 0.0, False), (2.1e-5, 0.0, True),  # rounding, where the heads change nothing: a fifth of the tolerance
    (5e-5, 1.1e-3, False), (5e-5, 0.9e-3, True),  # a twentieth of what the heads change
    (9.9e-5, INF, False), (1.1e-4, INF, True), (1.1e-4, 1.0, True), (5e-5, NAN, False),
])  # fmt: skip
def test_how_far_answers_may_be_off(off: float, effect: float, fails: bool) -> None:
    for size in (1.0, 8.0, 1e-3):  # all of it is a share of the largest answer
        worst, why = compared([[size, size * off]], [[size, 0.0]], size * effect)
        assert worst == pytest.approx(off, abs=1e-12)
        assert why == fails * f"its outputs differ from the masked model's by {off:.2g} of their largest value"


@pytest.mark.parametrize(("got", "masked", "why"), [
    ([[1.0, 2.0]], [[1.0]], "another shape"), ([[1.0]], [[1.0], [1.0]], "another shape"), ([[1.0], [1.0]], [[1.0]], "another shape"),
    ([[1.0], [1.0, 2.0]], [[1.0], [1.0]], "another shape"), ([[1.0, INF]], [[1.0, 2.0]], "not finite where"),
    ([[1.0, 2.0]], [[1.0, NAN]], "not finite where"), ([[1.0, INF]], [[1.0, INF]], ""), ([[0.0]], [[0.0]], ""),
    ([[1.0], torch.ones(1, 2, 5)], [[1.0], torch.zeros(1, 3, 5)], ""),  # something for each head
    ([[1.0], torch.ones(1, 2, 5), [2.0]], [[1.0], torch.zeros(1, 3, 5), [1.0]], "by 1 of their largest"),
    ([[1, 0], [1, 2e-4]], [[1, 0], [1, 0]], "by 0.0002 of their largest"),
])  # fmt: skip
def test_outputs_of_another_form(got: list[Any], masked: list[Any], why: str) -> None:
    assert re.fullmatch(f".*{why}.*" if why else "", compared(got, masked, INF)[1])


@pytest.mark.parametrize(("kinds", "tolerance"), [
    ("double", 1e-9), ("double float", 1e-4), ("float half", 1e-2), ("bfloat16 half", 5e-2), ("", 1e-4),
])  # fmt: skip
def test_the_coarsest_type_says_how_exact_a_proof_can_be(kinds: str, tolerance: float) -> None:
    model = nn.ModuleList(nn.Linear(1, 1, dtype=getattr(torch, kind)) for kind in kinds.split())
    assert tolerance_of(model) == tolerance


def test_generation_is_compared_up_to_a_near_tie() -> None:
    """Near beside the largest magnitude; each row by its own; one row is enough."""
    sure, tie, negative = t(10, 9.85, 0)[None], t(10, 9.95, 0)[None], t(1, 0.9, -20)[None]
    rows, one = torch.stack([t(1, 0.5, 0), t(100, 0, 0)]), torch.cat([sure, tie])
    steps = ([sure] * 3, [sure, tie, sure], [tie, sure], [sure, negative, sure], [rows, rows], [one, sure])
    assert [len(_sure(each)) for each in steps] == [3, 2, 1, 2, 2, 1]


def test_answers_are_floats_but_not_attention_weights() -> None:
    """The first output is one, whatever it looks like."""
    weights, hidden = torch.randn(1, 2, 3, 3).softmax(-1), torch.randn(1, 3, 4)
    ids = torch.ones(2).long()
    others = {"cross_attentions": (weights,), "past_key_values": (hidden,), "ids": ids}
    (logits,) = answers({"logits": hidden.half(), **others})
    assert logits.dtype == torch.float32
    assert len(answers((weights, hidden, weights))) == len(answers(SimpleNamespace(a=hidden, b=hidden, c=weights))) == 2
    with pytest.raises(hp.HeadPruneError, match="no floating-point tensor"):
        answers({"ids": ids})
    masked = torch.cat([weights[0], torch.zeros(2, 1, 3)], 1)  # a query that sees nothing
    assert [_is_distribution(v) for v in (weights, masked, weights[0, 0])] == [True, True, False]
    pairs = [t(*pair).view(1, 1, 2) for pair in ((0.5, 0.5005), (0.5, 0.52), (2, -1), (0.5, 1), (0.5, -0.5))]
    assert [_is_distribution(v) for v in pairs] == [True] + [False] * 4


# -- the layers' own outputs ----------------------------------------------------------------------


def test_samples_and_heads_behind_the_cut() -> None:
    for rows in (1, ROWS, ROWS + 1, 1000):
        whole = torch.arange(2.0 * rows).view(rows, 2)
        sample = _sampled(whole)
        assert sample.shape == (min(rows, ROWS), 2)
        assert torch.equal(sample[[0, -1]], whole[[0, -1]])
        assert sample[:, 0].diff().gt(0).all()
        assert sample.data_ptr() != whole.data_ptr()
    assert [_sampled(v).shape for v in (torch.ones(2, 3, 4), t(1, 2, 3))] == [(6, 4), (1, 3)]
    features, full = ((4, 1), (2, 3), (0, 5)), torch.randn(2, 3, 8)  # 6 and 7 belong to no head
    cut = _by_head(full[..., [0, 1, 4, 5, 6, 7]], features, [0, 2], cut=True)
    assert all(torch.equal(a, b) for a, b in zip(_by_head(full, features, [0, 2], cut=False), cut, strict=True))


def seen(*heads: Tensor, place: str = "W_O") -> dict[str, list[list[Tensor]]]:
    return {place: [[h.view(1, -1) for h in heads]]}


@pytest.mark.parametrize(("got", "expected", "why"), [
    (seen(t(4, 1.25)), seen(t(4, 1.375)), ""),  # 0.125 of 4 is just within
    (seen(t(4, 1)), seen(t(4, 1.75)), "W_O differs from the masked model's by 0.19 of its largest value"),
    (seen(t(4), t(1)), seen(t(4), t(1.5)), r"W_O \(head 1 of those left\) differs from the masked model's by 0.33"),
    (seen(t(4), t(0.004)), seen(t(4), t(0.001)), ""),  # a faint head is compared as if it were larger: 1 % of the largest
    (seen(t(4), t(0.009)), seen(t(4), t(0.001)), "head 1 .* by 0.2 of its"),
    (seen(t(1, NAN)), seen(t(1, 2)), "W_O is not finite where the masked model's is"),
    (seen(t(1)), seen(t(1), t(1)), "what reaches W_O has another shape"), ({}, seen(t(1)), "W_O runs 0 times instead of 1"),
    ({**seen(t(1)), **seen(t(9), place="x")}, seen(t(1)), ""),  # places that only the pruned model has
    ({"W_O": [[]]}, {"W_O": [[]]}, ""), (seen(t(0.5)), seen(t(0.0)), r"by 5e\+29 of its"), (seen(t(0.0)), seen(t(0.0)), ""),
    ({**seen(t(1)), **seen(t(9), place="x")}, {**seen(t(1)), **seen(t(1), place="x")}, "x differs from the masked model's by 8 of"),
])  # fmt: skip
def test_what_differs(got: Any, expected: Any, why: str) -> None:
    assert re.fullmatch(f".*{why}.*" if why else "", differing(got, expected, 0.125))


# -- which integers count heads, and the ways to try ------------------------------------------------


@pytest.mark.parametrize(("layer", "left", "fields", "now"), [
    (PLAIN, (5, 5), {"num_heads": 12, "n_head": 12, "num_attention_heads": 12, "h": 12, "heads": 12}, 5),
    (PLAIN, (5, 5), {"all_head_size": 768, "embed_dim": 768, "inner_dim": 768}, 320),
    (PLAIN, (5, 5), {"head_dim": 64, "attention_head_size": 64, "num_layers": 12, "max_position_embeddings": 768, "window_size": 12,
                     "d_model": 768, "num_heads": 8, "dropout": 0.1, "is_causal": True, "_num_heads": 12, "max_length": 12}, None),
    (GROUPED, (6, 2), {"num_heads": 12}, 6), (GROUPED, (6, 2), {"num_key_value_heads": 4, "n_kv_heads": 4}, 2),
    (GROUPED, (6, 2), {"kv_dim": 256, "value_width": 256}, 128), (GROUPED, (6, 2), {"hidden_size": 768}, 384),
    (GROUPED, (6, 2), {"num_key_value_groups": 3, "num_layers": 4, "kv_dim": 300, "inner_dim": 256, "num_kv_heads": 5, "num_heads": 4}, None),
    (GROUPED, (8, 4), {"num_key_value_groups": 3, "n_rep": 3}, 2), (GROUPED, (8, 4), {"num_key_value_heads": 4}, None),
    (GROUPED, (0, 0), {"num_heads": 12, "num_key_value_heads": 4}, 0), (GROUPED, (0, 0), {"num_key_value_groups": 3}, 1),
])  # fmt: skip
def test_which_integers_count_heads(
    layer: hp.AttentionLayer, left: tuple[int, int], fields: dict[str, Any], now: int | None
) -> None:
    """One that only looks like a head count, or is as large by chance, stays."""
    removal = Removal((), {}, "inner" if now is None else "all")
    changes = count_changes(fields, layer, left, removal, beside=False)
    assert changes == ({} if now is None else dict.fromkeys(fields, now))


def test_counts_by_the_place_and_by_groups() -> None:
    every = Removal((), {}, "all")
    # A module there calls the key/value heads its heads.
    beside = count_changes({"num_heads": 4, "n_head": 12, "heads": 5}, GROUPED, (6, 2), every, beside=True)
    assert beside == {"num_heads": 2, "n_head": 6}
    fields = {"kv_groups": 4, "norm_groups": 12, "group_size": 3}
    by_group = count_changes(fields, GROUPED, (8, 4), replace(every, by_group=True), beside=False)
    assert by_group == {"norm_groups": 8, "group_size": 2}
    shared = hp.AttentionLayer("a", 0, "decoder", 12, 1, 64)  # one key/value head
    left = [groups_left(*pair) for pair in ((GROUPED, [0, 4, 5, 11]), (GROUPED, []), (PLAIN, [1, 2]), (shared, [1, 2]))]
    assert left == [3, 0, 2, 1]


def test_ways_are_tried_from_the_one_that_changes_least() -> None:
    def layer(**about: Any) -> hp.AttentionLayer:
        return hp.AttentionLayer("a", 0, "encoder", 4, 4, 2, **about)

    drop, shaped = {"a": [1]}, HeadArgument("bias", 1, False)
    plain = ways([layer()], drop)
    order = [(w.by_group, w.narrow, w.own_config, ("none", "inner", "all").index(w.widths)) for w in plain]
    assert order == sorted(order)
    assert len(order) == len(set(order)) == 24
    assert not any(w.cut_arguments or w.side_modules for w in plain)
    assert [w.cut_arguments for w in ways([layer(arguments=(shaped,))], drop)[:6]] == [False] * 3 + [True] * 3
    assert [w.side_modules for w in ways([layer(side_modules=("x",))], drop)][:12] == [False] * 6 + [True] * 6
    older = {"layers": [layer().to_json()], "drop": drop, "widths": "all"}
    assert Removal.from_json(older) == Removal((layer(),), drop, "all")


@pytest.mark.parametrize("groups", [2, 4])
def test_without_any_head_a_layer_is_smallest(groups: int) -> None:
    """It kept a whole group, so that a plan with a head of every group could be faster than "no heads, the most that can be gained"."""
    config = tf.LlamaConfig(
        **sizes("sdpa", num_hidden_layers=2, num_attention_heads=8, hidden_size=64), num_key_value_heads=groups
    )
    model, example = randomise(tf.LlamaForCausalLM(config)), text()
    one_each, none = copy.deepcopy(model), copy.deepcopy(model)
    layer = "model.layers.0.self_attn"
    hp.prune(one_each, {layer: [h for h in range(8) if h % (8 // groups)]}, example)
    proof = hp.prune(none, {layer: list(range(8))}, example)
    assert proof.ghosts == (layer,)
    assert none.get_submodule(layer).q_proj.weight.shape == none.get_submodule(layer).k_proj.weight.shape == (8, 64)
    assert len(none.get_submodule(layer).q_proj.weight) < len(one_each.get_submodule(layer).q_proj.weight)


def test_layers_that_share_keys_and_values_are_told_at_once() -> None:
    """Gemma 3n's last layers read those of earlier ones: no plan for one alone runs, which a run said when all was scored and searched."""
    kinds = ["sliding_attention", "full_attention"] * 3
    config = tf.Gemma3nTextConfig(
        **sizes("sdpa", num_hidden_layers=6), vocab_size_per_layer_input=100, num_key_value_heads=2, head_dim=8,
        hidden_size_per_layer_input=8, laurel_rank=8, num_kv_shared_layers=2, sliding_window=6, layer_types=kinds,
        activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2,
    )  # fmt: skip
    model, example = randomise(tf.Gemma3nForCausalLM(config)), text()
    found = layers_that_run(model, hp.find_attention(model, example), example)
    assert [layer.prunable for layer in found] == [True, True, False, False, False, False]
    assert "does not run" in found[3].reason
    plain = randomise(tf.BertModel(tf.BertConfig(**sizes("sdpa"))))
    layers = hp.find_attention(plain, text())
    assert layers_that_run(plain, layers, text()) == layers


def test_layers_that_lose_the_same_heads_keep_their_own_weights() -> None:
    """A stand-in's tensors go as they are cut; those of the next layer, at the same place in memory, were taken for them."""
    for count in range(2, 7):
        layer = nn.TransformerEncoderLayer(32, 4, 32, batch_first=True)
        dense = randomise(nn.TransformerEncoder(layer, count, enable_nested_tensor=False))
        model = copy.deepcopy(dense)
        layers = hp.find_attention(model, torch.randn(2, 8, 32))
        for way in ways(layers, {a.name: [0, 1] for a in layers})[:6]:
            undo = removal.snapshot(model)
            removal.cut(model, way)
            for pruned, whole in zip(model.layers, dense.layers, strict=True):
                old, half = whole.self_attn, 16
                assert pruned.self_attn.out_proj.weight.equal(old.out_proj.weight[:, half:])
                for i, name in enumerate("qkv"):
                    new = getattr(pruned.self_attn, f"{name}_proj")
                    assert new.weight.equal(old.in_proj_weight.chunk(3)[i][half:])
                    assert new.bias.equal(old.in_proj_bias.chunk(3)[i][half:])
            undo()


# -- longer inputs ---------------------------------------------------------------------------------


def ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % 7


def shapes(example: Any, limit: int | None = None) -> list[list[tuple[int, ...]]]:
    return [[tuple(each.shape) for each in choices] for choices in longer(example, limit)]


@pytest.mark.parametrize(("length", "limit", "lengths"), [
    (8, None, [64, 32, 16, 10]), (33, None, [66, 132, 42]), (100, None, [200, 400, 125]), (2, None, [64, 8, 4, 3]), (8, 20, [20, 16, 10]),
    (8, 12, [12, 10]), (8, 9, [9]), (8, 8, []), (1, None, []), (4097, None, []),
])  # fmt: skip
def test_lengths_to_try(length: int, limit: int | None, lengths: list[int]) -> None:
    """Every length with one row and with all."""
    assert shapes(ids(2, length), limit) == [[(rows, length) for length in lengths for rows in (1, 2)]] * bool(lengths)


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("attention_mask", torch.ones(3, 8, 8), (1, 64, 64)), ("attention_bias", torch.ones(3, 1, 8, 8), (1, 1, 64, 64)),  # for pairs of tokens
    ("mask", torch.ones(8, 8), (64, 64)), ("bias", torch.ones(5, 5), (5, 5)),  # square, but not of the tokens
    ("pixel_values", torch.ones(3, 3, 8, 8), (1, 3, 8, 8)), ("bbox", torch.ones(3, 8, 4).long(), (1, 64, 4)), ("labels", torch.ones(3), (1,)),
    ("cells", torch.ones(3, 8, 8, 1).long(), (1, 64, 64, 1)), ("sizes", torch.ones(4), (4,)), ("scale", torch.tensor(2.0), ()),
    ("more_embeds", torch.ones(3, 8, 5), (1, 64, 5)), ("decoder_input_ids", ids(3, 5), (1, 64)), ("pixel_mask", ids(3, 6), (1, 6)),
])  # fmt: skip
def test_what_comes_with_the_tokens(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    assert tuple(longer({"input_ids": ids(3, 8), name: value})[0][0][name].shape) == expected


def test_tokens_by_their_shape_and_what_is_added() -> None:
    by_second, by_first = shapes(torch.ones(2, 8, 5))  # features may have their tokens first
    assert by_second == [(rows, length, 5) for length in (64, 32, 16, 10) for rows in (1, 2)]
    assert by_first == [(length, rows, 5) for length in (64, 8, 4, 3) for rows in (1, 8)]
    (square, *_), *_ = longer({"input_ids": ids(8, 8), "token_type_ids": ids(8, 8)})
    assert square["token_type_ids"].shape == (1, 64)  # no mask, though square
    several = torch.ones(2, 3, 8, 8), ids(2, 8)
    for none in ({"input_ids": ids(8)}, (torch.ones(2, 8).bool(),), ids(0, 8), ids(2, 3, 4, 5), several):
        assert longer(none) == []
    zeros, masks = torch.zeros(2, 5, dtype=torch.long), ("attention_mask", "special_mask", "float_attention_mask")
    example = dict.fromkeys(masks, zeros) | {"input_ids": ids(2, 5), masks[2]: zeros.float(), "pair": (zeros, [zeros])}
    extended = longer(example)[0][1]
    assert all(torch.equal(extended["input_ids"][:, start : start + 4], ids(2, 5)[:, :4]) for start in (0, 5, 60))
    assert [bool(extended[name].any()) for name in masks] == [True, False, False]
    assert extended["pair"][1][0].shape == (2, 64)


@pytest.mark.parametrize(("fields", "limit"), [
    ({"max_position_embeddings": 20, "hidden_size": 8}, 20), ({"max_position_embeddings": 1}, None), ({"max_position_embeddings": 2}, 2),
    ({"max_position_embeddings": 30, "n_positions": 25}, 25), ({"max_position_embeddings": True}, None), ({}, None),
])  # fmt: skip
def test_the_least_limit_of_a_config(fields: dict[str, Any], limit: int | None) -> None:
    assert position_limit(SimpleNamespace(config=SimpleNamespace(**fields))) == limit  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [
    lambda table, i: nn.functional.embedding(i, table), lambda table, i: table[i], lambda table, i: table[:, i[:, 0]],
    lambda table, i: table.index_select(1, i[0]), lambda table, i: table.gather(0, i),
])  # fmt: skip
def test_an_index_out_of_range_never_reaches_a_gpu(use: Any) -> None:
    table = torch.randn(5, 5)
    with Bounds():
        use(table, torch.tensor([[4, 0]]))
        for wrong in (5, -6):
            with pytest.raises(IndexError, match=f"index {wrong} is out of range for 5 entries"):
                use(table, torch.tensor([[wrong, 0]]))
        assert torch.equal(table[table > 0], table[table > 0])


# -- models that the proof must refuse, and a right prune of such a model, which passes -------------

X = noise(2, 8, WIDTH)
IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(4))


class Constants(Attention):
    """Attention with a constant for each head that no trace sees: what is left takes the first heads' constants.

    Args:
        after: Tokens from which on the constants act.
    """

    def __init__(self, after: int = 10**9) -> None:
        super().__init__()
        self.after, self.constants = after, [1.0, -2.0, 3.0, 0.5]

    def joined(self, result: Tensor) -> Tensor:
        constants = torch.tensor(self.constants[: self.num_heads]).to(result)[:, None, None]
        later = torch.arange(result.shape[2])[:, None] >= self.after
        return super().joined(torch.where(later, result * constants, result))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.o(self.attend(x, attn_mask=mask))


class Model(nn.Module):
    """Ids, or features ``[B, L, D]`` or ``[L, B, D]``, with a mask or none."""

    def __init__(self, after: int = 16, gate: float = 1.0, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(50, WIDTH), Constants(after), nn.Linear(WIDTH, 3)
        self.gate, self.batch_first = gate, batch_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        if mask is not None:
            mask = mask.bool()
            mask = mask[:, None, None] if mask.shape[0] == len(x) else mask  # padding [B, L], or pairs [L, L]
        return self.head(x + self.gate * self.attention(x, mask))


@pytest.mark.parametrize("example", [
    IDS, {"x": IDS}, X, (X,), (X, torch.ones(2, 8, dtype=torch.bool)), (IDS, torch.ones(8, 8, dtype=torch.bool).tril()),
    {"x": X, "mask": torch.ones(2, 8, dtype=torch.long)}, X[:1], "tokens first",
])  # fmt: skip
def test_what_acts_on_later_tokens_alone(example: Any) -> None:
    """Such a prune passed, and was wrong by half of its output on 30 tokens."""
    first = isinstance(example, str)
    model, example = randomise(Model(batch_first=not first)), X.transpose(0, 1) if first else example
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, {"attention": [0, 1]}, example)
    hp.prune(model, {"attention": [2, 3]}, example)  # the first heads have their own constants


def faint(kind: str, after: int, dtype: torch.dtype) -> nn.Module:
    model = randomise(Model(after, gate={"gate": 1e-4, "scale": 1e-7}.get(kind, 1.0)))
    with torch.no_grad():
        model.attention.o.weight.mul_({"zero": 0.0, "tiny": 1e-6}.get(kind, 1.0))
        if kind == "biased":
            model.attention.o.bias.fill_(1e5)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gate", "scale", "zero", "tiny", "biased"])
def test_behind_a_faint_gate(kind: str, dtype: torch.dtype) -> None:
    """Behind a gate of 1e-4 (ReZero), LayerScale or a W_O that is zero yet, no output tells a wrong cut from a right one."""
    x = X.to(dtype)
    wrong = faint(kind, 0, dtype)
    before = copy.deepcopy(wrong.state_dict())
    with pytest.raises(hp.PruneError, match="attention"):
        hp.prune(wrong, {"attention": [0]}, x)
    assert all(torch.equal(v, before[k]) for k, v in wrong.state_dict().items())
    dense = faint(kind, 10**9, dtype)
    for drop in ([0], [1, 3], [0, 1, 2, 3]):
        pruned = copy.deepcopy(dense)
        hp.prune(pruned, {"attention": drop}, x)
        with hp.mask(dense, {"attention": drop}, x):
            torch.testing.assert_close(answer(pruned, x), answer(dense, x))


class Outputs(nn.Module):
    """Several outputs, of which one is scaled by the number of heads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.attention, self.way = nn.Linear(WIDTH, WIDTH), Attention(), way

    def forward(self, x: Tensor) -> Any:
        before = self.first(x).relu()
        after = before + self.attention(before) / self.attention.num_heads
        if self.way == "outlier":  # one channel so large that the others hardly count beside it
            return torch.cat([after, torch.full_like(after[..., :1], 3e3)], -1)
        return {"maps": [before, after], "loss": (after.mean() * 0 + 1, after), "none": (None, after)}[self.way]


@pytest.mark.parametrize("way", ["maps", "loss", "none", "outlier"])
def test_the_proof_looks_at_every_output(way: str) -> None:
    """A count that scales an output must not pass because another output hides it."""
    model = randomise(Outputs(way))
    with pytest.raises(hp.PruneError):
        hp.prune(model, {"attention": [1]}, X)
    assert model.attention.num_heads == HEADS


def deep() -> tuple[Any, dict[str, list[int]], Tensor]:
    """A model with a fifth of the tolerance in rounding (2e-5, where this was tried), and heads in it that give nothing."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 12, "n_embd": 768, "vocab_size": 50, "n_positions": 64}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    drop = {f"transformer.h.{i}.attn": [0, 3, 5] for i in range(4)}
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.ndim > 1):
            weight.normal_(0, 0.3)
        for name, gone in drop.items():
            model.get_submodule(name).c_proj.weight.view(12, 64, 768)[gone] = 0
    return model, drop, torch.randint(0, 50, (2, 20))


@pytest.mark.slow
@pytest.mark.parametrize("finest", [None, 1e-6])
def test_rounding_of_a_deep_model_is_told_from_a_wrong_cut(
    finest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if finest is not None:  # so that any machine's rounding is above it
        monkeypatch.setattr("headprune.surgery.proof.FINEST", finest)
    model, drop, ids = deep()
    with torch.no_grad():
        before = model(ids).logits
        proof = hp.prune(model, drop, {"input_ids": ids})
        after = model(ids).logits
    assert 1e-10 < proof.difference <= proof.tolerance
    assert after.dtype == torch.float32
    assert (after - before).abs().max() <= proof.tolerance * before.abs().max()


@pytest.mark.parametrize("why", ["no float64", "too large"])
def test_where_float64_cannot_tell_the_first_error_stays(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.surgery.proof.FINEST", 1e-6)
    model, drop, ids = deep()
    if why == "too large":
        monkeypatch.setattr("headprune.surgery.proof.MOST_COPIED", 1e6)
    else:
        model.transformer.ln_f.register_forward_hook(lambda m, args, output: output.float())
    with pytest.raises(hp.PruneError, match=r"its outputs differ .* is unchanged"):
        hp.prune(model, drop, {"input_ids": ids})
    assert model.transformer.h[0].attn.c_proj.weight.shape == (768, 768)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "proved"), [(3, True), (30, False)])
def test_where_rounding_grows_float64_decides(share: float, proved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """D-FINE chooses what it looks at by its own numbers: a right prune was refused for 1.05 times the tolerance."""
    model, drop, ids = deep()
    rounding = hp.prune(copy.deepcopy(model), drop, {"input_ids": ids}).difference
    monkeypatch.setitem(TOLERANCE, torch.float32, rounding / share)
    with nullcontext() if proved else pytest.raises(hp.PruneError, match="outputs differ"):
        proof = hp.prune(model, drop, {"input_ids": ids})
        assert proof.difference == rounding <= proof.tolerance
    assert model.transformer.h[0].attn.c_proj.weight.shape == (576 if proved else 768, 768)


class Growing(Model):
    """Learned positions, of which longer inputs are out of range; and what long inputs made it keep."""

    def __init__(self, most: int, after: int) -> None:
        super().__init__(after)
        self.places, self.kept, self.longest = nn.Embedding(most, WIDTH), nn.Buffer(torch.zeros(1)), 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.kept, self.longest = torch.zeros(x.shape[1]), max(self.longest, x.shape[1])
        return super().forward(self.embed(x) + self.places(torch.arange(x.shape[1])))


@pytest.mark.parametrize(("most", "fails"), [(8, False), (15, False), (16, False), (17, False), (32, True), (64, True)])
def test_learned_positions(most: int, fails: bool) -> None:
    """What is longer than they are is not tried on; what fits is: 8 tokens become 64, 32, 16 or 10. It leaves no traces."""
    model = randomise(Growing(most, 16))
    with pytest.raises(hp.PruneError) if fails else nullcontext():
        hp.prune(model, {"attention": [0]}, IDS)
    assert (model.longest, model.kept.shape) == (0, (1,))


def test_the_proof_stays_cheap_and_generates() -> None:
    """Three passes for each input (dense, masked, pruned) where the first way is right; the longer one has one row."""
    model, example = bert()
    rows: list[tuple[int, ...]] = []
    layers = hp.find_attention(model, example)
    model.register_forward_pre_hook(lambda m, a, k: rows.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    assert hp.prune(model, {layers[0].name: [0]}, example, layers=layers).inputs == 5
    assert (len(rows), rows.count((1, 64))) == (15, 3)
    writer, example = gpt2()
    assert hp.prune(writer, {"transformer.h.0.attn": [1]}, example).inputs == 6  # the sixth generates with a cache
    hp.prune(writer, {"transformer.h.1.attn": [1]}, example["input_ids"])  # ids alone are no prompt


def test_a_failing_layer_is_named_and_an_interrupt_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(nn.Sequential(Attention(), nn.LayerNorm(WIDTH), Constants(0), nn.LayerNorm(WIDTH), Attention()))
    with pytest.raises(hp.PruneError, match=r"The heads of 2 cannot be removed exactly: .* is unchanged") as told:
        hp.prune(model, {"0": [0], "2": [0], "4": [1]}, X)
    assert "Mask them instead" in told.value.hint
    before = {n: id(p) for n, p in model.named_parameters()}

    def stop(*_: object) -> None:
        if model[0].num_heads < HEADS:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        hp.prune(model, {"0": [0]}, X)
    handle.remove()
    assert {n: id(p) for n, p in model.named_parameters()} == before
    hp.prune(model, {"0": [0], "4": [1]}, X)


class Padded(Attention):
    """Zeros at padding, after W_O."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.o(self.attend(x, attn_mask=keep[:, None, None, :])) * keep[..., None]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Padded()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.attention(x, keep)


def test_what_comes_after_the_output_projection_stays() -> None:
    model, full = randomise(Around()), torch.ones(2, 8, dtype=torch.bool)
    part = full & (torch.arange(8) < 6)
    with hp.mask(model, {"attention": [0, 1, 2, 3]}, (X, full)):
        masked = answer(model, (X, part))
    hp.prune(model, {"attention": [0, 1, 2, 3]}, (X, full))
    torch.testing.assert_close(answer(model, (X, part)), masked)


class Scaled(nn.Module):
    """The tutorials' attention, whose softmax is scaled by the model's width; it does not name its embeddings (as CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_size, self.heads = 32, 4
        self.queries, self.keys, self.values, self.fc_out = (nn.Linear(32, 32) for _ in range(4))
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 3)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).reshape(*x.shape[:2], self.heads, 8) for p in (self.queries, self.keys, self.values))
        weights = torch.softmax(torch.einsum("nqhd,nkhd->nhqk", q, k) / self.embed_size**0.5, dim=3)
        return self.head(x + self.fc_out(torch.einsum("nhql,nlhd->nqhd", weights, v).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_that_only_scales_stays(dtype: torch.dtype) -> None:
    """Also where all tokens of the example are alike, so that attention is uniform whatever the scale."""
    model, alike = randomise(Scaled()).to(dtype), {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    dense, layers = copy.deepcopy(model), hp.find_attention(model, alike)
    hp.prune(model, {layers[0].name: [1, 2, 3]}, alike)
    assert model.embed_size == 32
    other = torch.randint(0, 50, (3, 9))
    with hp.mask(dense, {layers[0].name: [1, 2, 3]}, layers=layers):
        exact = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(answer(model, other), answer(dense, other), rtol=exact, atol=2e-2)


def test_nested_tensors_with_padding() -> None:
    """PyTorch's encoder turns padded batches into nested tensors, which only its fused kernel takes."""
    model = randomise(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2))
    padding = torch.arange(8) >= torch.tensor([[4], [8]])
    example, drop = {"src": X, "src_key_padding_mask": padding}, {"layers.1.self_attn": [0, 2]}
    with hp.mask(model, drop, X):
        masked = answer(model, example)
    assert model.use_nested_tensor
    hp.prune(model, drop, X)
    torch.testing.assert_close(answer(model, example)[~padding], masked[~padding], rtol=1e-4, atol=1e-5)


def test_modes_and_training() -> None:
    """New modules take the mode of the old, and learn; those that stay keep theirs."""
    model = randomise(TorchEncoder()).train()
    hp.prune(model, {"encoder.layers.0.self_attn": [0]}, X)
    assert all(m.training for m in model.modules())
    frozen, example = bert()
    frozen.train()
    still = [m.eval() for m in frozen.modules() if isinstance(m, nn.Dropout)]
    hp.prune(frozen, {"L0": [0]}, example)
    assert not any(m.training for m in still)
    writer, example = gpt2()
    hp.prune(writer, {f"transformer.h.{i}.attn": [i] for i in range(3)}, example)
    writer.train()(**example, labels=example["input_ids"]).loss.backward()
    assert all(p.grad is not None for n, p in writer.named_parameters() if "attn" in n)


@pytest.mark.parametrize(("second", "shared"), [([1], True), ([2], False), ([], False), ([0, 1, 2, 3], False)])
def test_shared_weights_stay_shared_where_the_same_heads_go(second: list[int], shared: bool, tmp_path: Any) -> None:
    model, drop = randomise(Pair()), {"first": [1], "second": second}
    with hp.mask(model, drop, X):
        masked = answer(model, X)
    hp.prune(model, drop, X)
    torch.testing.assert_close(answer(model, X), masked, rtol=1e-4, atol=1e-5)
    assert (model.first.o.weight is getattr(getattr(model.second, "o", None), "weight", None)) == shared
    assert torch.equal(answer(hp.load(hp.save(model, tmp_path / "pruned"), Pair()), X), answer(model, X))


def test_mistakes_are_told_in_a_line() -> None:
    model = model_of(Attention)
    layers, x = hp.find_attention(model, X), text()
    hp.prune(model, {}, X)
    hp.prune(model, {"0": [torch.tensor(1).item()]}, X, layers=layers)
    refuses("not as it was traced", hp.prune, model, {"0": [1]}, X, layers=layers)
    for wrong in (torch.zeros(2, 5, 7), x):
        refuses("does not run on the example", hp.prune, model, {"2": [1]}, wrong, layers=layers)
    with pytest.raises(hp.HeadPruneError, match="has no module"), hp.mask(nn.Linear(2, 2), {"0": [1]}, layers=layers):
        pass
    refuses("not finite, so a prune cannot be proved", hp.prune, model, {"2": [1]}, X * torch.nan, layers=layers)
