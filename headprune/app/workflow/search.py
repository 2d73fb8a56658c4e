"""Finds the plans that `headprune prune` carries out: its settings, checks before the long work, and the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from headprune import plan_search
from headprune.app.documents import Orders, Planning, Point
from headprune.app.options import Options, TaskOptions
from headprune.app.runs import RunFolder
from headprune.app.workflow.scene import Console, Scene, budget_input
from headprune.budgets import Budget, Fit, SearchOptions, Subject
from headprune.errors import HeadPruneError, ScoresError
from headprune.evaluation import interval, measurable
from headprune.fingerprint import fingerprint, versions
from headprune.inputs import model_device
from headprune.plan_search import Trials
from headprune.planning import AUTO, Order, Search, arrange, needs_scores
from headprune.planning.strategies import effort_named
from headprune.plans import PruningPlan
from headprune.running import tracked
from headprune.scoring import HeadScores, score
from headprune.searching import candidates, may_add_biases
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

    def candidates(self, scores: Sequence[HeadScores]) -> list[HeadScores]:
        """The scores to plan by: those of ``source`` that were asked for, or all; and random only if there is nothing else."""
        all_of_them = self.source is None or not self.methods
        return candidates([s for s in scores if all_of_them or s.method in self.methods])

    def planning(self, result: plan_search.SearchResult) -> Planning:
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


def check_search(config: PruneConfig, scene: Scene) -> None:
    """Refuse a search or plan that removes no head or names unknown heads, and a metric that cannot be measured.

    Raises:
        HeadPruneError: No head would be removed, a layer or head does not exist, or the metric cannot be measured.
    """
    if config.plan is not None:
        config.plan.on(scene.layers)
        if not any(config.plan.drop.values()):
            hint = 'Name some in its `drop`, such as {"L0": [3]}.'
            raise HeadPruneError(f"The plan {config.plan_file} drops no head.", hint)
    else:
        plan_search.constraints_of(config.search, scene.maskable)
        for budget in config.search.budgets:
            if budget.by_metric and scene.metric != scene.measures.for_plans:
                message = (
                    f"{budget.flag} measures every plan that is tried, and {scene.metric} would be generated each time."
                )
                raise HeadPruneError(message, f"Give --keep, or leave out --metric {scene.metric}.")
            budget.check_dense(subject_for(budget, scene))
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


def trials_of(scene: Scene, config: PruneConfig, store: Store | None = None, known: Orders | None = None) -> Trials:
    """The `Trials` of plans on the scene's choosing part; ``known`` orders are not made again."""
    biases = may_add_biases(config.search.strategy, scene.model, scene.layers)
    trials = Trials(
        scene.model, scene.layers, list(scene.parts.score.batches()), list(scene.parts.choose.batches()),
        repair=config.search.repair, biases=biases, metric=scene.measures.for_plans, store=store or Store(),
    )  # fmt: skip
    orders = known.orders if known else {}
    for name in orders:
        trials.store.get(f"order {name}", partial(orders.__getitem__, name))
    return trials


def search_or_plan(
    scene: Scene, config: PruneConfig, scores: Sequence[HeadScores], trials: Trials, console: Console
) -> plan_search.SearchResult:
    """For every budget a plan that meets it; or the user's plan.

    Raises:
        HeadPruneError: A budget that no order can meet; a plan that does not fit the model.
    """
    if config.plan is None:
        return plan_search.find_plans(
            config.search, scores, trials, lambda budget: subject_for(budget, scene, trials), console
        )
    config.plan.check_model(scene.model)
    return plan_search.SearchResult((Fit(replace(config.plan.on(scene.maskable), budget=f"plan {config.plan_file}")),))


def known_orders(config: PruneConfig, scene: Scene, scores: Sequence[HeadScores], console: Console) -> Orders | None:
    """The orders of the run that the scores are from, if a search for these budgets would make the like; else None."""
    source = config.source
    if source is None or config.plan is not None or config.anew:
        return None
    known, counts = source.read_orders(), _counts(config, scene)
    if known is None or known.made_from != _made_from(config, scene, config.candidates(scores)):
        return None
    if not all(count is not None and count >= known.fewest for count in counts):
        return None
    console.say(f"Heads go in the orders that were made for {source.path} (--no-resume searches anew).")
    return known


def orders_document(
    config: PruneConfig, scene: Scene, scores: Sequence[HeadScores], result: plan_search.SearchResult
) -> Orders:
    """The orders of a search, for later budgets."""
    total = sum(layer.num_heads for layer in scene.maskable)
    levels = plan_search.levels_of(total, [count for count in _counts(config, scene) if count is not None])
    return Orders(made_from=_made_from(config, scene, scores), fewest=min(levels), orders=dict(result.orders))


def _counts(config: PruneConfig, scene: Scene) -> list[int | None]:
    total = sum(layer.num_heads for layer in scene.maskable)
    return [budget.heads(total) for budget in config.search.budgets]


def _made_from(config: PruneConfig, scene: Scene, scores: Sequence[HeadScores]) -> str:
    """A digest of everything that orders of removal depend on, but for the budgets."""
    parts = [part.content_hash for part in (scene.parts.score, scene.parts.choose)]
    by_groups = any(budget.by_groups for budget in config.search.budgets)
    options, device = asdict(replace(config.search, budgets=())), model_device(scene.model).type
    facts = [versions(), device, scene.options.loading.dtype, scene.options.data.batch_size, options, parts, by_groups]
    # Not the values: several processes may add them up in another order than one.
    known = [[s.method, s.unit, s.examples, s.flat().argsort().tolist()] for s in scores]
    return digest(facts, known, fingerprint(scene.model))


def subject_for(budget: Budget, scene: Scene, trials: Trials | None = None) -> Subject:
    """What a budget is measured on; without trials (before the search) only the dense model can be measured."""
    inputs = budget_input(scene) if budget.timed else scene.typical_input()
    if trials is not None:
        return trials.subject(scene.example, inputs)
    return Subject(scene.model, scene.layers, scene.example, inputs)


def random_orders(scene: Scene, config: PruneConfig, fits: Sequence[Fit]) -> list[Order]:
    """The control: heads drawn at random, under the same constraints."""
    levels, batches = sorted({f.plan.kept for f in fits}), list(scene.parts.score.batches())[:1]
    constraints, orders = plan_search.constraints_of(config.search, scene.maskable), []
    for seed in range(scene.options.seed, scene.options.seed + RANDOM_DRAWS):
        scores = score(scene.model, batches, "random", layers=scene.layers, seed=seed)
        orders.append(arrange(Search(scene.maskable, scores, constraints), "one-shot", levels))
    return orders


def curves(config: PruneConfig, result: plan_search.SearchResult, trials: Trials) -> dict[str, Order]:
    """The orders whose curves are drawn: by scores, and the used (or best) one of the orders that `auto` makes itself."""
    orders, fits = dict(result.orders), result.fits
    own = [name for name, order in orders.items() if not order.method]
    if config.search.strategy != AUTO or len(own) < 2:
        return orders
    used = fits[0].plan.strategy

    def merit(name: str) -> tuple[int, float]:
        """How many of the budgets an order reaches, and how good its plans are there."""
        plans = [orders[name].plan(f.plan.asked) for f in fits if orders[name].least <= f.plan.asked]
        return len(plans), sum(map(trials.merit, plans))

    best = used if used in own else max(own, key=merit)
    return {name: order for name, order in orders.items() if name not in own or name == best}


def trade_off(
    orders: dict[str, Order], randoms: Sequence[Order], fits: Sequence[Fit], trials: Trials, console: Console
) -> list[Point]:
    """The metric on the choosing part against heads kept, by every order and by random."""
    total = fits[0].plan.total
    levels = sorted(plan_search.levels_of(total, [f.plan.asked for f in fits]), reverse=True)
    jobs = [("dense", PruningPlan({}, total, total, total))]
    if not orders:  # a plan of the user's
        jobs += [("plan", replace(f.plan, asked=f.plan.kept)) for f in fits]
        levels = [f.plan.kept for f in fits]
    # Unused orders and the control would take most of the time: they are measured at the budgets and the last level only.
    drawn = {levels[-1], *(keep for f in fits for keep in (f.plan.asked, f.plan.kept))}
    used = fits[0].plan.strategy, fits[0].plan.method
    named = [*orders.items(), *(("random", order) for order in randoms)]
    for keep in levels:
        here = [(n, o) for n, o in named if keep in drawn or (n != "random" and (o.strategy, o.method) == used)]
        jobs += [(name, order.plan(keep)) for name, order in here if order.least <= keep]
    curve = []
    with console.track("trade-off on the choosing part") as progress:
        for name, plan in tracked(jobs, progress):
            measured = trials.measure(plan.drop)
            low, high = interval(measured, trials.metric)
            value, loss = measured.metrics[trials.metric], measured.metrics["loss"]
            point = Point(method=name, kept=plan.kept, asked=plan.asked, value=value, low=low, high=high, loss=loss)
            curve.append(point)
    return curve
