"""Benchmarks: nothing here is asserted anywhere. Each compares in one run, alternating, and prints ratios."""
