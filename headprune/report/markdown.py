"""The report's text. Every figure in it comes from the run folder's documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headprune.latency import WARM_UP
from headprune.scoring import METHODS
from headprune.scoring.agreement import agreements, chance
from headprune.scoring.base import HeadScores
from headprune.uncertainty import FEW

_SHOWN = 8
_PAIRS = 3  # pairs of methods that get a sentence each; more are in the table alone


def render(name: str, run: dict[str, Any], scores: Sequence[HeadScores], metrics: dict[str, Any] | None) -> str:
    """The whole report."""
    sections = [
        f"# Attention heads of {run['options']['model']}",
        _opening(run),
        "## What was found\n\n" + "\n".join(f"- {s}" for s in _findings(run, scores, metrics)),
    ]
    if metrics is not None:
        sections += [_results(metrics), *_repair(metrics), _trade_off(metrics, run), _latency(metrics, run)]
    if scores:
        sections += [_importance(scores, metrics), *_agreement(scores)]
    if metrics is not None:
        sections.append(_removed(metrics, run))
    sections += [_method(run, scores, metrics), _reproduce(run)]
    return "\n\n".join(sections) + "\n"


def _opening(run: dict[str, Any]) -> str:
    model, parts = run["model"], run["parts"]
    heads = f"{model['heads']} heads in {len(model['layers'])} attention layers"
    cut = ", ".join(f"{p['examples']:,} to {n} (`{p['split']}`)" for n, p in parts.items())
    return (
        f"{model['class']}, {model['task']}, {model['parameters']:,} parameters, {heads}. "
        f"Data: `{run['options']['data']['dataset']}`; disjoint examples: {cut}. "
        f"Made by headprune {run['environment']['headprune']} on {run['when']}, {_device(run)}."
    )


def _device(run: dict[str, Any]) -> str:
    e = run["environment"]
    threads = f", {e['threads']} thread{'s' * (e['threads'] != 1)}" if e["device"] == "cpu" else ""
    return f"{e['device_name']} ({e['device']}{threads}, {run['model']['dtype']})"


# -- what was found ---------------------------------------------------------------------------


def _findings(run: dict[str, Any], scores: Sequence[HeadScores], metrics: dict[str, Any] | None) -> Iterator[str]:
    if metrics is not None:
        for budget in metrics["budgets"]:
            yield _budget_sentence(budget, metrics, run)
            if "measured" in budget.get("budget", {}):
                yield _asked_sentence(budget)
        yield _speed_sentence(metrics)
        if warning := _trained_on(metrics, run):
            yield warning
    real = [s for s in scores if s.method != "random"]
    for s in real:
        yield _score_sentence(s)
    pairs = agreements(scores)
    for both in pairs if len(pairs) <= _PAIRS else []:
        a, b = both.first, both.second
        if both.spearman != both.spearman:
            yield f"{a.capitalize()} and {b} cannot be compared: one of them scores all heads alike."
            continue
        word = "agree" if both.spearman > 0.7 else "agree in part" if both.spearman > 0.3 else "hardly agree"
        yield (
            f"{a.capitalize()} and {b} {word} on the order of the heads: Spearman {both.spearman:.2f}, "
            f"Kendall {both.kendall:.2f}; {100 * both.top_half:.0f} % of the better half are the same heads (50 % by chance)."
        )


def _budget_sentence(budget: dict[str, Any], metrics: dict[str, Any], run: dict[str, Any]) -> str:
    metric, change = metrics["metric"], budget["change"]
    before, after = metrics["dense"]["metrics"][metric], budget["pruned"]["metrics"][metric]
    verdict = {
        "no measurable change": "**no measurable change** (the interval holds 0)",
        "worse": "**worse**, by more than chance",
        "better": "**better**, by more than chance",
    }[change["verdict"]]
    control = budget["random"]
    mean = sum(control) / len(control)
    return (
        f"With **{budget['kept']} of {budget['total']} heads** ({_chosen(budget)}), {metric} on "
        f"{change['examples']:,} examples goes from {_value(metric, before)} to {_value(metric, after)}: "
        f"{_change(metric, change)}: {verdict}. Random heads in the same number{_as_repaired(budget)} give {_value(metric, mean)} "
        f"(mean of {len(control)}, {_value(metric, min(control))} to {_value(metric, max(control))}){_alike(budget, metric)}."
    )


def _as_repaired(budget: dict[str, Any]) -> str:
    """How the random control was repaired."""
    if not budget.get("repair"):
        return ""
    return ", repaired layer by layer alone," if budget["repair"].get("layers_alone") else ", repaired as well,"


def _alike(budget: dict[str, Any], metric: str) -> str:
    """What the chosen heads give with the control's repair."""
    alike = (budget.get("repair") or {}).get("layers_alone")
    return (
        f"; repaired in the same way, the chosen heads give {_value(metric, alike['metrics'][metric])}" if alike else ""
    )


def _chosen(budget: dict[str, Any]) -> str:
    """How a budget's heads were chosen."""
    by = [budget["method"]] if budget["method"] else []
    by += [budget["strategy"]] if budget.get("strategy") not in ("", None, *by) else []
    asked = budget.get("budget", {}).get("asked", "")
    if asked.startswith("plan "):
        return f"as `{asked.removeprefix('plan ')}` says"
    return f"chosen by {', '.join(by)}" if by else "as the plan says"


def _asked_sentence(budget: dict[str, Any]) -> str:
    """What a budget asked for, and what that was measured to be, once the plan was chosen."""
    b = budget["budget"]
    limit, now, low, high = (_amount(b, b[name]) for name in ("limit", "measured", "low", "high"))
    interval = f" (95 %: {low} to {high})" if b["low"] < b["high"] else ""
    if b["kind"] == "drop":
        return (
            f"Asked: a loss of no more than {b['limit']:g}. The fewest heads that hold it, by the upper end of the 95 % "
            f"interval on the choosing part, are {budget['kept']}: {b['measured']:.4f} ({b['low']:.4f} to {b['high']:.4f}) there."
        )
    of = f" of the dense model's {_COSTS[b['kind']]}" if b["relative"] else ""
    where = ""
    if b["kind"] == "latency":
        where = (
            f" at batch {b['batch']}" + (f" x {b['length']} tokens" if b["length"] else "") + ", on a fresh measurement"
        )
    return f"Asked: at most {limit}{of}; with {budget['kept']} heads it is {now}{interval}{where}."


def _amount(budget: dict[str, Any], value: float) -> str:
    if budget["relative"]:
        return f"{100 * value:.3g} %"
    return f"{value:.4g} ms" if budget["kind"] == "latency" else f"{value:,.0f} {budget['unit']}"


_COSTS = {"latency": "latency", "flops": "FLOPs", "params": "parameters", "kv-cache": "key/value cache"}


def _trained_on(metrics: dict[str, Any], run: dict[str, Any]) -> str:
    """Does the dense model do far better where plans were chosen than where they are reported?"""
    metric, dense = metrics["metric"], metrics["dense"]
    chosen = next(p for p in metrics["curve"] if p["method"] == "dense")
    lower = metric == "perplexity"
    apart = chosen["high"] < dense["low"] if lower else chosen["low"] > dense["high"]
    if not apart:
        return ""
    split = run["parts"]["choose"]["split"]
    return (
        f"**Caution:** the dense model's {metric} is {_value(metric, chosen['value'])} on the choosing part (`{split}`) and "
        f"{_value(metric, dense['metrics'][metric])} on the reporting part, so it was probably trained on `{split}`. The "
        "reported figures stand, but the choice between plans was made on examples that flatter the model; `--choose-split` "
        "names another."
    )


def _speed_sentence(metrics: dict[str, Any]) -> str:
    """The most and the least that was gained, and the most there was to gain."""
    latency, budget = metrics["latency"], metrics["budgets"][0]
    ratios = [(row["speedups"][budget["name"]], row) for row in latency["rows"]]
    parts = [f"{_ratio(s)} at {_shape(row)}" for s, row in ratios]
    slow = [s for s, _ in ratios if s["verdict"] != "faster"]
    verdict = "It is faster everywhere it was timed" if not slow else "It is not faster everywhere"
    if len(slow) == len(ratios):
        verdict = "**It is not measurably faster anywhere it was timed**"
    text = f"Speed with {budget['kept']} heads, dense time over pruned time: {'; '.join(parts)}. {verdict}."
    if latency["bound"]:
        most = max(latency["rows"], key=lambda row: row["speedups"][latency["bound"]]["ratio"])
        limit = most["speedups"][latency["bound"]]["ratio"]
        text += (
            f" With all prunable heads gone, the most that pruning heads can gain here, it would be {limit:.2f} times "
            f"as fast at {_shape(most)}: the rest of the time is not in the heads."
        )
    return text


def _score_sentence(s: HeadScores) -> str:
    flat, error, labels = s.flat(), s.flat_stderr(), s.labels()
    order = flat.argsort(descending=True).tolist()
    top = ", ".join(f"{labels[i]} ({_with_error(flat[i], error[i], '.4f', '±')})" for i in order[:3])
    text = f"By {s.method} on {s.basis} the most important heads are {top}"
    if s.signed and float(flat.min()) < 0 and bool(error.isfinite().all()):
        harmful = int(((flat + 1.96 * error) < 0).sum())
        unsure = int((flat.abs() < 1.96 * error).sum())
        text += (
            f"; {harmful} of {len(flat)} heads are harmful beyond their standard error, "
            f"and {unsure} cannot be told from 0"
        )
    return text + "."


def _with_error(value: Any, error: Any, form: str, sign: str) -> str:
    return f"{value:{form}}" if error != error else f"{value:{form}}{sign}{error:{form}}"


# -- tables -----------------------------------------------------------------------------------


def _results(metrics: dict[str, Any]) -> str:
    metric, dense = metrics["metric"], metrics["dense"]
    names = [metric, *(m for m in ("accuracy", "f1", "loss") if m in dense["metrics"] and m != metric)]
    lines = [
        "## Dense and pruned, on the reporting part",
        "",
        "| heads | "
        + " | ".join({"f1": "F1 (macro)"}.get(m, m) for m in names)
        + " | change (95 %) | verdict | parameters | FLOPs |",
        "|---" * (len(names) + 5) + "|",
    ]
    cells = [_value(m, dense["metrics"][m]) for m in names]
    total = metrics["budgets"][0]["total"]
    lines.append(
        f"| {total} (dense) | " + " | ".join(cells) + f" | | | {dense['parameters']:,} | {_flops(dense['flops'])} |"
    )
    for b in _largest_first(metrics):
        cells = [_value(m, b["pruned"]["metrics"][m]) for m in names]
        lines.append(
            f"| {b['kept']} | "
            + " | ".join(cells)
            + f" | {_change(metric, b['change'])} | {b['change']['verdict']}{_p_of(b['change'])} "
            f"| {b['parameters']:,} ({b['parameters'] / dense['parameters'] - 1:+.1%}) "
            f"| {_flops(b['flops'])} ({b['flops'] / dense['flops'] - 1:+.1%}) |"
        )
    lines += [
        "",
        "Change: of the metric in the first column after heads, paired by example; interval, p and verdict are of one test, which "
        "counts two examples more than were seen (`headprune.uncertainty`). FLOPs: one forward pass on one example of median length.",
        *_rests_on_few(metrics),
    ]
    return "\n".join(lines)


def _p_of(change: dict[str, Any]) -> str:
    p = change["p_value"]  # older runs have none for perplexity
    return "" if p is None else f" (p {p:.2g})"


def _rests_on_few(metrics: dict[str, Any]) -> Iterator[str]:
    """Changes of perplexity that hang on so few examples that their intervals may be too narrow."""
    for b in _largest_first(metrics):
        c = b["change"]
        if metrics["metric"] != "accuracy" and 0 < c.get("carried_by", 0.0) < FEW <= c["examples"]:
            yield (
                f"\n**Caution:** with {b['kept']} heads, the change of the loss rests on about {c['carried_by']:.0f} of the "
                f"{c['examples']:,} examples, so its interval may be too narrow; measure on more."
            )


def _trade_off(metrics: dict[str, Any], run: dict[str, Any]) -> str:
    choose = run["parts"]["choose"]
    metric = metrics["metric"]
    methods = [m for m in dict.fromkeys(p["method"] for p in metrics["curve"]) if m != "dense"]
    asked = sorted({p["asked"] for p in metrics["curve"] if p["method"] != "dense"}, reverse=True)
    lines = [
        "## Trade-off",
        "",
        f"![{metric} against heads kept](tradeoff.png)",
        "",
        f"Curves: heads masked{' and the rest repaired' + (' (but for the last step)' if _stepped(metrics) else '') if any(b.get('repair') for b in metrics['budgets']) else ''}, on the {choose['examples']:,} examples of the choosing part (`{choose['split']}`); shaded: "
        "95 % interval. Diamonds: pruned for real, reloaded, on the reporting part. Which curve's plans are used "
        f"was decided on the choosing part, for all budgets together{_judged(metrics)}.",
        "",
        f"| heads kept | {' | '.join(methods)} |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for keep in asked:
        cells = []
        for m in methods:
            values = [p["value"] for p in metrics["curve"] if p["method"] == m and p["asked"] == keep]
            cells.append(_value(metric, sum(values) / len(values)) if values else "–")
        lines.append(f"| {keep} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_compared(metrics)])


def _compared(metrics: dict[str, Any]) -> list[str]:
    """What the order that is used was chosen by."""
    orders = metrics.get("planning", {}).get("compared")
    if not orders:
        return []
    near = "divergence" in orders[0]["plans"][0]
    what = "divergence (KL) from the dense model's answers, in nats, mean over examples" if near else "loss, in nats"
    decided = "the mean of its logarithm over the budgets" if near and len(orders[0]["plans"]) > 1 else ""
    lines = [
        "",
        f"What decided between the orders that were tried: their plans' {what}, on the choosing part, heads masked"
        f"{' and the rest repaired layer by layer' if any(b.get('repair') for b in metrics['budgets']) else ''}. Lower is better"
        f"{f'; what counts is {decided}' if decided else ''}"
        f"{'; fewer heads come first, since a drop is the budget' if _drops(metrics) else ''}.",
        "",
        f"| order | {' | '.join(plan['budget'] for plan in orders[0]['plans'])} |",
        "|---" * (len(orders[0]["plans"]) + 1) + "|",
    ]
    for order in orders:
        cells = [f"{plan['divergence' if near else 'loss']:.3g} ({plan['kept']} heads)" for plan in order["plans"]]
        name = f"**{order['order']}** (used)" if order["used"] else order["order"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _drops(metrics: dict[str, Any]) -> bool:
    return any(b.get("budget", {}).get("kind") == "drop" for b in metrics["budgets"])


def _judged(metrics: dict[str, Any]) -> str:
    by = metrics.get("planning", {}).get("judged_by")
    return f", by {by}" if by else ""


def _latency(metrics: dict[str, Any], run: dict[str, Any]) -> str:
    latency = metrics["latency"]
    run = {**run, "environment": metrics.get("environment", run["environment"])}
    lines = [
        "## Latency",
        "",
        "![latency](latency.png)",
        "",
        "| input | model | median, ms | 95th percentile, ms | dense time / its time (95 %) | |",
        "|---|---|---|---|---|---|",
    ]
    for row in latency["rows"]:
        for name, timing in row["timings"].items():
            faster = row["speedups"].get(name)
            ratio, verdict = (_ratio(faster), faster["verdict"]) if faster else ("", "")
            lines.append(
                f"| {_shape(row)} | {name} | {timing['median']:.2f} | {timing['p95']:.2f} | {ratio} | {verdict} |"
            )
    rounds = min(t["runs"] for row in latency["rows"] for t in row["timings"].values())
    clock = "CUDA events" if run["environment"]["device"].startswith("cuda") else "a monotonic clock"
    lines += [
        "",
        f"One forward pass; at least {rounds} rounds after {WARM_UP} for warm-up, the models in turn within each round, "
        f"{clock}, on {_device(run)}. Ratios: median over rounds of the ratio within a round, with its bootstrap interval.",
    ]
    if latency["bound"]:
        lines += [
            "",
            f"“{latency['bound']}” is this model with every prunable head removed: no choice of heads can gain more. "
            "Feed-forward layers, embeddings and the cost of launching operations stay as they are."
            + (
                f" In {latency['bound_ghosts']} of its layers one head (or group) stays with zero output, for the cache."
                if latency["bound_ghosts"]
                else ""
            ),
        ]
    return "\n".join(lines)


def _importance(scores: Sequence[HeadScores], metrics: dict[str, Any] | None) -> str:
    lines = ["## Importance", "", "![importance of every head](importance.png)", ""]
    if metrics is not None:
        lines += [f"Crosses: the heads removed to keep {metrics['budgets'][0]['kept']}.", ""]
    for s in scores:
        if s.method == "random":
            continue
        flat, error, labels = s.flat(), s.flat_stderr(), s.labels()
        order = flat.argsort(descending=True).tolist()

        def row(indices: list[int], labels: list[str] = labels, flat: Any = flat, error: Any = error) -> str:
            return ", ".join(
                f"{labels[i]} {flat[i]:.4g}" + ("" if error[i] != error[i] else f" ± {error[i]:.2g}") for i in indices
            )

        shown = min(_SHOWN, len(order) // 2)
        seconds = f", {s.details['seconds']:,} s" if "seconds" in s.details else ""
        lines += [
            f"**{s.method}** ({s.unit}; {s.basis}{seconds}; {_certainty(s)})",
            "",
            f"- highest: {row(order[:shown])}",
            f"- lowest: {row(order[::-1][:shown])}",
            "",
        ]
    lines.append("All values are in `scores.json`.")
    return "\n".join(lines)


def _certainty(s: HeadScores) -> str:
    """Standard errors, or why there are none, and whether other examples would order the heads alike."""
    text = f"no standard error: {s.details['stderr']}" if "stderr" in s.details else "± is the standard error"
    if "estimated" in s.details:
        text += f"; {s.details['estimated']}"
    if s.caution:
        text += f"; {s.caution}"
    if stable := s.details.get("stability"):
        how = "examples drawn anew" if stable["by"] == "bootstrap" else "draws within the standard errors"
        text += f"; {how} order the heads alike to Spearman {stable['spearman']:.2f}"
    return text


def _agreement(scores: Sequence[HeadScores]) -> list[str]:
    """The table of every pair of methods, if there are several."""
    pairs = agreements(scores)
    if not pairs:
        return []
    heads = len(scores[0].flat())
    random = chance(heads)
    lines = [
        "## Agreement of the methods",
        "",
        "![Spearman's rho of every pair of methods](agreement.png)",
        "",
        "| | | Spearman | Kendall | better half in common |",
        "|---|---|---|---|---|",
        *(
            f"| {a.first} | {a.second} | {_rank(a.spearman)} | {_rank(a.kendall)} | {a.top_half:.0%} |"
            for a in sorted(pairs, key=lambda a: -(a.spearman if a.spearman == a.spearman else -2))
        ),
        "",
        f"The random control: of orders of {heads} heads that know nothing of each other, 95 % stay within ±{random.spearman:.2f} "
        f"(Spearman), ±{random.kendall:.2f} (Kendall), and share at most {random.top_half:.0%} of the better half.",
    ]
    return ["\n".join(lines)]


def _rank(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _removed(metrics: dict[str, Any], run: dict[str, Any]) -> str:
    lines = ["## Heads removed", ""]
    budgets = _largest_first(metrics)
    common = [note for note in budgets[0]["notes"] if len(budgets) > 1 and all(note in b["notes"] for b in budgets)]
    for b in budgets:
        lines += [
            f"<details><summary>{b['total'] - b['kept']} of {b['total']} removed, {b['kept']} kept, "
            f"saved in <code>{b['checkpoint']}/</code></summary>",
            "",
            *(
                f"- L{a['index']} ({a['name']}): {', '.join(f'H{h}' for h in b['drop'][a['name']])}"
                for a in run["model"]["layers"]
                if a["name"] in b["drop"]
            ),
            "",
            "</details>",
            "",
        ]
        if b["proof"]["ghosts"]:
            lines += [
                f"With {b['kept']} heads, these layers have none left but keep one head (or group) with zero output, so "
                f"that their cache works: {', '.join(b['proof']['ghosts'])}.",
                "",
            ]
        lines += [*(f"{note}\n" for note in b["notes"] if note not in common)]
    lines += [*(f"{note}\n" for note in common)]
    proofs = [b["proof"] for b in metrics["budgets"]]
    lines.append(
        f"Proof: on {min(p['inputs'] for p in proofs)} inputs of different shape and content, each pruned model's outputs differ from "
        f"the masked model's by at most {max(p['difference'] for p in proofs):.1e} of their largest value (allowed: "
        f"{proofs[0]['tolerance']:.0e}). Each saved folder was loaded again; its outputs differ from the model in memory "
        f"by {max(p['reload_difference'] for p in proofs):.1g}, and the figures above are the loaded model's."
    )
    computed = run["model"]["dtype"]
    if halved := {b["dtype"] for b in metrics["budgets"] if b.get("dtype", computed) != computed}:
        lines += [
            "",
            f"Weights are saved in {' and '.join(sorted(halved))}, as the checkpoint was stored, so that those that were refitted are "
            f"rounded; the figures above include that. Both the dense and the saved weights were computed with in {computed}.",
        ]
    return "\n".join(lines)


def _largest_first(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(metrics["budgets"], key=lambda b: -b["kept"])


def _method(run: dict[str, Any], scores: Sequence[HeadScores], metrics: dict[str, Any] | None) -> str:
    parts = run["parts"]
    lines = [
        "## How it was measured",
        "",
        f"- {'Scores come from' if scores else 'Nothing was scored; set aside for it were'} {parts['score']['examples']:,} "
        f"examples of `{parts['score']['split']}`; plans were chosen on "
        f"{parts['choose']['examples']:,} of `{parts['choose']['split']}`; accuracy is reported on "
        f"{parts['report']['examples']:,} of `{parts['report']['split']}`. No example is in two parts.",
        f"- Columns: {', '.join(f'{k} = `{v}`' for k, v in run['columns'].items())}.",
    ]
    lines += [f"- {s.method}: {_about(s.method)}{_particulars(s)}" for s in scores]
    if metrics is not None:
        lines += _planning(metrics.get("planning", {}), run)
        lines += _weights(metrics["budgets"])
    lines += [f"- {note}" for note in run["notes"]]
    fixed = [a for a in run["model"]["layers"] if not a["prunable"]]
    lines += [f"- {a['name']} cannot be pruned: {a['reason']}." for a in fixed]
    return "\n".join(lines)


def _weights(budgets: Sequence[dict[str, Any]]) -> list[str]:
    """What became of the weights that stayed."""
    lines = []
    repaired = [b["repair"] for b in budgets if b.get("repair")]
    if repaired:
        lines.append(
            f"- Repair: in every layer that lost heads, W_O and the kept heads' values were refitted by least squares, on the "
            f"{repaired[0]['examples']:,} scoring examples{_mixtures(repaired[0])}, to what the dense model's W_O gives there; with a pull towards the old "
            "weights, whose strength was chosen on held-out halves of those examples, as was whether the values change at all. "
            "Removed heads are masked or pruned behind that. Every step was tried on examples that it was not fitted to, and left out "
            "where it brought the answers no nearer to the dense model's there."
        )
    if any(r.get("answers") for r in repaired):
        lines.append(
            "- Then those W_O were moved together, by one least-squares (Gauss-Newton) step in closed form, towards the dense model's "
            "logits on these examples; its ridge did best on examples left out. No labels, no training. Random heads were "
            "repaired layer by layer alone, which is cheaper; what the chosen heads give with that repair stands beside them."
        )
    tuned = [b["finetune"] for b in budgets if b.get("finetune")]
    if tuned:
        lines.append(
            f"- Fine-tuned on {tuned[0]['examples']:,} examples for {tuned[0]['options']['epochs']:g} epochs, with distillation from "
            "the dense model; the best epoch was chosen on the choosing part."
        )
    return lines or ["- No weight was changed or trained after pruning."]


def _mixtures(repair: dict[str, Any]) -> str:
    """What was fitted to beside the scoring examples."""
    count = repair.get("mixtures", 0)
    return (
        f" and {count:,} mixtures of them (the first half of one text with the second half of another)" if count else ""
    )


def _stepped(metrics: dict[str, Any]) -> bool:
    """Whether a repair ended with a step towards the dense model's answers."""
    return any((b.get("repair") or {}).get("answers") for b in metrics["budgets"])


def _repair(metrics: dict[str, Any]) -> list[str]:
    """What the repair changed, by budget."""
    rows = [b for b in _largest_first(metrics) if b.get("repair") or b.get("finetune")]
    if not rows:
        return []
    metric, tunes = metrics["metric"], any(b.get("finetune") for b in rows)
    steps = any((b.get("repair") or {}).get("layers_alone") for b in rows)
    lines = [
        "## Repair",
        "",
        f"| heads | {metric} without | {'layer by layer alone | ' if steps else ''}{'repaired | fine-tuned' if tunes else 'repaired'} | W_O's error without | repaired | ridge | layers with new values |",
        "|---" * (7 + tunes + steps) + "|",
    ]
    for b in rows:
        repair, tuned = b.get("repair"), b.get("finetune")
        fits = list(repair["layers"].values()) if repair else []
        before, after = ([f[k] for f in fits] for k in ("before", "after"))
        now = _value(metric, b["pruned"]["metrics"][metric])
        middle = [_value(metric, tuned["before"]["metrics"][metric]), now] if tuned else [now, "–"] if tunes else [now]
        if steps:
            alike = (repair or {}).get("layers_alone")
            middle.insert(0, _value(metric, alike["metrics"][metric]) if alike else "–")
        ridges = sorted({f["ridge"] for f in fits})
        lines.append(
            f"| {b['kept']} | {_value(metric, repair['without']['metrics'][metric]) if repair else '–'} | {' | '.join(middle)} | "
            + (
                f"{sum(before) / len(fits):.2f} | {sum(after) / len(fits):.2f} | {_ridge(ridges[0])} to {_ridge(ridges[-1])} "
                f"| {sum(f['values'] for f in fits)} of {len(fits)} |"
                if fits
                else "– | – | – | – |"
            )
        )
    lines += [
        "",
        "On the reporting part. W_O's error: of its output per token, squared, as a share of the dense output's variance, mean over "
        "the refitted layers, on what they were fitted to. A ridge of ∞ left a layer's old weights as they were: no refit did better "
        "on held-out examples.",
    ]
    for b in rows:
        if step := (b.get("repair") or {}).get("answers"):
            lines.append(
                f"\n{b['kept']} heads: the step towards the dense model's answers brought their difference (of logits, root mean "
                f"square) from {step['before']:.2f} to {step['after']:.2f} on the {step['examples']:,} examples {_fitted_to(step)}; on others "
                f"{step['held_out']:.2f} is to be expected, to first order."
            )
    lines += [f"\n{b['kept']} heads: {text}" for b in rows if (text := tried(b.get("repair")))]
    notes: dict[str, list[str]] = {}
    repaired = [b for b in rows if b.get("repair")]
    for b in repaired:
        for note in b["repair"]["notes"]:
            notes.setdefault(note, []).append(str(b["kept"]))
    for note, kept in notes.items():
        lines.append("\n" + (note if len(kept) == len(repaired) else f"{' and '.join(kept)} heads: {note}"))
    return ["\n".join(lines)]


def _ridge(strength: float) -> str:
    return "∞" if strength == float("inf") else f"{strength:g}"


def tried(repair: dict[str, Any] | None) -> str:
    """How every step of a repair did on examples that it was not fitted to; "" if none was tried."""
    trials = (repair or {}).get("trials", ())
    each = (
        f"{t['step']} {_known(t['before'])} to {_known(t['after'])} on {t['examples']:,}{'' if t['kept'] else ', no better than chance: **left out**'}"
        for t in trials
    )
    return f"divergence from the dense model's answers, on examples not fitted to: {'; '.join(each)}." if trials else ""


def _known(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _fitted_to(step: dict[str, Any]) -> str:
    count = step.get("mixtures", 0)
    return f"that it was made from, {count:,} of them mixtures" if count else "that it was made from"


def _planning(planning: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """The strategy and its constraints."""
    lines = [f"- {planning['strategy']}: {planning['about']}"] if "strategy" in planning else []
    if planning.get("strategy") == "auto" and run.get("methods") == ["gradient"]:
        lines.append(
            "- Of scores it had those by gradient alone, beside the orders that it makes itself (`-m ablation -m gradient` adds ablation's)."
        )
    if protect := planning.get("protect"):
        lines.append(f"- Protected, so that they stay: {protect}.")
    if least := planning.get("min_heads_per_layer"):
        lines.append(f"- Every layer keeps at least {least} query heads.")
    for name, work in planning.get("work", {}).items():
        cost = f"{work['passes']:,.0f} forward passes over {work['examples']:,} examples, {work['flops'] / 1e12:,.3g} TFLOPs"
        if why := work.get("left_out"):
            lines.append(f"- {name} was left out: {why}. `--effort high` makes it.")
        else:
            lines.append(f"- {name} was counted beforehand to take about {cost}; no choice depended on time.")
    if most := (planning.get("effort") or {}).get("examples"):
        lines.append(
            f"- At effort {planning['effort']['name']} a search looks at up to {most:,} scoring examples each time."
        )
    return lines


def _particulars(s: HeadScores) -> str:
    """What was special in this run."""
    said = []
    if s.details.get("loss", "the model's own") != "the model's own":
        said.append(f"The loss is {s.details['loss']}.")
    if isinstance(s.details.get("replayed"), list):
        said.append(f"Not replayed: {'; '.join(s.details['replayed'])}.")
    if "resumed" in s.details:
        said.append(f"{s.details['resumed'].capitalize()}.")
    return "".join(f" {text}" for text in said)


def _about(method: str) -> str:
    return METHODS[method].about if method in METHODS else "a method of the user's."


def _reproduce(run: dict[str, Any]) -> str:
    e = run["environment"]
    commands = "\n".join(dict.fromkeys(run["commands"]))
    took = " and ".join(f"{s:,.0f} s" for s in run["seconds"])
    return (
        f"## Reproduce\n\n```\n{commands}\n```\n\n"
        f"Took {took}. Python {e['python']}, torch {e['torch']}, transformers {e['transformers']}, {e['system']}; "
        f"seed {run['options']['seed']}; model fingerprint `{run['model']['fingerprint']}`. Scores, plans and metrics repeat "
        "from the seed; timings do not."
    )


# -- numbers ----------------------------------------------------------------------------------


def _value(metric: str, value: float) -> str:
    if metric in ("accuracy", "f1"):
        return f"{100 * value:.1f} %"
    return f"{value:,.4g}"


def _change(metric: str, change: dict[str, Any]) -> str:
    if metric == "perplexity":
        return f"{change['value']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"
    return f"{100 * change['value']:+.2f} points ({100 * change['low']:+.2f} to {100 * change['high']:+.2f})"


def _ratio(speedup: dict[str, Any]) -> str:
    return f"{speedup['ratio']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"


def _shape(row: dict[str, Any]) -> str:
    return f"batch {row['batch']}" + (f" x {row['length']} tokens" if row["length"] else "")


def _flops(count: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"
