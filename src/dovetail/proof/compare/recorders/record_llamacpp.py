"""Record a GGUF file as llama.cpp runs it, through the raw binding of llama-cpp-python: every float32 node that the graph
names, by `cb_eval`. KV cache in float32 and flash attention off: else they alone differ by 9e-3.

A name that comes again in one pass is NAME~1, NAME~2: `Qcur-0` is the projection, then the same in heads, then rotated. Nodes
whose rows are not the tokens (the KV cache, scores) are left out, and so is `norm`: a norm before its weight is multiplied."""

import ctypes
import json
import re
import sys
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np
from safetensors.numpy import save_file

F32 = 0  # ggml_type
FLASH_OFF = 0  # llama_flash_attn_type
LEFT_OUT = re.compile(r"norm(-\d+)?|node_\d+|cache_.*|kq.*-\d+")
LOGITS = "result_output"
FILE_TYPES = {"0": "float32", "1": "float16", "32": "bfloat16"}  # general.file_type: the dtype of the weights


class GgmlTensor(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


def dtype_of(model, asked: str) -> str:
    """The dtype of the file's weights, which is not the request's to choose."""
    text = ctypes.create_string_buffer(64)
    if api.llama_model_meta_val_str(model, b"general.file_type", text, len(text)) < 0:
        return asked  # the file does not say
    dtype = FILE_TYPES.get(text.value.decode())
    if dtype is None:
        raise SystemExit(
            f"the file is quantized (general.file_type {text.value.decode()}); convert the model to f32, bf16 or f16"
        )
    if dtype != asked:
        raise SystemExit(f"the file's weights are {dtype}, but {asked} was requested; use --dtype {dtype}")
    return dtype


def main(model_file: str, out: Path, request: dict) -> None:
    base = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.rglob("libggml-base.*"))))
    base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    taps: dict[str, np.ndarray] = {}
    sizes = [0]  # the last one: tokens of the pass

    def seen(pointer, ask, user):
        node = ctypes.cast(pointer, ctypes.POINTER(GgmlTensor)).contents
        if ask or node.type != F32 or not (node.buffer or node.view_src):
            return True
        size = base.ggml_nbytes(pointer)
        data = (ctypes.c_uint8 * size)()
        base.ggml_backend_tensor_get(pointer, data, 0, size)
        flat = np.frombuffer(bytes(data), np.float32)
        x = np.lib.stride_tricks.as_strided(flat, list(node.ne)[::-1], list(node.nb)[::-1]).copy()
        x = x.reshape(x.shape[-2], -1) if x.shape[0] == x.shape[1] == 1 else x[0].reshape(x.shape[1], -1)
        name, again = node.name.decode(errors="replace").split(" (")[0], 0
        if LEFT_OUT.fullmatch(name) or x.shape[0] != sizes[-1]:
            return True
        name = "logits" if name == LOGITS else name
        while f"{name}~{again}" * bool(again) in taps or (not again and name in taps):
            again += 1
        taps[f"{name}~{again}" if again else name] = x
        return True

    callback = api.ggml_backend_sched_eval_callback(seen)  # kept alive until the end
    api.llama_backend_init()
    model = api.llama_model_load_from_file(model_file.encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"{model_file}: llama.cpp could not load it")
    dtype = dtype_of(model, request["dtype"])
    rows, steps = request["rows"], request["steps"]
    passes: list[dict] = []
    for number, row in enumerate(rows):
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = max(64, len(row))
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = F32
        options.flash_attn_type = FLASH_OFF
        options.cb_eval = callback
        context = api.llama_init_from_model(model, options)
        start = 0
        for size in [len(row) - steps, *[1] * steps]:
            taps.clear()
            sizes.append(size)
            batch = api.llama_batch_init(size, 0, 1)
            batch.n_tokens = size
            for i in range(size):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = row[start + i], start + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1  # all rows: else the last layer has the last token alone
            assert api.llama_decode(context, batch) == 0, "llama_decode failed"
            file = f"{len(passes)}.safetensors"
            save_file({name: np.ascontiguousarray(x) for name, x in taps.items()}, out / file)
            positions = list(range(start, start + size))
            ids = row[start : start + size]
            passes.append({"files": [file], "ids": ids, "sequences": [number] * size, "positions": positions})
            start += size
            api.llama_batch_free(batch)
        api.llama_free(context)
    engine = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
    data = {"format": "dovetail-dump-1", "engine": engine, "dtype": dtype, "passes": passes}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
