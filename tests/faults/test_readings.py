"""No config.json is read in another way than transformers reads it."""

import random
from collections import Counter

from pretrained import DESCRIPTION
from readings import case, compare


def test_every_config_is_read_as_transformers_reads_it_or_refused():
    counts = Counter()
    for index in range(600):
        try:
            case(random.Random(index))
            counts["accepted"] += 1
        except ValueError:
            counts["refused"] += 1
    assert min(counts.values()) > 100
    compare(DESCRIPTION)
