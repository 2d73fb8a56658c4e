"""`headprune inspect`."""

from __future__ import annotations

from headprune.app.options import LoadOptions
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import Manner, Model, takes_options
from headprune.cli.session import session


@app.command(epilog="Example: `headprune inspect openai-community/gpt2`")
@takes_options
def inspect(
    model: Model,
    loading: LoadOptions,
    manner: Manner,
) -> None:
    """List a model's attention layers, heads and groups, and what can be pruned."""
    with session(manner) as console:
        from headprune.app.models import dummy_input, load_model
        from headprune.trace import find_attention

        loaded = load_model(model, loading, with_processor=False, any_task=True)
        for note in loaded.notes:
            console.say(note)
        layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))
        tables.print_layers(console, type(loaded.model).__name__, layers)
        console.document({"model": model, "layers": [layer.to_json() for layer in layers]})
