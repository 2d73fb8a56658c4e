"""What a run folder's JSON files hold: one definition each, by which they are written, read and reported.

`Run` is run.json, `Metrics` is metrics.json, `Heads` is heads.json and `FinetuneRecord` is finetune.json. The files of scores and plans
hold values of the library, which writes and reads them itself (`headprune.scoring.HeadScores`, `headprune.plans.PruningPlan`).

An unknown key is an error: what this version does not understand could make its report wrong. A field that has a default was added
later, or is only there where it applies: files without it are readable, and only what was set is written. A key that changes its name
or meaning needs a new `headprune.files.SCHEMA`.
"""

from headprune.app.documents.base import Document, File
from headprune.app.documents.common import Cut, Environment, Epoch, Examples, Measured, Training
from headprune.app.documents.finetune import (
    FinetunedChanges,
    FinetunedModels,
    FinetuneFacts,
    FinetuneRecord,
    TrainingOptions,
)
from headprune.app.documents.heads import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.app.documents.metrics import (
    MOST_APART,
    AlsoData,
    AlsoMeasured,
    Asked,
    BudgetResult,
    ComparedOrder,
    ComparedPlan,
    Dense,
    EngineLatency,
    ExportedModel,
    Latency,
    Metrics,
    PlannedWork,
    Planning,
    Point,
    Proved,
    Refitted,
    Repaired,
    StepTrial,
    TimeParts,
    Trained,
)
from headprune.app.documents.run import LayerFacts, ModelFacts, Run

__all__ = [
    "MOST_APART", "AlsoData", "AlsoMeasured", "Asked", "BudgetResult", "ComparedOrder", "ComparedPlan", "Cut", "Dense", "Document",
    "EngineLatency", "Environment", "Epoch", "Examples", "ExportedModel", "File", "FinetuneFacts", "FinetuneRecord",
    "FinetunedChanges", "FinetunedModels", "Heads", "Latency", "LayerFacts", "LayerProfile", "Measured", "Metrics",
    "ModelFacts", "PlannedWork", "Planning", "Point", "Positions", "Proved", "Refitted", "Repaired", "Run", "Sample",
    "SampleLayer", "StepTrial", "TimeParts", "Trained", "Training", "TrainingOptions",
]  # fmt: skip
