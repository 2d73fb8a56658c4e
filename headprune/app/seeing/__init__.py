"""What people see of heads: profiles and samples as a document (heads.json), as pictures and in the terminal."""

from headprune.app.seeing.cells import by_role, head_named, layer_of
from headprune.app.seeing.inputs import of_image, of_text
from headprune.app.seeing.looking import look, look_at
from headprune.app.seeing.pictures import figure_of_all, figure_of_head
from headprune.app.seeing.terminal import all_heads, figures_of, one_head, role_counts, role_table

__all__ = [
    "all_heads", "by_role", "figure_of_all", "figure_of_head", "figures_of", "head_named", "layer_of", "look", "look_at", "of_image", "of_text", "one_head", "role_counts",
    "role_table",
]  # fmt: skip
