"""What heads look at: their attention weights on any traced model, and figures and words for what each of them does."""

from headprune.seeing.figures import HeadProfile

__all__ = ["HeadProfile"]
