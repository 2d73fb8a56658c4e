"""Where the time goes: the parts are found, their shares are right, and a plan's bound is what brute force gives."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional as F

import headprune as hp
from headprune import latency
from headprune.app.console import Console
from headprune.app.workflow import timing
from headprune.timing import PARTS, generation
from headprune.timing.parts import ATTENTION, ENDS, FEED_FORWARD, LAUNCH, PROJECTIONS, REST, Parts
from headprune.timing.profiling import profiled, read
from tests.support.zoo import ZOO, bert, gpt2, llama, mha, t5, text

CPU = torch.device("cpu")


@torch.library.custom_op("headprune_tests::slow", mutates_args=())
def slow(x: Tensor, seconds: float) -> Tensor:
    """An operation that takes some time."""
    time.sleep(seconds)
    return x.clone()


class Slow(nn.Linear):
    seconds = 0.004

    def forward(self, x: Tensor) -> Tensor:
        return slow(super().forward(x), self.seconds)


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

    def __init__(self, width: int, heads: int, hidden: int, second: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three = Attention(width, heads)
        self.four, self.five = nn.Linear(width, hidden), second(hidden, width)

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


def places(model: nn.Module, example: Any) -> dict[str, str]:
    """The part of every module that is called."""
    layers = hp.find_attention(model, example)
    started = profiled(model.eval(), example, CPU).started
    parts = Parts(model, layers, started)
    return {name: parts.place(name).part for name in started}


def test_a_profile_leaves_nothing_in_memory() -> None:
    model, example = bert()
    gc.collect()
    gc.disable()
    try:
        profiled(model.eval(), example, CPU)
        assert not any(isinstance(each, FunctionEvent) for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of many passes, for tests of what takes long: other work may interrupt some."""
    monkeypatch.setattr("headprune.timing.shares.MIN_PASSES", 9)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit", "mha"])
def test_shares_add_up(name: str) -> None:
    model, example = ZOO[name]()
    found = hp.breakdown(model, example, min_seconds=0)
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == pytest.approx(found.total)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(found.parts[part] > 0 for part in PARTS)
    assert found.stand_ins == (name == "mha")
    assert (found.batch, found.length) == latency.example_shape(example)


def test_parts_of_bert() -> None:
    found = places(*bert())
    layer = "bert.encoder.layer.1"
    expected = {
        "bert.embeddings.word_embeddings": ENDS, "bert.embeddings.LayerNorm": ENDS, "bert.pooler.dense": ENDS, "classifier": ENDS,
        "bert": REST, f"{layer}.attention.self": ATTENTION, f"{layer}.attention.self.value": PROJECTIONS,
        f"{layer}.attention.output.dense": PROJECTIONS, f"{layer}.attention.output.LayerNorm": REST,
        f"{layer}.intermediate.dense": FEED_FORWARD, f"{layer}.intermediate.intermediate_act_fn": FEED_FORWARD,
        f"{layer}.output.dense": FEED_FORWARD, f"{layer}.output.LayerNorm": REST,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_parts_of_t5() -> None:
    """Two attention layers in a block, and a table of relative positions that is an embedding."""
    found = places(*t5())
    block = "decoder.block.0.layer"
    expected = {
        "lm_head": ENDS, "decoder.embed_tokens": ENDS, "encoder.block.0.layer.1.DenseReluDense.wo": FEED_FORWARD,
        f"{block}.0.SelfAttention.relative_attention_bias": ATTENTION, f"{block}.1.EncDecAttention.k": PROJECTIONS,
        f"{block}.1.EncDecAttention": ATTENTION, f"{block}.2.DenseReluDense.wi": FEED_FORWARD, f"{block}.2.layer_norm": REST,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_parts_do_not_hang_on_names() -> None:
    example = torch.randn(2, 5, 16)
    found = places(Stack([Block(16, 4, 24), Block(16, 4, 24)], 16), example)
    assert [name for name in found if found[name] == PROJECTIONS] == [
        f"then.{i}.three.{p}" for i in (0, 1) for p in "abcd"
    ]
    assert [n for n in found if found[n] == FEED_FORWARD] == [f"then.{i}.{n}" for i in (0, 1) for n in ("four", "five")]
    assert [name for name in found if found[name] == ENDS] == ["first", "last"]
    assert [name for name in found if found[name] == ATTENTION] == ["then.0.three", "then.1.three"]
    # A layer without attention, in the list of the others, is neither of the ends.
    found = places(Stack([nn.Linear(16, 16), Block(16, 4, 24)], 16), example)
    assert found["then.0"] == REST
    assert found["then.1.five"] == FEED_FORWARD


def test_parts_of_a_model_that_is_one_block() -> None:
    class Whole(Attention):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.up, self.down, self.end = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x + super().forward(x)
            out: Tensor = self.end(self.down(F.gelu(self.up(x))))
            return out

    found = places(Whole(), torch.randn(2, 5, 16))
    expected = {
        "": ATTENTION, "a": PROJECTIONS, "d": PROJECTIONS, "up": FEED_FORWARD, "down": FEED_FORWARD, "end": ENDS,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.usefixtures("patient")
def test_a_slow_feed_forward_is_found() -> None:
    torch.manual_seed(0)
    model = Stack([Block(16, 4, 24, Slow), Block(16, 4, 24, Slow)], 16).eval()
    found = hp.breakdown(model, torch.randn(2, 5, 16), min_seconds=0)
    assert found.parts[FEED_FORWARD] > 2 * 1000 * Slow.seconds * 0.9
    assert max(found.parts, key=found.parts.__getitem__) == FEED_FORWARD
    everything = {layer.name: range(4) for layer in found.layers}
    assert found.bound(everything) < 1.6  # heads are not what takes the time


@pytest.mark.usefixtures("patient")
def test_large_products_take_what_their_operations_say() -> None:
    """Feed-forward layers of four times the projections' work, by matrix products of the same size."""
    torch.manual_seed(0)
    model, example = Stack([Block(256, 4, 256)], 256), torch.randn(4, 64, 256)
    model.then[0].five = nn.Sequential(*(nn.Linear(256, 256) for _ in range(15)))
    found = hp.breakdown(model, example, min_seconds=0)
    assert 2 < found.parts[FEED_FORWARD] / found.parts[PROJECTIONS] < 8
    assert found.shares[LAUNCH] < 0.3


@pytest.mark.parametrize("make", [bert, llama, t5, mha])
def test_the_bound_by_brute_force(make: Any) -> None:
    """Saved is what the cut of the weights takes off: counted on a model that is really pruned."""
    model, example = make()
    found = hp.breakdown(model, example, min_seconds=0)
    drop = {a.name: list(a.units[0]) for a in found.layers if len(a.units) > 1}
    saved = 0.0
    pruned = copy.deepcopy(model)
    hp.prune(pruned, drop, example)
    dense, after = (
        {n: p.numel() for n, p in m.named_parameters() if p.ndim > 1} for m in (_with_stand_ins(model), pruned)
    )
    for cost, (name, part) in zip(found.costs, _owners(model, example, found), strict=True):
        if part == PROJECTIONS:
            saved += cost.time * (1 - after[f"{name}.weight"] / dense[f"{name}.weight"])
        else:
            layer = next(a for a in found.layers if a.module == name)
            saved += cost.time * len(drop.get(layer.name, [])) / layer.num_heads
    assert saved > 0
    assert found.bound(drop) == pytest.approx(found.total / (found.total - saved))


def _with_stand_ins(model: nn.Module) -> nn.Module:
    """A copy in which nothing is pruned, but attention is written as a pruned model's is."""
    from headprune.pruned import convert
    from headprune.pruned.structure import set_module

    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if (stand_in := convert(module)) is not None:
            set_module(made, name, stand_in)
    return made


def _owners(model: nn.Module, example: Any, found: hp.Breakdown) -> list[tuple[str, str]]:
    """What the costs are of, in their order: that of the first call."""
    model = _with_stand_ins(model)
    pass_ = profiled(model, example, CPU) if isinstance(example, dict) else profiled(model, tuple(example), CPU)
    parts = Parts(model, found.layers, pass_.started)
    placed = [parts.place(name) for name in pass_.busy]
    return list(dict.fromkeys((p.owner, p.part) for p in placed if p.part in (PROJECTIONS, ATTENTION)))


def test_the_bound_of_no_heads_and_of_none_gone() -> None:
    model, example = bert()
    found = hp.breakdown(model, example, min_seconds=0)
    assert found.bound({}) == 1
    everything = {layer.name: range(layer.num_heads) for layer in found.layers}
    attention = found.parts[PROJECTIONS] + found.parts[ATTENTION] + sum(cost.launch for cost in found.costs)
    assert found.bound(everything) == pytest.approx(found.total / (found.total - attention))
    with pytest.raises(hp.HeadPruneError, match="no head 9"):
        found.bound({"L0": [9]})


def test_a_model_is_left_as_it_was() -> None:
    model, example = bert()
    model.train()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hp.breakdown(model, example, min_seconds=0)
    assert model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(hp.HeadPruneError, match="does not run on the example"):
        hp.breakdown(model, {"input_ids": torch.full((1, 4), 10**6)}, layers=hp.find_attention(model, example))


@dataclass
class Range:
    start: float
    end: float

    def elapsed_us(self) -> float:
        return self.end - self.start


@dataclass
class Event:
    """What the profiler gives: of a GPU, as there is none here."""

    name: str
    time_range: Range
    cpu_parent: Event | None = None
    device_time_total: float = 0.0
    device_type: Any = _autograd.DeviceType.CPU
    cpu_children: list[Event] = field(default_factory=list)


def test_kernels_are_their_modules() -> None:
    """On CUDA an operation takes what its kernels take; what only launches it is not its time."""
    root = Event("headprune:", Range(0, 1000))
    block = Event("headprune:block", Range(100, 600), root)
    product = Event("aten::linear", Range(200, 300), block, device_time_total=5000)
    inner = Event("aten::addmm", Range(210, 290), product, device_time_total=5000)  # counted once, with what calls it
    outer = Event("aten::add", Range(700, 800), root, device_time_total=40)
    empty = [Event("empty", Range(1000 + 10 * i, 1004 + 10 * i)) for i in range(4)]
    copied = Event("headprune:block", Range(0, 9000), device_type=_autograd.DeviceType.CUDA)
    kernel = Event("gemm", Range(0, 5000), device_type=_autograd.DeviceType.CUDA)
    found = read([root, block, product, inner, outer, *empty, copied, kernel], on_device=True)
    assert found.busy == pytest.approx({"": 0.04, "block": 5.0})
    # A range costs 10 µs, half of it in the range; on the CPU 395 of the block's 500 µs are between operations.
    assert found.idle == pytest.approx({"": 0.39, "block": 0.395})
    assert found.started == {"": 0, "block": 100}
    assert read([root, block, product, inner, outer, *empty], on_device=False).busy == pytest.approx(
        {"": 0.1, "block": 0.1}
    )


def test_launch_overhead_on_cuda_is_the_wall_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from headprune.timing import shares
    from headprune.timing.profiling import Pass

    model, example = bert()
    layers = hp.find_attention(model, example)
    real = profiled(model, example, CPU)
    monkeypatch.setattr(shares, "model_device", lambda _: torch.device("cuda"))
    passed = Pass(dict.fromkeys(real.busy, 0.1), dict.fromkeys(real.busy, 99.0), real.started)
    kernels = 0.1 * len(real.busy)
    found = shares._broken_down(model, layers, (3, 9), [passed], 4 * kernels, False)
    assert found.total == pytest.approx(4 * kernels)
    assert found.parts[LAUNCH] == pytest.approx(3 * kernels)
    overlapping = shares._broken_down(model, layers, (3, 9), [passed], kernels / 2, False)
    assert overlapping.parts[LAUNCH] == 0
    assert sum(overlapping.parts.values()) == pytest.approx(kernels / 2)


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_the_cache_of_generated_tokens(make: Any) -> None:
    """Bytes per token are those of the tensors in the model's own cache; the tokens are those of `generate`."""
    model, example = make()
    example = {k: v[:2] for k, v in example.items() if k in ("input_ids", "attention_mask")}
    pruned = copy.deepcopy(model)
    drop = {a.name: list(a.units[0]) for a in hp.find_attention(model, make()[1])}
    hp.prune(pruned, drop, make()[1])
    row = generation({"dense": model, "pruned": pruned}, example, new=4, min_rounds=1, min_seconds=0)
    assert row is not None
    for name, each in (("dense", model), ("pruned", pruned)):
        seq2seq = model.config.is_encoder_decoder
        given = {**example, "decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)} if seq2seq else example
        with torch.no_grad():
            cache = each(**given, use_cache=True).past_key_values
        own = cache.self_attention_cache if seq2seq else cache
        tensors = [t for layer in own.layers for t in (layer.keys, layer.values)]
        tokens = given["decoder_input_ids" if seq2seq else "input_ids"].numel()
        assert row.cache[name] == sum(t.numel() * t.element_size() for t in tensors) / tokens
    assert row.cache["pruned"] < row.cache["dense"]
    assert (row.batch, row.length, row.new) == (2, 9, 4)
    assert row.tokens_per_second["dense"] == pytest.approx(2000 / row.token["dense"].median)
    assert set(row.token_speedups) == set(row.prefill_speedups) == {"pruned"}


def test_the_tokens_are_those_that_generate_gives() -> None:
    from headprune.timing import decoding

    for make in (gpt2, llama, t5):
        model, _ = make()
        example = {"input_ids": text(1, 6)["input_ids"], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
        written: list[int] = []
        step = decoding._prompt(model, example)
        with torch.no_grad():
            for _ in range(5):
                step = decoding._next(model(**step, use_cache=True), step)
                written.append(int(step.get("decoder_input_ids", step.get("input_ids"))))
        wanted = model.generate(
            **example, max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert written == wanted[0, -5:].tolist()


def test_what_does_not_write_is_not_timed() -> None:
    model, example = bert()
    assert generation({"dense": model}, example) is None
    model, example = mha()
    assert generation({"dense": model}, example) is None


@pytest.mark.parametrize(("totals", "kept"), [([336.0, 0.8, 0.7], 0.8), ([336.0, 5.0, 9.0, 7.0, 8.0, 0.7], 5.0)])
def test_a_disturbed_breakdown_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, totals: list[float], kept: float
) -> None:
    """A few passes on a busy machine once took 475 times what the same model took where models were timed in turn."""
    model, example = bert()
    layers = hp.find_attention(model, example)
    left = iter(totals)

    def made(*_: Any, **__: Any) -> hp.Breakdown:
        total = next(left)
        return hp.Breakdown(2, 5, total, dict.fromkeys(PARTS, total / len(PARTS)), (), tuple(layers))

    monkeypatch.setattr(timing, "breakdown", made)
    rows = [latency.LatencyRow(2, 5, {"dense": latency.Timing(0.71, 0.9, 20, 0.7, 0.72)}, {})]
    (row,) = timing.time_parts(model, layers, [(2, 5, example)], {}, rows, Console(quiet=True))
    assert row.total == kept
