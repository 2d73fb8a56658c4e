"""What `headprune prune` works on: its settings and its scene; checks before the long work, and the search for plans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from headprune import plan_search
from headprune.api import candidates, may_add_biases
from headprune.app.data import Part
from headprune.app.documents import Orders, Planning, Point
from headprune.app.options import Options, TaskOptions
from headprune.app.runs import RunFolder
from headprune.app.workflow.scene import Scene, budget_input
from headprune.attention import Heads
from headprune.budgets import Budget, Fit, SearchOptions, Subject
from headprune.errors import HeadPruneError, ScoresError, UndefinedError
from headprune.evaluation import Measurement, interval, measurable
from headprune.fingerprint import fingerprint, versions
from headprune.gates import mask
from headprune.inputs import model_device
from headprune.plan_search import SearchResult, Trials
from headprune.planning import AUTO, Order, Search, arrange, needs_scores
from headprune.planning.strategies import effort_named
from headprune.plans import PruningPlan
from headprune.running import tracked
from headprune.scoring import HeadScores, maskable_of
from headprune.scoring.statistics import uniform
from headprune.store import Store, digest


@dataclass(frozen=True)
class PruneConfig:
    """The settings of `headprune prune`.

    Attributes:
        options: Model, data and scoring.
        search: The budgets, and how plans are searched for.
        plan: The user's plan, instead of a search.
        plan_file: The file of that plan.
        finetune: Epochs to train afterwards; 0 for none.
        methods: Scores to plan by, with their settings (`headprune.scoring.base.method_and_settings`); with a ``source``, () takes
            all of its scores but random.
        source: The run whose scores to use; None scores first, if the search needs scores.
        anew: Whether to search although there are orders of the same search.
        exports: Formats to write the pruned models in as well, names of `headprune.exporting.FORMATS`.
        tasks: Tasks of lm-evaluation-harness to measure the dense and the pruned models on.
    """

    options: Options
    search: SearchOptions = field(default_factory=SearchOptions)
    plan: PruningPlan | None = None
    plan_file: str = ""
    finetune: float = 0.0
    methods: Sequence[str] = ()
    source: RunFolder | None = None
    anew: bool = False
    exports: Sequence[str] = ()
    tasks: TaskOptions = field(default_factory=TaskOptions)

    @property
    def needs_scores(self) -> bool:
        return self.plan is None and needs_scores(self.search.strategy)

    @property
    def uses_scores(self) -> bool:
        """Whether the search uses scores, if there are any."""
        return self.needs_scores or (self.plan is None and self.search.strategy == AUTO)

    @property
    def methods_to_score(self) -> Sequence[str]:
        """The methods to score by before the search."""
        return self.methods if self.source is None and self.uses_scores else ()

    def read_scores(self) -> list[HeadScores]:
        """The scores of ``source``; [] without one.

        Raises:
            HeadPruneError: Scores by one of the methods are missing.
        """
        if self.source is None:
            return []
        scores = self.source.read_scores()
        known = [s.method for s in scores]
        if missing := [m for m in self.methods if m not in known]:
            hint = f"It has {', '.join(known)}; score again with --method {missing[0]}."
            raise ScoresError(f"{self.source.scores_path} holds no scores by {missing[0]}.", hint)
        return scores

    def planning(self, result: SearchResult) -> Planning:
        """How the plans were made, for the report."""
        if self.plan is not None:
            return Planning(plan=self.plan_file)
        search = self.search
        return Planning(
            strategy=search.strategy, protect=str(search.protect),
            min_heads_per_layer=search.min_heads_per_layer, effort=effort_named(search.effort), work=dict(result.work),
            judged_by=result.judged_by, compared=result.compared,
        )  # fmt: skip

    def check_placement(self) -> None:
        """Refuse to train or export a model that is spread over devices, before it is loaded.

        Raises:
            HeadPruneError: Training or an export was asked for, with a device map.
        """
        flag = "--finetune" if self.finetune else "--export" if self.exports else None
        if flag and self.options.loading.device_map is not None:
            raise HeadPruneError(
                f"{flag} and --device-map do not go together: it takes the whole model into memory.",
                f"Leave out {flag}: `headprune finetune` and `headprune export` take the pruned folder, where it fits.",
            )


@dataclass(frozen=True, kw_only=True)
class PruneScene(Scene):
    """A scene to prune in.

    Attributes:
        tasks: Tasks of lm-evaluation-harness to measure models on (`headprune.app.harness.load_tasks`).
        scores: All scores that there are.
        known: The orders of an earlier search, which are not made again.
        store: Keeps results.
    """

    config: PruneConfig
    tasks: Sequence[Any] = ()
    scores: Sequence[HeadScores] = ()
    known: Orders | None = None
    store: Store = field(default_factory=Store)

    @property
    def candidates(self) -> list[HeadScores]:
        """The scores to plan by: those of ``config.source`` that were asked for, or all; and random only if there is nothing else."""
        asked = self.config.methods if self.config.source is not None else ()
        return candidates([s for s in self.scores if not asked or s.method in asked])

    @property
    def counts(self) -> list[int | None]:
        """The number of heads that each budget keeps, if that is known before the search."""
        total = sum(layer.num_heads for layer in self.maskable)
        return [budget.heads(total) for budget in self.config.search.budgets]

    @property
    def content(self) -> RunFolder:
        """Where the run's new files go."""
        assert self.store.folder is not None
        return RunFolder(self.store.folder / "content")

    @cached_property
    def trials(self) -> Trials:
        """The `Trials` of plans on the choosing part."""
        search = self.config.search
        trials = Trials(
            self.model, self.layers, list(self.parts.score.batches()), list(self.parts.choose.batches()), repair=search.repair,
            biases=may_add_biases(search.strategy, self.model, self.layers), metric=self.measures.for_plans, store=self.store,
            # A budget of lost accuracy is proved on them, and a training's best epoch is chosen by them.
            fit_choose=not (self.config.finetune or any(budget.by_metric for budget in search.budgets)),
        )  # fmt: skip
        orders = self.known.orders if self.known else {}
        for name in orders:
            trials.store.get(f"order {name}", partial(orders.__getitem__, name))
        return trials

    def input_for(self, budget: Budget) -> dict[str, Any]:
        """What a budget is measured on."""
        return budget_input(self) if budget.timed else self.typical_input()

    def measure(
        self, name: str, what: nn.Module | Heads, also: Part | None = None, repaired: bool = False
    ) -> Measurement:
        """Evaluate a model, or the dense one with heads masked, on the reporting part or on a second dataset.

        Args:
            name: The result's name in the store.
            repaired: Whether the kept heads are refitted layer by layer, as for the random control: a whole repair of each
                draw would take long.
        """
        part = also or self.parts.report

        def make() -> Measurement:
            with self.console.track(f"measuring: {name}") as progress:
                if isinstance(what, nn.Module):
                    return self.measures.evaluate(what, part, progress)
                repair = self.trials.repaired(what) if repaired else nullcontext()
                with repair, mask(self.model, what, layers=self.layers):
                    return self.measures.evaluate(self.model, part, progress)

        # The second datasets are not in the key of the run's store.
        return self.store.get(name if also is None else f"{name} on {also.name} {also.content_hash}", make)


def check_search(scene: PruneScene) -> None:
    """Refuse a search or plan that removes no head or names unknown heads, and a metric that cannot be measured.

    Raises:
        HeadPruneError: No head can be masked or would be removed, a layer or head does not exist, or the metric cannot be measured.
    """
    plan, metric = scene.config.plan, scene.metric
    maskable_of(scene.model, scene.layers)
    if plan is not None:
        plan.on(scene.layers)
        if not any(plan.drop.values()):
            hint = 'Name some in its `drop`, such as {"L0": [3]}.'
            raise HeadPruneError(f"The plan {scene.config.plan_file} drops no head.", hint)
    else:
        plan_search.constraints_of(scene.config.search, scene.maskable)
        for budget in scene.config.search.budgets:
            if budget.by_metric and metric != scene.measures.for_plans:
                message = f"{budget.flag} measures every plan that is tried, and {metric} would be generated each time."
                raise HeadPruneError(message, f"Give --keep, or leave out --metric {metric}.")
            budget.check_dense(Subject(scene.model, scene.layers, scene.example, scene.input_for(budget)))
    scene.measures.texts(scene.parts.report)
    metric = scene.measures.own
    if metric in measurable(scene.model, scene.parts.report.batches(), scene.measures.further):
        return
    what, name = f"The {metric} of {scene.options.model}", scene.loaded.task.name
    if metric == "perplexity":
        raise HeadPruneError(
            f"{what} cannot be measured: its own loss is not the cross-entropy of its logits, nor a mean over labels.",
            f"Check --task (it is {name}), or use the Python API, which takes any loss: headprune.score(model, batches).",
        )
    raise HeadPruneError(f"{what} cannot be read off its logits.", f"Check --task (it is {name}).")


RANDOM_DRAWS = 3


def search_or_plan(scene: PruneScene) -> SearchResult:
    """For every budget a plan that meets it; or the user's plan.

    Raises:
        HeadPruneError: A budget that no order can meet; a plan that does not fit the model.
    """
    config, trials = scene.config, scene.trials
    if config.plan is not None:
        config.plan.check_model(scene.model)
        return SearchResult((Fit(replace(config.plan.on(scene.maskable), budget=f"plan {config.plan_file}")),))

    def subject_for(budget: Budget) -> Subject:
        return trials.subject(scene.example, scene.input_for(budget))

    def find() -> SearchResult:
        result = plan_search.find_plans(config.search, scene.candidates, trials, subject_for, scene.console)
        fits = {fit.plan.asked: fit for fit in result.fits}  # "50%" and "36" may be the same
        return replace(result, fits=tuple(fits.values()))

    return scene.store.get("search", find)


def known_orders(scene: PruneScene) -> Orders | None:
    """The orders of the run that the scores are from, if a search for these budgets would make the like; else None."""
    source = scene.config.source
    if source is None or scene.config.plan is not None or scene.config.anew:
        return None
    known = source.read_orders()
    if known is None or known.made_from != _made_from(scene):
        return None
    if not all(count is not None and count >= known.fewest for count in scene.counts):
        return None
    scene.console.say(f"Heads go in the orders that were made for {source.path} (--no-resume searches anew).")
    return known


def orders_document(scene: PruneScene, result: SearchResult) -> Orders:
    """The orders of a search, for later budgets."""
    total = sum(layer.num_heads for layer in scene.maskable)
    levels = plan_search.levels_of(total, [count for count in scene.counts if count is not None])
    return Orders(made_from=_made_from(scene), fewest=min(levels), orders=dict(result.orders))


def _made_from(scene: PruneScene) -> str:
    """A digest of everything that orders of removal depend on, but for the budgets."""
    search = scene.config.search
    parts = [part.content_hash for part in (scene.parts.score, scene.parts.choose)]
    by_groups = any(budget.by_groups for budget in search.budgets)
    options, device = asdict(replace(search, budgets=())), model_device(scene.model).type
    facts = [versions(), device, scene.options.loading.dtype, scene.options.data.batch_size, options, parts, by_groups]
    # Not the values: several processes may add them up in another order than one.
    known = [[s.method, s.unit, s.examples, s.flat().argsort().tolist()] for s in scene.candidates]
    return digest(facts, known, fingerprint(scene.model))


def random_orders(scene: PruneScene, fits: Sequence[Fit]) -> list[Order]:
    """The control: heads drawn at random, under the same constraints."""
    levels, layers = sorted({f.plan.kept for f in fits}), tuple(scene.maskable)
    constraints, orders = plan_search.constraints_of(scene.config.search, layers), []
    sizes = [layer.num_heads for layer in layers]
    for seed in range(scene.options.seed, scene.options.seed + RANDOM_DRAWS):
        parts = torch.split(uniform(sum(sizes), seed), sizes)
        values = dict(zip((layer.name for layer in layers), parts, strict=True))
        scores = HeadScores("random", "", values, {}, 0, layers, fits[0].plan.model)
        orders.append(arrange(Search(layers, scores, constraints), "one-shot", levels))
    return orders


def trade_off(scene: PruneScene, result: SearchResult) -> list[Point]:
    """The metric on the choosing part against heads kept: of the dense model, and in the order that is used (or of the user's plan)."""
    plans, trials = [fit.plan for fit in result.fits], scene.trials
    used, total = plans[0], plans[0].total
    jobs = [("dense", PruningPlan({}, total, total, total))]
    orders = [(n, o) for n, o in result.orders.items() if (o.strategy, o.method) == (used.strategy, used.method)]
    for name, order in orders:
        levels = sorted(plan_search.levels_of(total, [plan.asked for plan in plans]), reverse=True)
        jobs += [(name, order.plan(keep)) for keep in levels if order.least <= keep]
    if not orders:
        jobs += [("plan", replace(plan, asked=plan.kept)) for plan in plans]
    curve = []
    with scene.console.track("trade-off on the choosing part") as progress:
        for name, plan in tracked(jobs, progress):
            try:
                measured = trials.measure(plan.drop)
            except UndefinedError as error:
                if not plan.drop:
                    raise
                scene.console.say(f"With {plan.kept} heads the trade-off has no point: {error.args[0]}")
                continue
            low, high = interval(measured, trials.metric)
            value, loss = measured.metrics[trials.metric], measured.metrics["loss"]
            point = Point(method=name, kept=plan.kept, asked=plan.asked, value=value, low=low, high=high, loss=loss)
            curve.append(point)
    return curve
