"""Models are timed fairly, and where the time goes is right: its parts, their shares, and a plan's bound is what brute force gives."""

import copy
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional as F

import headprune as hp
from headprune import batches, latency, timing
from tests.support.errors import refuses
from tests.support.zoo import ZOO, bert, gpt2, llama, mha, sizes, t5, text

CPU = torch.device("cpu")
PROJECTIONS, ATTENTION, FEED_FORWARD, ENDS, REST, LAUNCH = PARTS = timing.PARTS


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.a, self.b, self.c))
        out: Tensor = self.d(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Names that say nothing."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three = Attention(width, heads)
        self.four, self.five = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.three(self.one(x))
        return x + self.five(F.relu(self.four(self.two(x))))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.then, self.last = nn.Linear(width, width), nn.ModuleList(blocks), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.then:
            x = block(x)
        out: Tensor = self.last(x.mean(1))
        return out


INPUT = torch.randn(2, 5, 16)
LAYER, T5 = "bert.encoder.layer.1", "decoder.block.0.layer"
PLACES = {
    "bert": (bert(), {
        "bert.embeddings.word_embeddings": ENDS, "bert.embeddings.LayerNorm": ENDS, "bert.pooler.dense": ENDS, "classifier": ENDS,
        "bert": REST, f"{LAYER}.attention.self": ATTENTION, f"{LAYER}.attention.self.value": PROJECTIONS,
        f"{LAYER}.attention.output.dense": PROJECTIONS, f"{LAYER}.attention.output.LayerNorm": REST,
        f"{LAYER}.intermediate.dense": FEED_FORWARD, f"{LAYER}.intermediate.intermediate_act_fn": FEED_FORWARD,
        f"{LAYER}.output.dense": FEED_FORWARD, f"{LAYER}.output.LayerNorm": REST,
    }),
    "two attention layers in a block, and a table of relative positions that is an embedding": (t5(), {
        "lm_head": ENDS, "decoder.embed_tokens": ENDS, "encoder.block.0.layer.1.DenseReluDense.wo": FEED_FORWARD,
        f"{T5}.0.SelfAttention.relative_attention_bias": ATTENTION, f"{T5}.1.EncDecAttention.k": PROJECTIONS,
        f"{T5}.1.EncDecAttention": ATTENTION, f"{T5}.2.DenseReluDense.wi": FEED_FORWARD, f"{T5}.2.layer_norm": REST,
    }),
    "names that say nothing": ((Stack([Block(16, 4, 24), Block(16, 4, 24)], 16), INPUT), {
        "first": ENDS, "last": ENDS, **{f"then.{i}.three.{p}": PROJECTIONS for i in (0, 1) for p in "abcd"},
        **{f"then.{i}.{n}": FEED_FORWARD for i in (0, 1) for n in ("four", "five")}, "then.0.three": ATTENTION, "then.1.one": REST,
    }),
    "a layer without attention, in the list of the others": ((Stack([nn.Linear(16, 16), Block(16, 4, 24)], 16), INPUT), {
        "then.0": REST, "then.1.five": FEED_FORWARD,
    }),
    "one block": ((nn.Sequential(nn.Linear(16, 16), Attention(16, 4), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 3)), INPUT), {
        "": REST, "0": ENDS, "1": ATTENTION, "1.a": PROJECTIONS, "2": FEED_FORWARD, "3": FEED_FORWARD, "4": ENDS,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_the_part_of_every_module(name: str) -> None:
    """And a profile leaves nothing in memory: it was some 100 MB a pass."""
    (model, example), expected = PLACES[name]
    gc.collect()
    gc.disable()
    try:
        started = timing.profiled(model.eval(), example, CPU).started
        assert not any(isinstance(each, FunctionEvent) for each in gc.get_objects())
    finally:
        gc.enable()
    places = timing.ModulePlaces(model, hp.find_attention(model, example), started)
    assert {name: places.place(name)[0] for name in expected} == expected


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit", "mha"])
def test_shares_add_up(name: str) -> None:
    model, example = ZOO[name]()
    result = hp.breakdown(model, example, min_seconds=0)
    assert tuple(result.parts) == PARTS
    assert sum(result.parts.values()) == pytest.approx(result.total)
    assert sum(result.shares.values()) == pytest.approx(1)
    assert all(result.parts[part] > 0 for part in PARTS)
    assert result.stand_ins == (name == "mha")
    assert (result.batch, result.length) == latency.example_shape(example)


def test_modules_that_run_in_some_passes() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(16, 16), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) if self.calls % 3 else x

    model = Stack([Block(16, 4, 24), Sometimes()], 16).eval()
    layers = hp.find_attention(model, INPUT)
    for calls in ((0, 1, 0), (1, 0, 0)):  # it does not run in a later pass, or in the first
        passes = []
        for model.then[1].calls in calls:
            passes.append(timing.profiled(model, INPUT, CPU))
        assert ["then.1.inner" in p.busy for p in passes] == [number == 0 for number in calls]
        result = timing.breakdown_of(model, layers, (2, 0), passes, 1.0, False)
        assert sum(result.parts.values()) == pytest.approx(1.0)


def test_slow_passes_are_profiled_less_often() -> None:
    """Fast ones run twice under the profiler: its start empties the caches."""
    model = Stack([Block(16, 4, 24)], 16).eval()
    layers, runs = hp.find_attention(model, INPUT), []
    for slow in (math.inf, 0.0):
        calls: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing, "MIN_PASSES", 5)
            patch.setattr(timing, "_SLOW", slow)
            handle = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            result = hp.breakdown(model, INPUT, layers=layers, min_seconds=0)
            handle.remove()
        runs.append(len(calls))
        assert sum(result.parts.values()) == pytest.approx(result.total)
    assert runs[0] - runs[1] == 2 * 5 - 3


@pytest.mark.parametrize(("milliseconds", "rounds"), [(100.0, 20), (400.0, 13), (600.0, 10)])
def test_slow_passes_are_timed_less_often(milliseconds: float, rounds: int) -> None:
    """Twenty rounds, or as many as take five seconds, ten at least."""
    times = latency.in_turn({"dense": lambda: milliseconds, "pruned": lambda: milliseconds}, None, None)
    assert {name: len(own) for name, own in times.items()} == {"dense": rounds, "pruned": rounds}
    assert milliseconds * rounds >= 1000 * latency.seconds_of(milliseconds / 1000) * (1 - 1e-9)


def test_large_feed_forward_layers_are_recognised() -> None:
    model = Stack([Block(256, 4, 256)], 256)  # four times the projections' work, by matrix products of the same size
    model.then[0].five = nn.Sequential(*(nn.Linear(256, 256) for _ in range(15)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MIN_PASSES", 9)  # other work may interrupt some
        result = hp.breakdown(model, torch.randn(4, 64, 256), min_seconds=0)
    assert 2 < result.parts[FEED_FORWARD] / result.parts[PROJECTIONS] < 8
    assert result.shares[LAUNCH] < 0.3
    assert result.bound({layer.name: range(4) for layer in result.layers}) < 1.6  # heads are not what takes the time


@pytest.mark.parametrize("make", [bert, llama, t5])
def test_the_bound_by_brute_force(make: Any) -> None:
    """Saved is what the cut of the weights takes off: counted on a model that is really pruned."""
    model, example = make()
    result, pruned, saved = hp.breakdown(model, example, min_seconds=0), copy.deepcopy(model), 0.0
    drop = {a.name: list(a.units[0]) for a in result.layers if len(a.units) > 1}
    hp.prune(pruned, drop, example)
    dense, after = ({n: p.numel() for n, p in m.named_parameters() if p.ndim > 1} for m in (model, pruned))
    started = timing.profiled(model, example, CPU).started
    places = timing.ModulePlaces(model, result.layers, started)
    order = dict.fromkeys((owner, part) for part, owner in map(places.place, started) if owner is not None)
    for cost, (name, part) in zip(result.costs, sorted(order, key=lambda one: started[one[0]]), strict=True):
        if part == PROJECTIONS:
            saved += cost.time * (1 - after[f"{name}.weight"] / dense[f"{name}.weight"])
        else:
            layer = next(a for a in result.layers if a.module == name)
            saved += cost.time * len(drop.get(layer.name, [])) / layer.num_heads
    assert saved > 0
    assert result.bound(drop) == pytest.approx(result.total / (result.total - saved))


def test_bounds_of_all_heads_and_none_and_a_model_left_as_it_was() -> None:
    model, example = bert()
    model.train()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    result = hp.breakdown(model, example, min_seconds=0)
    assert model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert result.bound({}) == 1
    attention = result.parts[PROJECTIONS] + result.parts[ATTENTION] + sum(cost.launch for cost in result.costs)
    everything = {layer.name: range(layer.num_heads) for layer in result.layers}
    assert result.bound(everything) == pytest.approx(result.total / (result.total - attention))
    refuses("no head 9", result.bound, {"L0": [9]})
    with pytest.raises(hp.HeadPruneError, match="does not run on the example"):
        hp.breakdown(model, {"input_ids": torch.full((1, 4), 10**6)}, layers=result.layers)
    refuses("not known on meta", hp.breakdown, model.to("meta"), example, layers=result.layers)


def event(name: str, start: float, end: float, parent: Any = None, kernel: float = 0.0, **more: Any) -> FunctionEvent:
    """What the profiler gives of an operation on a GPU, as there is none here; with how long its kernel takes."""
    made = FunctionEvent(0, name, 0, start, end, use_device="cuda", **more)
    made.cpu_parent = parent
    if kernel:
        made.append_kernel("kernel", 0, kernel)
    return made


def test_kernels_are_their_modules() -> None:
    """On CUDA an operation takes what its kernels take; what only launches it is not its time."""
    root = event("headprune:", 0, 1000)
    block = event("headprune:block", 100, 600, root)
    product = event("aten::linear", 200, 300, block, 5000)
    inner = event("aten::addmm", 210, 290, product, 5000)  # counted once, with what calls it
    outer = event("aten::add", 700, 800, root, 40)
    empty = [event("empty", 1000 + 10 * i, 1004 + 10 * i) for i in range(4)]
    kernels = [event(name, 0, 5000, device_type=_autograd.DeviceType.CUDA) for name in ("headprune:block", "gemm")]
    events = [root, block, product, inner, outer, *empty, *kernels]
    result = timing.read(events, on_device=True)
    assert result.busy == pytest.approx({"": 0.04, "block": 5.0})
    # A range costs 10 µs, half of it in the range; on the CPU 395 of the block's 500 µs are between operations.
    assert result.idle == pytest.approx({"": 0.39, "block": 0.395})
    assert result.started == {"": 0, "block": 100}
    assert timing.read(events, on_device=False).busy == pytest.approx({"": 0.1, "block": 0.1})


def test_launch_overhead_on_cuda_is_the_wall_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = bert()
    layers, real = hp.find_attention(model, example), timing.profiled(model, example, CPU)
    monkeypatch.setattr(timing, "model_device", lambda _: torch.device("cuda"))
    one = timing.ProfiledPass(dict.fromkeys(real.busy, 0.1), dict.fromkeys(real.busy, 99.0), real.started)
    kernels = 0.1 * len(real.busy)
    for wall, launch in ((4 * kernels, 3 * kernels), (kernels / 2, 0)):  # the second time kernels overlap
        result = timing.breakdown_of(model, layers, (3, 9), [one], wall, False)
        assert (result.total, sum(result.parts.values())) == pytest.approx((wall, wall))
        assert result.parts[LAUNCH] == pytest.approx(launch)


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generated_tokens_and_their_cache(make: Any) -> None:
    """Bytes per token are those of the tensors in the model's own cache; the tokens are those of `generate`."""
    model, whole = make()
    seq2seq = model.config.is_encoder_decoder
    example = {k: v[:2] for k, v in whole.items() if k in ("input_ids", "attention_mask")}
    pruned = copy.deepcopy(model)
    hp.prune(pruned, {a.name: list(a.units[0]) for a in hp.find_attention(model, whole)}, whole)
    models = {"dense": model, "pruned": pruned}
    written: list[int] = []
    argmax = Tensor.argmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "argmax", lambda t, *a: written.append(int((out := argmax(t, *a))[0, 0])) or out)
        row = latency.benchmark_generation(models, example, new=4, min_rounds=1, min_seconds=0)
    assert row is not None
    end = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert written[:5] == model.generate(**example, **end)[0, -5:].tolist()
    for name, each in models.items():
        given = {**example, "decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)} if seq2seq else example
        cache = each(**given, use_cache=True).past_key_values
        own = cache.self_attention_cache if seq2seq else cache
        size = sum(t.numel() * t.element_size() for layer in own.layers for t in (layer.keys, layer.values))
        assert row.cache[name] == size / given["decoder_input_ids" if seq2seq else "input_ids"].numel()
    assert row.cache["pruned"] < row.cache["dense"]
    assert (row.batch, row.length, row.new) == (2, 9, 4)
    assert row.tokens_per_second["dense"] == pytest.approx(2000 / row.token["dense"].median)
    assert set(row.token_speedups) == set(row.prefill_speedups) == {"pruned"}
    for other in (bert, mha):  # which do not write
        model, example = other()
        assert latency.benchmark_generation({"dense": model}, example) is None


# -- models in turn --


@pytest.mark.parametrize("asked", [1, 6])
def test_models_take_turns(asked: int) -> None:
    """In six rounds at least: of one, an interval was a point, and two equal models always differed."""
    log: list[str] = []
    models = {name: nn.Identity() for name in "ab"}
    for name, model in models.items():
        model.register_forward_pre_hook(lambda *_, name=name: log.append(name + "!" * torch.is_grad_enabled()))
    row = hp.benchmark(models, torch.zeros(2, 3), min_runs=asked, min_seconds=0)
    assert log[-12:] == ["a", "b", "b", "a"] * 3
    assert log[:-12].count("a") == log[:-12].count("b") == 1 + latency.WARM_UP
    assert (row.batch, row.length, list(row.speedups)) == (2, 0, ["b"])
    assert row.timings["a"].runs == row.timings["b"].runs == 6


def test_inputs_whose_first_tensor_is_a_number() -> None:
    class Scaled(nn.Module):
        def forward(self, scale: Tensor, x: Tensor | None = None) -> Tensor:
            return scale if x is None else scale * x

    for more, batch in (({"x": torch.zeros(5, 3)}, 5), ({}, 1)):
        row = hp.benchmark({"a": Scaled()}, {"scale": torch.tensor(2.0), **more}, min_seconds=0)
        assert (row.batch, row.length) == (batch, 0)


def test_models_keep_their_mode() -> None:
    """Timed in evaluation mode; a model that was being trained stayed in it."""
    model, frozen = nn.Sequential(nn.Dropout(), nn.Linear(3, 3)), nn.Linear(3, 3).eval()
    model.train()
    model[0].eval()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.training))
    hp.benchmark({"a": model, "b": frozen}, torch.zeros(2, 3), min_runs=2, min_seconds=0)
    assert not any(seen)
    assert [m.training for m in (model, *model, frozen)] == [True, False, True, False]
    model.register_forward_pre_hook(lambda m, _: 1 / 0)
    with pytest.raises(hp.HeadPruneError, match="The model 'a' does not run on the example: ZeroDivisionError"):
        hp.benchmark({"a": model}, torch.zeros(2, 3))
    refuses("names no models", hp.benchmark, {}, torch.zeros(2, 3))
    refuses("holds no tensor", hp.benchmark, {"a": frozen}, {"x": 1})
    assert model.training


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "no measurable change"), (1.1, "slower"), (0.9, "faster")])
def test_planted_times_are_recognised(factor: float, expected: str) -> None:
    """Of two models in turn on a machine that changes its speed and is sometimes interrupted; by a bootstrap, 93 % of the equal ones."""
    drift = np.linspace(1, 5, 50)  # a machine that slows down for both does not blur the ratio
    assert latency.speedup(drift * 2, drift) == hp.Speedup(2, 2, 2, "faster")
    rng, verdicts = np.random.default_rng(1), []
    for _ in range(4000):
        drift = 1 + 0.3 * np.sin(np.linspace(0, 3, 20) + rng.uniform(0, 6))
        noise = np.exp(rng.normal(0, 0.03, (2, 20))) * (1 + (rng.random((2, 20)) < 0.05) * rng.exponential(1, (2, 20)))
        verdicts.append(latency.speedup(drift * noise[0], drift * noise[1] * factor).verdict)
    assert verdicts.count(expected) >= 3800


class GivesViews(nn.Module):
    """Submodules get views of a parameter: DeBERTa's relative embeddings, Perceiver's latents, Deformable DETR's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4)
        self.given = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(self.given(self.table[None]).expand(len(x), -1, -1))


# Fused: unknown to PyTorch's counter.
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1)


@pytest.mark.parametrize(("model", "shape", "expected"), [
    (nn.Linear(8, 4), (5, 8), 2 * 5 * 8 * 4), (GivesViews(), (2, 6, 4), 2 * (2 * 2 * 6 * 4 * 4)),
    (ENCODER, (1, 6, 32), 2 * 6 * (4 * 32 * 32 + 2 * 32 * 48 + 2 * 6 * 32)),
])  # fmt: skip
def test_flops(model: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert latency.flops(model, torch.randn(shape)) == expected
    assert all(p.requires_grad for p in model.parameters())


def test_counts_of_models() -> None:
    """FLOPs of BERT: quadratic are q·k and p·v in 3 layers, 2 * T² * 32 each; the pooler and the classifier do not grow."""
    short, long = (latency.flops(bert()[0], text(1, n)) for n in (4, 8))
    assert long - 2 * short == 3 * 2 * 2 * 32 * (8 * 8 - 2 * 4 * 4) - 2 * (32 * 32 + 32 * 2)
    model, _ = gpt2()  # shared parameters count once
    assert latency.parameters(model) == sum({id(p): p.numel() for p in model.parameters()}.values())


def test_experts_are_counted() -> None:
    """transformers' product of all experts at once is none that torch's counter knows: a pruned mixture seemed to save a third too much."""
    config = tf.Qwen3MoeConfig(
        **sizes("sdpa", num_hidden_layers=1), num_key_value_heads=2, head_dim=12, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24,
    )  # fmt: skip
    model, tokens, width = tf.Qwen3MoeForCausalLM(config), 9, config.hidden_size
    used, heads = config._experts_implementation, 12 * (config.num_attention_heads + 2 * 2 + config.num_attention_heads)
    attention = 2 * tokens * width * heads + 2 * 2 * tokens**2 * 12 * config.num_attention_heads
    experts = (
        2 * tokens * width * 4 + 2 * (2 * tokens) * 3 * width * 24
    )  # the router; two experts of three products a token
    head = 2 * tokens * width * config.vocab_size
    assert latency.flops(model, text(1, tokens)) == attention + experts + head
    assert config._experts_implementation == used == "grouped_mm"


@pytest.mark.parametrize(("batch", "length"), [(1, 4), (5, 9), (7, 30)])
def test_shapes(batch: int, length: int) -> None:
    inputs = batches.shaped(text(3, 9), batch, length)
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (batch, length)
    assert inputs["attention_mask"].all()


@pytest.mark.parametrize("length", [1, 4, 9, 30])
def test_texts_of_any_length_end_once(length: int) -> None:
    """They ended as often as they were repeated, and BART's classifiers refuse texts that do not all end as often."""
    ids, ends = torch.randint(5, 20, (3, 9)), torch.tensor([5, 8, 3])
    ids[torch.arange(3), ends] = 3
    example = {"input_ids": ids, "attention_mask": (torch.arange(9) <= ends[:, None]).long()}
    inputs = batches.shaped(example, 7, length)
    assert inputs["input_ids"].shape == (7, length)
    assert (inputs["input_ids"] == 3).sum(1).tolist() == [1] * 7
    assert (inputs["input_ids"][:, -1] == 3).all()
