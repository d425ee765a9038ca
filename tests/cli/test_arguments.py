"""What `sluice` says to wrong words, before it starts anything."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
from pathlib import Path

import pytest

from sluice_cli import place, up
from sluice_cli.__main__ import main
from sluice_cli.default_model import default_model


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["up", *argv]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("sluice up: ")
    assert told.err.count("\n") == 1, told.err
    return told.err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(default_model(), tmp_path / "model")
    return tmp_path / "model"


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sluice {importlib.metadata.version('sluice-serve')}\n"


def test_every_command_and_option_has_help(capsys):
    for argv in (["--help"], ["up", "--help"], ["chat", "--help"], ["size", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
    assert "--transport" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("config.json", "no config.json there; give the directory of a checkpoint"),
        ("tokenizer.json", "no tokenizer.json there"),
        ("model.safetensors", "no *.safetensors there"),
    ],
)
def test_a_model_directory_without_its_files(capsys, model, lost, words):
    (model / lost).unlink()
    told = refused(capsys, "--model", str(model))
    assert words in told
    assert str(model) in told


def test_a_field_that_is_not_supported_is_named(capsys, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "relu6"}))
    assert "config field hidden_act" in refused(capsys, "--model", str(model))


@pytest.mark.parametrize(
    ("file", "written", "words"),
    [
        ("tokenizer.json", b"[]", "not a JSON object; copy the tokenizer.json"),
        ("tokenizer.json", b"\xff", "tokenizer.json: 'utf-8' codec"),
        ("tokenizer.json", b'{"model": {}}', "decoder is null, not an object; copy the tokenizer.json"),
        ("generation_config.json", b"[]", "generation_config.json: not a JSON object"),
        ("generation_config.json", b'{"temperature": 9}', "'temperature': must be at least 0 and at most 2"),
        ("generation_config.json", b'{"eos_token_id": 640}', "'eos_token_id' has 640"),
    ],
)
def test_what_a_gateway_would_refuse_is_said_before_it_is_started(capsys, model, file, written, words):
    """The gateway died of it, and `sluice up` said neither file nor field."""
    (model / file).write_bytes(written)
    told = refused(capsys, "--model", str(model))
    assert words in told
    assert str(model / file) in told


def test_a_config_that_is_no_json(capsys, model):
    (model / "config.json").write_text("{")
    assert "config.json" in refused(capsys, "--model", str(model))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--page-tokens", "17", "--page-tokens: page_tokens"),
        ("--chunk-tokens", "17", "--chunk-tokens: chunk_tokens 17 must be a multiple of page_tokens 16"),
        ("--precision", "fp7", "--precision: precision 'fp7'"),
        ("--max-context-tokens", "1000000", "max_context_tokens is 1000000"),
        ("--memory-mib", "1", "--memory-mib: memory_bytes is 1048576"),
        ("--memory-mib", "-1", "--memory-mib is -1"),
        ("--max-running", "0", "--max-running is 0; give at least 1"),
        ("--wedge-floor-s", "0", "--wedge-floor-s is 0; give seconds above 0"),
        ("--quarantine-s", "-1", "--quarantine-s is -1"),
        ("--prefill", "0", "--prefill and --decode must be at least 1"),
        ("--api-keys-file", "/nowhere", "--api-keys-file /nowhere: No such file"),
    ],
)
def test_an_option_that_cannot_be(capsys, option, value, words):
    assert words in refused(capsys, option, value)


def test_keys_that_are_no_text(capsys, tmp_path):
    (tmp_path / "keys").write_bytes(b"a\xffb\n")
    told = refused(capsys, "--api-keys-file", str(tmp_path / "keys"))
    assert f"--api-keys-file {tmp_path / 'keys'}: not UTF-8 text" in told


def test_packages_that_are_missing_are_named(capsys, monkeypatch):
    monkeypatch.setattr(up, "NEEDED_FOR_A_MODEL", ("torch", "no_such_thing"))
    assert "no_such_thing not installed here: pip install 'sluice-serve[gateway,engine]'" in refused(capsys)


def test_a_reserved_port_lets_its_gateway_in_again_and_again():
    with place.reserved_port(0) as port:
        for _ in range(3):
            with socket.socket() as gateway:
                gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                gateway.bind(("127.0.0.1", port))
                gateway.listen()
                with pytest.raises(place.PortTaken), place.reserved_port(port):
                    pass


def test_without_a_wish_the_usual_port_or_a_free_one(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(place, "USUAL_PORT", other.getsockname()[1])
        with place.reserved_port(0) as port:
            assert port not in (0, place.USUAL_PORT)
    with place.reserved_port(0) as port:
        assert port == place.USUAL_PORT


def test_a_long_tmpdir_does_not_break_the_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with place.run_directory() as directory:
        assert len(str(directory)) + place.LONGEST_SOCKET <= place.UNIX_PATH_MAX
        assert directory.stat().st_mode & 0o077 == 0
    assert not directory.exists()


def test_a_host_that_is_no_address_of_this_machine(capsys):
    for host in ("203.0.113.7", "no.such.host.invalid", "::zz"):
        assert f"--host {host}: " in refused(capsys, "--scripted", "--host", host)


def test_an_origin_that_is_none_and_every_page_on_a_public_address(capsys):
    assert "--cors-origin 'example.com' is no origin" in refused(capsys, "--scripted", "--cors-origin", "example.com")
    told = refused(capsys, "--scripted", "--host", "0.0.0.0", "--cors-origin", "*")
    assert "loopback" in told
