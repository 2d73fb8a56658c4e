"""The results of a run's stages, on disk as soon as they exist, so that an interrupted run continues where it was."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headprune.app import report
from headprune.app.folders import Folder
from headprune.app.runs import PARTS, RunFolder
from headprune.app.workflow.scene import Scene
from headprune.documents import File, from_json, to_json
from headprune.errors import HeadPruneError, first_line, is_of_the_disk
from headprune.evaluation import Measurement
from headprune.files import dumps, loads
from headprune.fingerprint import config_hash, fingerprint, processor_hash, versions
from headprune.inputs import model_device
from headprune.planning import Order
from headprune.ranks import current
from headprune.scoring.resume import DiskStore, digest
from headprune.trials import Results

T = TypeVar("T")


class Stages(Results):
    """Results by name. What an interrupted run has made is read instead of made again.

    A result is always what is read back from JSON, so that going on gives what one run gives, to the bit; and one that JSON
    cannot hold is found when it is made, not at the end.

    Args:
        folder: Of this very computation (`stages_of`); None keeps nothing.

    Attributes:
        before: Seconds that interrupted runs took of it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._started = time.monotonic()
        known = [_read(path) for path in folder.glob("*.json")] if folder else []
        self.before = max((found.seconds for found in known if found), default=0.0)

    @property
    def path(self) -> Path:
        """The folder, where there must be one."""
        assert self.folder is not None
        return self.folder

    @property
    def store(self) -> DiskStore | None:
        """For tensors that are made on the way."""
        return DiskStore(self.folder) if self.folder else None

    def get(self, name: str, make: Callable[[], T], kind: Any, *, alone: bool = False) -> T:
        """A stage's result. Of several ranks the first one looks for it and keeps it, and all get what that one has.

        Args:
            name: Of the stage, within this computation.
            make: Gives the result.
            kind: Its type, as `headprune.documents` writes and reads it.
            alone: Whether the first of several ranks makes it, as what is timed; else all of them do, together.
        """
        ranks = current()
        known = ranks.first(f"known of {name}", lambda: self._known(name))
        if known is not None:
            with suppress(TypeError, ValueError, HeadPruneError):  # damaged: it is made anew
                result: T = from_json(kind, known.result)
                return result
        made = ranks.first(name, make) if alone else make()
        kept: T = from_json(kind, ranks.first(f"keeping {name}", lambda: self._keep(name, to_json(made, kind))))
        return kept

    def _known(self, name: str) -> _Result | None:
        known = _read(self.folder / f"{_short(name)}.json") if self.folder else None
        return known if known is not None and known.stage == name else None

    def _keep(self, name: str, made: Any) -> Any:
        result = loads(dumps(made))
        if self.folder:
            seconds = round(self.before + time.monotonic() - self._started, 1)
            _Result(stage=name, seconds=seconds, result=result).write(self.folder / f"{_short(name)}.json")
        return result

    def forget(self, name: str) -> None:
        """Make a stage's result anew when it is asked for again."""
        if self.folder:
            path = self.folder / f"{_short(name)}.json"
            current().first(f"forgetting {name}", lambda: path.unlink(missing_ok=True))

    def measurement(self, name: str, make: Callable[[], Measurement]) -> Measurement:
        """A stage that measures."""
        return self.get(name, make, Measurement)

    def order(self, name: str, make: Callable[[], Order]) -> Order:
        """A stage that plans."""
        return self.get(name, make, Order)


def stages_of(folder: Folder, name: str, scene: Scene, *facts: Any, say: Callable[[str], None]) -> Stages:
    """The stages of one computation: of this model, data, options and versions; of any other they are not found.

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
    own = folder.unfinished / f"{name}-{digest(versions(), device, options, parts, list(facts), scene.model)}"
    if found := len(list(own.glob("*.json"))):
        stages = "1 finished stage" if found == 1 else f"{found} finished stages"
        say(f"Continuing with {stages} of an interrupted run (--no-resume starts anew).")
    elif any(
        path != own for path in folder.unfinished.glob(f"{name}-*")
    ):  # its own may be there without a finished part
        say(
            f"Unfinished work in {folder.unfinished} is not used, as the model, data, seed, options or versions have changed."
        )
    return Stages(own)


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


@dataclass(frozen=True)
class _Result(File):
    """What a stage gave, as JSON can hold it.

    Attributes:
        seconds: From the beginning of the computation to the end of this stage.
    """

    kind: ClassVar[str] = "stage"

    stage: str
    seconds: float
    result: Any


def _read(path: Path) -> _Result | None:
    """A stage's file; None if there is none, or a damaged one."""
    try:
        return _Result.read(path)
    except HeadPruneError:
        return None


def _short(name: str) -> str:
    """A file's name for a stage's: its beginning, for people, and what tells it from others."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', name)[:40].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
