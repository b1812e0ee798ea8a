"""The layers of the package, read from the imports, and the side rules on heavy packages.

A module imports from lower layers, or from its own package. The table stands here once; a new module needs a line.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

from ajgrpo import cli

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "ajgrpo"

LAYERS = {
    "errors": 0, "types": 0, "config": 0, "metrics": 0, "rewards": 0, "imports": 0, "yaml_dialect": 0,
    "arithmetic": 0, "interrupts": 0,
    "packing": 1, "inference": 1, "weights.base": 1,
    "ops": 2, "inference.client": 2, "rollout.api": 2,
    "models": 3, "losses": 3, "rollout": 3,
    "hf": 4, "training": 4,
    "weights": 5, "server": 5,
    "backend": 6, "callbacks": 6, "canary": 6, "cli": 6, "data": 6,
    "dry_run": 6, "loggers": 6, "parts": 6, "plots": 6, "preflight": 6, "saving": 6, "tokenizer": 6, "trainer": 6,
    "train": 7, "serve": 7, "doctor": 7,
}  # fmt: skip

STANDARD = set(sys.stdlib_module_names)
ALLOWED = {
    "errors": set(), "types": {"numpy"}, "config": set(), "metrics": set(), "imports": set(), "interrupts": set(),
    "yaml_dialect": {"yaml"}, "rewards": {"math_verify"}, "arithmetic": {"numpy", "datasets"},
    "packing": {"numpy"},
    "inference": {"httpx"},
    "rollout": {"numpy", "transformers", "datasets", "jinja2"},
    "weights.base": {"numpy", "ml_dtypes"},
    "weights.vllm_plugin": {"vllm"},
    "weights.vllm_engine": {"numpy", "torch", "vllm"},
    "weights": {"numpy", "ml_dtypes", "jax", "cupy"},
    "ops": {"jax", "numpy", "jaxtyping"},
    "models": {"jax", "flax", "numpy"},
    "losses": {"jax", "numpy"},
    "hf": {"jax", "numpy", "ml_dtypes", "safetensors", "huggingface_hub"},
    "training": {"jax", "numpy", "optax", "orbax"},
    "server": {"jax", "numpy", "starlette", "uvicorn", "httpx"},
}  # fmt: skip
"""Third-party packages of the modules below layer 6."""


def modules():
    """Dotted name without the package → path, of every module of the package but its ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


MODULES = modules()


def longest_prefix(name, table):
    parts = name.split(".")
    candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((candidate for candidate in candidates if candidate in table), None)


def layer(name):
    return LAYERS[longest_prefix(name, LAYERS)]


def package(name):
    """The subpackage that a module belongs to; empty for the modules of ``ajgrpo`` itself."""
    return name.split(".")[0] if (PACKAGE / name.split(".")[0]).is_dir() else ""


def imports(path):
    """The modules that a source file imports, anywhere in it, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("ajgrpo.")
                yield f"ajgrpo.{inner}" if inner in MODULES else node.module


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_from_lower_layers_or_its_own_package(name):
    assert longest_prefix(name, LAYERS) is not None, f"{name} has no layer; give it one in LAYERS"
    own_package = package(name)
    for imported in imports(MODULES[name]):
        if imported.split(".")[0] != "ajgrpo":
            continue
        target = imported.removeprefix("ajgrpo.")
        assert target in MODULES, f"ajgrpo.{name} imports {imported}: import from the module that defines the name"
        if package(target) == own_package:
            assert layer(target) <= layer(name), f"ajgrpo.{name} imports the higher ajgrpo.{target}"
        else:
            assert layer(target) < layer(name), f"ajgrpo.{name} (layer {layer(name)}) imports ajgrpo.{target}"


@pytest.mark.parametrize("name", [name for name in MODULES if longest_prefix(name, ALLOWED) is not None])
def test_third_party_packages_stay_in_their_layers(name):
    allowed = ALLOWED[longest_prefix(name, ALLOWED)] | STANDARD | {"ajgrpo"}
    found = {imported.split(".")[0] for imported in imports(MODULES[name])}
    assert found <= allowed, f"ajgrpo.{name} imports {sorted(found - allowed)}"


def test_every_module_below_layer_six_has_a_list_of_packages():
    assert [name for name in MODULES if layer(name) < 6 and longest_prefix(name, ALLOWED) is None] == []


def test_server_and_client_meet_only_in_the_protocol():
    for name, path in MODULES.items():
        if name.startswith("server."):
            assert "ajgrpo.inference.client" not in set(imports(path))
        if name.startswith("inference."):
            assert not any(imported.startswith("ajgrpo.server") for imported in imports(path))


def test_only_one_module_knows_the_names_of_checkpoint_tensors():
    """Names such as ``model.layers.0.self_attn.q_proj.weight`` live in ``hf.mapping``."""
    for name, path in MODULES.items():
        if name != "hf.mapping":
            assert "_proj.weight" not in path.read_text(), f"ajgrpo.{name} spells a checkpoint's tensor name"


def test_what_the_rollout_worker_imports_leaves_jax_out():
    """Also transitively: the spawned worker starts fast and touches no accelerator."""
    light = [f"ajgrpo.{name}" for name in MODULES if layer(name) <= 1 or name.split(".")[0] in ("inference", "rollout")]
    assert {"ajgrpo.rollout.worker", "ajgrpo.rollout.loop", "ajgrpo.inference.client"} <= set(light)
    heavy = ("jax", "jaxlib", "flax", "optax", "orbax", "cupy")
    code = f"import importlib, sys\nfor m in {light!r}: importlib.import_module(m)\n"
    code += f"print([m for m in {heavy!r} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (printed.stdout, printed.returncode) == ("[]\n", 0), printed.stderr


def test_every_shipped_configuration_parses(monkeypatch):
    monkeypatch.chdir(ROOT)
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert "quickstart.yaml" in [path.name for path in paths]
    for path in paths:
        assert cli.parse(["--config", str(path)]).run.model
