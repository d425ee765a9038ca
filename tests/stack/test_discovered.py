"""A gateway process that knows its engines from EndpointSlices alone, as in a pod: environment, token, TLS and all.

The API server is the small one: the real one takes no slices with loopback addresses.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane_pki import Authority
from slice_server import SliceServer
from stack_double import KEY, RunningStack

from sluice_launch.commands import lone_gateway_command
from sluice_launch.process import Process, eventually
from sluice_runtime.address import split

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


class ThreadedServer:
    """A SliceServer with TLS in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        authority.issue("server", "api")
        self.server = SliceServer()
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = self.call(self.server.start(self._tls))

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def put(self, name: str, address: str | None) -> None:
        async def put() -> None:
            self.server.put(name, None if address is None else make_slice(address))

        self.call(put())

    def stop(self) -> None:
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def make_slice(address: str) -> dict[str, Any]:
    host, port = split(address)
    endpoint = {"addresses": [host], "targetRef": {"kind": "Pod", "uid": address}}
    return {"addressType": "IPv4", "ports": [{"name": "engine", "port": int(port)}], "endpoints": [endpoint]}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ThreadedServer]:
    folder = tmp_path / "account"
    folder.mkdir()
    server = ThreadedServer(folder)
    (folder / "token").write_text("a-token\n")
    (folder / "namespace").write_text("ns")
    yield server
    server.stop()


def test_engines_that_come_and_go_are_followed_and_an_api_server_that_is_away_changes_nothing(
    api, tmp_path, monkeypatch
):
    _, _, port = api.url.rpartition(":")
    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_PORT", port)
    with RunningStack() as stack:
        stack.start("prefill", "decode", "decode")
        prefill, one, other = (stack.engines[name].address for name in ("prefill-0", "decode-0", "decode-1"))
        api.put("p", prefill)
        api.put("d0", one)
        (stack.directory / "key").write_text(KEY)
        arguments = (
            *("--model-name", "m", "--tokenizer", "bytes"),
            *("--key-file", str(stack.directory / "key"), "--discover", "ns/m-prefill,m-decode"),
            *("--service-account", str(tmp_path / "account"), "--report-listen", "127.0.0.1:0", "--shutdown-s", "2"),
        )
        stack.gateway = Process(lone_gateway_command(arguments))
        ready = stack.gateway.wait_ready()
        stack.url, stack.report_address = ready["url"], ready["report"]

        def routed() -> set[str]:
            return {engine.address for engine in stack.report().engines if engine.ready}

        eventually(lambda: routed() == {prefill, one}, "both are met")
        assert len(stack.chat("hello", max_tokens=5).text()) == 5
        assert set(api.server.tokens) == {"Bearer a-token"}
        api.put("d1", other)
        eventually(lambda: routed() == {prefill, one, other}, "a new one is met")
        stack.engines["decode-0"].drain()
        eventually(lambda: routed() == {prefill, other}, "one drains")
        api.put("d0", None)
        eventually(lambda: {e.address for e in stack.report().engines} == {prefill, other}, "it has left")
        api.call(api.server.stop())
        assert len(stack.chat("hello again", max_tokens=5).text()) == 5
        assert routed() == {prefill, other}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--discover", "nowhere"), "say NAMESPACE/SERVICE"),
        (("--discover", "ns/svc", "--service-account", "/nowhere"), "let the pod have its service account's token"),
        (("--discover", "ns/svc", "--prefill", "a:1"), "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(arguments, said, monkeypatch, capsys):
    from sluice_gateway.__main__ import main

    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_PORT", "1")
    try:
        status = main(["--model-name", "m", "--tokenizer", "bytes", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_report_port_that_is_taken_ends_the_gateway_and_says_so(capfd):
    with RunningStack() as stack:
        stack.start("unified")
        stack.start_gateway()
        arguments = ("--model-name", "m", "--tokenizer", "bytes", "--report-listen", stack.report_address)
        second = Process(lone_gateway_command(arguments))
        assert second.popen.wait(60) == 1
        assert second.end() == 1
    assert f"--report-listen {stack.report_address}: nothing can be bound there" in capfd.readouterr().err
