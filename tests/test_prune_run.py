"""What a run of `prune` says before, compares, draws and times; and how deep a reader must go: by the command line."""

import json
import math
import re
from collections import Counter
from math import prod
from pathlib import Path
from random import Random
from traceback import walk_stack
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf

import headprune as hp
from tests.support.commands import PRUNE, metrics_of, run, stderr_of
from tests.support.folders import WORDS, common, tokenizer, write_jsonl
from tests.support.zoo import randomise

pytestmark = pytest.mark.usefixtures("brief")
LINE = r"Roughly .*: ([\d,]+) forward passes over 40 examples"


def passes(*arguments: Any, stream: str = "stderr") -> int:
    """What the line before a run says, as it was before the terminal wrapped it."""
    (count,) = re.findall(LINE, " ".join(getattr(run(*arguments), stream).split()))
    return int(count.replace(",", ""))


def test_every_run_says_what_it_will_take(bert_folder: Path, data_folder: Path, scored: Path) -> None:
    """Most runs said nothing. Of scores it is what they are counted to be; more budgets take more."""
    given = [bert_folder, "-d", data_folder, "-L", 40]
    methods = ["-m", "gradient", "-m", "ablation", "-m", "integrated-gradients:steps=5", "-m", "weight-norm"]
    assert passes("score", *given, *methods, "--dry-run", stream="stdout") == 3 + (1 + 8 / 2) + 3 * 5 + 0
    one = passes("prune", *given, "-k", 4, "--dry-run")
    assert 3 < one < passes("prune", *given, "-k", 4, "-k", 6, "--dry-run")
    assert passes("prune", "-k", 4, "-s", "one-shot", "--dry-run") > 3, "with scores that are there"


def test_what_cannot_be_told_stops_nothing(bert_folder: Path, data_folder: Path, here: Path, monkeypatch: Any) -> None:
    def failing(*more: Any) -> Any:
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr("headprune.app.workflow.cost._pace", failing)
    said = run("score", bert_folder, "-d", data_folder, "-L", 40, "-m", "weight-norm").stderr
    assert "could not be told (RuntimeError: no" in " ".join(said.split())


def test_orders_are_compared_and_the_used_one_is_drawn(bert_folder: Path, data_folder: Path, here: Path) -> None:
    """The order is used whose plans stay nearest to the dense model. The curve is that order's alone."""
    given = [bert_folder, "-d", data_folder, "-L", 40, "-m", "gradient", "-k", 6, "-k", 4, "--no-repair", "-o", "run"]
    assert passes("prune", *given) > 3
    metrics = metrics_of(here / "run")
    planning, curve = metrics["planning"], metrics["curve"]
    compared = {order["order"]: order for order in planning["compared"]}
    assert set(compared) == {"compensated", "re-scored", "gradient", "gradient, per-layer"}
    nearness = {name: prod(plan["divergence"] for plan in order["plans"]) for name, order in compared.items()}
    (used,) = [name for name, order in compared.items() if order["used"]]
    assert used == min(nearness, key=nearness.__getitem__)
    assert planning["judged_by"] == "the divergence (KL in nats) from the dense model's answers, on 30 examples"
    assert [(plan["budget"], plan["kept"]) for plan in compared[used]["plans"]] == [("keep 6", 6), ("keep 4", 4)]
    assert [(point["method"], point["asked"]) for point in curve] == [("dense", 8), *((used, n) for n in (6, 4, 3))]
    assert planning["work"]["re-scored"]["passes"] > planning["work"]["compensated"]["passes"] > 0


def test_a_run_that_can_repair_nothing_says_so(data_folder: Path, here: Path) -> None:
    """Nystromformer adds to the heads' outputs before W_O, which so cannot be refitted. Its random heads are not repaired, either."""
    config = tf.NystromformerConfig(**common(num_landmarks=16, segment_means_seq_len=16, conv_kernel_size=3))
    randomise(tf.NystromformerForSequenceClassification(config)).save_pretrained("model")
    tokenizer().save_pretrained("model")
    said = run("prune", "model", "-d", data_folder, "-L", 40, "-m", "gradient", "-k", 6, "-o", "run").stderr
    report, why = (here / "run" / "report.md").read_text(), "Nothing was repaired: no output projection (W_O)"
    assert why in " ".join(said.split())
    assert why in report
    assert "draws of as many heads. Chosen heads" in report
    assert metrics_of(here / "run")["budgets"][0]["repair"] is None


def test_later_budgets_need_no_search(scored: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run has its orders, whose plans are nested; for fewer heads, or another search, they are made anew."""
    run(*PRUNE, 6, "-k", 3, "-o", "first", "--scores", scored)
    monkeypatch.setattr("headprune.plan_search.arrange", Mock(side_effect=hp.HeadPruneError("searched", "")))
    for again in (["-o", "second"], ["--dry-run"]):
        result = run(*PRUNE, 4, "--scores", "first", *again)
    assert "4" in result.stdout
    drops = [metrics_of(here / f)["budgets"] for f in ("first", "second")]
    (six, two), (four,) = ([{(n, h) for n, heads in b["drop"].items() for h in heads} for b in own] for own in drops)
    assert six < four < two
    assert (here / "first/orders.json").read_text() == (here / "second/orders.json").read_text()
    for other in (["--no-resume"], ["--no-repair"], ["--protect", "L0.H1"]):
        assert "searched" in stderr_of(*PRUNE, 4, "--scores", "first", "-o", "third", *other, code=1)
    assert "searched" in stderr_of(*PRUNE, 1, "--scores", "second", "-o", "third", code=1)


@pytest.mark.parametrize(
    ("words", "lengths", "metric", "guessing"),
    [
        (7, [9, 36], "accuracy", 2 / 3),
        (7, [9, 36], "f1_macro", 0.4),  # always 1: F1 of class 1 is 0.8, of class 0 it is 0
        (7, [9, 36], "average_precision", 2 / 3),  # the share of class 1
        (15, [17, 64], "neg_mean_squared_error", -2 / 9),
        (14, [16, 32], "loss", math.log(3) - 2 / 3 * math.log(2)),  # the entropy of labels of which two thirds are 1
        (15, [17, 64], "loss", 2 / 9),  # the variance of numbers of which two thirds are 1
        (28, [30], "perplexity", 3 / 2 ** (2 / 3)),  # once the vocabulary's size, though the model gives two classes
    ],
)
def test_longer_inputs_are_longer_and_guessing_is_known(
    words: int, lengths: list[int], metric: str, guessing: float, here: Path
) -> None:
    """Texts that fill the model were timed at all its positions, and again at two fewer, as if that were four times as long.

    Without the metric of always giving the most frequent label, a model that does so was recommended with fewer heads.
    """
    positions, classes = 64 if words in (7, 15) else 32, 1 if words == 15 else 2
    config = tf.BertConfig(**common(max_position_embeddings=positions, num_hidden_layers=1), num_labels=classes)
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(here / "model")
    tokenizer().save_pretrained(here / "model")
    for seed, split in enumerate(("train", "validation", "test")):
        chosen = Random(seed)
        rows = [{"text": " ".join(chosen.choices(WORDS, k=words)), "label": label} for label in [0, 1, 1] * 4]
        write_jsonl(here / "data" / f"{split}.jsonl", rows)
    run(*PRUNE, 3, "model", "-d", "data", "-m", "weight-norm", "--no-repair", "-b", 4, "-o", "run", "--metric", metric)
    metrics = metrics_of(here / "run")
    timed = [(row["batch"], row["length"]) for row in metrics["latency"]["rows"]]
    assert timed == [(size, length) for length in lengths for size in (1, 4)]
    assert metrics["dense"]["guessing"] == pytest.approx(guessing)


def test_the_first_token_of_a_text_is_never_guessed(llama_folder: Path, data_folder: Path, here: Path) -> None:
    """It was counted among the tokens to predict: 10.3 % for 11.4 %."""
    quick = [llama_folder, "-d", data_folder, "-L", 20, "-m", "weight-norm", "--no-repair", "-o", "run"]
    run(*PRUNE, 4, *quick, "--metric", "accuracy")
    words, rows = tokenizer(), (data_folder / "test.jsonl").read_text().splitlines()
    counts = Counter(token for row in rows for token in words(json.loads(row)["text"])["input_ids"][1:])
    share = counts.most_common(1)[0][1] / counts.total()
    assert metrics_of(here / "run")["dense"]["guessing"] == pytest.approx(share)


def test_few_frames_lie_between_prune_and_the_solver(
    bert_folder: Path, data_folder: Path, here: Path, monkeypatch: Any
) -> None:
    chains: set[tuple[str, ...]] = set()
    solve, house = torch.linalg.solve, str(Path(hp.__file__).parent)

    def counting(*arguments: Any, **more: Any) -> Any:
        codes = [frame.f_code for frame, _ in walk_stack(None)]
        names = [code.co_name for code in codes if code.co_filename.startswith(house) and code.co_name[0] != "<"]
        chains.add(tuple(names[: names.index("prune") + 1]))  # comprehensions are part of their function
        return solve(*arguments, **more)

    monkeypatch.setattr(torch.linalg, "solve", counting)
    run("prune", bert_folder, "-d", data_folder, "-L", 20, "--keep", 4, "-s", "one-shot", "-m", "gradient", "-q")
    assert len(min(chains, key=len)) <= 12


@pytest.mark.parametrize("kind", ["MBart", "T5"])
def test_classifiers_that_read_the_end_of_a_text(kind: str, data_folder: Path, here: Path) -> None:
    """Made-up texts had no end, and those that are timed several: `inspect` and `bench` failed, `prune` when all else was done."""
    sizes = {"vocab_size": 30, "d_model": 32, "pad_token_id": 0, "eos_token_id": 3, "num_labels": 2}
    if kind == "T5":
        config = tf.T5Config(**sizes, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    else:
        parts = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
        parts |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        config = tf.MBartConfig(**sizes, **parts, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64)
    model = randomise(getattr(tf, f"{kind}ForSequenceClassification")(config)).eval()
    model.save_pretrained("m")
    words = tokenizer()
    words.model_input_names = ["input_ids", "attention_mask"]
    words.save_pretrained("m")
    assert "cross" in run("inspect", "m").stdout
    run("bench", "m", "m", "--batch-sizes", "1,2", "--lengths", "8,12", "-q")
    run(*PRUNE, 6, "m", "-d", data_folder, "-L", 20, "-b", 8, "-m", "weight-norm", "--no-repair", "-o", "run")
    told, (budget,) = metrics_of(here / "run"), metrics_of(here / "run")["budgets"]
    assert {row["batch"] for row in told["latency"]["rows"]} == {1, 8}
    rows = [json.loads(line) for line in (data_folder / "test.jsonl").read_text().splitlines()]
    for each, stored in ((model, told["dense"]), (hp.load(here / "run" / budget["checkpoint"]), budget["pruned"])):
        guesses = [int(each(**words(row["text"], return_tensors="pt")).logits.argmax()) for row in rows]
        right = [guess == row["label"] for guess, row in zip(guesses, rows, strict=True)]
        assert stored["metrics"]["accuracy"] == pytest.approx(sum(right) / len(rows))
