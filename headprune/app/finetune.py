"""Fine-tune a pruned model with distillation from the dense one; an interrupted training continues where it stopped."""

from __future__ import annotations

import copy
import math
import random
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from headprune.app.data import Part
from headprune.app.distillation import DistillationLoss
from headprune.app.options import FinetuneOptions
from headprune.app.rowwise import Shared
from headprune.batches import apparent_size
from headprune.errors import HeadPruneError
from headprune.evaluation import evaluate
from headprune.fingerprint import fingerprint, versions
from headprune.inputs import model_device, move
from headprune.jsonio import replacing
from headprune.ranks import current, joined
from headprune.running import Progress, evaluating
from headprune.scoring.resume import digest

if TYPE_CHECKING:
    from accelerate import Accelerator

SAVE_SECONDS = 60.0  # between two saves of the training's state, at least
_SAVE_SHARE = 0.05  # of the time that saving may take
_TRIED = 8  # batches, of which the largest shows whether its rows can be shared out among processes
_POOL = 32  # batches among which examples are sorted by length
_LARGEST_GRADIENT = 1.0  # norm of all gradients together; a longer gradient is scaled down to it

Data = Part | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model, and how it was trained.

    Attributes:
        model: In evaluation mode, on the device of the pruned model.
        examples: Training examples per epoch.
        steps: Optimizer steps made, of the ``planned`` ones.
        history: The choosing part's metrics before training (step 0) and after every epoch.
        best: The step whose weights ``model`` has; 0 if training did not make the model better.
        resumed: The step at which this run continued an interrupted one; None if it did not.
        seconds: Duration of the training, without that of an interrupted run.
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
    accelerator: Accelerator | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Finetuned:
    """Train a copy of a pruned model on labels and on the dense model's answers; keep the weights of the best epoch.

    Distillation as in Hinton et al. 2015 (arXiv:1503.02531), of hidden states as in Jiao et al. 2020 (TinyBERT,
    arXiv:1909.10351): see `DistillationLoss`. AdamW, in the weights' own precision. Shapes stay, so pruned heads stay pruned.

    Args:
        pruned: A transformers model, or any module whose output has ``logits``; it is not changed.
        dense: The model before pruning, on the same device; it is not changed. None with ``alpha=0``.
        train: A `Part` (see `load_train`), or batches: dicts of tensors, the batch first, with ``labels``.
        choose: Examples that decide when to stop and which epoch is kept. Never those that are reported.
        metric: What decides: ``"accuracy"`` (highest), or ``"perplexity"`` or ``"loss"`` (lowest, nats per token).
        work: A folder for unfinished work. A later call with the same model, data and options continues from it and ends
            with the same weights (to the bit on a CPU); any other call starts from the beginning. The caller removes it.
        accelerator: To share the rows of every batch out among the processes of an `accelerate.Accelerator`.
        progress: Called with (steps done, steps planned).
        say: Called with a line about the unfinished work that was found.

    Raises:
        HeadPruneError: Models or labels that do not fit each other, a loss that is not finite, damaged unfinished work.
    """
    options = options or FinetuneOptions()
    device = _device_of(pruned, dense)
    model = copy.deepcopy(pruned)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    order = _Order(train, options)
    held_out = list(choose.batches()) if isinstance(choose, Part) else list(choose)
    loss = DistillationLoss(model, dense, options.mixture)
    with joined(accelerator) as ranks, _own_random_state(options.seed), evaluating(dense or model):
        ranks.agree("a model", lambda: fingerprint(pruned))
        with evaluating(model):
            loss.prepare(move(order[0], device))
            some = range(min(_TRIED, len(order)))
            step = Shared(model, loss, loss.divergence.rows, lambda: [move(order[i], device) for i in some])
        training = _Training(model, step, order, held_out, metric, options)
        if work is not None:
            facts = [versions(), device.type, asdict(options), metric, _content(train), _content(choose)]
            training.resume(work, ranks.first("training", lambda: digest(facts, pruned, dense)), say)
        training.run(progress)
    for parameter, like in zip(model.parameters(), pruned.parameters(), strict=True):
        parameter.grad = None
        parameter.requires_grad_(like.requires_grad)
    return training.result()


def _device_of(pruned: nn.Module, dense: nn.Module | None) -> torch.device:
    """The device of both models.

    Raises:
        HeadPruneError: Different devices, or weights that cannot be trained.
    """
    device = model_device(pruned)
    if dense is not None and model_device(dense) != device:
        raise HeadPruneError(
            f"The pruned model is on {device}, the dense one on {model_device(dense)}.", "Put both on one."
        )
    if any(p.dtype == torch.float16 for p in pruned.parameters()):
        raise HeadPruneError("Small steps get lost in float16 weights.", "Train with --dtype float32 or bfloat16.")
    return device


def _content(data: Data) -> list[Any]:
    return [data.content_hash(), data.batch_size] if isinstance(data, Part) else list(data)


# -- the order of the examples ----------------------------------------------------------------


class _Order:
    """All batches of the training, in order: the examples of a batch depend on the seed and the batch's number alone.

    So a training that continues after an interruption gets the batches that it would have got.
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
        """An epoch's batches, as numbers of examples; the examples of a batch have similar lengths."""
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


# -- the training -----------------------------------------------------------------------------


class _Training:
    """The training loop.

    What a step does depends on the state that `save` writes, the seed and the step's number alone, so a training that
    continues after an interruption ends with the weights of an uninterrupted one.

    Attributes:
        step: Optimizer steps made so far.
        history: The choosing part's metrics before training and after every epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Shared,
        order: _Order,
        held_out: Sequence[Any],
        metric: str,
        options: FinetuneOptions,
    ) -> None:
        from transformers import get_linear_schedule_with_warmup  # imports PEFT, which takes seconds

        self.model, self.loss, self.order, self.held_out = model, loss, order, held_out
        self.metric, self.options = metric, options
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},  # biases and norms
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate)
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, math.ceil(len(order) / 10), len(order))
        self.step = 0
        self.history: list[dict[str, float]] = []
        self._best_weights: dict[str, Any] = {}
        self._file: Path | None = None
        self._resumed: int | None = None
        self._saved, self._wait = time.monotonic(), SAVE_SECONDS
        self._measure()
        if metric not in self.history[0]:
            raise HeadPruneError(f"The {metric} cannot be read off the model's logits.", "Decide by the loss.")

    @property
    def best(self) -> int:
        """The step with the best value of the metric; the lower loss where that ties, then the earlier."""
        return self._best_of(self.history)

    def _best_of(self, history: Sequence[Mapping[str, float]]) -> int:
        sign = -1 if self.metric == "accuracy" else 1
        return int(min(history, key=lambda h: (sign * h[self.metric], h["loss"], h["step"]))["step"])

    def run(self, progress: Progress | None) -> None:
        """Train to the end, or until the patience is over; the model then has its best weights."""
        began = time.monotonic()
        tell = progress or (lambda done, total, note="": None)
        tell(self.step, len(self.order))
        while self.step < len(self.order) and not self._patience_over():
            self._update()
            tell(self.step, len(self.order))
            if epoch_ends := self.step % self.order.per_epoch == 0 or self.step == len(self.order):
                self._measure()
            if epoch_ends or time.monotonic() - self._saved >= self._wait:
                self.save()
        if self.best != self.step:
            self.model.load_state_dict(self._best_weights)
        self._seconds = round(time.monotonic() - began, 1)

    def result(self) -> Finetuned:
        """What `run` made."""
        return Finetuned(
            self.model.eval(), self.order.examples, self.step, len(self.order), self.history, self.best, self._resumed,
            self._seconds,
        )  # fmt: skip

    def _update(self) -> None:
        """One step of the optimizer."""
        from transformers import set_seed

        set_seed(int(np.random.SeedSequence((self.options.seed, self.step)).generate_state(1)[0]))
        self.model.train()
        loss = self.loss.backward(move(self.order[self.step], model_device(self.model)))
        if not loss.isfinite():
            raise HeadPruneError(
                f"The loss became {loss.item()} at step {self.step + 1}.", "Use a smaller --learning-rate."
            )
        nn.utils.clip_grad_norm_(self.model.parameters(), _LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1

    def _measure(self) -> None:
        """Add the choosing part's metrics to the history, and keep the weights if they are the best so far."""
        epoch = round(self.step / self.order.per_epoch, 3)
        self.history.append({"step": self.step, "epoch": epoch, **evaluate(self.model, self.held_out).metrics})
        if self.best == self.step:
            self._best_weights = {k: v.to("cpu", copy=True) for k, v in self.model.state_dict().items()}

    def _patience_over(self) -> bool:
        epochs = self.history[1:]  # compared with each other: the first may be worse than no training
        return bool(epochs) and sum(h["step"] > self._best_of(epochs) for h in epochs) >= self.options.patience

    def save(self) -> None:
        """Write all that the next step depends on, if there is a folder for unfinished work."""
        if self._file is None or not current().main:
            return
        began = time.monotonic()
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        with replacing(self._file) as file:
            torch.save({**parts, "step": self.step, "history": self.history, "best_weights": self._best_weights}, file)
        self._saved = time.monotonic()
        self._wait = max(SAVE_SECONDS, (self._saved - began) / _SAVE_SHARE)

    def resume(self, work: Path, key: str, say: Callable[[str], None]) -> None:
        """Continue from what `save` wrote for a training of the same ``key``, if it did; from now on it writes to ``work``.

        Raises:
            HeadPruneError: The file is damaged.
        """
        self._file = work / f"{key}.pt"
        if not current().first("unfinished training", self._file.is_file):
            if any(work.glob("*.pt")):
                say(
                    f"Unfinished work in {work} is not used, as the model, data, seed, options or versions have changed."
                )
            return
        try:
            _check_whole(self._file)
            state = torch.load(self._file, map_location="cpu", weights_only=True)
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
            step, history, best = state["step"], list(state["history"]), dict(state["best_weights"])
            if type(step) is not int or not 0 <= step <= len(self.order) or not history:
                raise ValueError("it is at no step of this training")
            self._best_of(history)
        except Exception as error:
            raise HeadPruneError(
                f"The unfinished work in {work} is damaged ({type(error).__name__}).", "Start again with --no-resume."
            ) from error
        self.step, self.history, self._best_weights = step, history, best
        self._resumed = self.step
        say(f"Continuing from step {self.step} of an interrupted training (--no-resume starts again).")

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


def _check_whole(file: Path) -> None:
    """Compare the checksums in a file of `torch.save`, which `torch.load` does not.

    Raises:
        BadZipFile: The file is cut short, or some of it is not what was saved.
    """
    with zipfile.ZipFile(file) as parts:
        if damaged := parts.testzip():
            raise zipfile.BadZipFile(damaged)


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Training seeds Python's, NumPy's and torch's generators: afterwards they are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
