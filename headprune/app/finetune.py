"""Fine-tune a pruned model with distillation from the dense one; an interrupted training goes on where it was."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from headprune.app.data import Part
from headprune.app.distillation import DistillationLoss
from headprune.app.options import FinetuneOptions
from headprune.errors import HeadPruneError
from headprune.evaluation import evaluate
from headprune.fingerprint import versions
from headprune.inputs import model_device, move
from headprune.rows import apparent_size
from headprune.scoring.base import Progress
from headprune.scoring.resume import digest
from headprune.trace import evaluating

SAVE_SECONDS = 60.0  # between Trainer's checkpoints, at least
_SAVE_SHARE = 0.05  # of the time that saving may take
_POOL = 32  # batches among which examples are sorted by length
_WEIGHTS = "model.safetensors"
_STATE = "trainer_state.json"  # Trainer writes it last: a checkpoint that has it is complete

Data = Part | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model and how it came about.

    Attributes:
        model: In evaluation mode, on the device of the pruned one.
        examples: Training examples per epoch.
        steps: Optimizer steps that were made, of ``planned``.
        history: The choosing part's metrics before training (step 0) and after every epoch.
        best: The step whose weights ``model`` has; 0 if training made the model no better.
        resumed: The step of an interrupted run that this one went on from.
        seconds: That training took, this time.
    """

    model: nn.Module
    examples: int
    steps: int
    planned: int
    history: list[dict[str, float]]
    best: int
    resumed: int | None
    seconds: float


def finetune(
    pruned: nn.Module,
    dense: nn.Module | None,
    train: Data,
    choose: Data,
    options: FinetuneOptions | None = None,
    *,
    metric: str = "loss",
    work: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Finetuned:
    """Train a copy of a pruned model on labels and on the dense model's answers; keep what is best on other examples.

    Distillation as in Hinton et al. 2015 (arXiv:1503.02531), of hidden states as in Jiao et al. 2020 (TinyBERT,
    arXiv:1909.10351): see `DistillationLoss`. No shape changes, so what is pruned stays pruned.

    Args:
        pruned: A transformers model, or any module whose output has ``logits``; it is left as it was.
        dense: The model before pruning, on the same device; only read. None with ``alpha=0``.
        train: A `Part` (see `load_train`), or batches: dicts of tensors with the batch first and ``labels`` among them.
        choose: Examples that decide when to stop and which epoch is kept. Never those that are reported.
        metric: What decides: ``"accuracy"`` (highest), or ``"perplexity"`` or ``"loss"`` (lowest, nats per token).
        work: A folder for unfinished work. With the same model, data and options a later call goes on from there,
            to the same weights (bit for bit on a CPU); with others it starts anew. The caller removes the folder.
        progress: Told steps done and steps planned.
        say: Told what is there already.

    Raises:
        HeadPruneError: Models or labels that do not fit each other, a loss that is not finite.
    """
    options = options or FinetuneOptions()
    device = _device_of(pruned, dense)
    with tempfile.TemporaryDirectory() as passing, _own_random_state(options.seed):
        model = copy.deepcopy(pruned)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        loss = DistillationLoss(model, dense, options.mixture)
        order = _Order(train, options)
        held_out = list(choose.batches()) if isinstance(choose, Part) else list(choose)
        with evaluating(model), evaluating(dense or model):
            loss.prepare(move(order[0], device))
        before = {"step": 0, "epoch": 0.0, **evaluate(model, held_out).metrics}
        if metric not in before:
            raise HeadPruneError(f"The {metric} cannot be read off the model's logits.", "Decide by the loss.")
        folder, start = Path(passing), None
        if work is not None:
            # The folder's place counts too: Trainer notes where its best checkpoint lies.
            facts = [versions(), device.type, str(work.resolve()), asdict(options), metric]
            folder = work / digest([*facts, _content(train), _content(choose)], pruned, dense)
            start = _interrupted(folder, say)
        began = time.monotonic()
        with evaluating(dense or model), _config_kept(model):
            trainer = _Trainer(model, loss, order, held_out, metric, options, folder, device, progress)
            if start is not None:
                _fill(model, start)  # Trainer's own loading lets weights that do not fit pass
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        history = [before, *trainer.history()]
        best, steps = _best(history, metric), trainer.state.global_step
        _set_weights(model, pruned, folder / f"checkpoint-{best}" if best and best != steps else None, best)
        resumed = int(start.name.rpartition("-")[2]) if start is not None else None
        seconds = round(time.monotonic() - began, 1)
        return Finetuned(model.to(device).eval(), order.examples, steps, len(order), history, best, resumed, seconds)


def _device_of(pruned: nn.Module, dense: nn.Module | None) -> torch.device:
    """Where both models are.

    Raises:
        HeadPruneError: On different devices, or weights that cannot be trained.
    """
    device = model_device(pruned)
    if dense is not None and model_device(dense) != device:
        raise HeadPruneError(
            f"The pruned model is on {device}, the dense one on {model_device(dense)}.", "Put both on one."
        )
    if any(p.dtype == torch.float16 for p in pruned.parameters()):
        raise HeadPruneError("Small steps get lost in float16 weights.", "Train with --dtype float32 or bfloat16.")
    return device


def _set_weights(model: nn.Module, pruned: nn.Module, checkpoint: Path | None, step: int) -> None:
    """The trained model at its best step, fit for use.

    Args:
        checkpoint: Where the weights of that step are; None if the model has them.
        step: 0 for those from before the training.
    """
    if step == 0:
        model.load_state_dict(pruned.state_dict())
    elif checkpoint is not None:
        _fill(model, checkpoint)
    for parameter, like in zip(model.parameters(), pruned.parameters(), strict=True):
        parameter.grad = None
        parameter.requires_grad_(like.requires_grad)


def _content(data: Data) -> list[Any]:
    return [data.content_hash(), data.batch_size] if isinstance(data, Part) else list(data)


def _best(history: Sequence[Mapping[str, Any]], metric: str) -> int:
    """The step with the best value; the lower loss where that ties, then the earlier."""
    sign = -1 if metric == "accuracy" else 1
    return int(min(history, key=lambda h: (sign * h[metric], h["loss"], h["step"]))["step"])


# -- the order of the examples ----------------------------------------------------------------


class _Order(Dataset[Any]):
    """Every batch of the whole training, in turn: which examples it has depends on the seed and its number alone.

    So a training that goes on sees what it would have seen, whatever the samplers of the libraries do.
    """

    def __init__(self, train: Data, options: FinetuneOptions) -> None:
        self.train, self.seed = train, options.seed
        self.examples = len(train) if isinstance(train, Part) else sum(map(apparent_size, train))
        if not len(train):
            raise HeadPruneError("There are no examples to train on.", "Check the data.")
        self.per_epoch = math.ceil(len(train) / train.batch_size) if isinstance(train, Part) else len(train)
        self.total = max(1, round(options.epochs * self.per_epoch))
        self._epoch: tuple[int, list[Any]] = (-1, [])

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        epoch, number = divmod(index, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        chosen: Any = self._epoch[1][number]
        if isinstance(self.train, Part):
            return self.train.collate([self.train.features[i] for i in chosen])
        batch: Mapping[str, Any] = self.train[chosen]
        return batch

    def _shuffled(self, epoch: int) -> list[Any]:
        """An epoch's batches (as their examples' numbers), each of examples of like length."""
        rng = np.random.default_rng((self.seed, epoch))
        if not isinstance(self.train, Part):
            return [int(i) for i in rng.permutation(len(self.train))]
        size, lengths = self.train.batch_size, self.train.lengths()
        order = rng.permutation(len(self.train)).tolist()
        batches = []
        for start in range(0, len(order), _POOL * size):
            pool = sorted(order[start : start + _POOL * size], key=lambda i: lengths[i])
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        return [batches[i] for i in rng.permutation(len(batches))]


# -- Trainer ----------------------------------------------------------------------------------


class _Trainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer with our loss, our order and our evaluation, and silent."""

    def __init__(
        self,
        model: nn.Module,
        loss: DistillationLoss,
        order: _Order,
        held_out: Sequence[Any],
        metric: str,
        options: FinetuneOptions,
        folder: Path,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        arguments = TrainingArguments(
            output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=1,  # an item of `_Order` is a batch
            learning_rate=options.learning_rate, weight_decay=options.weight_decay, optim="adamw_torch",
            warmup_steps=math.ceil(len(order) / 10), lr_scheduler_type="linear", seed=options.seed,
            eval_strategy="no", save_strategy="steps", save_steps=len(order), save_total_limit=2,
            metric_for_best_model="rank", greater_is_better=False, logging_strategy="no", report_to="none",
            disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, use_cpu=device.type == "cpu",
        )  # fmt: skip
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several devices would be wrapped in DataParallel
        pace = _Pace(order, metric, options.patience, progress)
        super().__init__(model=model, args=arguments, train_dataset=order, callbacks=[pace])
        self.remove_callback(PrinterCallback)
        self.loss, self.order, self.held_out, self.metric = loss, order, held_out, metric

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.order, batch_size=1, collate_fn=_only))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.loss(inputs).mean()
        if not loss.isfinite():
            raise HeadPruneError(
                f"The loss became {loss.item()} at step {self.state.global_step + 1}.", "Use a smaller --learning-rate."
            )
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The choosing part's metrics, and ``eval_rank``: 0 if this is the best epoch yet, which Trainer then keeps."""
        found = evaluate(self.model, self.held_out).metrics
        step = self.state.global_step
        history = [*self.history(), {"step": step, **found}]
        metrics = {f"eval_{k}": v for k, v in found.items()}
        self.log(dict(metrics))
        # Falls with every new best, so that Trainer, which knows one number, decides as `_best` does.
        metrics["eval_rank"] = -float(len(history)) if _best(history, self.metric) == step else math.inf
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def history(self) -> list[dict[str, float]]:
        return _history(self.state, self.order)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The weights as they are in memory: save_pretrained may rename and reshape them, which loading here would not undo."""
        from safetensors.torch import save_model

        path = Path(output_dir or self.args.output_dir)
        path.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(path / _WEIGHTS), metadata={"format": "pt"})


class _Pace(TrainerCallback):  # type: ignore[misc]
    """When to measure, to save and to stop."""

    def __init__(self, order: _Order, metric: str, patience: int, progress: Progress | None) -> None:
        self.order, self.metric, self.patience, self.progress = order, metric, patience, progress
        self.saved = self.asked = time.monotonic()
        self.wait = SAVE_SECONDS

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.progress:
            self.progress(state.global_step, len(self.order))
        self._stop(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.progress:
            self.progress(state.global_step, len(self.order))
        self.asked = time.monotonic()
        if state.global_step % self.order.per_epoch == 0 or state.global_step == len(self.order):
            control.should_evaluate = control.should_save = True
        elif self.asked - self.saved >= self.wait:
            control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.asked = time.monotonic()
        self._stop(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()
        self.wait = max(SAVE_SECONDS, (self.saved - self.asked) / _SAVE_SHARE)

    def _stop(self, state: Any, control: Any) -> None:
        """Out of the history alone, so that it is the same after an interruption."""
        history = _history(state, self.order)
        if history:
            best = _best(history, self.metric)
            if sum(h["step"] > best for h in history) >= self.patience:
                control.should_training_stop = True


def _history(state: Any, order: _Order) -> list[dict[str, float]]:
    """The evaluations that Trainer has logged."""
    found = []
    for entry in state.log_history:
        if "eval_loss" in entry:
            metrics = {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
            found.append({"step": entry["step"], "epoch": round(entry["step"] / order.per_epoch, 3), **metrics})
    return found


def _only(items: list[Any]) -> Any:
    return items[0]


# -- unfinished work --------------------------------------------------------------------------


def _interrupted(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint of an interrupted training; incomplete ones are removed."""
    if not folder.is_dir():
        if folder.parent.is_dir() and any(folder.parent.iterdir()):
            say(
                f"Unfinished work in {folder.parent} is not used: its model, data, seed, options or versions were others."
            )
        return None
    complete = []
    for path in folder.glob("checkpoint-*"):
        try:
            json.loads((path / _STATE).read_text())
            complete.append((int(path.name.rpartition("-")[2]), path))
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)
    if not complete:
        return None
    step, newest = max(complete)
    say(f"Going on from step {step} of an interrupted training (--no-resume starts anew).")
    return newest


def _fill(model: nn.Module, folder: Path) -> None:
    """Load the weights that `save_model` wrote, all of them."""
    from safetensors.torch import load_model

    try:
        load_model(model, str(folder / _WEIGHTS), device=str(model_device(model)))
    except Exception as error:
        raise HeadPruneError(
            f"The unfinished work in {folder} is damaged ({type(error).__name__}).", "Start anew with --no-resume."
        ) from error


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Trainer seeds Python's, NumPy's and torch's generators: they are put back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _config_kept(model: nn.Module) -> Iterator[None]:
    """Trainer sets ``use_cache``, also where there is none, and that would be saved with the model."""
    attributes = vars(getattr(model, "config", None) or object)
    before = dict(attributes)
    try:
        yield
    finally:
        if isinstance(attributes, dict):
            attributes.clear()
            attributes.update(before)
