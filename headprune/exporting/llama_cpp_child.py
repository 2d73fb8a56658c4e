"""Runs a GGUF file in llama.cpp (PyPI's xllamacpp), in a process of its own: a file that it cannot read ends the process.

Standard library only, and started by `headprune.exporting.llama_cpp`. Reads ``{"path": sys.path, "file", "context", "threads", "requests": [...]}``
from stdin; writes a JSON document ``{"version", "answers": [...]}`` to the file that it is told. A request is what llama.cpp's
server takes for completions.
"""

import json
import sys


def main() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = asked["file"]
    settings.n_ctx = settings.n_batch = settings.n_ubatch = asked["context"]
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = asked["threads"]
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if asked["exact"]:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.warmup = settings.fit_params = False
    settings.cache_ram_mib = 0
    settings.verbosity = 1 if asked["verbose"] else -1
    server = xllamacpp.Server(settings)
    answers = [server.handle_completions({"cache_prompt": False, **request}) for request in asked["requests"]]
    with open(asked["answers"], "w", encoding="utf-8") as out:
        json.dump({"version": xllamacpp.__version__, "answers": answers}, out)


if __name__ == "__main__":
    main()
