"""The results of a run on disk as soon as they exist, so that an interrupted run continues where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from headprune.app import report
from headprune.app.folders import Folder
from headprune.app.runs import PARTS, RunFolder
from headprune.app.workflow.scene import Scene
from headprune.errors import HeadPruneError, first_line, is_of_the_disk
from headprune.fingerprint import config_hash, fingerprint, processor_hash, versions
from headprune.inputs import model_device
from headprune.store import Store, digest


def store_of(folder: Folder, name: str, scene: Scene, *facts: Any, say: Callable[[str], None]) -> Store:
    """The results of one computation: of this model, data, options and versions.

    Args:
        name: What it does.
        facts: What else it depends on.
    """
    options = asdict(scene.options)
    loading = options["loading"]
    del loading["trust_remote_code"], options["data"]["also"], options["methods"]  # change no number here
    del loading["device_map"], loading["device_memory"]  # nor does where weights are kept
    parts = [digest(*part.batches(), part.rows) for part in (scene.parts.score, scene.parts.choose, scene.parts.report)]
    device = model_device(scene.model).type
    return folder.store(say).keyed(name, versions(), device, options, parts, list(facts), scene.model)


def made_from(scene: Scene, *facts: Any) -> str:
    """A name for a model, data and versions, by which a command that is typed again knows whether its result is still that of them.

    Args:
        facts: What else the result depends on, beside the command's options.
    """
    model = (fingerprint(scene.model), config_hash(scene.model), processor_hash(scene.loaded.processor))
    parts = [
        part.content_hash() for part in (scene.parts.score, scene.parts.choose, scene.parts.report, *scene.parts.also)
    ]
    return digest(versions(), model, parts, list(facts))


def publish(folder: RunFolder, content: RunFolder, of: str) -> None:
    """Write the report of a complete run, and put all of it in the place of what is there.

    Args:
        of: See `made_from`.

    Raises:
        HeadPruneError: The report could not be written; all else is in its place. Or the disk is full: then nothing is, and what was
            there stays.
    """
    trouble: Exception | None = None
    try:
        report.write(content)
    except Exception as error:
        if is_of_the_disk(error):  # the report will be written once there is room, so the old folder stays until then
            raise
        trouble = error
    folder.publish(content.path, PARTS, of)
    if trouble is not None:
        raise HeadPruneError(
            f"The report could not be written ({type(trouble).__name__}: {first_line(trouble)}); all else is in {folder.path}.",
            f"`headprune report {folder.path}` tries again.",
        ) from trouble
