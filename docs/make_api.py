"""Writes docs/api.md from the docstrings of headprune's public names: `python docs/make_api.py` (`--check` compares only)."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import headprune as hp

PATH = Path(__file__).parent / "api.md"
GROUPS = {
    "Find and mask": ["find_attention", "AttentionLayer", "mask"],
    "See": ["attention_weights", "profile_heads", "HeadProfile"],
    "Score": ["score", "HeadScores", "agreement"],
    "Plan": ["search", "plan", "PruningPlan"],
    "Repair and prune": ["repair", "Repair", "Trial", "prune", "Proof", "stand_in"],
    "Measure": [
        "evaluate",
        "Measurement",
        "compare",
        "Change",
        "Metric",
        "Answers",
        "Generation",
        "benchmark",
        "LatencyRow",
        "Timing",
        "Speedup",
        "breakdown",
        "Breakdown",
    ],
    "Save, load and export": ["save", "load", "export", "Exported"],
    "Errors": ["HeadPruneError", "PruneError"],
}
HEAD = """# Python API

Made from the docstrings by `docs/make_api.py`; change them, not this file. All names are `headprune.NAME`; what is not listed here may
change from one version to the next. What several functions take:

- `model`: any `torch.nn.Module` with softmax attention, of transformers or your own. On its device, in any mode.
- `batches`: a list of batches, or any iterable (a generator is consumed once, and kept). A batch is a dict of tensors that the model accepts,
  with `labels`; or a pair `(inputs, labels)`, with a `loss_fn` where a loss is asked for.
- `example`: what the model is called with, without labels: a dict of tensors, a tensor or a tuple. Where it may be left out, an input is
  made up: for transformers models, and for others once `repair` or `prune` has seen one.
- `layers`: what `find_attention` gave, to save the trace. By default the model is traced on the example or the first batch.
- `plan`: a `PruningPlan`, or a dict `{layer_name: [head, ...]}`; `L3` serves as a layer's name.
- `accelerator`: an `accelerate.Accelerator`, whose processes share the work out; each makes the same call with all batches.
- `progress`: called with (done, total, note).

A mistake raises `HeadPruneError`, which says in a line what is wrong and what to try.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether docs/api.md is what would be written")
    if not parser.parse_args().check:
        PATH.write_text(document(), encoding="utf-8")
    elif PATH.read_text(encoding="utf-8") != document():
        sys.exit("docs/api.md is not what the docstrings say: run python docs/make_api.py")


def document() -> str:
    """The whole of docs/api.md."""
    missing = set(hp.__all__) - {"__version__"} ^ {name for names in GROUPS.values() for name in names}
    if missing:
        raise SystemExit(f"GROUPS and headprune.__all__ differ in {', '.join(sorted(missing))}")
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [described(name, getattr(hp, name)) for name in names]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def described(name: str, thing: Any) -> str:
    """A public name: its signature, its docstring, and those of a class's own methods."""
    text = f"### {name}\n\n"
    if inspect.isclass(thing):
        fields = "" if issubclass(thing, Exception) else signature(name, thing)
        text += fields + body(thing)
        for member, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if member.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            shown = f"{name}.{member}"
            if not isinstance(value, property):
                shown += compact(inspect.signature(getattr(thing, member)), without_self=inspect.isfunction(value))
            text += f"**`{shown}`** " + body(function)
        return text
    return text + signature(name, thing) + body(thing)


def signature(name: str, thing: Any) -> str:
    """A call in a code block, a line an argument where there are many."""
    parameters = list(inspect.signature(thing).parameters.values())
    line = f"{name}{compact(inspect.signature(thing))}"
    if len(line) > 110:
        lines, starred = [], False
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and not starred:
                lines.append("    *,")
                starred = True
            lines.append(f"    {shown(p)},")
        returned = inspect.signature(thing).return_annotation
        line = f"{name}(\n" + "\n".join(lines) + "\n)" + arrow(returned)
    return f"```python\n{line}\n```\n\n"


def compact(own: inspect.Signature, without_self: bool = False) -> str:
    """A signature in a line."""
    parameters = list(own.parameters.values())[1 if without_self else 0 :]
    texts: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        texts.append(shown(p))
    return f"({', '.join(texts)})" + arrow(own.return_annotation)


def arrow(annotation: Any) -> str:
    return f" -> {annotation}" if isinstance(annotation, str) and annotation != "None" else ""


def shown(p: inspect.Parameter) -> str:
    """An argument with its type and default."""
    name = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
    text = name if p.annotation is p.empty else f"{name}: {p.annotation}"
    if p.default is p.empty:
        return text
    made = type(p.default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return f"{text} = {'…' if made else repr(p.default)}"


def body(thing: Any) -> str:
    """A docstring as Markdown: its sections in bold, their entries as lists."""
    lines = inspect.cleandoc(thing.__doc__ or "").splitlines()
    found: list[str] = []
    section, depth = "", 0
    for line in lines:
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if re.fullmatch(r"(Args|Attributes|Returns|Raises):", line):
            section = bare[:-1]
            found += ["", f"**{'Arguments' if section == 'Args' else section}**", ""]
            depth = 4
        elif bare.startswith(">>>"):
            break  # a test, and always last
        elif section and bare and indent == depth and section != "Returns":
            names, colon, rest = bare.partition(": ")
            found.append(f"- `{names}`: {rest}" if colon else f"- {bare}")
        elif section and bare and indent >= depth:
            found.append(f"  {bare}" if section != "Returns" else bare)
        else:
            section = "" if bare else section
            found.append(bare)
    text = re.sub(r"``(.+?)``", r"`\1`", "\n".join(found))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n\n"


if __name__ == "__main__":
    main()
