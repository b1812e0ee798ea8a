"""The output directory: one run at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajgrpo.errors import ConfigError
from ajgrpo.saving import check_writable, claimed

HOLD = """
import sys
from pathlib import Path
from ajgrpo.saving import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_serves_one_process_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by another run \(process {holder.pid} on "), claimed(tmp_path):
            pass
        holder.communicate("")
    with claimed(tmp_path):  # its end frees the directory
        pass


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output_dir='.*file/out' cannot be written"):
        check_writable(tmp_path / "file" / "out")
