"""Time training and decoding: `deeploop bench`."""

import json
from collections.abc import Iterable
from typing import Any

from deeploop.bench.options import BenchArgs
from deeploop.runs.folder import provenance


def run(args: BenchArgs) -> str:
    """Time what the options name, and return the table."""
    from deeploop.bench import decode, training  # now: they import torch

    return decode.run(args) if args.decode else training.run(args)


def collect(rows: Iterable[dict[str, Any]], facts: dict[str, Any], args: BenchArgs) -> dict[str, Any]:
    """Time the rows, and write the record after each: the next one may not fit the memory."""
    cells: list[dict[str, Any]] = []
    record = {**facts, "cells": cells, **provenance()}
    for row in rows:
        cells.append(row)
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record
