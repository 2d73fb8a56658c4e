"""`headprune score`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.asked import known_methods, planned
from headprune.cli.made import key_of, options_of
from headprune.cli.options import Data, Loading, Manner, Model, Placing, Scoring, Seed, Writing, by_groups
from headprune.cli.session import session


@app.command(
    epilog="Example: `headprune score distilbert/distilbert-base-uncased-finetuned-sst-2-english -d nyu-mll/glue --subset sst2`"
)
@by_groups
def score(
    model: Model,
    data: Data,
    scoring: Scoring,
    loading: Loading,
    placing: Placing,
    writing: Writing,
    manner: Manner,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", help="Scoring method; repeatable. `headprune methods` lists them [ablation, gradient]."
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            "-k",
            help="What l0 and dsp aim at, and where --examples and --time look closest.",
            rich_help_panel="Scoring",
        ),
    ] = None,
    seed: Seed = None,
) -> None:
    """Score the importance of every head, by ablation and by gradient."""
    with session(manner, shared=True) as console:
        key = key_of(
            "score", data, scoring, loading, placing, writing, model=model, method=method, keep=keep, seed=seed
        )
        from headprune.app import runs, workflow
        from headprune.app.folders import claimed
        from headprune.scoring import DEFAULT_METHODS

        options = options_of(None, model, data, scoring, loading, seed, keep, placing=placing)
        methods = known_methods(method) or list(DEFAULT_METHODS)
        choose = partial(runs.choose_folder, writing.output, Path(model.rstrip("/")).name, writing.overwrite, key)
        if writing.dry_run:
            folder = choose()
            scene = workflow.open_scene(options, console, methods)
            tables.print_layers(console, type(scene.model).__name__, scene.layers)
            cost = workflow.cost_of_scores(scene, methods)
            console.result(
                f"Would score by {', '.join(methods)} and write {folder.path}. {cost.line} Nothing was written."
            )
            console.document(planned(folder, methods, scene))
            return
        with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
            did = partial(
                folder.already_published, key, writing.overwrite
            )  # it may have been killed just after the end
            _, scores = workflow.score_run(options, methods, folder, console, did)
        # The work is done: that nobody reads this to its end (`| head`) does not interrupt it.
        tables.print_scores(console, scores)
        console.result(
            f"\nReport: {folder.report_path}\nPage:   {folder.page_path}\nNext:   headprune prune --keep 50% -o {folder.path}"
        )
        console.document({"folder": str(folder.path), "scores": [s.to_json() for s in scores]})
