"""`headprune show`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.app.options import DataOptions, LoadOptions
from headprune.cli.app import app
from headprune.cli.options import Manner, Model, Seed, Typed, takes_options
from headprune.cli.session import session
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.documents import Heads
    from headprune.app.models import LoadedModel

_PICTURES = (".png", ".svg", ".pdf")
_LIMIT = 64


@app.command(
    epilog='Example: `headprune show openai-community/gpt2 --text "When Mary and John went to the store, John gave"`'
)
@takes_options
def show(
    model: Model,
    data: DataOptions,
    loading: LoadOptions,
    manner: Manner,
    typed: Typed,
    text: Annotated[str | None, typer.Option("--text", "-t", help="A text to look at.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image file to look at.")] = None,
    head: Annotated[str | None, typer.Option("--head", help="One head, large: L3.H7.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A picture to write: .png, .svg or .pdf.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Show what every head attends to: on a text or an image, and with a dataset what each does on average."""
    with session(manner) as console:
        _check(text, image, data, output)
        from headprune.app.models import dummy_input, load_model
        from headprune.app.seeing import look_at, of_image, of_text
        from headprune.trace import find_attention

        loaded = load_model(model, loading, any_task=True)
        for note in loaded.notes:
            console.say(note)
        heads = None
        if data.dataset:
            limits: dict[str, Any] = {name: _LIMIT for name in ("limit", "report_limit") if name not in typed}
            heads = _over_data(loaded, replace(data, seed=seed, **limits), console)
        if text is not None or image is not None:
            given = of_text(loaded, text) if text is not None else of_image(loaded, image or Path())
            layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))
            with console.track("looking"):
                one = look_at(loaded, given, layers, seed)
            heads = one if heads is None else replace(heads, samples=one.samples)
        assert heads is not None
        _print(heads, head, output, bool(data.dataset), console)


def _check(text: str | None, image: Path | None, data: DataOptions, output: Path | None) -> None:
    """Refuse what cannot be shown, before anything is loaded."""
    if text is None and image is None and not data.dataset:
        raise HeadPruneError("There is nothing to look at.", 'Give --text "…", --image FILE or --dataset DATA.')
    if text is not None and image is not None:
        raise HeadPruneError("--text and --image are two inputs.", "Give one of them.")
    if text is not None and not text.strip():
        raise HeadPruneError("The text is empty.", "Give a longer one.")
    if output is not None and output.suffix.lower() not in _PICTURES:
        raise HeadPruneError(f"{output} is no name of a picture.", f"Let it end in {', '.join(_PICTURES)}.")
    if output is not None and not output.parent.is_dir():
        raise HeadPruneError(f"There is no folder {output.parent}.", "Make it, or choose another.")


def _over_data(loaded: LoadedModel, data: DataOptions, console: Console) -> Heads:
    from headprune.app.data import load_parts
    from headprune.app.seeing import look
    from headprune.trace import find_attention

    parts = load_parts(data, loaded, labelled=False)
    layers = find_attention(loaded.model, next(parts.score.batches(2)))
    with console.track("looking"):
        return look(loaded, parts.score, layers, data.seed)


def _print(heads: Heads, head: str | None, output: Path | None, profiled: bool, console: Console) -> None:
    from headprune.app.pictures import save
    from headprune.app.seeing import head_named, layer_of
    from headprune.app.seeing.pictures import figure_of_all, figure_of_head
    from headprune.app.seeing.terminal import all_heads, figures_of, one_head, role_counts, role_table

    sample = heads.samples[-1] if heads.samples else None
    colours = console.out.color_system is not None
    document: dict[str, Any] = heads.to_json()
    what = f"{heads.examples} example{'s' * (heads.examples != 1)}, {heads.tokens} {heads.unit}"
    if head is not None:
        layer, number = head_named(heads, head)
        profile = layer.heads[number]
        name = f"L{layer.index}.H{number}"
        console.result(f"{name} ({layer.name}): {profile.role}: {profile.because} ({what}).")
        console.show(figures_of(profile))
        seen = layer_of(sample, layer.index) if sample is not None else None
        if sample is not None and seen is not None:
            console.show(one_head(sample, seen, number, colours))
            if output is not None:
                save(figure_of_head(sample, seen, number, f"{name}: {profile.role}"), output)
        elif output is not None:
            raise HeadPruneError(f"There is no sample of {name} to draw.", "Give --text or --image.")
        document = {"head": name, **{f: getattr(profile, f) for f in profile.__dataclass_fields__}}
    else:
        if sample is not None:
            console.show(all_heads(heads, sample, console.out.width, colours))
            if output is not None:
                save(figure_of_all(heads, sample), output)
        elif output is not None:
            raise HeadPruneError("There is no sample to draw.", "Give --text or --image.")
        if profiled:
            console.show(role_table(heads))
        console.result(f"\nRoles on {what}; docs/heads.md says when a head has one:")
        for line in role_counts(heads):
            console.result(line)
        for layer in heads.layers:
            if layer.unseen:
                console.say(layer.unseen)
    if output is not None:
        console.result(f"\nPicture: {output}")
    console.document(document)
