"""The paper: its grids of runs (`grids.toml`), and the numbers that it prints (`numbers.json`). No torch."""
