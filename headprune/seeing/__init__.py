"""What heads look at: their attention weights on any traced model, and figures and words for what each of them does."""

from headprune.seeing.maps import attention_weights
from headprune.seeing.profiles import profile_heads
from headprune.seeing.roles import HeadProfile

__all__ = ["HeadProfile", "attention_weights", "profile_heads"]
