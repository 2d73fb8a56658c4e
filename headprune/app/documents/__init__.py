"""What a run folder's JSON files hold: one dataclass each, by which they are written, read and reported (`headprune.documents`).

`Run` is run.json, `Metrics` is metrics.json, `Heads` is heads.json and `FinetuneRecord` is finetune.json. The files of scores and plans
hold values of the library, which writes and reads them itself (`headprune.scoring.HeadScores`, `headprune.plans.PruningPlan`). A key that
changes its name or meaning needs a new `headprune.files.SCHEMA`.
"""

from headprune.app.documents.finetune import (
    FinetunedChanges,
    FinetunedModels,
    FinetuneFacts,
    FinetuneRecord,
    TrainingOptions,
)
from headprune.app.documents.heads import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.app.documents.metrics import (
    MOST_RATIO,
    AlsoData,
    AlsoMeasured,
    Asked,
    BudgetResult,
    Dense,
    EngineLatency,
    ExportedModel,
    Latency,
    Metrics,
    Planning,
    Point,
    Proved,
    Repaired,
    TimeParts,
    Trained,
)
from headprune.app.documents.run import Cut, Environment, Examples, LayerFacts, Measured, ModelFacts, Run, Training

__all__ = [
    "MOST_RATIO", "AlsoData", "AlsoMeasured", "Asked", "BudgetResult", "Cut", "Dense", "EngineLatency", "Environment",
    "Examples", "ExportedModel", "FinetuneFacts", "FinetuneRecord", "FinetunedChanges", "FinetunedModels", "Heads", "Latency",
    "LayerFacts", "LayerProfile", "Measured", "Metrics", "ModelFacts", "Planning", "Point", "Positions", "Proved", "Repaired",
    "Run", "Sample", "SampleLayer", "TimeParts", "Trained", "Training", "TrainingOptions",
]  # fmt: skip
