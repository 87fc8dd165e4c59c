"""Tables and figures of the pages, made from docs/results: `make results`."""
