"""Fine-tune a pruned model by transformers' Trainer, with distillation from the dense one.

The loss and the metrics are headprune's. The random numbers of a step depend only on the seed and the step's number, so a training
that continues from one of Trainer's checkpoints ends with the weights of one that was not interrupted (to the bit on a CPU).

With several processes, each computes the losses of some examples of every batch, and DistributedDataParallel averages the gradients.
On a CPU, every process draws dropout for the whole batch and uses the part of its own examples, so a step equals that of one
process, but for rounding. On a GPU, dropout kernels draw their own random numbers, so it differs.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from headprune.app.data import Part
from headprune.app.documents import Training
from headprune.app.options import FinetuneOptions, Mixture, check_values
from headprune.app.sources import widen
from headprune.batches import apparent_size, find_rows
from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.evaluation import evaluate
from headprune.files import digest as file_digest
from headprune.files import write_file
from headprune.fingerprint import versions
from headprune.inputs import LABELS, call, model_device, move, seeded, tensors, without_labels
from headprune.losses import ExampleLoss
from headprune.parallel import current
from headprune.running import Progress, evaluating, no_progress, restoring_dicts
from headprune.store import digest

SAVE_SECONDS = 60.0  # between two checkpoints, at least
_SAVE_SHARE = 0.05  # the share of the time that saving checkpoints may take
_WEIGHTS, _STATE = "pytorch_model.bin", "trainer_state.json"
_FILES = (_WEIGHTS, _STATE, "optimizer.pt", "scheduler.pt")  # a checkpoint's files, by Trainer's names
_SAME = 1e-4  # relative: how much an example's loss may depend on the other examples of its batch
_SEAL = "checksum.txt"  # written last, so it marks a complete checkpoint


def finetune(
    pruned: nn.Module, dense: nn.Module, train: Part, choose: Part, options: FinetuneOptions, work: Path, *,
    metric: str = "loss", progress: Progress = no_progress, say: Callable[[str], None] = lambda text: None,
) -> tuple[nn.Module, Training]:  # fmt: skip
    """A copy of a pruned model, trained on labels and on the dense model's answers (`DistillationLoss`), and how it was trained.

    Uses AdamW. Weights in bfloat16 are trained in float32, with products in bfloat16 (mixed precision), and rounded at the end: small
    steps would get lost in bfloat16. Shapes stay, so pruned heads stay pruned. Under torchrun every process makes the same call.

    Args:
        pruned: A transformers model, or any module whose output has ``logits``; it is not changed.
        dense: The model before pruning, on the same device; it is not changed.
        train: Examples with labels, which are optional if ``alpha`` is 1.
        choose: Examples that decide when to stop and which epoch's weights are kept (those from before training, if no epoch
            was better). Never the reported ones.
        work: A folder for checkpoints. A later call with the same model, data and options continues from the last one, any
            other call starts from the beginning. The caller removes it.
        metric: What decides: ``"accuracy"`` (highest), or ``"perplexity"`` or ``"loss"`` (lowest, nats per token).
        progress: Called with (steps done, steps planned).
        say: Called with a line about checkpoints that were found.

    Raises:
        HeadPruneError: Models or labels that do not fit each other, weights that cannot be trained here, or a loss that is not finite.
    """
    check_values(options)
    began, device = time.monotonic(), model_device(pruned)
    # Trainer replaces accelerate's state of the process, which decides on devices from then on: restore it afterwards.
    accelerate_kept = restoring_dicts(kind._shared_state for kind in (PartialState, AcceleratorState, GradientState))
    with accelerate_kept, seeded(pruned, options.seed), evaluating(dense):
        facts = [versions(), device.type, options, metric, train.batch_size, choose.batch_size]
        folder = work / digest(facts, train.content_hash, choose.content_hash, pruned, dense)
        arguments, student = _arguments(folder, options, metric, pruned, train), copy.deepcopy(pruned)
        widen(student)
        loss = DistillationLoss(student, dense, options.mixture, move(next(train.batches()), device))
        before = evaluate(student, choose.batches()).metrics
        if metric not in before:
            raise HeadPruneError(f"The {metric} cannot be read off the model's logits.", "Decide by the loss.")
        state = current().first("checkpoint", lambda: _last_state(folder, say))
        resumed, flow = state and state.global_step, _Flow(options.patience, progress)
        trainer = _Trainer(loss, arguments, train_dataset=train, eval_dataset=choose, callbacks=[flow])
        trainer.remove_callback(PrinterCallback)
        if state is None or not flow.over(state):  # otherwise it was interrupted after its last step
            try:
                trainer.train(resume_from_checkpoint=resumed and str(folder / f"checkpoint-{resumed}"))
            except Exception as error:
                raise current().cause(error) from error.__cause__
            state = trainer.state
        trainer.accelerator.wait_for_everyone()  # the first process may be writing
        best = state.best_global_step if state.best_global_step and state.best_metric > _merit(before, metric) else 0
        tuned = loss.student = copy.deepcopy(pruned).eval()
        if best:
            file = folder / f"checkpoint-{best}" / _WEIGHTS
            loss.load_state_dict(torch.load(file, map_location=device, weights_only=True))
    history = ({"step": 0, "epoch": 0.0, **before}, *(h for h in state.log_history if "loss" in h))
    return tuned, Training(
        examples=len(train), steps=state.global_step, planned=state.max_steps, history=history, best=best, resumed=resumed,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip


def _arguments(
    folder: Path, options: FinetuneOptions, metric: str, pruned: nn.Module, train: Part
) -> TrainingArguments:
    """Trainer's arguments: no output, files only in ``folder``, training on the model's device, in its precision.

    Raises:
        HeadPruneError: Trainer cannot use this precision or device.
    """
    device, dtypes = model_device(pruned), {p.dtype for p in pruned.parameters()}
    if torch.float16 in dtypes:
        raise HeadPruneError("Small steps get lost in float16 weights.", "Train with --dtype float32 or bfloat16.")
    steps = options.epochs * math.ceil(len(train) / train.batch_size)
    arguments = TrainingArguments(
        str(folder), use_cpu=device.type == "cpu", bf16=torch.bfloat16 in dtypes, seed=options.seed, num_train_epochs=options.epochs,
        learning_rate=options.learning_rate, weight_decay=options.weight_decay,
        warmup_steps=0.1 if steps > 1 else 0,  # the rate begins at 0, and a single step would change nothing
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, metric_for_best_model=metric, greater_is_better=True,
        logging_strategy="no", report_to="none", disable_tqdm=True, log_level_replica="passive", average_tokens_across_devices=False,
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)  # no DataParallel: it would split batches among all GPUs
    if torch.empty(0, device=arguments.device).device != device:
        hint = "Choose a GPU with CUDA_VISIBLE_DEVICES."
        raise HeadPruneError(f"The model is on {device}, and transformers' Trainer trains on {arguments.device}.", hint)
    return arguments


def _merit(metrics: Mapping[str, float], metric: str) -> float:
    """A value that is higher for a better epoch: accuracy, with ties broken by the loss; or the negative metric."""
    return metrics["accuracy"] - 1e-9 * metrics["loss"] if metric == "accuracy" else -metrics[metric]


def _last_state(folder: Path, say: Callable[[str], None]) -> TrainerState | None:
    """Trainer's state at the last complete checkpoint whose best checkpoint is complete too; None if there is none.

    Later and damaged checkpoints are removed: Trainer counts them among those that it keeps.
    """
    checkpoints = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*")}
    whole = {n: TrainerState.load_from_json(str(path / _STATE)) for n, path in checkpoints.items() if _is_whole(path)}
    last = max((n for n, state in whole.items() if (state.best_global_step or n) in whole), default=0)
    for n, path in checkpoints.items():
        if n > last or n not in whole:
            shutil.rmtree(path, ignore_errors=True)
    if last:
        say(f"Continuing from step {last} of an interrupted training (--no-resume starts again).")
    elif any(folder.parent.glob("*")):
        why = "it is damaged" if checkpoints else "the model, data, seed, options or versions have changed"
        say(f"Unfinished work in {folder.parent} is not used, as {why}.")
    return whole.get(last)


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written completely and has not changed since, by its checksum."""
    with suppress(OSError, UnicodeError):
        return (checkpoint / _SEAL).read_text() == _checksum(checkpoint)
    return False


def _checksum(checkpoint: Path) -> str:
    return file_digest(checkpoint / name for name in _FILES)


class _Trainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer on `Part`s, with our loss and metrics."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        train, order = self.train_dataset, torch.Generator()
        lengths = LengthGroupedSampler(train.batch_size, lengths=train.lengths(), generator=order)
        return DataLoader(train.features, train.batch_size, sampler=lengths, collate_fn=train.collate)

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], *_: Any, **__: Any) -> Tensor:
        """The mean loss of a batch; with several processes, scaled so that their averaged gradients are its gradient."""
        size, count, rank = apparent_size(inputs), self.accelerator.num_processes, self.accelerator.process_index
        if count == 1 or not self.model.separable:
            return torch.mean(model(inputs))
        share = range(rank * size // count, (rank + 1) * size // count)
        own = share or range(1)  # every process takes part in the averaging of the gradients
        with _Draws(size, own):
            losses = model(self.model.divergence.rows.take(inputs, own))
        return torch.mean(losses).mul(len(share) * count / size)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        step = self.state.global_step
        set_seed(_seed(self.args.seed, step))
        loss: Tensor = self.accelerator.reduce(super().training_step(*args, **kwargs), "mean")
        if not loss.isfinite():
            raise HeadPruneError(f"The loss became {loss.item()} at step {step + 1}.", "Use a smaller --learning-rate.")
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """What Trainer compares epochs by: `_merit`, under the metric's name."""
        metric = self.args.metric_for_best_model
        metrics = evaluate(self.model.student, self.eval_dataset.batches()).metrics
        self.log(metrics.copy())
        return {f"eval_{metric}": _merit(metrics, metric)}

    def save_model(self, output_dir: str, _internal_call: bool = False) -> None:
        if self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), Path(output_dir, _WEIGHTS))


class _Flow(TrainerCallback):  # type: ignore[misc]
    """Seeds every epoch, saves checkpoints within long epochs too, and stops when the patience is used up."""

    def __init__(self, patience: int, progress: Progress) -> None:
        self.patience, self.progress, self.wait = patience, progress, SAVE_SECONDS
        self.saved = self.stepped = time.monotonic()

    def over(self, state: TrainerState) -> bool:
        """Whether training has ended: after the last step, or with the patience used up."""
        worse = [h for h in state.log_history if "loss" in h and h["step"] > (state.best_global_step or 0)]
        return state.global_step >= state.max_steps or len(worse) >= self.patience

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        given["train_dataloader"].sampler.generator.manual_seed(_seed(args.seed, int(state.epoch)))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.progress(state.global_step, state.max_steps)
        self.stepped = time.monotonic()
        due = broadcast_object_list([self.stepped - self.saved >= self.wait])  # clocks differ between processes
        # Not after an epoch's last step: the epoch is saved once it is evaluated, which a resumed run would not do.
        control.should_save |= due[0] and state.epoch % 1 > 0 and not control.should_training_stop

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            write_file(checkpoint / _SEAL, _checksum(checkpoint))
        self.saved = time.monotonic()
        self.wait = max(SAVE_SECONDS, (self.saved - self.stepped) / _SAVE_SHARE)
        control.should_training_stop |= self.over(state)


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws dropout for a whole batch, and uses the part of some of its examples."""

    def __init__(self, size: int, own: range) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.own = size, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func is torch.ops.aten.bernoulli_.float and args[0].device.type == "cpu" and args[0].ndim
        if not drawn or args[0].shape[0] % len(self.own):
            return func(*args, **(kwargs or {}))
        like, each = args[0], args[0].shape[0] // len(self.own)
        order = sorted(range(like.ndim), key=lambda d: (-like.stride()[d], d))  # drawn in the order of memory
        whole = torch.empty_permuted((each * self.size, *like.shape[1:]), order, dtype=like.dtype, device=like.device)
        func(whole, *args[1:], **(kwargs or {}))
        return like.copy_(whole[each * self.own.start : each * self.own.stop])


# -- the loss ------------------------------------------------------------------------------------------


class DistillationLoss(nn.Module):
    """A student's fine-tuning loss for each example of a batch, ``[batch]``, from the labels and a teacher's outputs.

    ``alpha * T^2 * KL(teacher || student at T) + (1 - alpha) * loss on the labels + hidden states``: the KL term as in
    Hinton et al. 2015 (arXiv:1503.02531, section 2), with `Divergence`; the hidden states as in Jiao et al. 2020
    (TinyBERT, arXiv:1909.10351, equation 8). Pruning heads does not change their width, so no matrix has to be learned,
    and each layer is compared with the same layer of the teacher. The squared difference is divided by the mean square of
    the teacher's hidden states, so that it does not depend on their scale; hidden states of zeros would have the loss 1.
    In nats; each example's loss is the mean over its tokens.

    It is a module whose only output is the loss, so that DistributedDataParallel sees which weights the loss depends on.

    Args:
        student: A transformers model, or any module whose output has ``logits``.
        teacher: The same model before pruning; in evaluation mode, on the same device.
        example: A batch, to check that models and labels fit, and to find how the model compares labels with logits.

    Raises:
        HeadPruneError: No labels where they are needed; models with other classes or widths.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, mixture: Mixture, example: Mapping[str, Any]) -> None:
        super().__init__()
        self.student, self.mixture, self.example = student, mixture, example
        # The tuple keeps the teacher out of this module's parameters: it is neither trained nor saved.
        self.teachers = (teacher,) if mixture.alpha > 0 or mixture.hidden_states else ()
        self.labels = ExampleLoss(student)
        self.divergence = Divergence(student, 0, mixture.temperature)
        with evaluating(student), torch.no_grad():
            self.divergence.rows = find_rows(student, [example], lambda b: tensors(call(student, self._inputs(b))))
            if mixture.alpha < 1:
                if not any(name in example for name in LABELS):
                    raise HeadPruneError("The batches to train on have no labels.", "Train with alpha 1.")
                self.labels.prepare([example])
            self(example)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Losses ``[batch]``, differentiable by the student's weights."""
        inputs, alpha, parts = self._inputs(batch), self.mixture.alpha, []
        more = {"output_hidden_states": True} if self.mixture.hidden_states else {}
        output = call(self.student, inputs, **more)
        if alpha < 1:
            loss = output.loss if self.labels.use.own else self.labels.of_output(output, batch)
            parts.append((1 - alpha) * loss)
        for teacher in self.teachers:
            with torch.no_grad():
                answer = call(teacher, inputs, **more)
            if alpha > 0:
                known, now = logits_of(answer, batch), logits_of(output, batch)
                _check_shapes("logits are", known, now)
                parts.append(alpha * self.divergence.between(known, now, batch))
            if self.mixture.hidden_states:
                parts.append(self._hidden(answer, output, batch))
        return sum(parts[1:], start=parts[0])

    @cached_property
    def separable(self) -> bool:
        """Whether an example's loss is independent of the rest of its batch, in training too; tried on three examples."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules()):
            return False
        with evaluating(self.student), torch.no_grad():
            whole = self(self.example)
            single = torch.stack([self(row).mean() for row in self.divergence.rows.singles(self.example)[:3]])
        return whole.ndim == 1 and torch.allclose(single, whole[: len(single)], rtol=0, atol=_SAME * float(whole.max()))

    def _inputs(self, batch: Mapping[str, Any]) -> Any:
        return batch if self.labels.use.own else without_labels(self.student, batch)

    def _hidden(self, answer: Any, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``: relative squared differences of the hidden states, averaged over layers."""
        layers = []
        for known, now in zip(_hidden_states(answer), _hidden_states(output), strict=True):
            _check_shapes("hidden states are", known, now)
            difference, size = (x.float().square().flatten(2).mean(-1) for x in (now - known, known))
            layers.append(self.divergence.mean(difference, batch) / self.divergence.mean(size, batch).clamp(min=1e-12))
        return torch.stack(layers).mean(dim=0)


def _hidden_states(output: Any) -> list[Tensor]:
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    states = [state for name in names for state in getattr(output, name, None) or ()]
    if not states:
        raise HeadPruneError("The model gives no hidden states.", "Fine-tune without them.")
    return states


def _check_shapes(what: str, known: Tensor, now: Tensor) -> None:
    if known.shape != now.shape:
        raise HeadPruneError(
            f"The dense model's {what} {tuple(known.shape)}, the pruned one's {tuple(now.shape)}.",
            "Use the dense model that the pruned one was made from, or leave hidden states out.",
        )
