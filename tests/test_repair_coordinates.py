"""The directions that output projections are moved along, against gradients written out."""

import pytest
import torch
from torch import Tensor

from headprune.repairing import coordinates
from headprune.repairing.coordinates import Coordinates, Parts, longest

NAMES = ("a", "b")


def some_parts(seed: int = 0) -> list[Parts]:
    """Two batches of two projections, 4 to 6 inputs and 5 outputs, two directions, the inputs of unequal length."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        {
            name: (noise(rows, tokens, wide) * torch.logspace(0, -1, wide), noise(2, rows, tokens, 5))
            for name, wide in zip(NAMES, (4, 6), strict=True)
        }
        for rows, tokens in ((7, 3), (4, 2))
    ]


def written_out(parts: list[Parts], name: str) -> Tensor:
    """Every gradient, ``[rows, in, out]``."""
    found = []
    for part in parts:
        x, slopes = part[name]
        for i in range(len(x)):
            found += [sum(torch.outer(x[i, t], slopes[p, i, t]) for t in range(x.shape[1])) for p in range(len(slopes))]
    return torch.stack(found)


def rows_of(found: Coordinates, parts: list[Parts]) -> Tensor:
    return torch.cat([found.of(part) for part in parts])


def test_all_coordinates_keep_every_inner_product() -> None:
    parts = some_parts()
    found = longest(parts)
    rows = rows_of(found, parts)
    gradients = torch.cat([written_out(parts, name).flatten(1) for name in NAMES], dim=1)
    torch.testing.assert_close(rows @ rows.T, gradients @ gradients.T)
    alpha = torch.randn(len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, matrix in found.matrices(rows.T @ alpha).items():
        torch.testing.assert_close(matrix, torch.einsum("r,rio->io", alpha, written_out(parts, name)))


def test_some_are_orthonormal_and_a_row_is_the_gradient_along_them() -> None:
    parts = some_parts()
    found = longest(parts, 11)
    axes = [found.matrices(one) for one in torch.eye(11, dtype=torch.float64)]
    flat = torch.stack([torch.cat([axis[name].flatten() for name in NAMES]) for axis in axes])
    torch.testing.assert_close(flat @ flat.T, torch.eye(11, dtype=torch.float64))
    gradients = torch.cat([written_out(parts, name).flatten(1) for name in NAMES], dim=1)
    torch.testing.assert_close(rows_of(found, parts), gradients @ flat.T)


def test_they_are_the_longest_of_the_products_of_eigenvectors() -> None:
    parts = some_parts()
    lengths = []
    for name in NAMES:
        xs = torch.cat([part[name][0].flatten(0, 1) for part in parts])
        slopes = torch.cat([part[name][1].flatten(0, 2) for part in parts])
        left, right = (torch.linalg.svd(t)[2] for t in (xs, slopes))  # rows are the axes
        lengths.append((left @ written_out(parts, name) @ right.T).square().sum(0).flatten())
    best = torch.cat(lengths).sort(descending=True).values
    for most in (1, 5, 20):
        kept = rows_of(longest(parts, most), parts)
        torch.testing.assert_close(kept.square().sum(), best[:most].sum())


def test_little_room_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = some_parts()
    whole = rows_of(longest(parts, 9), parts)
    monkeypatch.setattr(coordinates, "_MOST_GRADIENTS", 1)
    torch.testing.assert_close(rows_of(longest(parts, 9), parts), whole)


def test_wide_projections_are_seen_along_their_largest_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = some_parts()
    monkeypatch.setattr(coordinates, "_WIDEST", 2)
    found = longest(parts)
    assert rows_of(found, parts).shape[1] == 2 * 2 * 2
    assert found.matrices(torch.ones(8, dtype=torch.float64))["b"].shape == (6, 5)


def test_a_projection_without_inputs_has_none() -> None:
    parts = some_parts()
    for part in parts:
        part["a"] = part["a"][0][..., :0], part["a"][1]
    found = longest(parts)
    rows = rows_of(found, parts)
    assert rows.shape[1] == 6 * 5
    assert found.matrices(rows[0])["a"].shape == (0, 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    parts = some_parts()
    parts[0]["a"][1][0, 0, 0, 0] = bad
    assert not rows_of(longest(parts), parts).isfinite().all()
