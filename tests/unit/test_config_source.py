"""Where a configuration may come from: files and pipes, and nothing that waits or never ends."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnres_aot import input_file
from attnres_aot.cli.entry import main
from attnres_aot.config.reader import DEFAULT_CONFIG
from attnres_aot.config.source import MAX_BYTES, read_source
from attnres_aot.errors import ConfigError


@dataclass(frozen=True)
class Refused:
    name: str
    path: str
    says: str


REFUSED = [
    Refused("absent", "none.yaml", "none.yaml: cannot be read: No such file or directory; give --config the path"),
    Refused(
        "shipped", "kimi_k3_all.yaml", "`attnres-aot config kimi_k3_all > kimi_k3_all.yaml` writes the one that ships"
    ),
    Refused("folder", ".", ".: cannot be read: it is a folder, not a file"),
    Refused("below_a_file", "plain/x", "plain/x: cannot be read: Not a directory"),
    Refused("loop", "loop", "loop: cannot be read: Too many levels of symbolic links"),
    Refused("endless_device", "/dev/zero", "/dev/zero: cannot be read: it is a device, not a file"),
    Refused("long_name", "x" * 300, "x: cannot be read: File name too long"),
    Refused("long_path", "x/" * 3000 + "x", "x: cannot be read: File name too long"),
    Refused("nul", "a\0b", "cannot be read: embedded null byte"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plain").write_text("x")
    Path("loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_is_no_file_is_refused(case, folder):
    with pytest.raises(ConfigError) as caught:
        read_source(Path(case.path))
    assert case.says in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_socket_is_refused(folder):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        with pytest.raises(ConfigError, match="socket: "):
            read_source(Path("socket"))


def test_a_pipe_without_a_writer_is_empty_at_once(folder):
    os.mkfifo("pipe")
    assert read_source(Path("pipe")) == b""


def test_a_pipe_is_read_to_its_end():
    """As a shell gives it to `--config /dev/stdin` and `--config <(command)`."""
    read, write = os.pipe()
    data = DEFAULT_CONFIG.read_bytes() * 20
    writer = threading.Thread(target=lambda: (os.write(write, data[:10]), os.write(write, data[10:]), os.close(write)))
    writer.start()
    try:
        assert read_source(Path(f"/dev/fd/{read}")) == data
    finally:
        writer.join()
        os.close(read)


def test_a_pipe_whose_writer_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(input_file, "PIPE_S", 0.05)
    read, write = os.pipe()
    os.write(write, b"name: x")
    try:
        with pytest.raises(ConfigError, match=r"no whole file came through the pipe in 0\.05 s"):
            read_source(Path(f"/dev/fd/{read}"))
    finally:
        os.close(read)
        os.close(write)


def test_no_more_is_read_than_shows_that_a_file_is_too_large(folder):
    with Path("big").open("wb") as file:
        file.truncate(1 << 40)
    assert len(read_source(Path("big"))) == MAX_BYTES + 1


@pytest.mark.parametrize("command", ["verify", "inspect", "doctor"])
@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000], ids=["name", "path"])
def test_a_path_beyond_the_limits_of_the_system_is_no_bundle(command, path, folder, capsys):
    assert main([command, path]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err


@pytest.mark.parametrize("options", [["--dry-run"], []], ids=["preview", "build"])
def test_building_into_such_a_path_is_refused(options, folder, capsys):
    assert main(["build", "--arch", "sm_90", "--only", "nb0-write0", "--out", "x" * 300, *options]) == 1
    assert "File name too long" in capsys.readouterr().err
