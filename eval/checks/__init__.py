"""Checks: pure functions from one answer and what a suite's row asks of it to values in [0, 1].

One kind of check a file; `eval.checks.registry` is the table of kinds, `eval.checks.catalogue` the
table of metrics they give. Nothing here knows a model, a target, an interval or a limit.
"""
