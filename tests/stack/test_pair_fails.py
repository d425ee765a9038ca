"""The way between two engines that are well is cut, with no client asking: the pair is named, and named well again."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from lying_source import BareGateway
from stack_double import EngineProcess, RunningStack
from tcp_proxy import TcpProxy

from sluice_launch.process import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def failing(decode: EngineProcess) -> list[str]:
    return list(decode.load().failing_sources)


def test_a_lane_that_is_cut_is_found_without_a_client() -> None:
    with RunningStack() as stack:
        prefill, decode = stack.start("prefill", "decode")
        _, _, port = str(prefill.ready["source_address"]).rpartition(":")
        with TcpProxy(int(port)) as lane, BareGateway(decode) as gateway:
            source = urlsplit(lane.url).netloc
            assert gateway.generate(source, list(range(1, 40))).reason == "length"
            lane.stall()
            eventually(lambda: failing(decode) == [source], "decode says that it gets no records from there")
            told = decode.inspect()["pairs"]
            assert [(pair["source"], pair["reason"]) for pair in told] == [(source, "SourceSilent")]
            assert prefill.probe("/livez")[0] == decode.probe("/livez")[0] == 200, "both engines are well"
            lane.flow()
            eventually(lambda: failing(decode) == [], "it works again")
            assert gateway.generate(source, list(range(2, 40))).reason == "length"
        assert [event["source"] for event in decode.process.events if event.get("event") == "pair"] == [source] * 2
        for engine in stack.engines.values():
            engine.settled()


def test_a_lane_that_never_worked_is_found_before_the_first_request() -> None:
    """Gateways name the sources of their fleet to each decode engine, which looks after those it never leased from."""
    with RunningStack() as stack:
        prefill, decode = stack.start("prefill", "decode")
        _, _, port = str(prefill.ready["source_address"]).rpartition(":")
        with TcpProxy(int(port)) as lane:
            source = urlsplit(lane.url).netloc
            lane.stall()
            decode.load(source)
            eventually(lambda: failing(decode) == [source], "decode says that it gets no records from there")
            lane.flow()
            eventually(lambda: failing(decode) == [], "it works")
        for engine in stack.engines.values():
            engine.settled()
