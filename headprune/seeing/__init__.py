"""What heads look at: their attention weights on any traced model, and figures and words for what each of them does."""

from headprune.seeing.figures import HeadProfile
from headprune.seeing.profiles import Profiler, profile_heads
from headprune.seeing.weights import attention_weights

__all__ = ["HeadProfile", "Profiler", "attention_weights", "profile_heads"]
