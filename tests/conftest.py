"""Shared test set-up: strict JAX on eight CPU devices, offline, one thread per library, and no process left behind."""

from __future__ import annotations

import os
import pathlib
import threading
import time
import uuid
from collections.abc import Iterator

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
SESSION_MARK = f"AJGRPO_TEST_SESSION={uuid.uuid4().hex}"
"""Stands in the environment of every process that the tests start, however deep."""

# All of this must stand before the first import of jax, numpy or a Hugging Face library.
os.environ.update(
    dict([SESSION_MARK.split("=")]),
    JAX_PLATFORMS="cpu",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("HF_HOME", str(REPOSITORY / ".cache" / "huggingface"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped or expectedly failed test fails the run")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With ``--forbid-skips``: no skip and no empty run passes."""
    if session.config.getoption("--forbid-skips") and unexecuted(session.config) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--forbid-skips") and (names := unexecuted(config)):
        terminalreporter.section("not executed, and --forbid-skips is set", red=True, bold=True)
        for name in names:
            terminalreporter.write_line(name)


def unexecuted(config: pytest.Config) -> list[str]:
    """Ids of the tests and modules that were skipped or marked as expected failures."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    return [report.nodeid for kind in ("skipped", "xfailed", "xpassed") for report in reporter.stats.get(kind, [])]


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the run when a process that the tests started is still there shortly after the last test."""
    yield
    deadline = time.monotonic() + 10.0
    while (left := marked_processes()) and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert not left, f"processes left behind by the tests: {left}"


def marked_processes() -> dict[int, str]:
    """Process id → command line of the other processes of this test session (none where there is no /proc)."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) == os.getpid() or SESSION_MARK.encode() not in (entry / "environ").read_bytes():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
        # Python's own helper lives as long as this process; a zombie (no command line) has ended.
        if command and "resource_tracker" not in command:
            found[int(entry.name)] = command
    return found
