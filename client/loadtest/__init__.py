"""Load test of a server: Triton's own `perf_analyzer` makes the load, and its export becomes a report.

`python -m client.loadtest` (all options: `--help`). `runs` runs the tool, `figures` reads what it wrote,
`report` makes table, JSON, plots and a page of it.
"""
