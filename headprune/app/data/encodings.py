"""The encoding function of each task, which turns a dataset's row into features.

A new task is a line in `ENCODINGS`, beside its entry in `headprune.app.options.TASKS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.app.data.encoder import Encoder, Encoding, Feature, Row
from headprune.app.options import Task
from headprune.batches import Rows
from headprune.conventions import SAME, find_label_use
from headprune.divergence import IGNORED, gives_several, logits_in, regresses
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import call, inputs_of, model_device, move, tensors
from headprune.running import quiet

# Usual column names, the clearest first; a comma joins the two columns of a pair of texts.
CLASSES = (
    "label", "labels", "class", "target", "sentiment", "category", "intent", "ner_tags", "pos_tags", "tags", "fine_label",
)  # fmt: skip
TEXTS = (
    "premise,hypothesis", "sentence1,sentence2", "question1,question2", "text_a,text_b",
    "question,sentence", "question,passage", "text", "sentence", "content", "review", "tweet", "document",
    "tokens", "words", "article",
)  # fmt: skip
CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("question,context", "question,passage")
SOURCES = ("article", "document", "dialogue", "source", "input", "question", "text")
TARGETS = ("highlights", "summary", "target", "output", "answer", "label", "labels")
IMAGES = ("image", "img", "pixel_values", "picture")
SOUNDS = ("audio", "speech", "sound")
TRANSCRIPTS = ("text", "sentence", "transcription", "transcript", "normalized_text")


# -- padding ---------------------------------------------------------------------------------------------


def settle_padding(encoder: Encoder, features: Sequence[Feature]) -> str:
    """Pad texts on a side where no answer depends on it: the tokenizer's own, if it can be; a note if it is not that.

    On the left, padding moves all tokens where positions are counted from a batch's start; on the right, a model that reads
    its answer off the last place finds padding there.
    """
    padded = [each for each in features if "input_ids" in each and "attention_mask" in each]
    texts = sorted(padded, key=lambda each: len(each["input_ids"]))
    if not texts or len(texts[0]["input_ids"]) == len(texts[-1]["input_ids"]):
        return ""
    own = encoder.processor.padding_side
    for side in [own] if encoder.encoding.side else [own, "left" if own == "right" else "right"]:
        encoder.processor.padding_side = side
        if _answers_alike(encoder, texts[0], texts[-1]):
            moved = f"Texts are padded on the {side}: on the {own}, as the tokenizer does it, an answer depends on the padding."
            return "" if side == own else moved
    encoder.processor.padding_side = own
    return (
        "A text's answer depends on how far it is padded, or on the other texts of its batch, so all figures depend on "
        "--batch-size; with --batch-size 1 they are those of each text alone."
    )


def _answers_alike(encoder: Encoder, short: Feature, long: Feature) -> bool:
    """Whether a text gets the same answer alone as beside a longer one; True where that cannot be told."""
    model, answers = encoder.model, list[Tensor]()
    with suppress(Exception), quiet(model), torch.no_grad():  # a model that does not run says so later, and where
        for features in ([short], [short, long]):
            batch = move(encoder.collate(features), model_device(model))
            output, mask = call(model, inputs_of(model, batch)), batch["attention_mask"][0].bool()
            logits = logits_in(output)
            answer = tensors(output)[0][0] if logits is None else logits[0]
            if encoder.encoding.labels != "right" and (answer.ndim > 1 or encoder.encoding.side):
                answer = answer[mask]  # there is one for every token
            answers.append(answer)
        alone, beside = answers[0], answers[1][: len(answers[0])]  # a text that is written is padded on the right
        rounding = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 0.1
        return bool((alone - beside).abs().max() <= rounding * alone.abs().max())
    return True


# -- texts ----------------------------------------------------------------------------------------------


def encode_text(encoder: Encoder, row: Row, _: int) -> Feature:
    """A text, or a pair of texts, with its class, several classes, or numbers for a regression head."""

    def target(label: Any) -> Any:
        if isinstance(label, list) or gives_several(encoder.model):
            return encoder.classes.several(label, any_number=regresses(encoder.model))
        return encoder.classes.number(label)

    return {**encoder.tokens(row), **encoder.labels(row, target)}


def encode_words(encoder: Encoder, row: Row, _: int) -> Feature | str:
    """A list of words; each word's label is on its first token, so that a word counts once."""
    (words,) = encoder.inputs(row)
    if not words:
        return "empty"
    coded = encoder.truncate(words, is_split_into_words=True)
    owners = coded.word_ids()

    def targets(tags: Any) -> list[int | float]:
        if not isinstance(tags, list) or len(tags) != len(words):
            many = len(tags) if isinstance(tags, list) else "no"
            raise HeadPruneError(f"{len(words)} words, but {many} labels.", "Check the two columns.")
        pairs = zip(owners, [None, *owners], strict=False)
        return [IGNORED if word in (None, last) else encoder.classes.number(tags[word]) for word, last in pairs]

    return {**coded, **encoder.labels(row, targets)}


def encode_question(encoder: Encoder, row: Row, _: int) -> Feature | str:
    """A question and its context, with the answer's first and last token; SQuAD's columns: answers {text, answer_start}."""
    answers = None if encoder.label is None else row[encoder.label]
    if encoder.label is not None and not (answers and answers["text"]):
        return "without an answer"
    question, context = encoder.inputs(row)
    coded = encoder.truncate(question, context, how="only_second", return_offsets_mapping=True)
    offsets, sequence = coded.pop("offset_mapping"), coded.sequence_ids()
    if answers is None:
        return dict(coded)
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    places = enumerate(zip(sequence, offsets, strict=True))
    inside = [i for i, (s, (a, b)) in places if s == 1 and a < end and b > start]
    missing = [(start, offsets[inside[0]][0]), (offsets[inside[-1]][1], end)] if inside else [(start, end)]
    if len(coded["input_ids"]) >= encoder.max_length and any(context[a:b].strip() for a, b in missing):
        return "with the answer behind the cut"
    if not inside:
        return "with an answer that is not in the context"
    return {**coded, "start_positions": inside[0], "end_positions": inside[-1]}


def encode_pair(encoder: Encoder, row: Row, _: int) -> Feature | str:
    """A source text and its target text, for an encoder-decoder."""
    text = encoder.target(row)
    if text is None:
        return "without a target"
    target = encoder.truncate(text_target=text)
    return {**encoder.tokens(row), "labels": list(target["input_ids"])}


def encode_masked(encoder: Encoder, row: Row, number: int) -> Feature | str:
    """A text with 15 % of its tokens masked; only these are predicted."""
    coded = encoder.tokens(row)
    ids, special = coded["input_ids"], set(encoder.processor.all_special_ids)
    open_ = [i for i, token in enumerate(ids) if token not in special]
    if not open_:
        return "without a token to mask"
    generator = torch.Generator().manual_seed(encoder.options.seed * 1_000_003 + number)
    count = max(1, round(0.15 * len(open_)))
    masked = {open_[i] for i in torch.randperm(len(open_), generator=generator)[:count].tolist()}
    labels = [token if i in masked else IGNORED for i, token in enumerate(ids)]
    coded["input_ids"] = [encoder.processor.mask_token_id if i in masked else t for i, t in enumerate(ids)]
    return {**coded, "labels": labels}


def prepare_masked(encoder: Encoder) -> str:
    if encoder.processor.mask_token_id is None:
        raise HeadPruneError("The tokenizer has no mask token.", "Use a masked language model's tokenizer.")
    return "15 % of each text's tokens were masked, drawn by seed and row; only they are predicted."


_CHATS_NOTE = "Chats were written out by the tokenizer's chat template; what every speaker says is predicted."


def encode_causal(encoder: Encoder, row: Row, _: int) -> Feature | str:
    """A text, or a chat (a list of ``{"role": …, "content": …}``) written out by the tokenizer's chat template."""
    value, *more = encoder.inputs(row)
    if not more and _is_chat(value):
        # The template writes the special tokens: the tokenizer's own would come twice.
        coded = dict(encoder.truncate(_write_chat(encoder, value), add_special_tokens=False))
    else:
        coded = encoder.tokens(row)
    if len(coded["input_ids"]) < 2:
        return "of less than two tokens"
    coded.pop("token_type_ids", None)
    ids = list(coded["input_ids"])
    return {**coded, "labels": [*ids[1:], IGNORED] if encoder.shifted else ids}


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with ``role`` and ``content``, as chat templates take it."""
    messages = isinstance(value, list) and bool(value)
    return messages and all(isinstance(m, Mapping) and {"role", "content"} <= {*m} for m in value)


def _write_chat(encoder: Encoder, chat: list[Row]) -> str:
    """A chat as text, by the tokenizer's chat template."""
    if not getattr(encoder.processor, "chat_template", None):
        raise HeadPruneError(
            f"column {encoder.columns['text']!r} holds chats, and the tokenizer has no chat template.",
            "Set its chat_template, or write the chats out into a column of texts.",
        )
    if _CHATS_NOTE not in encoder.notes:
        encoder.notes.append(_CHATS_NOTE)
    try:
        return str(encoder.processor.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # templates raise what they like, mostly about the order of roles
        hint = "Correct this chat, or leave it out."
        raise HeadPruneError(f"the tokenizer's chat template refuses the chat: {first_line(error)}", hint) from error


def prepare_causal(encoder: Encoder) -> str:
    """Find out whether the model's loss needs shifted labels; a note if it does.

    Raises:
        HeadPruneError: The model is not causal: it sees the tokens that it has to predict.
    """
    model = encoder.model
    generator = torch.Generator().manual_seed(0)
    vocabulary = encoder.config.get_text_config().vocab_size
    # Image tokens and other special ones, which are avoided here, are mostly at a vocabulary's start or end.
    ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (1, 8), generator=generator).to(model_device(model))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with quiet(model), torch.no_grad():
        if _sees_ahead(model, ids):
            raise HeadPruneError(
                f"{type(model).__name__}, as it is set up, sees the tokens behind each one: its perplexity on plain text "
                "would mean nothing.",
                "Use --task masked-lm, if it is a masked language model (or is_decoder in its config).",
            )
        encoder.shifted = find_label_use(model, [example], Rows()).convention == SAME
    return "This model's own loss does not shift labels: they are the next tokens." if encoder.shifted else ""


def _sees_ahead(model: nn.Module, ids: Tensor) -> bool:
    """Whether logits depend on later tokens: compares a text ``[1, tokens]`` with one that differs in the last token."""
    other = torch.cat([ids[:, :-1], ids[:, -1:] ^ 1], dim=1)
    mask = torch.ones_like(ids)
    before, after = (logits_in(call(model, {"input_ids": t, "attention_mask": mask})) for t in (ids, other))
    if before is None or after is None or before.ndim != 3 or before.shape[1] < ids.shape[1]:
        return False
    most = 1e-5 if before.dtype in (torch.float32, torch.float64) else 1e-3
    return bool((after - before)[:, :-1].abs().max() > most * before.abs().max())


# -- images and sounds ----------------------------------------------------------------------------------


def encode_image(encoder: Encoder, row: Row, _: int) -> Feature:
    """An image with its class."""
    (image,) = encoder.inputs(row)
    if isinstance(image, str | list):  # an image processor would fetch what the text names, also from a network
        raise encoder.holds_no("image", "Give the images themselves, not their names.")
    # The config of CLIP's and SigLIP's classifiers has a part for images.
    channels = getattr(getattr(encoder.config, "vision_config", encoder.config), "num_channels", 3)
    wanted = {1: "L", 3: "RGB"}.get(channels)
    if wanted and getattr(image, "mode", wanted) != wanted:
        image = image.convert(wanted)
    coded = encoder.processor(images=image, return_tensors="pt")
    # SigLIP 2 also takes the shape of each image, and a mask of its patches.
    return {**{k: v[0] for k, v in coded.items()}, **encoder.labels(row, encoder.classes.number)}


def encode_sound(encoder: Encoder, row: Row, _: int) -> Feature:
    """A sound with its class."""
    coded = encoder.processor(_samples(encoder, row), sampling_rate=encoder.processor.sampling_rate)
    feature = {k: torch.as_tensor(v[0]) for k, v in coded.items()}
    return {**feature, **encoder.labels(row, encoder.classes.number)}


def prepare_sound(encoder: Encoder) -> str:
    """A note where the model sees the zeros that pad sounds: its answers then depend on their batch."""
    rate, name = encoder.processor.sampling_rate, encoder.processor.model_input_names[0]
    coded = [encoder.processor(np.zeros(n * rate, np.float32), sampling_rate=rate) for n in (1, 2)]
    if np.shape(coded[0][name][0]) == np.shape(coded[1][name][0]):
        return ""
    why = "its feature extractor gives no attention_mask"
    if "attention_mask" in coded[0]:
        if getattr(encoder.config, "feat_extract_norm", "") != "group":
            return ""
        why = "feat_extract_norm is 'group' in its config: the first convolution's norm is taken over them, too"
    return (
        f"The model sees the zeros that make the sounds of a batch equally long ({why}), "
        "so its answers depend on the batch; with --batch-size 1 there are none."
    )


def encode_speech(encoder: Encoder, row: Row, _: int) -> Feature | str:
    """A sound, with its transcript as labels."""
    text = encoder.target(row)
    if text is None:
        return "without a transcript"
    extractor, tokenizer = encoder.processor.feature_extractor, encoder.processor.tokenizer
    coded = extractor(_samples(encoder, row), sampling_rate=extractor.sampling_rate, return_tensors="pt")
    labels = list(encoder.truncate(text, tokenizer=tokenizer)["input_ids"])
    if labels[:1] == [encoder.config.decoder_start_token_id]:
        labels = labels[1:]  # the model puts it there itself when it shifts the labels
    return {"input_features": coded["input_features"][0], "labels": labels}


def _samples(encoder: Encoder, row: Row) -> Any:
    """A row's sound as an array; refuses any sampling rate but the model's."""
    (sound,) = encoder.inputs(row)
    wanted = getattr(encoder.processor, "feature_extractor", encoder.processor).sampling_rate
    if isinstance(sound, Mapping):
        array, rate = np.asarray(sound["array"], dtype=np.float32), int(sound["sampling_rate"])
    elif hasattr(sound, "get_all_samples"):  # torchcodec's decoder, as datasets gives it
        decoded = sound.get_all_samples()
        array, rate = decoded.data.mean(dim=0).numpy(), int(decoded.sample_rate)
    else:
        raise encoder.holds_no("sound", "Give {array, sampling_rate}, or install torchcodec.")
    if rate != wanted:
        hint = "Resample the dataset (datasets: cast_column with Audio(sampling_rate=…))."
        raise HeadPruneError(f"the sound has {rate} samples a second, the model takes {wanted}.", hint)
    return array


_SINGLE = "Accuracy is that of single labels: a text counts once for each label that it may have."
_SPANS = "Accuracy is the share of the answers' starts and ends that are found, each by itself."

ENCODINGS = {
    "sequence-classification": Encoding(
        encode_text, {"text": TEXTS, "label": CLASSES}, prepare=lambda e: _SINGLE if gives_several(e.model) else ""
    ),
    "token-classification": Encoding(encode_words, {"text": TEXTS, "label": CLASSES[::-1]}, "input"),
    "question-answering": Encoding(
        encode_question, {"text": QUESTIONS, "answers": ("answers", "answer")}, side="right", prepare=lambda _: _SPANS
    ),
    "masked-lm": Encoding(encode_masked, {"text": TEXTS}, "input", masks=True, prepare=prepare_masked),
    # On the left, the first word would be predicted from padding.
    "causal-lm": Encoding(encode_causal, {"text": (*TEXTS, *CHATS)}, "input", side="right", prepare=prepare_causal),
    "seq2seq": Encoding(encode_pair, {"source": SOURCES, "target": TARGETS}, "right"),
    "image-classification": Encoding(encode_image, {"image": IMAGES, "label": CLASSES}, pads=False),
    "audio-classification": Encoding(encode_sound, {"audio": SOUNDS, "label": CLASSES}, prepare=prepare_sound),
    "speech-seq2seq": Encoding(encode_speech, {"audio": SOUNDS, "transcript": TRANSCRIPTS}, "right", pads=False),
}
_OF_INPUTS = {"text": "sequence-classification", "image": "image-classification", "audio": "audio-classification"}


def encoding_of(task: Task) -> Encoding:
    """A task's encoding; for a base model, the classification encoding of its modality, used without labels."""
    return ENCODINGS[task.name if task.name in ENCODINGS else _OF_INPUTS[task.modality]]
