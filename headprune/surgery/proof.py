"""The proof: a pruned model must answer as the masked one did."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headprune.attention import Heads, Layers
from headprune.errors import HeadPruneError, first_line
from headprune.gates import mask
from headprune.inputs import Example, call, does_not_run, map_tensors, model_device, seeded, tensors, widened
from headprune.running import attributes_kept, exact_attention
from headprune.surgery.evidence import Bounds, Prompt, Seen, differing, gap, largest, watching
from headprune.surgery.removal import Removal, cut, snapshot, ways

_SAME = "the same changes were tried before"  # by another removal

# Relative tolerances of the proof: what summing the same products in another order may change.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Outputs of the layers themselves may differ by this many tolerances, at most by the second number: differences do not
# average out there, while a wrong cut is off by as much as the outputs are large.
LAYERS, COARSEST = 10, 0.2
# If heads hardly matter, as after a repair, outputs may differ by no more than this share of the tolerance. In half
# precision (tolerances from HALF up), rounding in a deep model exceeds that: there, the layers' outputs are the proof.
FINEST, HALF = 0.2, 1e-3
# A model that sorts or samples by its own numbers, as detectors do, makes more of rounding: where a copy in float64 proves the
# prune, outputs in float32 may differ by this many tolerances.
UNSTABLE = 10
MOST_COPIED = 4e9  # bytes of the largest float32 model that is copied in float64, which takes twice as many


def tolerance_of(model: nn.Module) -> float:
    """The relative tolerance for a model: that of its coarsest dtype."""
    return max((TOLERANCE.get(p.dtype, 0.0) for p in model.parameters()), default=TOLERANCE[torch.float32])


@dataclass(frozen=True)
class Proof:
    """What `prune` checked.

    Attributes:
        difference: Largest difference between the masked and the pruned model's outputs, as a share of
            that output's largest value.
        tolerance: What ``difference`` had to stay under.
        inputs: How many differently shaped inputs were compared; generation with a cache counts as one.
        ghosts: Layers without heads that still hold one head with zero output (for their cache).
    """

    difference: float
    tolerance: float
    inputs: int
    ghosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """What a pruned model has to return for one input.

    Attributes:
        batch: The input.
        masked: The masked model's outputs.
        effect: How much the mask changed each output, at most; infinity where that is not known.
        seen: The outputs of the layers that lose heads.
    """

    batch: Example
    masked: list[Tensor]
    effect: list[float]
    seen: Seen


Inputs = Sequence[Sequence[Example]]
DOES_NOT_RUN = "the pruned model does not run"


def references(model: nn.Module, inputs: Inputs, drop: Heads, layers: Layers) -> list[Reference]:
    """The masked model's outputs for its inputs.

    Args:
        inputs: The choices for each input; the first that the model takes is used. It must take the first input, the
            example.

    Raises:
        HeadPruneError: The model does not run on the example, or its outputs are not finite.
    """
    result = []
    with exact_attention(model):  # dense and masked by the same arithmetic
        for number, choices in enumerate(inputs):
            for batch in choices:
                try:
                    # An index out of range ends all work on a GPU, so it must not get there. A CPU raises by itself.
                    on_cpu = model_device(model).type == "cpu"
                    with Bounds() if number and not on_cpu else nullcontext():  # type: ignore[no-untyped-call]
                        result.append(_reference(model, batch, drop, layers))
                    break
                except HeadPruneError:
                    raise
                except Exception as error:
                    if number == 0:
                        raise does_not_run(error) from error
                    # A model may refuse an input that was only derived, or not generate from its example alone.
    if not any(torch.isfinite(t).any() for t in result[0].masked):
        raise HeadPruneError("The masked model's outputs are not finite, so a prune cannot be proved on them.")
    return result


def _reference(model: nn.Module, batch: Example, drop: Heads, layers: Layers) -> Reference:
    """What the pruned model has to return for one input."""
    with mask(model, drop, layers=layers):
        if isinstance(batch, Prompt):
            sure = _sure(_answer(model, batch))
            return Reference(batch, sure, [math.inf] * len(sure), {})
        with watching(model, layers, drop, cut=False) as seen:
            outputs = _answer(model, batch)
    # A model may decide on the length of its output, so a mask may change that too.
    pairs = zip(outputs, _answer(model, batch), strict=True)
    effect = [largest(m - d) if m.shape == d.shape else math.inf for m, d in pairs]
    return Reference(batch, outputs, effect, seen)


def prove(
    model: nn.Module, touched: Layers, drop: Heads, inputs: Inputs, layers: Layers, *, keep: bool = True
) -> tuple[Removal, Proof, str]:
    """Remove the heads of the layers ``touched`` in the first way that passes the proof.

    Args:
        inputs: As `references` takes them.
        layers: All layers of the model.
        keep: Leave the heads removed; else the model is unchanged.

    Returns:
        The removal, what was compared, and "". If no way passes: the one that came nearest, and why it is not exact;
        the model is unchanged.
    """
    tolerance, removals = tolerance_of(model), ways(touched, {layer.name: drop[layer.name] for layer in touched})
    # With the full tolerance, heads that hardly matter would pass whatever is done to them.
    least = tolerance * (FINEST if tolerance < HALF else 1)
    reference = references(model, inputs, removals[0].drop, layers)
    tried = _try_ways(model, removals, reference, tolerance, least, keep)
    _, proof, failure = tried
    # An output that differs by little may do so by rounding: then the difference is gone in float64.
    rounded = bool(failure) and keep and least < proof.difference <= UNSTABLE * tolerance
    if rounded and (exact := _exact_in_float64(model, removals, inputs, layers, tolerance, least)):
        # A layer's own outputs hold more rounding than the model's; that they are right is known from float64.
        for allowed in (tolerance, UNSTABLE * tolerance):
            again = _try_ways(model, [exact], reference, allowed, allowed, keep, LAYERS * LAYERS)
            if not again[2]:
                return again
    return tried


def _exact_in_float64(
    model: nn.Module, removals: list[Removal], inputs: Inputs, layers: Layers, tolerance: float, least: float
) -> Removal | None:
    """The first removal that passes the proof on a copy of a float32 model in float64; None if none does, or if there is no such copy."""
    held = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if any(t.dtype != torch.float32 or t.is_meta for t in held) or sum(t.nbytes for t in held) > MOST_COPIED:
        return None
    try:
        wide = copy.deepcopy(model).double()
        reference = references(wide, [[*map(_doubled, some)] for some in inputs], removals[0].drop, layers)
        removal, _, failure = _try_ways(wide, removals, reference, tolerance, least, keep=False)
    except Exception:  # what cannot be copied, computes in float32 by itself, or needs more memory than there is
        return None
    return None if failure else removal


def _doubled(batch: Example) -> Example:
    """An input in float64."""
    wide = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
    return Prompt(wide) if isinstance(batch, Prompt) else cast(Example, wide)


def _try_ways(
    model: nn.Module,
    removals: list[Removal],
    reference: list[Reference],
    tolerance: float,
    least: float,
    keep: bool,
    times: float = LAYERS,
) -> tuple[Removal, Proof, str]:
    """As `prove`, by the given removals; ``reference``, ``least`` and ``times`` as in `_compare`."""
    restore, nearest, known = snapshot(model), math.inf, Changes()
    for removal in removals:
        try:
            difference, failure = _compare(model, removal, reference, tolerance, least, known, times)
            if failure or not keep:
                restore()
        except BaseException:  # an interrupt must not leave half a prune either
            restore()
            raise
        off = difference or math.inf  # it did not run, or was tried before
        if not failure or (failure != _SAME and off <= nearest):
            proof = Proof(difference, tolerance, len(reference), removal.ghosts)
            tried, nearest = (removal, proof, failure), off
        if not failure:
            break
    return tried


Changes = set[tuple[str, ...]]


def _compare(
    model: nn.Module,
    removal: Removal,
    reference: list[Reference],
    tolerance: float,
    least: float,
    known: Changes,
    times: float = LAYERS,
) -> tuple[float, str]:
    """Remove heads, and compare the model with the masked one.

    Args:
        least: The tolerance where the heads hardly change an output.
        known: The changes of all removals that were tried before; those of this one are added.
        times: By how many tolerances the layers' own outputs may differ.

    Returns:
        The largest relative difference, and why it failed ("" if it did not).
    """
    worst, shape = 0.0, "the pruned model's outputs have another shape"
    differ = "its outputs differ from the masked model's by {:.2g} of their largest value"
    try:
        if (changes := cut(model, removal)) in known:
            return worst, _SAME
        known.add(changes)
        for each in reference:
            with watching(model, removal.layers if each.seen else (), removal.drop, cut=True) as seen:
                outputs = _answer(model, each.batch)
            outputs = outputs[: len(each.masked)] if isinstance(each.batch, Prompt) else outputs
            if len(outputs) != len(each.masked) or outputs[0].shape != each.masked[0].shape:
                return worst, shape
            for got, expected, effect in zip(outputs, each.masked, each.effect, strict=True):
                if _per_head(got.shape, expected.shape):
                    continue
                if got.shape != expected.shape:
                    return worst, shape
                if (difference := gap(got, expected)) == math.inf:
                    return worst, "the pruned model's outputs are not finite where the masked one's are"
                scale = max(largest(expected), 1e-30)
                worst = max(worst, difference / scale)
                if difference > max(0.05 * effect, least * scale):
                    return worst, differ.format(worst)
            if why := differing(seen, each.seen, min(times * tolerance, COARSEST)):
                return worst, why
    except Exception as error:
        return worst, f"{DOES_NOT_RUN} ({type(error).__name__}: {first_line(error)})"
    return worst, differ.format(worst) if worst > tolerance else ""


def _per_head(got: torch.Size, expected: torch.Size) -> bool:
    """Whether a tensor has only lost heads in one dimension, as attention weights and caches do."""
    fewer = [g < e for g, e in zip(got, expected, strict=False) if g != e]
    return len(got) == len(expected) > 2 and fewer == [True]


def _continued(model: nn.Module, prompt: Prompt) -> list[Tensor]:
    """The scores of three tokens that the model generates, greedily and with a cache."""
    pad = getattr(cast(Any, model).config, "pad_token_id", None)
    out = cast(Any, model).generate(
        **prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=1, use_cache=True, output_logits=True,
        return_dict_in_generate=True, pad_token_id=pad if isinstance(pad, int) else 0,
    )  # fmt: skip
    return [s.detach().float() for s in out.logits]


def _sure(scores: list[Tensor]) -> list[Tensor]:
    """Scores up to the first step at which the two best tokens nearly tie: rounding may decide there, and all later scores differ."""
    for step, each in enumerate(scores, 1):
        first, second = each.topk(2, dim=-1).values.unbind(-1)
        if ((first - second) <= 1e-2 * each.abs().amax(-1)).any():
            return scores[:step]
    return scores


def _answer(model: nn.Module, batch: Example) -> list[Tensor]:
    """What the model answers, with the same random numbers each time: some models draw noise even in evaluation mode."""
    # Some modules keep what a long input made them compute, such as other frequencies or a wider mask.
    with attributes_kept(model), seeded(model, 0):
        if isinstance(batch, Prompt):
            return _continued(model, batch)
        return answers(call(model, batch))


def answers(output: Any) -> list[Tensor]:
    """The outputs that a prune must preserve, in float32 or wider: every floating-point tensor but attention weights.

    Attention weights have a head dimension, or are a mean over heads: they cannot stay the same.
    """
    if isinstance(output, Mapping):
        output = {k: v for k, v in output.items() if not k.endswith("attentions") and k != "past_key_values"}
    elif hasattr(output, "__dict__") and not isinstance(output, Tensor):
        output = vars(output)
    floats = [t.detach() for t in tensors(output) if t.is_floating_point()]
    if not floats:
        raise HeadPruneError("The model returns no floating-point tensor that a prune could be proved on.")
    return [widened(t) for t in floats[:1] + [t for t in floats[1:] if not _is_distribution(t)]]


def _is_distribution(t: Tensor) -> bool:
    """Whether a tensor looks like attention weights: not negative, with a sum of 1 (or of 0, if masked) over the keys."""
    if t.ndim < 3:
        return False
    sums = t.sum(-1)
    return bool((t >= 0).all() and (((sums - 1).abs() < 1e-3) | (sums == 0)).all())
