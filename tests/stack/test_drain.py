"""Engine/Drain on real processes: nobody notices but the engine, which runs empty, or is named.

A client sees a pause at most, as long as another engine can serve.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from stack_double import EngineProcess, RunningStack, send_signal

from sluice_launch.process import eventually, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

LONG = "a long story " * 60  # about 800 tokens of one byte each


class Clients:
    """Streams side by side, each in a thread of its own; the first error is kept."""

    def __init__(self, stack: RunningStack, prompts: list[str], max_tokens: int) -> None:
        self.texts: dict[str, str] = {}
        self.routes: dict[str, dict[str, object]] = {}
        self.errors: list[BaseException] = []
        self._stack, self._max_tokens = stack, max_tokens
        self._threads = [threading.Thread(target=self._run, args=(prompt,), daemon=True) for prompt in prompts]

    def start(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def _run(self, prompt: str) -> None:
        try:
            stream = self._stack.chat(prompt, max_tokens=self._max_tokens)
            self.texts[prompt] = stream.text()
            self.routes[prompt] = stream.route
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.errors == []


def runs_empty(engine: EngineProcess, within_s: float = 60.0) -> None:
    def is_empty() -> bool:
        told = engine.load()
        assert told.draining
        return bool(told.empty)

    eventually(is_empty, f"{engine.name} is empty", within_s)
    engine.settled()


@pytest.fixture
def three() -> Iterator[RunningStack]:
    """A prefill and two decode engines; an answer takes a while."""
    with RunningStack(scripted={"step_cost_us": 10_000.0}, spec={"max_running": 8}) as stack:
        stack.start("prefill", "decode", "decode")
        stack.start_gateway()
        yield stack


def test_a_decode_engine_drains_under_load_and_no_client_notices(three):
    prompts = [f"{number}: tell me a story" for number in range(8)]
    alone = {prompt: three.chat(prompt, max_tokens=60).text() for prompt in prompts[:2]}
    clients = Clients(three, prompts, 60).start()
    one, other = three.engines["decode-0"], three.engines["decode-1"]
    eventually(lambda: one.load().running and other.load().running, "both decode")
    told = one.drain()
    assert told.remaining > 0
    assert not told.empty
    # What comes now goes to the other one, though this one has rows to spare.
    late = Clients(three, ["late " + prompt for prompt in prompts], 20).start()
    late.join()
    clients.join()
    assert {route["decode_pid"] for route in late.routes.values()} == {other.pid("leader")}
    assert {prompt: clients.texts[prompt] for prompt in alone} == alone
    assert all(len(text) == 60 for text in clients.texts.values())
    runs_empty(one)
    assert routed(three) == {engine.address for engine in three.engines.values()} - {one.address}
    assert one.probe("/livez")[0] == 200
    assert one.probe("/readyz")[0] == 503
    assert one.process.popen.poll() is None
    for engine in three.engines.values():
        engine.settled()
    # The end of a drain is SIGTERM, and there is nothing left to wait for.
    assert three.forget("decode-0") == 0


def test_what_is_not_done_in_time_goes_on_elsewhere_and_reads_the_same(three):
    """The engine gives it back; the client sees neither that nor another text."""
    (hasty,) = three.start("decode", drain_s=0.3)
    # Only it may serve at first.
    three.write_fleet("prefill-0", hasty.name)
    eventually(lambda: routed(three) == {hasty.address, three.engines["prefill-0"].address}, "the fleet is small")
    clients = Clients(three, ["tell it to me", "and to me"], 300).start()
    eventually(lambda: hasty.load().running == 2, "both decode")
    three.write_fleet()
    eventually(lambda: len(routed(three)) == 4, "the others are back")
    assert hasty.drain().left_ms <= 300
    runs_empty(hasty, 30.0)
    clients.join()
    assert all(len(text) == 300 for text in clients.texts.values())
    assert hasty.pid("leader") not in {route["decode_pid"] for route in clients.routes.values()}
    assert clients.texts == {prompt: three.chat(prompt, max_tokens=300).text() for prompt in clients.texts}
    for engine in three.engines.values():
        engine.settled()


def routed(stack: RunningStack) -> set[str]:
    """Addresses of the engines that get work."""
    return {engine.address for engine in stack.report().engines if engine.ready}


@pytest.fixture
def two_sources() -> Iterator[RunningStack]:
    """Two prefill engines that take a second for a long prompt, and a decode engine."""
    with RunningStack(scripted={"token_cost_us": 1500.0}, spec={"max_running": 4}) as stack:
        stack.start("prefill", "prefill", "decode")
        stack.start_gateway()
        yield stack


def busy_source(stack: RunningStack) -> tuple[EngineProcess, EngineProcess]:
    """(one that is in the middle of a prompt, the other one)."""

    def busy() -> EngineProcess | None:
        sources = [stack.engines["prefill-0"], stack.engines["prefill-1"]]
        return next((s for s in sources if s.inspect()["sequences"].get("prefilling")), None)

    found: EngineProcess = eventually(busy, "one of them prefills")
    return found, stack.engines["prefill-1" if found.name == "prefill-0" else "prefill-0"]


def test_a_prefill_engine_in_mid_handoff_finishes_it_and_takes_no_other(two_sources):
    clients = Clients(two_sources, [LONG], 20).start()
    source, other = busy_source(two_sources)
    assert source.drain().remaining == 1
    late = Clients(two_sources, ["late " + LONG], 20).start()
    late.join()
    clients.join()
    assert clients.routes[LONG]["prefill_pid"] == source.pid("leader")
    assert clients.routes[LONG]["tries"] == 1
    assert late.routes["late " + LONG]["prefill_pid"] == other.pid("leader")
    runs_empty(source)
    for engine in two_sources.engines.values():
        engine.settled()


def test_a_room_that_outlives_the_drain_of_its_source_is_refused_and_opened_elsewhere(two_sources):
    (hasty,) = two_sources.start("prefill", drain_s=0.2)
    for name in ("prefill-0", "prefill-1"):
        two_sources.forget(name)
    two_sources.write_fleet()
    eventually(lambda: two_sources.get("/readyz")[0] == 200, "the gateway sees the new one")
    clients = Clients(two_sources, [LONG], 20).start()
    eventually(lambda: hasty.inspect()["sequences"].get("prefilling"), "it prefills")
    (other,) = two_sources.start("prefill")
    two_sources.write_fleet()
    eventually(lambda: other.address in routed(two_sources), "the gateway sees the other one")
    hasty.drain()
    clients.join()
    assert len(clients.texts[LONG]) == 20
    assert clients.routes[LONG]["prefill_pid"] in (hasty.pid("leader"), other.pid("leader"))
    runs_empty(hasty)
    for engine in two_sources.engines.values():
        engine.settled()


@pytest.fixture(scope="module")
def idle() -> Iterator[RunningStack]:
    with RunningStack() as stack:
        stack.start("unified")
        yield stack


def test_an_idle_engine_is_empty_at_once_and_stays_for_whoever_asks(idle):
    engine = idle.engines["unified-0"]
    assert not engine.load().draining
    told = engine.drain()
    assert (told.remaining, told.empty) == (0, True)
    load = engine.load()
    assert (load.draining, load.empty, load.quarantined) == (True, True, False)
    engine.process.wait_for("drained")
    status, said = engine.probe("/readyz")
    assert (status, said["draining"], said["quarantined"]) == (503, True, False)
    assert engine.probe("/livez")[0] == 200
    again = engine.drain()
    assert again.empty
    assert again.left_ms <= told.left_ms
    assert [event["event"] for event in engine.process.events].count("draining") == 1
    engine.settled()


def test_a_second_drain_gives_no_second_time() -> None:
    with RunningStack(scripted={"step_cost_us": 10_000.0}, spec={"drain_s": 3.0}) as stack:
        (engine,) = stack.start("unified")
        stack.start_gateway()
        stream = stack.chat("on and on", max_tokens=6_000)
        pieces = iter(stream)
        next(pieces)
        first = engine.drain()
        assert 0 < first.left_ms <= 3000
        eventually(lambda: engine.drain().left_ms < first.left_ms, "time goes by")
        # Nobody else can serve; what matters here is that the engine lets go.
        runs_empty(engine, 30.0)
        stream.drop()


@pytest.mark.parametrize("asked", ["rpc", "sigterm"])
def test_an_engine_that_is_stuck_in_its_drain_is_named_and_ends(asked) -> None:
    """With the budgets of production no other verdict would come so early."""
    spec = {"drain_s": 1.0, "health": {"quarantine_s": 0}}
    with RunningStack(scripted={"step_cost_us": 10_000.0}, spec=spec) as stack:
        (engine,) = stack.start("unified")
        stack.start_gateway()
        stream = stack.chat("on and on", max_tokens=6_000)
        next(iter(stream))
        stop_process(engine.pid("rank"))
        if asked == "rpc":
            assert not engine.drain().empty
        else:
            send_signal(engine.supervisor, 15)
        incident = engine.process.wait_for("incident")
        assert (incident["reason"], incident["culprit"]) == ("DrainStalled", "leader.loop")
        eventually(lambda: engine.process.popen.poll() is not None, "it ends", 60.0)
        assert stack.forget(engine.name) == 3
        stream.drop()
