"""Model directories: round trips, shards, atomic replacement, memory, and readable errors."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ajgrpo.errors import CheckpointError, KeyMismatchError, UnsupportedModelError
from ajgrpo.hf import io
from ajgrpo.hf.mapping import assemble, checkpoint_manifest, flatten
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import Params
from tests.hf.test_mapping import drawn_tensors
from tests.models import reference

HF_CONFIG = reference.hf_config("qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
CONFIG = ModelConfig.from_hf(HF_CONFIG)


def write_model(directory: Path, hf_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A model directory as transformers writes it, through the library's own writer."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_params_equal(params: Params, expected: Params) -> None:
    assert flatten(params).keys() == flatten(expected).keys()
    for path, leaf in flatten(expected).items():
        np.testing.assert_array_equal(flatten(params)[path], leaf, strict=True, err_msg=str(path))


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", HF_CONFIG, drawn_tensors(CONFIG))


@pytest.fixture
def params() -> Params:
    return assemble(CONFIG, drawn_tensors(CONFIG).items(), "float32")


# Reading


def test_config_and_generation_config_are_read(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    raw, config = io.read_config(model)
    assert raw == HF_CONFIG
    assert config.eos_token_ids == (2, 9)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        io.read_config(tmp_path)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, HF_CONFIG | {"quantization_config": {"quant_method": "fp8"}}, {})
    with pytest.raises(UnsupportedModelError, match="fp8"):
        io.read_config(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_weights_are_read_into_the_dtype_asked_for(model: Path, dtype: str) -> None:
    expected = assemble(CONFIG, drawn_tensors(CONFIG).items(), "float32" if dtype == "auto" else jnp.dtype(dtype))
    assert_params_equal(io.load_params(model, CONFIG, dtype=dtype), expected)


def test_each_leaf_is_placed_when_it_is_complete_and_then_let_go(model: Path, params: Params) -> None:
    placed: dict[tuple[str, ...], str] = {}
    alive: list[weakref.ref[np.ndarray]] = []

    def place(path: tuple[str, ...], leaf: np.ndarray) -> str:
        np.testing.assert_array_equal(leaf, flatten(params)[path])
        assert not [ref for ref in alive if ref() is not None], "an earlier leaf is still held"
        alive.append(weakref.ref(leaf))
        placed[path] = "/".join(path)
        return placed[path]

    tree = io.load_params(model, CONFIG, dtype="float32", place=place)
    assert flatten(tree) == placed
    assert placed.keys() == flatten(params).keys()


def test_mismatches_are_raised_once_before_anything_is_read(tmp_path: Path) -> None:
    tensors = drawn_tensors(CONFIG)
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_norm.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((40, 24), np.float32)
    tensors["score.weight"] = np.zeros((1, 24), np.float32)
    write_model(tmp_path, HF_CONFIG, tensors)
    placed = []
    with pytest.raises(KeyMismatchError) as caught:
        io.load_params(tmp_path, CONFIG, dtype="float32", place=lambda path, leaf: placed.append(path))
    error = caught.value
    assert error.missing == ("model.layers.0.self_attn.q_norm.weight", "model.norm.weight")
    assert error.unexpected == ("score.weight",)
    assert error.misshaped == ("model.layers.1.mlp.down_proj.weight: expected (24, 40), found (40, 24)",)
    assert str(tmp_path) in str(error)
    assert not placed


def test_a_head_that_repeats_the_tied_embedding_is_accepted_and_any_other_refused(
    tmp_path: Path, params: Params
) -> None:
    tensors = drawn_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_model(tmp_path, HF_CONFIG, tensors)
    assert_params_equal(io.load_params(tmp_path, CONFIG, dtype="float32"), params)
    tensors["lm_head.weight"][3, 3] += 1
    write_model(tmp_path, HF_CONFIG, tensors)
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        io.load_params(tmp_path, CONFIG, dtype="float32")


def test_an_untied_config_on_tied_weights_is_refused(model: Path) -> None:
    untied = ModelConfig.from_hf(HF_CONFIG | {"tie_word_embeddings": False})
    with pytest.raises(KeyMismatchError, match=r"missing \(1\): lm_head.weight"):
        io.load_params(model, untied, dtype="float32")


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    tensors = drawn_tensors(CONFIG) | {"model.norm.weight": np.zeros(24, np.int8)}
    write_model(tmp_path, HF_CONFIG, tensors)
    with pytest.raises(CheckpointError, match=r"model.norm.weight \(I8\)"):
        io.load_params(tmp_path, CONFIG, dtype="float32")


def test_directories_without_usable_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        io.load_params(tmp_path, CONFIG, dtype="float32")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it holds pytorch_model\.bin: convert"):
        io.load_params(tmp_path, CONFIG, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        io.load_params(tmp_path, CONFIG, dtype="float32")


# Writing


def test_a_saved_model_is_the_file_that_the_library_writes(model: Path, params: Params, tmp_path: Path) -> None:
    io.save_checkpoint(tmp_path / "deep" / "out", HF_CONFIG, CONFIG, params)
    saved = tmp_path / "deep" / "out"
    assert files(saved) == ["config.json", "model.safetensors"]
    assert io.read_config(saved) == (HF_CONFIG, CONFIG)
    library, ours = (load_file(path / "model.safetensors") for path in (model, saved))
    assert list(ours) == list(library)
    for name, tensor in library.items():
        assert ours[name].tobytes() == tensor.tobytes()
    assert files(tmp_path / "deep") == ["out"]


def test_shards_hold_at_most_the_bytes_allowed_and_are_read_back(params: Params, tmp_path: Path) -> None:
    limit = 8000
    io.save_checkpoint(tmp_path, HF_CONFIG, CONFIG, params, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    manifest = checkpoint_manifest(CONFIG)
    assert list(index["weight_map"]) == [spec.name for spec in manifest]
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in manifest)
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 3
    for shard in shards:
        tensors = load_file(tmp_path / shard)
        assert set(tensors) == {name for name, file in index["weight_map"].items() if file == shard}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
    assert_params_equal(io.load_params(tmp_path, CONFIG, dtype="float32"), params)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"names files that are missing: {shards[1]}"):
        io.load_params(tmp_path, CONFIG, dtype="float32")


def test_a_tensor_larger_than_a_shard_gets_a_shard_of_its_own() -> None:
    manifest = checkpoint_manifest(CONFIG)
    plan = io.plan_shards(manifest, 1)
    assert [len(specs) for specs in plan.values()] == [1] * len(manifest)
    assert [spec for specs in plan.values() for spec in specs] == manifest
    assert list(io.plan_shards(manifest, 10**9)) == ["model.safetensors"]


def test_device_arrays_are_saved_in_another_dtype_which_the_config_then_states(params: Params, tmp_path: Path) -> None:
    old_spelling = {key: value for key, value in HF_CONFIG.items() if key != "dtype"} | {"torch_dtype": "float32"}
    on_device = assemble(CONFIG, drawn_tensors(CONFIG).items(), "float32")
    on_device["embed"]["embedding"] = jnp.asarray(on_device["embed"]["embedding"])
    io.save_checkpoint(tmp_path / "out", old_spelling, CONFIG, on_device, dtype="bfloat16")
    raw, config = io.read_config(tmp_path / "out")
    assert raw == old_spelling | {"torch_dtype": "bfloat16"}
    expected = assemble(CONFIG, drawn_tensors(CONFIG).items(), jnp.bfloat16)
    assert_params_equal(io.load_params(tmp_path / "out", config, dtype="auto"), expected)


def test_an_existing_directory_keeps_other_files_and_loses_stale_shards(params: Params, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "metrics.jsonl").write_text("kept")
    io.save_checkpoint(tmp_path, HF_CONFIG, CONFIG, params, max_shard_bytes=8000)

    def extras(directory: Path) -> None:
        assert not (directory / "checkpoint-5").exists()
        (directory / "tokenizer.json").write_text("{}")

    io.save_checkpoint(tmp_path, HF_CONFIG, CONFIG, params, write_extras=extras)
    assert files(tmp_path) == ["checkpoint-5", "config.json", "metrics.jsonl", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"
    assert_params_equal(io.load_params(tmp_path, CONFIG, dtype="float32"), params)


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_while_writing_leaves_everything_as_it_was(existing: bool, params: Params, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if existing:
        io.save_checkpoint(target, HF_CONFIG, CONFIG, params)
    before = (target / "model.safetensors").read_bytes() if existing else None

    def extras(directory: Path) -> None:
        raise OSError("disk full")

    changed = {**params, "final": {"scale": params["final"]["scale"] + 1}}
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*out: disk full"):
        io.save_checkpoint(target, HF_CONFIG, CONFIG, changed, write_extras=extras)
    assert files(tmp_path) == (["out"] if existing else [])
    if existing:
        assert files(target) == ["config.json", "model.safetensors"]
        assert (target / "model.safetensors").read_bytes() == before


def test_a_directory_that_cannot_be_written_is_named(params: Params, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {target}"):
            io.save_checkpoint(target, HF_CONFIG, CONFIG, params)
    assert files(tmp_path) == ["file"]


# Finding


def test_a_directory_is_its_own_model(tmp_path: Path) -> None:
    assert io.resolve_model(tmp_path) == tmp_path
    assert io.resolve_model(str(tmp_path)) == tmp_path


def test_a_hub_id_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo_id, revision, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert io.resolve_model("someone/model", revision="v2") == tmp_path
    assert calls == [("someone/model", "v2", True, False)]


@pytest.mark.parametrize("name", ["/no/such/directory", "someone/model-that-is-not-cached", "a b"])
def test_what_is_neither_directory_nor_hub_model_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"model '{name}' is no directory, and the hub does not give it"):
        io.resolve_model(name)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = "import sys, ajgrpo.hf.io; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# Transformers


@pytest.mark.reference
@pytest.mark.parametrize("max_shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "seed"), [("llama", 3), ("qwen2", 1), ("qwen3", 0)])
def test_checkpoints_of_transformers_come_back_byte_equal(
    family: str, seed: int, dtype: str, max_shard_size: str, tmp_path: Path
) -> None:
    import torch

    model = reference.torch_model(reference.random_hf_config(family, seed)).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    raw, config = io.read_config(tmp_path / "theirs")
    assert config.dtype == dtype
    params = io.load_params(tmp_path / "theirs", config, dtype="auto")
    io.save_checkpoint(tmp_path / "ours", raw, config, params)
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == raw
    if max_shard_size == "1GB":
        weights = [tmp_path / side / "model.safetensors" for side in ("theirs", "ours")]
        assert filecmp.cmp(*weights, shallow=False)
    else:
        assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
        theirs = [tensor for _, tensor in sorted(_bytes_of_tensors(tmp_path / "theirs").items())]
        ours = [tensor for _, tensor in sorted(_bytes_of_tensors(tmp_path / "ours").items())]
        assert theirs == ours


def _bytes_of_tensors(directory: Path) -> dict[str, bytes]:
    from safetensors import safe_open

    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found |= {name: tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.reference
@pytest.mark.parametrize(("family", "seed"), [("llama", 2), ("qwen2", 4), ("qwen3", 3)])
def test_transformers_loads_a_saved_checkpoint_with_equal_logits(family: str, seed: int, tmp_path: Path) -> None:
    import torch
    import transformers

    hf_config = reference.random_hf_config(family, seed)
    config = ModelConfig.from_hf(hf_config)
    params = assemble(config, drawn_tensors(config).items(), "float32")
    io.save_checkpoint(tmp_path, hf_config, config, params, max_shard_bytes=8000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.arange(20) % config.vocab_size
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    ours = reference.sequence_logits(config, params, jnp.asarray(tokens))
    np.testing.assert_allclose(ours / np.abs(expected).max(), expected / np.abs(expected).max(), atol=1e-4)
