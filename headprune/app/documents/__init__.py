"""What a run folder's JSON files hold: one dataclass each, by which they are written, read and reported (`headprune.documents`).

`Run` is run.json, `Metrics` is metrics.json, `Heads` is heads.json and `FinetuneRecord` is finetune.json. The files of scores and plans
hold values of the library, which writes and reads them itself (`headprune.scoring.HeadScores`, `headprune.plans.PruningPlan`). A key that
changes its name or meaning needs a new `headprune.files.SCHEMA`.
"""

from headprune.app.documents.heads import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.app.documents.metrics import (
    DISTURBED,
    AlsoData,
    AlsoMeasured,
    BudgetRecord,
    BudgetResult,
    Dense,
    EngineLatency,
    ExportedModel,
    Latencies,
    Metrics,
    Planning,
    Point,
    Proved,
    Repaired,
    TimeParts,
    Trained,
)
from headprune.app.documents.run import (
    Cut,
    Environment,
    Examples,
    FinetunedChanges,
    FinetunedModels,
    FinetuneRecord,
    LayerFacts,
    Measured,
    ModelFacts,
    Run,
    Training,
    TrainingOptions,
)

__all__ = [
    "DISTURBED", "AlsoData", "AlsoMeasured", "BudgetRecord", "BudgetResult", "Cut", "Dense", "EngineLatency", "Environment",
    "Examples", "ExportedModel", "FinetuneRecord", "FinetunedChanges", "FinetunedModels", "Heads", "Latencies",
    "LayerFacts", "LayerProfile", "Measured", "Metrics", "ModelFacts", "Planning", "Point", "Positions", "Proved", "Repaired",
    "Run", "Sample", "SampleLayer", "TimeParts", "Trained", "Training", "TrainingOptions",
]  # fmt: skip
