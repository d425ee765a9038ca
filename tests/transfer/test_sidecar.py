"""Two sidecars, two processes, one READ: what arrives is what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
from sidecar_double import LANES, sidecar_pair
from transfer_double import STATE, same_records

from sluice_engine.transfer.messages import RecordsDone

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.mark.parametrize("lanes", LANES)
async def test_scattered_and_adjacent_records_arrive_whole_and_verified(tmp_path: Path, lanes: str) -> None:
    async with sidecar_pair(tmp_path, lanes) as pair:
        expected = "cma" if "cma" in lanes else "tcp"
        assert pair.reader.link.hello.lane.lane == expected
        assert pair.reader.link.hello.lane.warning == ""
        items = pair.items((0, 7), (1, 8), (2, 9), (20, 1), (39, 3)) + pair.items((5, 0), kind=STATE)
        pair.reader.pull(pair.source, "lease", items)
        done = await pair.reader.finish("lease")
        assert isinstance(done, RecordsDone), done
        assert done.num_records == len(items)
        assert same_records(pair.source.pools, pair.reader.pools, items)
        stats = await pair.reader.link.stats()
        assert stats.counters["records_digested"] == len(items)
        moved, over_tcp = stats.counters["bytes"], stats.counters["tcp_bytes"]
        assert over_tcp < moved / 2 if "cma" in lanes else over_tcp >= moved, (moved, over_tcp)
