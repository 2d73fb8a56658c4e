"""From scores and a goal to the plans that will be carried out: fitted to the budgets, chosen by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headprune.app.documents import Point
from headprune.app.workflow.config import PruneConfig
from headprune.app.workflow.scene import Console, Scene
from headprune.app.workflow.timing import budget_input
from headprune.budgets import Budget, Fit
from headprune.budgets.subject import Subject
from headprune.options import AUTO
from headprune.plan_search import SearchResult, constraints_of, find_plans, levels_of, may_add_biases, subject_of
from headprune.planning import Order, Search, arrange
from headprune.plans import PruningPlan
from headprune.scoring import HeadScores, score
from headprune.store import Store
from headprune.trials import Trials

RANDOM_DRAWS = 3


def trials_of(scene: Scene, config: PruneConfig, store: Store | None = None) -> Trials:
    """Plans tried on the scene's choosing part."""
    return Trials(
        scene.model, scene.layers, list(scene.parts.score.batches()), list(scene.parts.choose.batches()),
        repair=config.search.repair, biases=may_add_biases(config.search.strategy, scene.model, scene.layers), metric=scene.metric,
        store=store,
    )  # fmt: skip


def search_or_plan(
    scene: Scene, config: PruneConfig, scores: Sequence[HeadScores], trials: Trials, console: Console
) -> SearchResult:
    """For every budget a plan that meets it; or the user's plan.

    Raises:
        HeadPruneError: A budget that no order can meet; a plan that does not fit the model.
    """
    if config.plan is None:
        return find_plans(config.search, scores, trials, lambda budget: subject_for(budget, scene, trials), console)
    config.plan.check_model(scene.model)
    config.plan.on(scene.layers)  # a layer that cannot be masked is refused by name
    return SearchResult((Fit(replace(config.plan.on(scene.maskable), budget=f"plan {config.plan_file}")),))


def subject_for(budget: Budget, scene: Scene, trials: Trials | None = None) -> Subject:
    """What a budget is measured on; before the search (without trials) only the dense model can be."""
    inputs = budget_input(scene) if budget.timed else scene.typical_input()
    if trials is not None:
        return subject_of(trials, scene.example, inputs)
    return Subject(scene.model, scene.layers, scene.example, inputs, metric=scene.metric)


def random_orders(scene: Scene, config: PruneConfig, fits: Sequence[Fit]) -> list[Order]:
    """The control: heads drawn at random, under the same constraints."""
    levels = sorted({f.plan.kept for f in fits})
    batches = list(scene.parts.score.batches())[:1]
    return [
        arrange(
            Search(
                scene.maskable,
                score(scene.model, batches, "random", layers=scene.layers, seed=scene.options.seed + i),
                constraints_of(config.search, scene.maskable),
            ),
            "one-shot",
            levels,
        )
        for i in range(RANDOM_DRAWS)
    ]


def curves(config: PruneConfig, result: SearchResult, trials: Trials) -> dict[str, Order]:
    """The orders whose curves are drawn: of those that `auto` makes itself the one that is used, or the best one, beside the scores'."""
    orders, fits = dict(result.orders), result.fits
    own = [name for name, order in orders.items() if not order.method]
    if config.search.strategy != AUTO or len(own) < 2:
        return orders
    used = fits[0].plan.strategy
    best = used if used in own else _best({name: orders[name] for name in own}, [f.plan.asked for f in fits], trials)
    return {name: order for name, order in orders.items() if name not in own or name == best}


def _best(orders: dict[str, Order], levels: Sequence[int], trials: Trials) -> str:
    """The order that reaches most of some numbers of kept heads, and has the best plans there."""

    def merit(name: str) -> tuple[int, float]:
        plans = [orders[name].plan(keep) for keep in levels if orders[name].least <= keep]
        return len(plans), sum(map(trials.merit, plans))

    return max(orders, key=merit)


def trade_off(
    orders: dict[str, Order], randoms: Sequence[Order], fits: Sequence[Fit], trials: Trials, console: Console
) -> list[Point]:
    """The metric on the choosing part against heads kept, by every order and by random."""
    total = fits[0].plan.total
    levels = sorted(levels_of(total, [f.plan.asked for f in fits]), reverse=True)
    jobs = [("dense", PruningPlan({}, total, total, total))]
    if not orders:  # a plan of the user's
        jobs += [("plan", replace(f.plan, asked=f.plan.kept)) for f in fits]
        levels = [f.plan.kept for f in fits]
    # What is not used, and the control, would take most of the time: they are drawn where it was asked for, and at the end.
    drawn = {levels[-1], *(keep for f in fits for keep in (f.plan.asked, f.plan.kept))}
    used = fits[0].plan.strategy, fits[0].plan.method
    named = [*orders.items(), *(("random", order) for order in randoms)]
    for keep in levels:
        here = [(n, o) for n, o in named if keep in drawn or (n != "random" and (o.strategy, o.method) == used)]
        jobs += [(name, order.plan(keep)) for name, order in here if order.least <= keep]
    curve = []
    with console.track("trade-off on the choosing part") as progress:
        for i, (name, plan) in enumerate(jobs):
            curve.append(Point(**trials.point(name, plan)))
            progress(i + 1, len(jobs))
    return curve
