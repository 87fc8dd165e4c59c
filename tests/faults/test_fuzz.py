"""The short version of the fuzzer: a case of every kind many times over, none with another exception."""

from fuzz import fuzz


def test_damaged_input_is_refused_in_words():
    counts, findings = fuzz(500, seed=2)
    assert findings == []
    assert sum(counts.values()) == 500
    refused = {name.removesuffix(": refused") for name in counts if name.endswith("refused")}
    assert {
        "config",
        "run folder",
        "checkpoint",
        "weights",
        "corpus",
        "puzzles",
        "chat",
        "requests",
        "packed runs",
        "pretrained folder",
        "GGUF file",
    } <= refused
    assert {
        f"forged {what}"
        for what in ("state", "tensors", "corpus", "puzzles", "requests", "scores", "packed runs")
    } <= refused
    accepted = {name.removesuffix(": accepted") for name in counts if name.endswith("accepted")}
    assert {"run in a list", "run in a report", "metrics"} <= accepted
