"""The matrix as data, and its tables on a virtual clock."""

from __future__ import annotations

import pytest

from sluice_engine.points import ENGINE_POINTS
from sluice_engine.watched_rows import EngineReason
from sluice_gateway.points import GATEWAY_POINTS
from sluice_gateway.status.watched_rows import GatewayReason
from sluice_harness.profiles import PROFILES
from sluice_harness.results import Result, append_result, read_results, summary_of
from sluice_harness.rows import MatrixError, Outcome, Phase, Row, load_rows, parse_rows, select
from sluice_harness.tables import run_table
from sluice_runtime.fault_points import SUPERVISOR_POINTS
from sluice_runtime.health.watched import Reason

ROWS = load_rows()


def test_there_are_enough_of_them_and_of_every_kind():
    assert len(ROWS) >= 70
    assert len(select(ROWS, ci=True)) >= 40
    assert {row.phase for row in ROWS} == set(Phase)
    assert {row.role for row in ROWS} == {"prefill", "decode", "unified", "gateway"}
    assert {row.expected.outcome for row in ROWS} == set(Outcome)
    assert {row.stack for row in ROWS} <= PROFILES.keys()


def test_every_reason_that_can_come_about_here_has_a_row_and_an_unscaled_one():
    # On a virtual clock only, until there are such threads.
    later = {EngineReason.COLLECTIVE_STUCK, EngineReason.TIER_STUCK}
    as_scaled = {EngineReason.ZYGOTE_DEAD}  # of a real model's stack, and a death has no budget to scale
    # Of a drain, whose budget is its own, and of what never began: tests/stack/test_not_accepting.py, tests/health.
    # And of memory that changes by itself: tests/engine/test_corruption.py, tests/stack/test_flipped_bytes.py.
    rare = {Reason.DRAIN_STALLED, Reason.START_FAILED, EngineReason.MEMORY_CORRUPT}
    wanted = {reason.value for reason in {*Reason, *EngineReason, *GatewayReason} - rare}
    assert {row.expected.reason for row in ROWS if row.expected.reason} == wanted
    at_full_scale = {row.expected.reason for row in select(ROWS, unscaled=True)}
    assert at_full_scale == wanted - {reason.value for reason in later | as_scaled}


def test_every_point_that_is_named_exists():
    assert {row.fault["point"] for row in ROWS if "point" in row.fault} <= {
        *ENGINE_POINTS,
        *GATEWAY_POINTS,
        *SUPERVISOR_POINTS,
    }


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_table], ids=lambda row: row.id)
def test_on_a_virtual_clock(row: Row) -> None:
    assert run_table(row, 0).problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[[row]]\nname = 'x'",
        "[[row]]\nname = 'x'\nfault = {}\noutcome = 'odd'",
        "[[row]]\nname = 'x'\nfault = {}\noutcome = 'dead'\nphases = ['someday']",
        "[[row]]\nname = 'x'\nfault = {}\noutcome = 'dead'\nci = ['decode/idle']",
        "[[row]]\nname = 'x'\nfault = {}\noutcome = 'dead'\nspeed = 1",
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(text: str) -> None:
    with pytest.raises(MatrixError, match=r"file\.toml"):
        parse_rows(text, "file.toml")


def test_results_go_on_where_a_run_was_left(tmp_path):
    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    good = Result("a/decode/idle", 0, 5.0, (), "dead", "LeaderDead", "leader", 1, 0.5, 5.0, 4.0)
    bad = Result("b/decode/idle", 0, 5.0, ("it was late",), "wedged", "RankFrozen", "rank0.loop", 3, 19.0, 15.0, 30.0)
    append_result(path, good)
    append_result(path, bad)
    with path.open("a") as file:
        file.write('{"id": "c/decode/id')
    assert read_results(path) == [good, bad]
    told = "\n".join(summary_of([good, bad]))
    assert "2 rows, 1 failed" in told
    assert "it was late" in told
