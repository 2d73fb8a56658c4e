"""`headprune score`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import DataOptions, LoadOptions
from headprune.cli import tables
from headprune.cli.app import command
from headprune.cli.options import Console, Distil, Model, Seed, Typed, Writing, known_methods, options_of


@command(
    "`headprune score distilbert/distilbert-base-uncased-finetuned-sst-2-english -d nyu-mll/glue --subset sst2`",
    shared=True,
)
def score(
    model: Model,
    data: DataOptions,
    loading: LoadOptions,
    writing: Writing,
    console: Console,
    typed: Typed,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="Scoring method, such as gradient or shapley:permutations=64; repeatable."),
    ] = None,
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Score the importance of every head, by ablation and by gradient."""
    from headprune.app import runs, workflow
    from headprune.app.folders import claimed, key_of
    from headprune.scoring import DEFAULT_METHODS

    key = key_of("score", data, loading, writing.output, writing.overwrite, model, method, distil, seed)
    methods = known_methods(method or DEFAULT_METHODS)
    options = options_of(None, model, data, loading, typed, seed=seed, distil=distil, methods=methods)
    choose = partial(runs.choose_folder, writing.output, Path(model.rstrip("/")).name, writing.overwrite, key)
    if writing.dry_run:
        scene = workflow.open_scene(options, console, labelled=None)
        doing = f"score by {', '.join(methods)} and write {choose().path}"
        tables.print_dry_run(console, scene, methods, choose(), doing, workflow.cost_of_scores(scene).line)
        return
    with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
        _, scores = workflow.score_run(options, folder, console)
    # The work is done: that nobody reads this to its end (`| head`) does not interrupt it.
    tables.print_scores(console, scores)
    console.result(f"\nReport: {folder.report_path}\nPage:   {folder.page_path}")
    console.result(f"Next:   headprune prune --keep 50% -o {folder.path}")
    console.document({"folder": str(folder.path), "scores": [s.to_json() for s in scores]})
