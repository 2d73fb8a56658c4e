"""What a run folder's JSON files hold: one dataclass each, by which they are written, read and reported (`headprune.documents`).

`Run` is run.json, `Metrics` is metrics.json, `Heads` is heads.json and `FinetuneRecord` is finetune.json. The files of scores and plans
hold values of the library, which writes and reads them itself (`headprune.scoring.HeadScores`, `headprune.plans.PruningPlan`). A key that
changes its name or meaning needs a new `headprune.files.SCHEMA`.
"""

from headprune.app.documents.heads import *  # noqa: F403 - every class there is a document, or part of one
from headprune.app.documents.metrics import *  # noqa: F403
from headprune.app.documents.run import *  # noqa: F403
