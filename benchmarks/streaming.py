"""A checkpoint of 3 GB cut by a process that may use 1 GB of memory; docs/scale.md.

    python benchmarks/streaming.py                        # writes section `streaming` of docs/scale.md; 10 to 20 minutes, 7 GB of disk
    python benchmarks/streaming.py --layers 2 --limit 0   # prints a quick look, writes nothing

A Llama with random weights is made shard by shard, so that making it needs little memory, too. Then processes cut it by the same plan: two under the limit,
streamed (`headprune.cut_checkpoint`) and as usual (`from_pretrained`, `prune`, `save`), and one as usual without a limit, with whose folder the streamed one is
compared, byte by byte.

The limit is that of a memory cgroup (as containers have it), and the files' pages in the system's cache are dropped before each process starts, so that every
page that it reads counts as its own. Such a limit counts everything: memory of its own, and pages of files that it maps, which the kernel takes back when
the limit is reached. RLIMIT_AS and RLIMIT_DATA would count the size of mapped files, not what of them is in memory. Needs root, or a cgroup that may be written
to; without one (or with ``--limit 0``) the memory is only measured.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "scale.md"
SHARD = 300e6


def config(layers: int) -> Any:
    import transformers

    made = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64, num_hidden_layers=layers,
        intermediate_size=5632, dtype="float32",
    )  # fmt: skip
    made.architectures = ["LlamaForCausalLM"]
    return made


def make(folder: Path, layers: int) -> None:
    """A model with random weights, of which one shard at a time is in memory."""
    import torch
    import transformers
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config(layers).save_pretrained(folder)
    with torch.device("meta"):
        empty = {name: t.contiguous() for name, t in transformers.LlamaForCausalLM(config(layers)).state_dict().items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=int(SHARD))
    drawn = torch.Generator().manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shape = empty[name].shape
            weights = (
                torch.randn(shape, generator=drawn).mul_(shape[-1] ** -0.5) if len(shape) > 1 else torch.ones(shape)
            )
            shard[name] = weights
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def plan(layers: int) -> dict[str, list[int]]:
    """Key/value groups to remove: another number in each layer, and all of one."""
    return {f"model.layers.{i}.self_attn": list(range(4 * (8 if i == 1 else i % 5))) for i in range(layers) if i % 5}


class Peaks(threading.Thread):
    """The most memory that this process has, looked at every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.resident = 0

    def run(self) -> None:
        while True:
            status = dict(re.findall(r"^(Rss\w+|VmRSS):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M))
            self.anonymous = max(self.anonymous, 1024 * (int(status["RssAnon"]) + int(status["RssShmem"])))
            self.resident = max(self.resident, 1024 * int(status["VmRSS"]))
            time.sleep(0.01)


def worker(options: argparse.Namespace) -> None:
    """Cut the model; what was measured goes to stdout."""
    import torch

    torch.set_num_threads(1)
    peaks = Peaks()
    peaks.start()
    import transformers

    import headprune as hp

    began = time.monotonic()
    heads, more = plan(options.layers), {}
    if options.worker == "streamed":
        done = hp.cut_checkpoint(options.model, heads, options.out)
        more = {
            "told": done.told(), "kept": done.kept, "total": done.total, "files": done.files, "weights": done.weights, "left": done.left,
            "loads": done.loads.call(),
        }  # fmt: skip
    else:
        model = transformers.LlamaForCausalLM.from_pretrained(options.model)
        hp.prune(model, heads)
        hp.save(model, options.out)
    read = int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])  # type: ignore[index]
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "anonymous": peaks.anonymous,
                "resident": peaks.resident,
                "read": read,
                **more,
            }
        )
    )


class Limit:
    """A memory cgroup of ours, within the one that this process is in."""

    def __init__(self, most: int) -> None:
        own = [line.strip().split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        old = next((Path(f"/sys/fs/cgroup/memory{path}") for _, kind, path in own if kind == "memory"), None)
        new = next((Path(f"/sys/fs/cgroup{path}") for number, _, path in own if number == "0"), None)
        at, name = (old, "memory.limit_in_bytes") if old else (new, "memory.max")
        if at is None:
            raise OSError("this system has no cgroups")
        self.path = at / f"headprune-streaming-{os.getpid()}"
        self.path.mkdir()
        self.most = most
        try:
            (self.path / name).write_text(str(most))
        except OSError:
            self.path.rmdir()
            raise
        self.version = 1 if old else 2

    def enter(self) -> None:
        """Put this process into it."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """The most that its processes had, pages of files included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())

    def reset(self) -> None:
        with suppress(OSError):
            (self.path / "memory.max_usage_in_bytes").write_text("0")

    def close(self) -> None:
        for _ in range(50):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


def forget(folder: Path) -> None:
    """Let the system drop what it has cached of a folder's files."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cut(how: str, model: Path, out: Path, layers: int, limit: Limit | None) -> dict[str, Any]:
    """What a process measured, or how it ended."""
    forget(model)
    if limit is not None:
        limit.reset()
    command = [
        sys.executable,
        __file__,
        "--worker",
        how,
        "--model",
        str(model),
        "--out",
        str(out),
        "--layers",
        str(layers),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=limit.enter if limit else None,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode and (limit is None or how == "streamed"):
        sys.exit(f"{how} failed with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"killed": done.returncode}
    found["peak"] = limit.peak() if limit else None
    print(how, found, flush=True)
    return found


def unequal(a: Path, b: Path) -> list[str]:
    """Files of two folders that differ, or that only one has."""
    names = sorted({p.name for p in (*a.iterdir(), *b.iterdir())})
    return [
        n for n in names if not ((a / n).is_file() and (b / n).is_file() and filecmp.cmp(a / n, b / n, shallow=False))
    ]


def section(found: dict[str, Any]) -> str:
    """The whole section: how it is used, how it works, and what was measured."""
    streamed, usual, limited = (found[name] for name in ("streamed", "usual", "usual, limited"))

    def mb(count: float) -> str:
        return f"{count / 1e6:,.0f} MB"

    def row(name: str, r: dict[str, Any]) -> str:
        if "killed" in r:
            return f"| {name} | killed by the kernel | | | | |"
        figures = f"{mb(r['anonymous'])} | {mb(r['resident'])} | {r['read'] / 1e9:.1f} GB | {r['seconds']:.0f} s"
        return f"| {name} | done | {figures} |"

    from headprune.surgery.watch import ROWS

    inputs = int(re.search(r"proved on (\d+) inputs", streamed["told"])[1])  # type: ignore[index]

    def a_layer(hidden: int) -> float:
        """MB that the proof keeps of a layer: float32, three places."""
        return ROWS * 3 * hidden * 4 * inputs / 1e6

    table = [
        row("streamed, under the limit", streamed),
        row("as usual, under the limit", limited),
        row("as usual, no limit", usual),
    ]
    return TEXT.format(
        rows=ROWS, inputs=inputs, kept_a=a_layer(2048), kept_b=a_layer(8192), size=found["size"] / 1e9, layers=found["layers"], shards=found["shards"], kept=streamed["kept"], total=streamed["total"],
        limit=mb(found["limit"]), peak=mb(streamed["peak"]), table="\n".join(table), base=mb(found["base"]), files=len(found["files"]),
        told=f"{streamed['told'][0].upper()}{streamed['told'][1:]}", torch=found["torch"], transformers=found["transformers"],
    )  # fmt: skip


TEXT = """## A checkpoint larger than the memory

```
headprune prune MODEL --plan plan.json --streaming
```

cuts a model that never has to be in memory as a whole. MODEL is a folder with safetensors files, sharded or not; the plan is
one of an earlier run, or [written by hand](planning.md#plan-files). The run folder gets the plan, the pruned folder, and `streamed.json`, which says what was proved.
In Python:

```python
done = hp.cut_checkpoint("llama-70b", plan, "llama-70b-pruned")
print(done.told())
```

**How.** Weights stay in their files, which are mapped into memory: the system reads a page when a layer needs it, and forgets it when memory is short.
Tensors that are cut go to temporary files in the folder that is being written, and are mapped, too. All else is the code that cuts a
model in memory, so the folder is the same: weights, config, removal record, model card, code and probe, byte by byte, on all models in `tests/test_streaming.py`
(BERT, Llama, Qwen3, T5, GPT-2, ViT, Whisper; even, uneven and emptied layers; one file or many). `max_shard_size=` says how large a file of weights may be.

**What is proved.** What `headprune.prune` proves: the cut model's answers, and what its layers give, against the model with these heads masked, on the
same inputs. Then the written folder is read again; its weights must be those that were written, and its answers those of the cut model. The model runs
in the type in which it is stored: for bfloat16 answers may differ by 5e-2 of the largest value, in float32 by 1e-4.

**What it costs.** The files are read some tens of times, from disk if memory is short. Memory of the process's own: the libraries, one tensor
while it is cut, the activations of one layer, and for the proof the model's answers to each input and {rows} positions of what each cut layer gives (its heads, W_O and
the module: {kept_a:.0f} MB a layer for {inputs} inputs at a hidden size of 2,048, {kept_b:.0f} MB at 8,192).

**What cannot be streamed** is refused in a line before the work: repair, fine-tuning and measuring (a plan that was searched for counts on repair: `--no-repair` cuts by it all
the same), pickled weights (`.bin`), quantised weights, models whose weights are converted as they load (experts stored one by one, another type in config.json than in the
files), code that comes with a model, names on the Hub (download the model first), Windows.

### Measured

A Llama with random weights ({size:.2f} GB in float32, {layers} layers of 32 heads, {shards} files) was cut to {kept} of {total} heads: another number in each
layer, and one layer without any. The limit is {limit}, of a memory cgroup, as containers have it. It counts memory of the process's own and every page of a file that it
maps or reads; the kernel takes such pages back when the limit is reached. Nothing of the model was in the system's cache when a process began. The cgroup's own count of its
peak, for the streamed cut: {peak}.

| cut | end | memory of its own | resident, mapped pages included | read from disk | time, one thread |
|---|---|---|---|---|---|
{table}

"Memory of its own" (RssAnon, at its most) is what the kernel cannot take back; {base} of it are Python and the libraries. Of the resident memory, pages of libraries that
another process had read before do not count for the cgroup, so it may be more than the limit. The machine was busy with other work, so times are only a rough guide; most of
the time under the limit goes into reading. RLIMIT_AS and
RLIMIT_DATA are no use here: they count how large mapped files are, not how much of them is in memory. "As usual" is `from_pretrained`, `headprune.prune`, `headprune.save`:
transformers maps files, too, so here it also gets by, but all that is cut stays in memory until the end, and whatever converts or copies weights (the command line without `--streaming`, `headprune.load`, another
type, repair) needs room for all of them.

The streamed folder and that of the usual cut have the same {files} files, byte by byte. The streamed cut said: "{told}"

Made by `python benchmarks/streaming.py` (torch {torch}, transformers {transformers})."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--limit", type=float, default=1e9, help="bytes; 0 only measures")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/headprune-streaming"), help="where 7 GB are free, on a disk"
    )
    parser.add_argument("--render", type=Path, help="only write the section again, from a results file")
    parser.add_argument("--worker", choices=("streamed", "usual"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    import shutil

    sys.path.insert(0, str(ROOT))
    from benchmarks.document import replace_section

    if options.render:
        replace_section(DOCUMENT, "streaming", section(json.loads(options.render.read_text())))
        return
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    limit = None
    try:
        make(folder / "dense", options.layers)
        weights = sorted((folder / "dense").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in weights)
        print(f"{size / 1e9:.2f} GB in {len(weights)} shards", flush=True)
        limit = Limit(int(options.limit)) if options.limit else None
        found = {"streamed": cut("streamed", folder / "dense", folder / "streamed", options.layers, limit)}
        found["usual"] = cut("usual", folder / "dense", folder / "usual", options.layers, None)
        if differ := unequal(folder / "streamed", folder / "usual"):
            sys.exit(f"the streamed folder is another: {', '.join(differ)}")
        files = sorted(p.name for p in (folder / "streamed").iterdir())
        print(f"all {len(files)} files are equal", flush=True)
        if limit is None:
            return
        shutil.rmtree(folder / "usual")
        found["usual, limited"] = cut("usual", folder / "dense", folder / "limited", options.layers, limit)
        import torch
        import transformers

        facts = {
            "size": size, "layers": options.layers, "shards": len(weights), "limit": options.limit, "base": imported(), "files": files,
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        results = folder.with_suffix(".json")
        results.write_text(json.dumps({**found, **facts}))
        print(f"results: {results}")
        replace_section(DOCUMENT, "streaming", section(json.loads(results.read_text())))
    finally:
        if limit is not None:
            limit.close()
        shutil.rmtree(folder, ignore_errors=True)


def imported() -> int:
    """Bytes of memory that a process has which has only imported what the workers import."""
    code = "import torch, transformers, headprune; transformers.LlamaForCausalLM, headprune.cut_checkpoint; print(open('/proc/self/status').read())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", told)[1])  # type: ignore[index]


if __name__ == "__main__":
    main()
