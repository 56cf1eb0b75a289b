from __future__ import annotations

import pytest

from gpu_scheduler.engines.sglang.base.request_table import RequestTable


def test_rid_of_a_request_is_no_prefix_of_another() -> None:
    request_table = RequestTable()
    rids = [request_table.add(request_id, 1).rid for request_id in ("r", "r1", "r10", "1:r", "", *map(str, range(40)))]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


def test_request_is_found_by_id_and_rid_until_it_is_closed() -> None:
    request_table = RequestTable()
    entry = request_table.add("a", 3)
    assert request_table.by_id("a") is entry and request_table.by_rid(entry.rid) is entry and len(request_table) == 1
    with pytest.raises(ValueError, match="a is here already"):
        request_table.add("a", 3)
    request_table.close(entry)
    assert request_table.by_id("a") is None and request_table.by_rid(entry.rid) is None and list(request_table) == []
    assert request_table.add("a", 3).rid != entry.rid
