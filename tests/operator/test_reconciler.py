"""The workers of the operator: a ModelDeployment that cannot be looked at to the end holds up no other, nor itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from operator_cluster import Cluster as Simulated
from operator_cluster import manifest

from sluice_operator import offline
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Apply, EnsureSecret, Tell, WriteStatus
from sluice_operator.keys.keyring import Keyring, encode, read_key
from sluice_operator.live import observe
from sluice_operator.live.apply import IDLE, Applier, Outcome
from sluice_operator.live.cluster import Conflict, Failed, Forbidden, NotFound, Refused
from sluice_operator.live.connection import Connection
from sluice_operator.live.handlers import Shell, WatchSilent
from sluice_operator.live.observe import Observer
from sluice_operator.live.reconcile import Reconciler
from sluice_operator.live.run import Operator, Options
from sluice_operator.live.template_check import TemplateCheck
from sluice_operator.live.work import Work
from sluice_operator.render.revision import StandardRenderer

NOWHERE = Connection("https://127.0.0.1:1", token="t")
_BY_CODE = {404: NotFound, 409: Conflict}
HUNG, WELL = ("ns", "hung"), ("ns", "well")


class Cluster:
    """Every ModelDeployment is gone but HUNG, about which the answer never comes."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find(self, path: str) -> Any:
        self.asked.append(path.rpartition("/")[2])
        if self.asked[-1] == HUNG[1]:
            await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def running(reconciler: Reconciler) -> AsyncIterator[None]:
    working = asyncio.create_task(reconciler.run())
    try:
        yield
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def test_a_look_that_never_ends_is_cut_off_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    cluster: Any = Cluster()
    nobody: Any = None
    work = Work(asyncio.get_running_loop().time)
    reconciler = Reconciler(cluster, nobody, nobody, nobody, work, bound_s=0.1)
    async with running(reconciler), asyncio.timeout(30):
        work.add(HUNG, 0)
        while reconciler.counts.failures["Stuck"] < 2:
            work.add(WELL, 0)
            await asyncio.sleep(0.02)
    assert cluster.asked.count("hung") >= 2
    assert cluster.asked.count("well") > 5
    assert set(reconciler.counts.failures) == {"Stuck"}
    assert "ns/hung: a reconcile that takes longer than 0 s is cut off" in caplog.text
    assert "in find" in caplog.text  # where it stood


async def test_a_cancelled_future_of_a_library_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC raises CancelledError for a call whose channel was closed: a worker that ends by it is not missed by its
    group, and the key that it had would never be looked at again."""
    cluster: Any = Cluster()
    again = asyncio.Event()

    async def cancelled(path: str) -> Any:
        cluster.asked.append(path)
        if len(cluster.asked) > 1:
            again.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(cluster, "find", cancelled)
    nobody: Any = None
    work = Work(asyncio.get_running_loop().time)
    reconciler = Reconciler(cluster, nobody, nobody, nobody, work)
    async with running(reconciler):
        work.add(WELL, 0)
        await asyncio.wait_for(again.wait(), 30)
    assert reconciler.counts.failures["Defect"] >= 1


class Namespaces:
    """Lists of ModelDeployments, by namespace; those of `lost` are forbidden."""

    def __init__(self, lost: set[str]) -> None:
        self.lost = lost
        self.failure: Refused | None = None
        self.listed = 0

    async def items(self, kind: str, namespace: str) -> list[Any]:
        return [item async for page in self.pages(kind, namespace) for item in page]

    async def pages(self, kind: str, namespace: str, _limit: int = 1) -> AsyncIterator[list[Any]]:
        self.listed += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if namespace in self.lost:
            raise Forbidden(403, "Forbidden", f"{kind} of {namespace}")
        yield [{"metadata": {"namespace": namespace, "name": "m", "resourceVersion": "5"}}]

    async def find(self, path: str) -> Any:
        if any(f"/{name}/" in path for name in self.lost):
            raise Forbidden(403, "Forbidden", path)
        return {"items": []}


async def looked_once(reconciler: Reconciler, compare: Any) -> None:
    """One full listing of a and b."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await reconciler.resync(("a", "b"), 60.0, compare)


async def test_a_namespace_that_is_lost_holds_up_no_other_and_is_told() -> None:
    cluster: Any = Namespaces({"a"})
    nobody: Any = None
    told: list[Any] = []
    work = Work(asyncio.get_running_loop().time)
    reconciler = Reconciler(cluster, nobody, nobody, nobody, work)
    reconciler._known["a", "m"] = nobody  # served until now

    async def compare(versions: Any, readable: Any) -> None:
        told.append((dict(versions), set(readable)))

    await looked_once(reconciler, compare)
    assert told == [({("b", "m"): 5}, {"b"})]
    assert reconciler.counts.lost == {"a": "Forbidden"}
    assert reconciler.counts.looked_at is None
    assert set(work._due) == {("b", "m")}
    cluster.lost.clear()
    reconciler._known.clear()
    await looked_once(reconciler, compare)
    assert reconciler.counts.lost == {}
    assert reconciler.counts.looked_at is not None


async def test_watches_of_which_one_ends_are_told_of_though_another_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of kopf's swallows that it was cancelled; its own end of the operator waits for that one."""
    over = asyncio.Event()

    async def fails() -> None:
        raise PermissionError("403: may not watch networkpolicies")

    async def stays() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    async def spawned(**_: Any) -> Any:
        return [asyncio.create_task(fails(), name="watches"), asyncio.create_task(stays(), name="another")]

    monkeypatch.setattr("kopf.spawn_tasks", spawned)
    monkeypatch.setattr("sluice_operator.live.ending.END_S", 0.1)
    nobody: Any = None
    shell = Shell(NOWHERE, Work(asyncio.get_running_loop().time), 1.0, nobody)
    try:
        with pytest.raises(WatchSilent, match=r"watches: PermissionError.*403: may not watch networkpolicies"):
            await asyncio.wait_for(shell.run(asyncio.Event(), ("ns",)), 20)
    finally:
        over.set()
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(sig)


class Reviewing:
    """Who may watch what: all but `barred`, (namespace, resource). It cannot be asked while `is_down`."""

    def __init__(self, *barred: tuple[str, str]) -> None:
        self.barred, self.is_down = set(barred), False

    async def call(self, method: str, path: str, body: Any) -> Any:
        if self.is_down:
            raise Forbidden(403, "Forbidden", path)
        asked = body["spec"]["resourceAttributes"]
        assert asked["verb"] == "watch"
        return {"status": {"allowed": (asked["namespace"], asked["resource"]) not in self.barred}}


async def test_only_what_can_be_watched_is_and_what_comes_back_needs_a_new_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One namespace without one right ended the watches of all."""
    operator = Operator(
        NOWHERE, Options("one", "sluice", namespaces=("a", "b", "c")), StandardRenderer("i"), fleet=None
    )
    operator.cluster = Namespaces({"a"})  # type: ignore[assignment]
    reviewing = operator.lease_cluster = Reviewing(("c", "networkpolicies"))  # type: ignore[assignment]
    assert await operator._readable() == ("b", "c")
    assert [await operator._can_watch(name) for name in "bc"] == [True, False]
    assert "c: networkpolicies may not be watched, so it is only looked at every 60 s" in caplog.text
    operator.shell.watched = ("b",)
    await operator.shell.compare({}, {"b", "c"})
    reviewing.barred.clear()
    with pytest.raises(WatchSilent, match="namespace c can be watched"):
        await operator.shell.compare({}, {"b", "c"})
    reviewing.is_down = True
    assert await operator._can_watch("c")


async def test_what_nobody_watches_is_no_silent_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def can_watch(_: str) -> bool:
        return False

    monkeypatch.setattr("sluice_operator.live.handlers.SILENT_S", 0.0)
    shell = Shell(NOWHERE, Work(asyncio.get_running_loop().time), 1.0, can_watch)
    shell.watched = ("b",)
    for _ in range(3):
        await shell.compare({("c", "m"): 7}, {"b", "c"})
    await shell.compare({("b", "m"): 8}, {"b", "c"})
    with pytest.raises(WatchSilent, match="no news of b/m"):
        await shell.compare({("b", "m"): 8}, {"b", "c"})


async def test_nodes_that_may_not_be_seen_are_unknown_and_asked_for_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its ClusterRole, an operator with --nodes made nothing at all."""
    cluster: Any = Namespaces({""})
    nobody: Any = None
    observer = Observer(cluster, nobody, nobody, may_see_nodes=True)
    monkeypatch.setattr(observe, "NODES_AGE_S", 0.0)
    assert [await observer.nodes(), await observer.nodes()] == [None, None]
    assert caplog.text.count("may not be listed") == 1
    cluster.lost.clear()
    monkeypatch.setattr(observe, "read_node", lambda item: item["metadata"]["name"])
    assert await observer.nodes() == ("m",)
    cluster.failure = Refused(503, "ServiceUnavailable", "etcd")
    assert [await observer.nodes(), await observer.nodes()] == [("m",), ("m",)]
    assert caplog.text.count("cannot be listed: 503") == 1


async def test_nodes_are_listed_once_however_many_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight looks had eight listings in memory at a time: of two thousand nodes with all their labels, a gigabyte."""
    cluster: Any = Namespaces(set())
    nobody: Any = None
    observer = Observer(cluster, nobody, nobody, may_see_nodes=True)
    monkeypatch.setattr(observe, "read_node", lambda item: item["metadata"]["name"])
    assert await asyncio.gather(*(observer.nodes() for _ in range(8))) == [("m",)] * 8
    assert cluster.listed == 1


class Broken(StandardRenderer):
    """Fails over everything, as one does over a value that nobody has thought of."""

    def engine(self, name: str, spec: Any, revision: str) -> Any:
        raise ValueError("Port out of range 0-65535")

    def gateway(self, name: str, spec: Any, revision: str) -> Any:
        raise ValueError("Port out of range 0-65535")


async def test_a_spec_over_which_the_operator_fails_is_told_of_in_status_and_by_the_offline_plan(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Simulated(manifest())
    nobody: Any = None
    work = Work(asyncio.get_running_loop().time)
    reconciler = Reconciler(nobody, nobody, Broken("i"), nobody, work)
    actions = reconciler._planned(parse("m", manifest()), simulated.observe())
    assert not [action for action in actions if isinstance(action, Apply)]
    (told,) = [action.status for action in actions if isinstance(action, WriteStatus)]
    accepted = next(condition for condition in told.conditions if condition.type == "Accepted")
    assert (accepted.status.value, accepted.reason, told.reason) == ("False", "OperatorDefect", "OperatorDefect")
    assert "Port out of range" in accepted.message
    assert "report the error" in accepted.message
    assert reconciler.counts.failures == {"Defect": 1}
    assert "in engine" in caplog.text or "in gateway" in caplog.text  # where it stood
    monkeypatch.setattr(offline, "StandardRenderer", Broken)
    lines = list(offline.report("ns", "m", manifest(), None, "i"))
    assert lines[0].text == "Accepted: False"
    assert "OperatorDefect: spec: ValueError: Port out of range" in lines[1].text
    assert lines[0].status == 1


async def test_a_dry_run_that_is_forbidden_or_cannot_be_rendered_holds_up_no_status() -> None:
    """A quota forbids Deployments to a dry run too: nothing was ever told of it."""

    class Full:
        offers = 0

        async def create(self, item: Any, **query: str) -> Any:
            self.offers += 1
            raise Forbidden(403, "Forbidden", "exceeded quota: q")

    cluster: Any = Full()
    simulated = Simulated(manifest())
    spec: Any = parse("m", manifest())
    for renderer, offers in ((StandardRenderer("i"), 3), (Broken("i"), 3)):
        check = TemplateCheck(cluster, renderer)
        assert await check.look(simulated.observe(), spec, {}) == {"dry_run": None, "warning": ""}
        assert cluster.offers == offers


class Secrets:
    """Secrets of one namespace, by name, with a resourceVersion that counts their lives."""

    def __init__(self, uid: str) -> None:
        self.there: dict[str, Any] = {}
        self.owner = [{"apiVersion": "sluice.dev/v1alpha1", "kind": "ModelDeployment", "name": "m", "uid": uid}]

    def put(self, name: str, **data: bytes) -> None:
        version = str(
            1 + int(self.there.get(name, {"metadata": {"resourceVersion": "0"}})["metadata"]["resourceVersion"])
        )
        owner = [reference | {"controller": True} for reference in self.owner]
        meta = {"name": name, "uid": name, "resourceVersion": version, "ownerReferences": owner}
        self.there[name] = {"kind": "Secret", "metadata": meta, "data": encode(data)}

    async def find(self, path: str) -> Any:
        return self.there.get(path.rpartition("/")[2])

    async def create(self, item: Any) -> None:
        assert item["metadata"]["name"] not in self.there
        self.put(item["metadata"]["name"], key=read_key(item).encode())

    async def replace(self, item: Any) -> None:
        name = item["metadata"]["name"]
        assert item["metadata"]["resourceVersion"] == self.there[name]["metadata"]["resourceVersion"]
        self.put(name, key=read_key(item).encode())


@pytest.mark.parametrize(
    "damage", [{"key": b""}, {"key": b" \n"}, {"other": b"x"}, {"key": b"\xff\xfe"}, {"key": b"a\nb"}, None]
)
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_key_that_is_lost_or_damaged_is_written_again_and_is_the_same_for_whoever_knew_it(
    damage: Any, is_known: bool
) -> None:
    """An empty one stayed empty for ever, and status spoke of the network."""
    cluster: Any = Secrets("u")
    nobody: Any = None
    observer = Observer(cluster, nobody, nobody, may_see_nodes=False)
    observed = Simulated(manifest()).observe()
    known = observe.Known("u", observed.memory, Keyring("ns", "m"))
    meta = {"namespace": "ns", "name": "m", "uid": "u"}
    cluster.put("m-key", key=b"good")
    await observer._read_secrets(meta, known)
    assert "m-key" in known.secrets
    if is_known:
        known.key = await observer._key({"metadata": meta})
    known.secrets.clear()  # as every full listing does
    cluster.there.clear() if damage is None else cluster.put("m-key", **damage)
    await observer._read_secrets(meta, known)
    assert "m-key" not in known.secrets  # so plan wants it made
    await Applier(cluster, nobody, observed, known).obey(EnsureSecret("m-key"))
    await observer._read_secrets(meta, known)
    assert "m-key" in known.secrets
    told = read_key(cluster.there["m-key"])
    assert told == "good" if is_known else len(told) == 64


async def carried_out(
    actions: list[Any], kind: type, error: Exception, known: observe.Known | None = None
) -> tuple[list[str], observe.Known, Any]:
    """(what was done, what is known then, what it raised), where each of `kind` ends with `error`."""
    done: list[str] = []

    class Obeying:
        def __init__(self, *_: Any) -> None: ...

        async def obey(self, action: Any) -> Any:
            if isinstance(action, kind):
                if isinstance(error, Conflict | NotFound):
                    return Outcome(stale=error)
                raise error
            done.append(type(action).__name__)
            return IDLE

    nobody: Any = None
    reconciler = Reconciler(nobody, nobody, nobody, nobody, Work(asyncio.get_running_loop().time))
    observed = Simulated(manifest()).observe()
    known = known or observe.Known("u", observed.memory, nobody)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice_operator.live.reconcile.Applier", Obeying)
        try:
            await reconciler._carry_out(actions, observed, known)
        except Refused as raised:
            return done, known, raised
    return done, known, None


@pytest.mark.parametrize(
    "error", [Failed(500, "InternalError", "failed calling webhook"), Forbidden(403, "x", "quota")]
)
async def test_a_write_that_is_refused_is_told_of_and_what_only_tells_is_done(error: Any) -> None:
    """A webhook that was down answered 500: there was no status at all."""
    status = WriteStatus(Simulated(manifest()).observe().status)
    actions = [EnsureSecret("k"), Apply({"kind": "Service", "metadata": {"name": "m"}}), EnsureSecret("k"), status]
    done, known, raised = await carried_out(actions, Apply, error)
    assert raised is error
    assert done == ["EnsureSecret", "WriteStatus"]
    assert str(error) in known.refused


@pytest.mark.parametrize("code", [404, 409, 413, 418, 429, 503])
async def test_a_webhook_that_denies_with_any_code_is_told_of_when_it_goes_on(code: int) -> None:
    """There was no status at all, for ever; once or twice it is the API server's own hurry, and no news."""
    denied = (_BY_CODE.get(code) or Refused)(code, "x", 'admission webhook "p.example.com" denied the request: no')
    status = WriteStatus(Simulated(manifest()).observe().status)
    actions = [Apply({"kind": "Service", "metadata": {"name": "m"}}), EnsureSecret("k"), status]
    known: observe.Known | None = None
    for look in range(1, 6):
        done, known, raised = await carried_out(actions, Apply, denied, known)
        assert "EnsureSecret" not in done
        assert ("WriteStatus" in done) == (look == 5)
        assert ("denied the request: no" in known.refused) == (look == 5)
    assert raised is denied


async def test_an_event_that_cannot_be_written_holds_up_nothing() -> None:
    """Neither what is told in status, nor a drain that comes after it."""
    limited = Refused(429, "TooManyRequests", "event rate limit")
    done, _, raised = await carried_out([Tell("A", "b", "c"), EnsureSecret("k")], Tell, limited)
    assert raised is None
    assert done == ["EnsureSecret"]


@contextlib.asynccontextmanager
async def looking_at(simulated: Simulated) -> AsyncIterator[Any]:
    """A reconciler to which every ModelDeployment is as `simulated`, and which changes nothing."""
    nobody: Any = None

    class Here:
        async def find(self, path: str) -> Any:
            return {"metadata": {"uid": "u", "namespace": "ns", "name": "m"}, "spec": simulated.spec}

    class Seen:
        async def observe(self, *_: Any) -> Any:
            return simulated.observe()

    with pytest.MonkeyPatch.context() as patch:
        here: Any = Here()
        reconciler = Reconciler(here, nobody, nobody, StandardRenderer("i"), Work(asyncio.get_running_loop().time))
        patch.setattr(reconciler, "observer", Seen())
        patch.setattr(reconciler, "_planned", lambda *_: ())
        yield reconciler


async def test_what_is_awaited_is_looked_at_soon_though_all_is_ready() -> None:
    """No watch tells of the end of a drain, nor of whom a gateway routes to: each cost a minute."""
    simulated = Simulated(manifest(decode={"replicas": 2}))
    simulated.run_until_quiet(2000)
    async with looking_at(simulated) as reconciler:
        assert await reconciler.reconcile(("ns", "m")) == 60.0
        simulated.change(decode={"replicas": 1})
        simulated.step()
        assert simulated.status.reason == ""
        assert await reconciler.reconcile(("ns", "m")) == 5.0


async def test_many_that_are_awaited_are_looked_at_more_seldom() -> None:
    """Three hundred of them would have cost a core, and the API server seven hundred requests a second."""
    scaled = manifest(decode={"replicas": 1, "scaling": {"mode": "Auto", "auto": {"maxReplicas": 2}}})
    async with looking_at(Simulated(scaled)) as reconciler:
        assert await reconciler.reconcile(("ns", "m")) == 5.0
        for number in range(299):
            last = await reconciler.reconcile(("ns", f"m{number}"))
        assert last == 30.0
        reconciler.cluster.find = lambda path: asyncio.sleep(0)
        await reconciler.reconcile(("ns", "m0"))
        assert len(reconciler._awaiting) == 299
