"""What the trainer keeps in memory between steps beside the base model: its text, compiled forms, teachers.

Knows: how a teacher is found (a release of the chain, or a folder), read and checked against the base.
Does not know: which objective wants one, or what for.

- A teacher's files are looked at again at every step and read again when they changed. At most `TEACHERS` stay.
- A teacher that is missing, damaged, or does not fit in base, shape, tokenizer or vocabulary is a TeacherError,
  whatever it is that a folder holds: no batch is at fault, and units wait until a person has put it right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from reef.core.errors import DigestError, InputError, MissingError, ReefError, TeacherError, TrainError
from reef.engines import Resolver, WeightFiles
from reef.engines.local.layout import check
from reef.engines.local.legal import Grammars, masks, open_grammars, unpack
from reef.engines.local.text import Text
from reef.trainers import folder as steps
from reef.trainers.local.llama import Llama, Lora, held
from reef.trainers.local.rows import Known
from reef.trainers.origin import same_base as same_base

TEACHERS = 2
TOLD = 300  # characters of a name, and of another's words, in an error
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
Version = tuple[tuple[str, int, int, int], ...]
"""Which files something was read from: path, bytes, modification time, inode."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Frozen weights: a model, perhaps the base itself, and a LoRA on it."""

    model: Llama
    lora: Lora | None


class Shelf:
    """One base model's. `text` and teachers are read when they are first asked for."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._text: Text | None = None
        self._grammars: Grammars | None = None
        self._teachers: dict[str, tuple[Version, Teacher]] = {}

    def known(self) -> Known:
        return Known(self._model.layout, self.text, self._legal)

    def text(self) -> Text:
        """The base's chat template and tokenizer. InputError when its folder has none."""
        if self._text is None:
            if self._model.folder is None:
                raise InputError("it needs the model's chat template, and the model came from no folder")
            self._text = Text(self._model.folder)
        return self._text

    def _legal(self, form: str, ids: Sequence[int]) -> Tensor:
        """`rows.Legal`, from the same code that limited the sampler."""
        if self._grammars is None:
            if self._model.folder is None:
                raise InputError("it was sampled under a grammar, and the model came from no folder")
            self._grammars = open_grammars(self._model.folder)
        return torch.from_numpy(unpack(masks(form, ids, self._grammars), self._model.layout.vocab))

    def teacher(self, name: str, resolve: Resolver, digest: str | None) -> Teacher:
        """The frozen weights of that name: a folder, or else a release. TeacherError, which says why, without them."""
        try:
            return self._find(name, resolve, digest)
        except TeacherError:
            raise
        except Exception as error:  # a folder may hold anything, and each reader has errors of its own
            if isinstance(error, DigestError):
                raise TeacherError(error.message) from None
            said = error.message if isinstance(error, ReefError) else f"{type(error).__name__}: {error}"
            raise TeacherError(f"the teacher {name[:TOLD]} cannot be used: {said[:TOLD]}") from error

    def _find(self, name: str, resolve: Resolver, digest: str | None) -> Teacher:
        place = Path(name).expanduser()
        source = _folder(place) if place.is_dir() else _release(name, resolve)
        same_base(f"the teacher {name[:TOLD]}", source.meta, digest)
        version = _version(source.files)
        kept = self._teachers.pop(name, None)
        if kept is None or kept[0] != version:
            kept = (version, self._read(name, place, source))
        self._teachers[name] = kept
        while len(self._teachers) > TEACHERS:
            self._teachers.pop(next(iter(self._teachers)))
        return kept[1]

    def _read(self, name: str, place: Path, source: WeightFiles) -> Teacher:
        model = self._model
        if source.kind == "base":
            return Teacher(model, None)
        if source.kind == "lora":
            return Teacher(model, _lora(name, model, source.files))
        if source.kind == "full":
            weights = held(load_file(source.files["model.safetensors"]), model.compute)
            _same_shapes(name, model, weights)
            return Teacher(Llama(model.layout, weights, model.compute, rounded=True), None)
        layout = check(place)
        self._same_tokens(name, place, layout.vocab)
        return Teacher(Llama.load(place, model.compute), None)

    def _same_tokens(self, name: str, place: Path, size: int) -> None:
        """That a whole model of its own speaks the base's tokens: the recorded ids mean nothing to it otherwise."""
        mine = self._model.layout.vocab
        if size != mine:
            raise TeacherError(
                f"the teacher {name} has a vocabulary of {size} tokens, the base model one of {mine}; a teacher needs "
                "the base's own tokenizer"
            )
        base = self._model.folder
        try:
            theirs = Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab(with_added_tokens=True)
            ours = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab(with_added_tokens=True) if base else None
        except Exception as error:  # the library raises plain Exception, even for a file that is not there
            raise TeacherError(
                f"the teacher {name}: its or the base's tokenizer.json cannot be read ({error})"
            ) from None
        if theirs != ours:
            raise TeacherError(
                f"the teacher {name} has another tokenizer than the base model, so the recorded token ids mean "
                "something else to it; use a teacher of the same family"
            )


def _release(name: str, resolve: Resolver) -> WeightFiles:
    try:
        return resolve(name)
    except MissingError:
        raise TeacherError(
            f"the teacher {name[:TOLD]} is neither a folder nor a release of the chain; give the full id (reef log), "
            "or the path of a Hugging Face model or of a PEFT LoRA"
        ) from None


def _folder(place: Path) -> WeightFiles:
    """What a folder holds: a LoRA in PEFT's layout, a step that Reef made, or (kind `model`) a whole model."""
    if (place / steps.STATE).is_file() and (place / "weights.json").is_file():
        return WeightFiles(*steps.part_files(place))
    files = {file.name: file for file in sorted(place.iterdir()) if file.is_file()}
    meta: dict[str, Any] = {}
    if "weights.json" in files:
        try:
            meta = json.loads(files["weights.json"].read_bytes())
        except ValueError as error:
            raise TeacherError(f"{files['weights.json']} is not JSON ({error})") from None
        if not isinstance(meta, dict) or not isinstance(meta.get("base") or {}, dict):
            raise TeacherError(f"{files['weights.json']} does not say which base model the weights belong to")
    return WeightFiles("lora" if ADAPTER[0] in files else "model", files, meta)


def _lora(name: str, model: Llama, files: Mapping[str, Path]) -> Lora:
    """A LoRA in PEFT's layout, on all linears or some of them."""
    if missing := [file for file in ADAPTER if file not in files]:
        raise TeacherError(f"the teacher {name} has no {missing[0]}")
    try:
        config = json.loads(files[ADAPTER[0]].read_bytes())
        tensors = load_file(files[ADAPTER[1]])
    except Exception as error:  # safetensors raises a class of its own
        raise TeacherError(f"the teacher {name} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise TeacherError(f"the teacher {name}: its adapter_config.json is not a JSON object")
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save"):
        if config.get(key):
            raise TeacherError(f"the teacher {name} is a LoRA that uses {key}, which is not applied here")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= model.layout.hidden:
        raise TeacherError(
            f"the teacher {name}: its adapter_config.json has no rank (r) between 1 and {model.layout.hidden}"
        )
    alpha = rank if alpha is None else alpha
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise TeacherError(f"the teacher {name}: its adapter_config.json has a lora_alpha that is no number above 0")
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    blank = {key: torch.zeros(shape) for key, shape in Lora.shapes(model, rank).items()}
    try:
        found = Lora.load(model, blank | tensors, rank, alpha)
    except TrainError as error:
        raise TeacherError(f"the teacher {name}: {error.message}") from None
    _finite(name, tensors)
    return found


def _same_shapes(name: str, model: Llama, weights: Mapping[str, Tensor]) -> None:
    for key, shape in model.layout.shapes().items():
        if key not in weights or tuple(weights[key].shape) != shape:
            raise TeacherError(f"the teacher {name} does not fit the base model: {key} is missing or has another shape")
    _finite(name, weights)


def _finite(name: str, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TeacherError(f"the teacher {name} has values that are not finite in {key}")


def _version(files: Mapping[str, Path]) -> Version:
    found = []
    for file in files.values():
        stat = file.stat()
        found.append((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(sorted(found))
