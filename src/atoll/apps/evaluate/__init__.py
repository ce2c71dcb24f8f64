"""`atoll evaluate RUN`: metrics of generated images with their protocol, and diagnostics of the ensemble.

Read `evaluation` first. In: the networks and the prepared data of a run. Out: `RUN/evaluation/latest.json`, whose
values `results` describes and `table` shows.
"""
