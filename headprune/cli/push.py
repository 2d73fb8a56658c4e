"""`headprune push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli.app import app
from headprune.cli.options import Manner, Trust, takes_options
from headprune.cli.session import session


@app.command(epilog="Example: `headprune push reports/MODEL-1/pruned-36 me/smaller --private`")
@takes_options
def push(
    folder: Annotated[Path, typer.Argument(help="A folder that headprune saved, or a run folder that contains one.")],
    repo: Annotated[str, typer.Argument(help="The repository, user/name; it is created if it does not exist.")],
    manner: Manner,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded; upload nothing.")] = False,
) -> None:
    """Upload a saved model to the Hugging Face Hub, with its model card. Needs `hf auth login`, or HF_TOKEN."""
    with session(manner) as console:
        from headprune import checkpoint
        from headprune.app.models import pruned_in

        source = pruned_in(folder)
        if (source / "config.json").is_file():
            checkpoint.load(
                source, trust_remote_code=trust_remote_code
            )  # what is damaged should not be what others get
        if dry_run:
            files = {p.relative_to(source).as_posix(): p.stat().st_size for p in checkpoint.files_to_upload(source)}
            for name, size in files.items():
                console.result(f"{size:>15,} bytes  {name}")
            said = checkpoint.metadata(source)
            for key in ("license", "base_model", "datasets"):
                console.result(f"{key}: {said.get(key) or f'not in the card; add it at the top of {source}/README.md'}")
            console.result(f"Would upload {sum(files.values()):,} bytes to {repo}. Nothing was uploaded.")
            console.document({"folder": str(source), "repo": repo, "files": files})
            return
        url = checkpoint.upload(
            source, repo, private=private or None, commit_message="Upload a model pruned by headprune"
        )
        console.result(url)
        console.document({"folder": str(source), "url": url})
