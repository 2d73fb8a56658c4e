"""From scores and a goal to the plans that will be carried out: fitted to the budgets, chosen by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headprune import searching
from headprune.app.documents import PlannedWork, Planning, Point
from headprune.app.workflow.scene import Console, Scene
from headprune.app.workflow.timing import budget_input
from headprune.budgets import Budget, Fit
from headprune.budgets.subject import Subject
from headprune.planning import Constraints, Order, Search, arrange, strategy_named
from headprune.planning.effort import effort_named
from headprune.plans import PruningPlan
from headprune.scoring import score
from headprune.searching import AUTO, Request, levels_of, subject_of
from headprune.store import Store
from headprune.trials import Trials

RANDOM_DRAWS = 3


@dataclass(frozen=True)
class Goal:
    """What `headprune prune` is asked for: budgets, or a plan.

    Attributes:
        strategy: A name of `headprune.planning.STRATEGIES`.
        protect: What must stay, such as ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        repair: Whether the heads that stay are refitted to what the removed ones gave.
        finetune: Epochs to train afterwards; 0 for none.
        plan: Instead of budgets.
        file: Where the plan is from.
        effort: How much work planning may be, a name of `headprune.planning.effort.EFFORTS`.
    """

    budgets: tuple[Budget, ...] = ()
    strategy: str = AUTO
    protect: str = ""
    min_heads_per_layer: int = 0
    repair: bool = True
    finetune: float = 0.0
    plan: PruningPlan | None = None
    file: str = ""
    effort: str = "normal"

    @property
    def needs_scores(self) -> bool:
        return self.plan is None and strategy_named(self.strategy).needs_scores

    @property
    def uses_scores(self) -> bool:
        """Whether scores are of use, if there are any."""
        return self.needs_scores or (self.plan is None and self.strategy == AUTO)

    def constraints(self, scene: Scene) -> Constraints:
        return Constraints.parse(self.protect, scene.maskable, self.min_heads_per_layer)

    def request(self, scene: Scene) -> Request:
        """What is searched for in a scene."""
        return Request(self.budgets, self.strategy, self.constraints(scene), self.effort, scene.options.seed)

    def planning(self, orders: dict[str, Order], trials: Trials) -> Planning:
        """How the plans were made, for the report."""
        if self.plan is not None:
            return Planning(plan=self.file, work={})
        found = Planning(
            strategy=self.strategy, about=strategy_named(self.strategy).about, protect=self.protect,
            min_heads_per_layer=self.min_heads_per_layer, effort=effort_named(self.effort),
            work={name: PlannedWork.model_validate(work) for name, work in trials.work.items()},
        )  # fmt: skip
        if len(orders) > 1:
            found = found.changed(judged_by=trials.judged_by)
        return found.changed(compared=trials.compared) if trials.compared else found


def trials_of(scene: Scene, goal: Goal, store: Store | None = None) -> Trials:
    """Plans tried on the scene's choosing part."""
    return Trials(
        scene.model, scene.layers, list(scene.parts.score.batches()), list(scene.parts.choose.batches()),
        repair=goal.repair, biases=searching.may_add_biases(goal.strategy, scene.model, scene.layers), metric=scene.metric,
        store=store,
    )  # fmt: skip


def fits_of(scene: Scene, goal: Goal, orders: dict[str, Order], trials: Trials, console: Console) -> list[Fit]:
    """For every budget a plan that holds it, all of the order whose plans do best on the choosing part; or the user's plan.

    Raises:
        HeadPruneError: A budget that no order can meet; a plan that does not fit the model.
    """
    if goal.plan is not None:
        goal.plan.check_model(scene.model)
        goal.plan.on(scene.layers)  # a layer that cannot be masked is refused by name
        return [Fit(replace(goal.plan.on(scene.maskable), budget=f"plan {goal.file}"))]

    return searching.fits_of(
        goal.request(scene), orders, trials, console, lambda budget: subject_for(budget, scene, trials)
    )


def subject_for(budget: Budget, scene: Scene, trials: Trials | None = None) -> Subject:
    """What a budget is measured on; before the search (without trials) only the dense model can be."""
    inputs = budget_input(scene) if budget.timed else scene.typical_input()
    if trials is not None:
        return subject_of(trials, scene.example, inputs)
    return Subject(scene.model, scene.layers, scene.example, inputs, metric=scene.metric)


def random_orders(scene: Scene, goal: Goal, fits: Sequence[Fit]) -> list[Order]:
    """The control: heads drawn at random, under the same constraints."""
    levels = sorted({f.plan.kept for f in fits})
    batches = list(scene.parts.score.batches())[:1]
    return [
        arrange(
            Search(
                scene.maskable,
                score(scene.model, batches, "random", layers=scene.layers, seed=scene.options.seed + i),
                goal.constraints(scene),
            ),
            "one-shot",
            levels,
        )
        for i in range(RANDOM_DRAWS)
    ]


def shown(goal: Goal, orders: dict[str, Order], fits: Sequence[Fit], trials: Trials) -> dict[str, Order]:
    """The orders whose curves are drawn: of those that `auto` makes itself the one that is used, or the best one, beside the scores'."""
    own = [name for name, order in orders.items() if not order.method]
    if goal.strategy != AUTO or len(own) < 2:
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
            curve.append(Point.model_validate(trials.point(name, plan)))
            progress(i + 1, len(jobs))
    return curve
