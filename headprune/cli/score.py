"""`headprune score`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headprune.app.options import DataOptions, LoadOptions
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import (
    Distil,
    Manner,
    Method,
    Model,
    Seed,
    Typed,
    Writing,
    known_methods,
    options_of,
    takes_options,
)
from headprune.cli.session import session


@app.command(
    epilog="Example: `headprune score distilbert/distilbert-base-uncased-finetuned-sst-2-english -d nyu-mll/glue --subset sst2`"
)
@takes_options
def score(
    model: Model,
    data: DataOptions,
    loading: LoadOptions,
    writing: Writing,
    manner: Manner,
    typed: Typed,
    method: Method = None,
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Score the importance of every head, by ablation and by gradient."""
    with session(manner, shared=True) as console:
        from headprune.app import runs, workflow
        from headprune.app.folders import claimed, key_of
        from headprune.scoring import DEFAULT_METHODS

        key = key_of("score", data, loading, writing.place, model, method, distil, seed)
        methods = known_methods(method or DEFAULT_METHODS)
        options = options_of(None, model, data, loading, typed, seed=seed, distil=distil, methods=methods)
        choose = partial(runs.choose_folder, writing.output, Path(model.rstrip("/")).name, writing.overwrite, key)
        if writing.dry_run:
            scene = workflow.open_scene(options, console, labelled=None)
            cost = workflow.cost_of_scores(scene)
            doing = f"score by {', '.join(methods)} and write {choose().path}"
            tables.print_dry_run(console, scene, methods, choose(), doing, cost.line)
            return
        with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
            _, scores = workflow.score_run(options, folder, console)
        # The work is done: that nobody reads this to its end (`| head`) does not interrupt it.
        tables.print_scores(console, scores)
        console.result(
            f"\nReport: {folder.report_path}\nPage:   {folder.page_path}\nNext:   headprune prune --keep 50% -o {folder.path}"
        )
        console.document({"folder": str(folder.path), "scores": [s.to_json() for s in scores]})
