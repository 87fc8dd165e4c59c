"""A sample of the consistency suite of `make faults`; and a defect that it finds."""

from consistency import consistency

import deeploop.train.active


def test_drawn_configurations_agree_with_themselves():
    assert consistency(6, seed=0) == []


def test_a_defect_is_found(monkeypatch):
    """Positions that forget the batches before, as they did."""
    monkeypatch.setattr(deeploop.train.active.ActiveRun, "_load_counts", lambda run, state: None)
    (found,) = consistency(1, seed=0)
    assert found.startswith("consistency 0/0: batch: other sequences drawn; rule=")
