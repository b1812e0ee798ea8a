import pathlib
import subprocess
import sys
import tomllib

import pytest

import ajgrpo

NAMES = [
    "AjgrpoError",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutLoop",
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "KeyMismatchError",
    "PicklingError",
    "RewardError",
    "Rollout",
    "RolloutGroup",
    "RolloutWorker",
    "RolloutWorkerError",
    "ServerError",
    "ServerIncompatibleError",
    "ServerResponseError",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingDivergedError",
    "TrainingSequence",
    "TrainingStalledError",
    "TurnRecord",
    "UnsupportedModelError",
    "WeightTransfer",
    "WeightTransferError",
    "WorkerDiedError",
    "WorkerStalledError",
    "__version__",
]


def test_the_public_names_are_pinned():
    assert sorted(ajgrpo.__all__) == NAMES
    assert set(NAMES) <= set(dir(ajgrpo))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves(name):
    value = getattr(ajgrpo, name)
    assert name == "__version__" or value.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ajgrpo' has no attribute 'Trainer'"):
        ajgrpo.Trainer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Trainer'"):
        exec("from ajgrpo import Trainer")


def test_importing_the_package_imports_nothing_else():
    code = "import sys, ajgrpo; print([m for m in sys.modules if m.startswith(('ajgrpo.', 'jax', 'numpy', 'torch'))])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert ajgrpo.__version__ == project["version"]
