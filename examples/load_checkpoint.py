"""Quantized experts from a file in the safetensors layout, loaded without a copy in float and multiplied.

A safetensors file is 8 bytes, the length of a header, then the header in JSON (dtype, shape and place of each tensor),
then the bytes of the tensors. numpy reads it in a dozen lines. The file here has the tensors of one layer of each kind
that people have: gpt-oss (mxfp4), DeepSeek (float8 with 128 x 128 scales), GPTQ and AWQ (int4, zero points).
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr

DTYPES = {"U8": np.uint8, "I32": np.int32, "F16": np.float16, "F32": np.float32, "F8_E4M3": jnp.float8_e4m3fn}
EXPERTS, K, N = 4, 256, 64


def load(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, by name; each is a view of the file, read when it is used."""
    data = np.memmap(path, np.uint8, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, each in header.items():
        start, end = (8 + length + offset for offset in each["data_offsets"])
        tensors[name] = data[start:end].view(DTYPES[each["dtype"]]).reshape(each["shape"])
    return tensors


def save(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors as a safetensors file."""
    names, header, end = {np.dtype(dtype): name for name, dtype in DTYPES.items()}, {}, 0
    for name, x in tensors.items():
        start, end = end, end + x.nbytes
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values()))


def checkpoint(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One layer in each layout, with random numbers: gpt-oss has all experts in one tensor, the others one for each."""
    tensors = {
        "gpt_oss.blocks": rng.integers(0, 256, (EXPERTS, N, K // 32, 16), np.uint8),
        "gpt_oss.scales": rng.integers(118, 124, (EXPERTS, N, K // 32), np.uint8),
    }

    def word(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    for i in range(EXPERTS):
        tensors[f"deepseek.{i}.weight"] = rng.standard_normal((N, K)).astype(jnp.float8_e4m3fn)
        tensors[f"deepseek.{i}.weight_scale_inv"] = rng.random((1, 2), np.float32)
        tensors |= {f"gptq.{i}.qweight": word(K // 8, N), f"gptq.{i}.qzeros": word(2, N // 8)}
        tensors |= {f"awq.{i}.qweight": word(K, N // 8), f"awq.{i}.qzeros": word(2, N // 8)}
        for kind in ("gptq", "awq"):
            tensors[f"{kind}.{i}.scales"] = rng.random((2, N)).astype(np.float16)
    return tensors


def weights(tensors: dict[str, np.ndarray]) -> dict[str, tr.quant.Scaled]:
    """Weights `[g, k, n]` of each layer of a checkpoint."""

    def experts(*names: str) -> list[list[np.ndarray]]:
        return [[tensors[name.format(i)] for i in range(EXPERTS)] for name in names]

    return {
        "gpt-oss": tr.quant.from_mxfp4(tensors["gpt_oss.blocks"], tensors["gpt_oss.scales"]),
        "deepseek": tr.quant.from_fp8_blocks(*experts("deepseek.{}.weight", "deepseek.{}.weight_scale_inv")),
        "gptq": tr.quant.from_gptq(*experts("gptq.{}.qweight", "gptq.{}.qzeros", "gptq.{}.scales")),
        "awq": tr.quant.from_awq(*experts("awq.{}.qweight", "awq.{}.qzeros", "awq.{}.scales")),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "layer.safetensors"
        save(path, checkpoint(rng))
        loaded = weights(load(path))
    x, sizes = rng.standard_normal((16, K), np.float32), np.array([5, 0, 8, 3])
    multiply = jax.jit(tr.grouped_matmul)
    ends = np.cumsum(sizes)
    for name, w in loaded.items():
        wide = np.asarray(w.dequantize(), np.float64)
        groups = zip(ends, sizes, wide, strict=True)
        parts = [x[end - size : end].astype(np.float64) @ matrix for end, size, matrix in groups]
        want = np.concatenate(parts)
        off = np.linalg.norm(multiply(x, w, sizes) - want) / np.linalg.norm(want)
        assert off < 1e-5, (name, off)
        print(f"{name:9} {w}, {w.nbytes / w.values.size * 8:.2f} bits a number: off by {off:.1e} of a float64 product")


if __name__ == "__main__":
    main()
