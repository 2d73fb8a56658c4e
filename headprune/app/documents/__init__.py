"""A dataclass for each JSON file of a run folder, to write, read and report it (`headprune.documents`).

`Run` is run.json, `Metrics` is metrics.json, `Heads` is heads.json and `FinetuneRecord` is finetune.json. The library itself writes and
reads the files of scores and plans (`headprune.scoring.HeadScores`, `headprune.plans.PruningPlan`). A key that changes its name or
meaning needs a new `headprune.files.SCHEMA`.
"""

from headprune.app.documents.heads import *  # noqa: F403 - every class there is a document, or part of one
from headprune.app.documents.metrics import *  # noqa: F403
from headprune.app.documents.run import *  # noqa: F403
from headprune.app.documents.values import *  # noqa: F403
