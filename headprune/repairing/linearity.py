"""Whether heads hand on their values unchanged but for the attention weights, so that these can be fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headprune.repairing.projections import Values
from headprune.repairing.runner import Runner, replaced


def linear(runner: Runner, values: Mapping[str, Values]) -> dict[str, Values]:
    """Those whose heads are linear in their values, and whose values nothing else looks at.

    Tried with every head's values turned and stretched, so that a norm would notice: W_O's input must be so alike, and
    the answers and other layers' inputs stay as they were where W_O gives what it gave.

    Args:
        values: By output projection.
    """
    batch = max(runner.batches, key=runner.rows.size)
    if runner.rows.size(batch) > 2:
        batch = runner.rows.take(batch, [0, 1])
    generator = torch.Generator().manual_seed(0)
    turns = {
        name: torch.linalg.qr(torch.randn(v.head_dim, v.head_dim, generator=generator, dtype=torch.float64))[0]
        * torch.linspace(0.5, 1.5, v.head_dim, dtype=torch.float64)
        for name, v in values.items()
    }
    with runner.deterministic_eval():
        xs, ys = runner.recorded(batch)
        _, answers = runner.run_with_values(batch, ys, lambda name, x, out: None, values)

        def fit(names: Sequence[str]) -> bool:
            plain = True

            def on_value(name: str, x: Tensor, out: Tensor) -> Tensor | None:
                nonlocal plain
                v = values[name]
                given = x @ v.weight.to(x) + (0 if v.bias is None else v.bias.to(x))
                plain &= name not in names or _close(out[..., v.features], given[..., v.features])
                turned = out[..., v.features.to(out.device)] @ turns[name].to(out)
                return replaced(v, out, turned) if name in names else None

            found, now = runner.run_with_values(batch, ys, on_value, values)
            if not plain or not all(map(_close, now, answers)):
                return False
            for name, calls in xs.items():
                for after, x in zip(found[name], calls, strict=True):
                    expected = x.clone()
                    if name in names:
                        columns = values[name].columns
                        expected[..., columns] = x[..., columns] @ turns[name].to(x)
                    if not _close(after, expected):
                        return False
                if name in names and not calls:
                    return False
            return True

        good = list(values) if fit(list(values)) else [name for name in values if fit([name])]
    return {name: values[name] for name in good}


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding, of the type that they are in."""
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    most = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
    return bool((found - expected).abs().amax() <= most * expected.abs().amax())
