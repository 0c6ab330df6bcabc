"""A model folder whose output layer is a tensor of its own: `python -m reef.engines.remote.untie FOLDER TARGET`.

Knows: the safetensors layout. Does not know: torch, releases. Models answer with the copy as with the original.

vLLM on CPUs (0.32) packs the output layer once; where it is tied to the embeddings, new full weights do not reach it.
With a tensor of its own it is loaded like every other. On GPUs nothing is packed, and none of this is needed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import orjson

from reef.core.errors import InputError, ReefError
from reef.engines.local.layout import read_json, tensor_shapes

HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
_STEP = 1 << 24  # bytes that are copied at once


def tied(folder: Path) -> bool:
    """Whether a model's output layer is its embeddings'."""
    config = read_json(folder / "config.json")
    return config.get("tie_word_embeddings", False) is True


def head(source: Path, target: Path) -> bool:
    """Write a safetensors file again with the output layer as a tensor; False (and no file) where it has one already,
    or has no embeddings. InputError when it is not whole."""
    shapes = tensor_shapes(source)
    name = next((each for each in _EMBEDDINGS if each in shapes), None)
    if HEAD in shapes or name is None:
        return False
    with source.open("rb") as read, target.open("wb") as write:
        length = int.from_bytes(read.read(8), "little")
        header = orjson.loads(read.read(length))
        begin, end = header[name]["data_offsets"]
        size = source.stat().st_size - 8 - length
        header[HEAD] = header[name] | {"data_offsets": [size, size + end - begin]}
        text = orjson.dumps(header)
        text += b" " * (-len(text) % 8)
        write.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(read, write, _STEP)
        read.seek(8 + length + begin)
        left = end - begin
        while left:
            data = read.read(min(left, _STEP))
            if not data:
                raise InputError(f"{source} ends too early; fetch it again", param="model")
            left -= write.write(data)
    return True


def untie(folder: Path, target: Path) -> None:
    """A copy of a model folder. InputError when there is nothing to do, or it is not one file."""
    if not tied(folder):
        raise InputError(f"{folder} has an output layer of its own; serve it as it is", param="model")
    if not (folder / "model.safetensors").exists():
        raise InputError(f"{folder} has no model.safetensors (one file); save it again as one", param="model")
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
    if not head(folder / "model.safetensors", target / "model.safetensors"):
        shutil.copyfile(folder / "model.safetensors", target / "model.safetensors")
    config = read_json(folder / "config.json") | {"tie_word_embeddings": False}
    (target / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m reef.engines.remote.untie FOLDER TARGET")
    try:
        untie(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ReefError, OSError) as error:
        sys.exit(str(error))
