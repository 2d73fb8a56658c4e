"""How near estimates come to real runs: `headprune estimate` and then `headprune prune` on five models; docs/scale.md, section `estimate`.

    python benchmarks/estimate.py                        # all models; writes the section
    python benchmarks/estimate.py --only vit t5 --quick  # some, with fewer examples; prints, writes nothing
    python benchmarks/estimate.py --cpu-time             # on a busy machine: CPU seconds in the place of seconds

Each model is a process of its own, which estimates a run and then makes it. Passes are counted while the run is made, by hooks on
the dense model; memory is the most that the process held. What is estimated is the run without loading model and data. The goal is that time is
within 30 %. A model that is not there is left out, and the table says so. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
DOCUMENT = ROOT / "docs" / "scale.md"
GOAL = 0.3


def minilm(home: Path, quick: bool) -> list[str]:
    """The fine-tuned BERT on its sentences."""
    if not MINILM.is_dir():
        raise FileNotFoundError("minilm-rt is not there")
    return [
        str(MINILM),
        "-d",
        str(MINILM / "data"),
        "-L",
        "96" if quick else "512",
        "--report-limit",
        "200" if quick else "800",
        "--keep",
        "36",
    ]


def bert(home: Path, quick: bool) -> list[str]:
    """A random BERT of 6 x 8 heads, 4 classes, on random texts."""
    import transformers as tf

    config = tf.BertConfig(
        vocab_size=_WORDS + 10, hidden_size=256, num_attention_heads=8, num_hidden_layers=6, intermediate_size=1024, num_labels=4,
        initializer_range=0.1, max_position_embeddings=128,
    )  # fmt: skip
    return _saved(home, tf.BertForSequenceClassification(config), 4, 96 if quick else 512)


def llama(home: Path, quick: bool) -> list[str]:
    """A random Llama of 8 x 8 query heads, 4 of keys and values in each layer."""
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=_WORDS + 10, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=8,
        intermediate_size=768, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    return _saved(home, tf.LlamaForCausalLM(config), 0, 64 if quick else 256)


def vit(home: Path, quick: bool) -> list[str]:
    """The demo's ViT on scikit-learn's digits, with ablation too."""
    from headprune.app import demo

    model, data, _ = demo.prepare(ROOT / demo.HOME, lambda done, total: None)
    return [
        str(model),
        "-d",
        str(data),
        "-L",
        "200" if quick else "1000",
        "--keep",
        "12",
        "--keep",
        "6",
        "-m",
        "ablation",
        "-m",
        "gradient",
    ]


def t5(home: Path, quick: bool) -> list[str]:
    """A random T5 of 4 + 4 layers of 8 heads, on pairs of random texts."""
    import transformers as tf

    config = tf.T5Config(
        vocab_size=_WORDS + 10, d_model=192, d_kv=24, num_heads=8, num_layers=4, num_decoder_layers=4, d_ff=512, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return _saved(home, tf.T5ForConditionalGeneration(config), -1, 64 if quick else 256)


MODELS: dict[str, Callable[[Path, bool], list[str]]] = {
    "minilm": minilm,
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "t5": t5,
}
_WORDS = 500


def _saved(home: Path, model: Any, labels: int, examples: int) -> list[str]:
    """A random model in a folder, with a tokenizer that knows the words of random texts; and the arguments of the run."""
    import numpy as np
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, **{f"w{i}": i + 3 for i in range(_WORDS)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    own = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", model_max_length=128
    )
    draw = np.random.default_rng(0)

    def text() -> str:
        return " ".join(f"w{i}" for i in draw.integers(_WORDS, size=int(np.clip(draw.lognormal(3.2, 0.4), 6, 60))))

    def row() -> dict[str, Any]:
        if labels > 0:
            return {"text": text(), "label": int(draw.integers(labels))}
        return {"source": text(), "target": text()} if labels < 0 else {"text": text()}

    data = home / "data"
    data.mkdir(parents=True)
    for split, count in (("train", examples), ("validation", examples // 2), ("test", examples)):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))
    model.save_pretrained(home / "model")
    own.save_pretrained(home / "model")
    return [str(home / "model"), "-d", str(data), "-L", str(examples), "--keep", "50%"]


def one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A model's run estimated, and made."""
    import torch
    import transformers as tf
    from typer.testing import CliRunner

    from headprune.app import workflow
    from headprune.app.workflow import estimating, pruning, saving
    from headprune.cli import app
    from headprune.estimating import Limits, meter

    tf.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    if options.cpu_time:
        meter.CLOCK = time.process_time
    made: dict[str, Any] = {}

    def announced(console: Any, make: Callable[[], Any]) -> None:
        """In the place of the line: the whole estimate, and from here on the run is metered."""

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        arguments = MODELS[name](home, options.quick)
        os.chdir(home)
        estimating.announce, pruning.announce = announced, announced
        run = workflow.prune_run

        def both(asked: Any, target: Any, console: Any) -> Any:
            scene = asked.open(asked.scores(), console)
            found = estimating.estimate_prune(asked, scene, asked.scores(), Limits(options.batches))
            made["estimate"], made["heads"] = found, sum(a.num_heads for a in scene.maskable)
            made["class"] = type(scene.model).__name__

            def opened(self: Any, scores: Any, console: Any) -> Any:
                return scene

            kind = type(asked)
            before, kind.open = kind.open, opened
            meter.clear_peak()
            counts, began, load, timed = meter.Meter(), meter.CLOCK(), saving.load, pruning._timed

            def apart(*arguments: Any) -> Any:
                """What is timed for the report: its passes are as many as the clock allows, so they are not counted."""
                passes, start = (counts.forward, counts.backward), meter.CLOCK()
                done = timed(*arguments)
                made["timing"] = meter.CLOCK() - start
                counts.forward, counts.backward = passes
                return done

            pruning._timed = apart
            try:
                with ExitStack() as stack:

                    def counted(scene: Any, path: Any) -> Any:
                        model = load(scene, path)
                        stack.enter_context(meter.counting(model, counts))
                        return model

                    saving.load = counted
                    stack.enter_context(meter.counting(scene.model, counts))
                    result = run(asked, target, console)
            finally:
                kind.open, saving.load, pruning._timed = before, load, timed
            made["seconds"], made["counts"], made["peak"] = meter.CLOCK() - began, counts, meter.peak()
            return result

        workflow.prune_run = both
        result = CliRunner().invoke(app, ["prune", *arguments, "-o", str(home / "run"), "-q"])
        if result.exit_code:
            raise RuntimeError(result.output[-400:] or repr(result.exception)) from result.exception
        os.chdir(ROOT)
    found, n = made["estimate"], made["estimate"].examples
    return {
        "model": name, "about": MODELS[name].__doc__, "class": made["class"], "heads": made["heads"], "examples": n,
        "estimated": {
            "seconds": found.seconds, "low": found.seconds_low, "high": found.seconds_high, "forward": found.forward, "backward": found.backward,
            "memory": found.memory, "flops": found.flops, "took": found.took,
            "phases": {p.name: round(p.seconds, 2) for p in found.phases},
        },
        "real": {
            "seconds": made["seconds"], "timing": made["timing"], "forward": made["counts"].forward / n, "backward": made["counts"].backward / n,
            "memory": made["peak"],
        },
    }  # fmt: skip


def seconds_of(row: dict[str, Any], options: argparse.Namespace) -> tuple[float, float]:
    """Estimated and real. In CPU time without what is timed for the report: that goes by the clock, whatever else runs."""
    if not options.cpu_time:
        return row["estimated"]["seconds"], row["real"]["seconds"]
    return row["estimated"]["seconds"] - row["estimated"]["phases"].get("timing", 0.0), row["real"]["seconds"] - row[
        "real"
    ]["timing"]


def section(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table."""
    import torch

    def pair(row: dict[str, Any], name: str, form: str) -> str:
        return f"{format(row['estimated'][name], form)} / {format(row['real'][name], form)}"

    lines = [
        "## Cost before it begins",
        "",
        "`headprune estimate MODEL -d DATA --keep 50%` takes the options of `prune` (without a budget those of `score`) and says what that will cost; `score`, `prune` and",
        "`finetune` say it in a line before they begin, unless it is over in seconds. The search is *rehearsed*: its code runs, the model does not, and what would be run is",
        "counted. Then each kind of work is done on a few batches of your data, which gives its time on this device.",
        "",
        "Estimated / real, for `headprune prune` (scores, search, repair, controls, timing, report; without loading):",
        "",
        f"| model | heads | examples | {'CPU ' if options.cpu_time else ''}seconds | ratio | forward passes | backward passes | memory, MB | TFLOPs | estimating took |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "left_out" in row:
            lines.append(f"| {row['model']} | | | left out: {row['left_out']} | | | | | | |")
            continue
        told, real = seconds_of(row, options)
        memory = f"{row['estimated']['memory'] / 1e6:,.0f} / {row['real']['memory'] / 1e6:,.0f}"
        lines.append(
            f"| {row['class']} ({row['model']}) | {row['heads']} | {row['examples']:,} | {told:,.0f} / {real:,.0f} | {told / real:.2f} "
            f"| {pair(row, 'forward', ',.1f')} | {pair(row, 'backward', ',.1f')} | {memory} | {row['estimated']['flops'] / 1e12:,.2f} "
            f"| {row['estimated']['took']:.0f} s |"
        )
    ratios = [told / real for told, real in (seconds_of(row, options) for row in rows if "real" in row)]
    good = sum(abs(ratio - 1) <= GOAL for ratio in ratios)
    kind = "time by the clock"
    if options.cpu_time:
        kind = "**on a busy machine**, so CPU time of the process, without what is timed for the report (at least a second for every model and input)"
    lines += [
        "",
        f"Within 30 %: {good} of {len(ratios)}. Measured by `python benchmarks/estimate.py{' --cpu-time' if options.cpu_time else ''}{' --quick' if options.quick else ''}`: {kind}, "
        f"{options.threads} thread{'s' if options.threads > 1 else ''}, torch {torch.__version__}, on at most {options.batches} batches. FLOPs are those of the passes; least squares are in the "
        "time, not in the FLOPs. A run whose budget is a time, an operation count or a loss depends on what it finds: then the estimate has a range.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="these models")
    parser.add_argument("--quick", action="store_true", help="few examples; writes nothing unless --write")
    parser.add_argument("--write", action="store_true", help="write the section even so")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds in the place of seconds")
    parser.add_argument("--batches", type=int, default=4, help="to measure on, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rows", type=Path, help="write the section from lines of JSON that were printed before; measure nothing"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.one:
        print(json.dumps(one(options.one, options)))
        return
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows else []
    for name in () if options.rows else options.only or MODELS:
        flags = [flag for flag, given in (("--quick", options.quick), ("--cpu-time", options.cpu_time)) if given]
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--one",
            name,
            *flags,
            "--batches",
            str(options.batches),
            "--threads",
            str(options.threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        except (IndexError, ValueError):
            rows.append(
                {"model": name, "left_out": (done.stderr.strip().splitlines() or ["nothing was said"])[-1][-200:]}
            )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    text = section(rows, options)
    print(text, file=sys.stderr)
    if options.write or not (options.quick or options.only):
        from document import replace_section

        replace_section(DOCUMENT, "estimate", text)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
