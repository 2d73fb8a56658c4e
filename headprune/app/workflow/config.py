"""What `headprune prune` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headprune.app.documents import Planning
from headprune.app.options import Options
from headprune.app.runs import RunFolder
from headprune.errors import HeadPruneError, ScoresError
from headprune.options import AUTO, SearchOptions
from headprune.plan_search import SearchResult, candidates
from headprune.planning import strategy_named
from headprune.planning.strategies import effort_named
from headprune.plans import PruningPlan
from headprune.scoring import HeadScores
from headprune.scoring.base import method_and_settings


@dataclass(frozen=True)
class PruneConfig:
    """What `headprune prune` is asked for.

    Attributes:
        options: Model, data and scoring.
        search: The budgets, and how plans are searched for.
        plan: Instead of a search.
        plan_file: Where that is from.
        finetune: Epochs to train afterwards; 0 for none.
        methods: Scores to plan by, with their settings (`headprune.options.method_and_settings`). Of a ``source``, () takes all that it has, but random.
        source: The run whose scores to use; None scores first, if the search needs scores.
        exports: Formats to write the pruned models in as well, names of `headprune.exporting.FORMATS`.
    """

    options: Options
    search: SearchOptions = field(default_factory=SearchOptions)
    plan: PruningPlan | None = None
    plan_file: str = ""
    finetune: float = 0.0
    methods: Sequence[str] = ()
    source: RunFolder | None = None
    exports: Sequence[str] = ()

    @property
    def needs_scores(self) -> bool:
        return self.plan is None and strategy_named(self.search.strategy).needs_scores

    @property
    def uses_scores(self) -> bool:
        """Whether scores are of use, if there are any."""
        return self.needs_scores or (self.plan is None and self.search.strategy == AUTO)

    @property
    def method_names(self) -> list[str]:
        """The methods, without their settings."""
        return [method_and_settings(text)[0] for text in self.methods]

    @property
    def methods_to_score(self) -> Sequence[str]:
        """The scores that are made before the search."""
        return self.methods if self.source is None and self.uses_scores else ()

    def read_scores(self) -> list[HeadScores]:
        """What ``source`` has.

        Raises:
            HeadPruneError: Scores by one of the methods are missing.
        """
        if self.source is None:
            return []
        scores = self.source.read_scores()
        known = [s.method for s in scores]
        if missing := [m for m in self.method_names if m not in known]:
            raise ScoresError(
                f"{self.source.scores_path} holds no scores by {missing[0]}.",
                f"It has {', '.join(known)}; score again with --method {missing[0]}.",
            )
        return scores

    def candidates(self, scores: Sequence[HeadScores]) -> list[HeadScores]:
        """The scores to plan by: those asked for, and random only if there is nothing else."""
        return candidates([s for s in scores if s.method in self.method_names] if self.methods else scores)

    def planning(self, result: SearchResult) -> Planning:
        """How the plans were made, for the report."""
        if self.plan is not None:
            return Planning(plan=self.plan_file)
        search = self.search
        return Planning(
            strategy=search.strategy, about=strategy_named(search.strategy).about, protect=str(search.protect),
            min_heads_per_layer=search.min_heads_per_layer, effort=effort_named(search.effort), work=dict(result.work),
            judged_by=result.judged_by, compared=result.compared,
        )  # fmt: skip

    def facts(self) -> list[object]:
        """What results depend on, beside the model, the data and the scores."""
        return [self.search, self.plan, self.plan_file, self.finetune]

    def check_placement(self) -> None:
        """Refuse what a model that is spread over devices cannot do, before it is loaded.

        Raises:
            HeadPruneError: It was to be trained or exported.
        """
        if self.options.loading.device_map is None:
            return
        if self.finetune:
            raise HeadPruneError(
                "--finetune and --device-map do not go together: weights that are loaded for each pass cannot be trained.",
                "Leave out --finetune; train the pruned folder where it fits (headprune finetune).",
            )
        if self.exports:
            raise HeadPruneError(
                "--export and --device-map do not go together: an export takes the whole model into memory.",
                "Leave out --export; `headprune export` writes the pruned folder's file where that fits.",
            )
