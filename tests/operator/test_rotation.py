"""Certificates under virtual time: every pod believes every other, whatever happens to the operator, its clock, and the
Secrets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from certificate_secrets import FactSecrets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice_operator.keys.rotation import (
    DAY_S,
    BeginRotation,
    FinishRotation,
    IssueLeaf,
    Lives,
    MakeAuthority,
    SeenCertificates,
    SetTrust,
    rotate,
)
from sluice_operator.names import PodRole

LIVES = Lives(authority=3000.0, leaf=900.0, settle=60.0)
# From a Secret to the pods of its role, at most; what `settle` counts on.
ARRIVES_S = 40.0
TURN_S = 10.0
START = 1_900_000_000.0


@dataclass
class World:
    """Pods hold what their role's Secret held up to ARRIVES_S ago. `skew`: the operator's clock is wrong by so much."""

    secrets: FactSecrets = field(default_factory=FactSecrets)
    now: float = START
    skew: float = 0.0
    awake_since: float = START
    steady_since: float = START
    delay: dict = field(default_factory=lambda: dict(zip(PodRole, (0.0, ARRIVES_S, ARRIVES_S / 2))))
    log: list = field(default_factory=list)
    broken: list = field(default_factory=list)

    def __post_init__(self):
        self.held = {}
        self._pending = {role: [] for role in PodRole}
        self._facts = None

    def seen(self) -> SeenCertificates:
        facts = replace(self.secrets.seen, steady_s=0.0)
        if facts != self._facts:
            self._facts, self.steady_since = facts, self.now
        return replace(facts, steady_s=self.now - self.steady_since)

    def plan(self):
        return rotate(self.seen(), self.now + self.skew, LIVES)

    def obey(self, step) -> None:
        self.log.append(step)
        self.secrets.obey(step)

    def restart(self) -> None:
        """Of the operator: it has seen nothing yet."""
        self._facts = None

    def step(self) -> None:
        for step in self.plan():
            self.obey(step)
        self.tick()

    def step_killed(self) -> None:
        """Killed after every single action."""
        for _ in range(50):
            steps = self.plan()
            if not steps:
                break
            self.obey(steps[0])
            self.restart()
        else:
            self.broken.append(f"never settles: {self.log[-5:]}")
        self.tick()

    def tick(self, seconds: float = TURN_S) -> None:
        self.now += seconds
        for role in PodRole:
            leaf = self.secrets.seen.leaves.get(role)
            line = self._pending[role]
            if leaf is not None and (not line or line[-1][1] != leaf):
                line.append((self.now + self.delay[role], leaf))
            while line and (line[0][0] <= self.now or role not in self.held):
                self.held[role] = line[0][1]
                if len(line) == 1:
                    break
                line.pop(0)
        self.look()

    def look(self) -> None:
        """Every pod shows its leaf to every other."""
        for shows, leaf in self.held.items():
            if leaf.not_after < self.now:
                self.broken.append(f"{self.now - START:.0f}: the leaf of {shows} has expired")
            for reads, other in self.held.items():
                if leaf.issuer not in other.trusted:
                    self.broken.append(f"{self.now - START:.0f}: {reads} does not believe {shows}: {leaf} {other}")

    def run(self, seconds: float, step=None) -> World:
        end = self.now + seconds
        while self.now < end:
            (step or self.step)()
        return self

    def kinds(self):
        return [type(step).__name__ for step in self.log]


def started() -> World:
    return World().run(3 * LIVES.settle)


def test_at_first_there_is_a_ca_and_a_leaf_for_each_role_and_then_nothing_to_do():
    world = World()
    assert world.plan() == (MakeAuthority(START + LIVES.authority),)
    world.run(200)
    assert world.kinds() == ["MakeAuthority", "IssueLeaf", "IssueLeaf", "IssueLeaf"]
    (ca,) = {leaf.issuer for leaf in world.secrets.seen.leaves.values()}
    assert all(leaf.trusted == {ca} for leaf in world.secrets.seen.leaves.values())


def test_a_leaf_is_renewed_when_two_thirds_of_its_life_are_over():
    world = started()
    world.run(LIVES.leaf * 0.6 - 180)
    assert world.kinds().count("IssueLeaf") == 3
    world.run(LIVES.leaf * 0.1)
    assert world.kinds()[4:] == ["IssueLeaf"] * 3
    assert world.broken == []


def test_a_ca_is_replaced_in_steps_each_of_which_waits_for_the_pods():
    world = started()
    before = world.secrets.seen.current.id
    world.run(LIVES.authority * 0.8)
    renewals = [step for step in world.log if isinstance(step, IssueLeaf) and step.signer == before]
    others = [step for step in world.log if step not in renewals]
    kinds = [type(step).__name__ for step in others]
    assert kinds == ["MakeAuthority", "BeginRotation", *["SetTrust"] * 3, *["IssueLeaf"] * 3, *["SetTrust"] * 3,
                     "FinishRotation"]  # fmt: skip
    after = world.secrets.seen.current.id
    assert [step.trusted for step in others[2:5]] == [{before, after}] * 3
    assert [(step.signer, step.trusted) for step in others[5:8]] == [(after, {before, after})] * 3
    assert [step.trusted for step in others[8:11]] == [{after}] * 3
    assert world.broken == []


def test_without_the_wait_somebody_is_not_believed():
    """The test can fail: this is what the wait is for."""
    world = started()
    world.seen = lambda: replace(world.secrets.seen, steady_s=1e9)
    world.run(LIVES.authority)
    assert any("does not believe" in line for line in world.broken)


@pytest.mark.parametrize("ages", [10, 3])
def test_for_generations_of_cas_everybody_believes_everybody(ages):
    world = World().run(LIVES.authority * ages)
    assert world.broken == []
    assert world.kinds().count("FinishRotation") >= ages


def test_killed_after_every_action_it_ends_up_there_too():
    world = World().run(LIVES.authority * 4, None)
    killed = World()
    killed.run(LIVES.authority * 4, killed.step_killed)
    assert world.broken == killed.broken == []
    assert killed.kinds().count("FinishRotation") >= 4


exact = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
YEAR_S = 365 * DAY_S
harmless = st.one_of(
    st.tuples(st.just("kill"), st.just(0)),
    st.tuples(st.just("skew"), st.sampled_from([0.0, YEAR_S, 20 * YEAR_S, 700.0])),
    # While it is behind it cannot know what is due: not for as long as the last third of a leaf's life.
    st.tuples(st.just("behind"), st.sampled_from([-700.0, -YEAR_S, -40 * YEAR_S])),
    st.tuples(st.just("away"), st.integers(1, 25)),
    st.tuples(st.just("delay"), st.sampled_from([(role, s) for role in PodRole for s in (0.0, ARRIVES_S)])),
    st.tuples(st.just("lose-leaf"), st.sampled_from(list(PodRole))),
)
traces = st.lists(st.tuples(st.integers(1, 40), harmless), max_size=12)


def happen(world: World, event) -> None:
    seen = world.secrets.seen
    match event:
        case ("kill", _):
            world.restart()
        case ("skew", seconds):
            world.skew = seconds
        case ("behind", seconds):
            world.skew = seconds
            world.run(LIVES.leaf / 3 - ARRIVES_S - 3 * TURN_S)
            world.skew = 0.0
        case ("away", turns):
            for _ in range(turns):
                world.tick()
            world.restart()
        case ("delay", (role, seconds)):
            world.delay[role] = seconds
        case ("lose-leaf", role):
            # Deleted, or filled with nonsense: read as if it were not there. One at a time, and seen soon.
            leaves = {other: leaf for other, leaf in seen.leaves.items() if other is not role}
            world.secrets.seen = replace(seen, leaves=leaves)


@pytest.mark.slow
@settings(exact, max_examples=60)
@given(traces, st.booleans())
def test_whatever_happens_to_operator_clock_and_leaves_everybody_believes_everybody(trace, killed):
    world = started()
    for turns, event in trace:
        for _ in range(turns):
            (world.step_killed if killed else world.step)()
        happen(world, event)
    world.skew = 0.0
    world.run(15 * LIVES.settle, world.step_killed if killed else world.step)
    assert world.broken == []


@pytest.mark.slow
@settings(exact, max_examples=40)
@given(st.integers(0, 330), st.booleans(), st.booleans())
def test_a_ca_that_is_lost_at_any_moment_is_replaced_without_anybody_being_refused(turns, killed, next_only):
    """Its Secret deleted or spoiled, or the half of it that is to come."""
    world = started()
    step = world.step_killed if killed else world.step
    for _ in range(turns):
        step()
    seen = world.secrets.seen
    world.secrets.seen = replace(seen, next=None) if next_only else replace(seen, current=None, next=None)
    lost = seen.next if next_only else seen.current
    world.run(12 * LIVES.settle, step)
    assert world.broken == []
    if lost is not None:
        assert all(leaf.issuer != lost.id for leaf in world.secrets.seen.leaves.values())


def test_who_can_write_one_secret_makes_nobody_trust_his_ca():
    world = started()
    seen = world.secrets.seen
    forged = replace(seen.leaves[PodRole.DECODE], issuer="evil", trusted=frozenset({"evil"}), not_after=START * 100)
    world.secrets.seen = replace(seen, leaves=dict(seen.leaves) | {PodRole.DECODE: forged})
    world.run(100)
    leaves = world.secrets.seen.leaves
    assert all("evil" not in leaf.trusted for leaf in leaves.values())
    assert leaves[PodRole.DECODE].not_after < START + 2 * LIVES.leaf
    added = replace(leaves[PodRole.DECODE], trusted=leaves[PodRole.DECODE].trusted | {"evil"})
    world.secrets.seen = replace(world.secrets.seen, leaves=dict(leaves) | {PodRole.DECODE: added})
    world.run(3 * LIVES.settle)
    assert all("evil" not in leaf.trusted for leaf in world.secrets.seen.leaves.values())


def test_a_clock_that_ran_ahead_leaves_nothing_that_is_not_valid_yet_or_renewed_for_ever():
    world = started()
    world.skew = 10 * LIVES.authority
    world.run(20 * LIVES.settle)
    world.skew = 0.0
    before = len(world.log)
    world.run(20 * LIVES.settle)
    assert world.broken == []
    assert len(world.log) - before <= 12


def test_steps_name_what_they_are_based_on():
    world = started()
    world.run(LIVES.authority)
    named = {type(step) for step in world.log}
    assert named == {MakeAuthority, BeginRotation, FinishRotation, IssueLeaf, SetTrust}
