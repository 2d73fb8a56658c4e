"""Estimates how long a run will take: a timed forward and backward pass, times the number of passes.

Meant to be within half of the real time; `benchmarks/passes.py` compares it with real runs on five models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from headprune import latency, plan_search
from headprune.amounts import duration
from headprune.app.data import Part
from headprune.app.workflow.scene import Console, Scene, inputs
from headprune.app.workflow.search import RANDOM_DRAWS, PruneScene
from headprune.batches import cost_of
from headprune.divergence import ENOUGH
from headprune.errors import first_line
from headprune.inputs import call, inputs_of, model_device, move, tensors, usable
from headprune.parallel import current
from headprune.repairing import step_multiplications
from headprune.running import config_kept, evaluating, quiet
from headprune.scoring import METHODS, method_and_settings

_REPAIR = 6.0  # passes of a repair over the scoring examples: most of them the last step's, taken once
_DECIDED = 7.0  # passes over the choosing part to decide on the steps of a repair
_TOKENS = 3.0  # times as many of both where an example has many answers, as in language models: two last steps, whose lengths are searched
# Passes over the reporting part for each plan: pruned, masked, repaired like random heads, and the random draws.
_MEASURED = 3.0 + RANDOM_DRAWS
_LEVELS = 3  # points of the curve beside the budgets, about
_FIT = 0.02  # seconds of a layer's fit, whatever its width
_MULTIPLY = 4e-11  # seconds of a multiplication in least squares; a layer's takes its width cubed
_STEPS = 2  # last steps of a repair, where an answer has several directions: one to four
_REPORT = 4.0  # seconds of the report and its pictures


@dataclass(frozen=True)
class Cost:
    """Forward passes over the examples (a backward pass counts as two), and seconds on this device."""

    passes: float
    seconds: float
    examples: int

    @property
    def line(self) -> str:
        """The estimate as a sentence."""
        return f"Roughly {duration(self.seconds)}: {self.passes:,.0f} forward passes over {self.examples:,} examples."


def announce(console: Console, make: Callable[[], Cost]) -> None:
    """Print the estimated cost in a line. An error here never stops a run."""
    try:
        cost = current().first("cost", make)
    except Exception as error:
        console.say(f"How long this takes could not be told ({type(error).__name__}: {first_line(error)}).")
        return
    size = current().size
    console.say(cost.line + ("" if size == 1 else f" This is for one process; {size} share the work."))


def cost_of_scores(scene: Scene) -> Cost:
    """The cost of `score_run`."""
    batches = list(scene.parts.score.batches())
    forward, back = _pace(scene.model, batches)
    passes, seconds = 0.0, 0.0
    for text in scene.options.methods:
        own = _passes(text, scene, len(batches))
        limit = method_and_settings(text)[1].seconds
        passes, seconds = passes + own, seconds + min(own * (forward + back) / 3, limit or math.inf)
    return Cost(passes, seconds + _REPORT, len(scene.parts.score))


def cost_of_pruning(scene: PruneScene) -> Cost:
    """The cost of `prune_run`."""
    config, parts, methods = scene.config, scene.parts, scene.config.methods_to_score
    # Its own: one process makes this estimate alone, and the scene's may wait for the others.
    trials = replace(scene, known=None).trials
    batches = list(parts.score.batches())
    forward, back = _pace(scene.model, batches)
    choose, report = (len(part) / len(parts.score) for part in (parts.choose, parts.report))
    compared = min(len(parts.choose), ENOUGH) / len(parts.score)
    by_scores, plans = methods or [s.method for s in scene.candidates], max(1, len(config.search.budgets))
    orders = 0 if config.plan else len(plan_search.orders_for(config.search, dict.fromkeys(by_scores)))
    planned = config.plan is not None or scene.known is not None
    planning = 0.0 if planned else plan_search.passes_of(config.search, scene.scores, trials)
    scoring = sum(_passes(method, scene, len(batches)) for method in methods)
    points = plans + _LEVELS
    passes = scoring + planning + points * choose + orders * plans * compared + report * (1 + _MEASURED * plans)
    fits = (1 + _MEASURED * plans) * _seconds_of_texts(scene)
    if config.search.repair:
        passes += (
            plans * (_REPAIR + _DECIDED * compared) * (_TOKENS if scene.loaded.task.metric == "perplexity" else 1.0)
        )
        widths = [len(p.weight) * (1 + trials.calibration.share) for p in trials.calibration.projections]
        fits += (points + plans * (orders + _MEASURED)) * sum(_FIT + _MULTIPLY * width**3 for width in widths)
        fits += plans * _MULTIPLY * _multiplications(scene)
    once = forward / sum(map(cost_of, batches))
    each = (once * cost_of(example) for _, _, example in inputs(scene))
    timing = sum((plans + 2) * latency.seconds_of(seconds) + 1.5 for seconds in each)
    if config.finetune:
        # Assumes as many training examples as scored ones: the training part is not read yet.
        passes += 4 * config.finetune * plans
    return Cost(passes, passes * (forward + back) / 3 + fits + timing + _REPORT, len(parts.score))


def cost_of_training(model: nn.Module, train: Part, choose: Part, report: Part, epochs: float) -> Cost:
    """The cost of `finetune_run`: the pruned model's steps, the dense model's outputs, and the measurements."""
    batch = next(train.batches())
    rows = next(len(t) for t in tensors(batch))
    forward, back = (seconds * len(train) / rows for seconds in _pace(model, [batch]))
    passes = epochs * (4 + len(choose) / len(train)) + 3 * len(report) / len(train)
    return Cost(passes, passes * (forward + back) / 3 + _REPORT, len(train))


def _pace(model: nn.Module, batches: Sequence[object]) -> tuple[float, float]:
    """Seconds of a forward pass and of a backward pass over all batches, timed on the batch of median size."""
    batch = usable(sorted(batches, key=cost_of)[len(batches) // 2])
    device, times = model_device(model), []
    moved = move(inputs_of(model, batch), device)
    first = next(p for p in model.parameters() if p.is_floating_point())
    before = first.requires_grad
    with torch.inference_mode(False), torch.random.fork_rng(), config_kept(model), evaluating(model):
        first.requires_grad_(True)
        try:
            for grad in (False, False, True):  # the first pass warms up
                began = latency.clock(device)
                with torch.set_grad_enabled(grad):
                    means = [t.float().mean() for t in tensors(call(model, moved)) if t.requires_grad]
                    if grad and means:
                        torch.autograd.grad(torch.stack(means).sum(), [first], allow_unused=True)
                times.append((latency.clock(device) - began) / 1000)
        finally:
            first.requires_grad_(before)
    scale = sum(map(cost_of, batches)) / cost_of(batch)
    return times[1] * scale, max(times[1], times[2] - times[1]) * scale


def _multiplications(scene: Scene) -> float:
    """Of a repair's last steps, where an example has one answer."""
    if not scene.loaded.task.head.endswith("Classification") or scene.loaded.task.head.startswith("Token"):
        return 0.0
    examples, labels = len(scene.parts.score), int(getattr(scene.model.config, "num_labels", 2))
    classes = max(1, labels - 1)
    return (1 if classes == 1 else _STEPS) * step_multiplications(examples, len(scene.parts.choose), classes)


def _seconds_of_texts(scene: Scene) -> float:
    """Seconds in which a model answers the reporting part with texts, by its batch of median size; 0 where it does not."""
    texts, batches = scene.measures.texts(scene.parts.report), list(scene.parts.report.batches())
    if texts is None:
        return 0.0
    device, middle = model_device(scene.model), len(batches) // 2
    began = latency.clock(device)
    with torch.inference_mode(), quiet(scene.model):
        texts.read(scene.model, move(batches[middle], device), middle * scene.options.data.batch_size)
    return (latency.clock(device) - began) / 1000 * len(batches)


def _passes(method: str, scene: Scene, batches: int) -> float:
    """Passes over the scoring examples that a scoring method makes."""
    name, settings = method_and_settings(method)
    heads = sum(layer.num_heads for layer in scene.maskable)
    if name == "shapley":
        return heads * max(1.0, (settings.permutations or 128) / batches) / 2
    if name in ("l0", "dsp"):
        return 3.0 * (settings.steps or max(200, 2 * batches)) / batches
    if name == "integrated-gradients":
        return 3.0 * (settings.steps or 8)
    if "ablation" not in name:
        return METHODS[name].passes
    # A head's pass begins at its layer. If few examples are ablated, gradients on all estimate the rest.
    few = min(1.0, (settings.examples or math.inf) / len(scene.parts.score)) if name == "ablation" else 1.0
    return 1 + heads / 2 * few + (3.0 if few < 1 else 0.0)
