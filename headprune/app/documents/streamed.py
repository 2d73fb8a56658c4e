"""streamed.json."""

from __future__ import annotations

from headprune.app.documents.base import Document, File
from headprune.app.documents.common import Environment


class StreamedProof(Document):
    """As `headprune.surgery.Proof`, and `headprune.streaming.Streamed`.

    Attributes:
        reload_difference: Of the written folder's answers from the cut model's, as a share of their largest value; None where the
            folder holds no answers to compare.
        told: All of it, in a line.
    """

    difference: float
    tolerance: float
    inputs: int
    ghosts: tuple[str, ...]
    reload_difference: float | None
    told: str


class StreamedRun(File):
    """What `headprune prune --streaming` did: nothing was measured, and nothing repaired.

    Attributes:
        model: As it was named.
        kept, total: Heads.
        checkpoint: The pruned model's folder in the run folder.
        loads: The call that loads that.
        weights, left: Bytes of the files of weights, before and after.
        files: How many files of weights were written.
        in_memory: Bytes of weights that could not stay in their files; None where the system does not tell.
    """

    kind = "streamed"

    command: str
    when: str
    environment: Environment
    model: str
    task: str
    kept: int
    total: int
    checkpoint: str
    loads: str
    proof: StreamedProof
    weights: int
    left: int
    files: int
    in_memory: int | None
    seconds: float
