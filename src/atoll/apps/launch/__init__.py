"""Launchers run all remaining jobs of a run on this machine, on Slurm or on Ray, behind one small interface.

Read `steps` (the jobs of a run and their dependencies), `launcher` (the interface), `local`, `slurm` and `ray`, then
`supervisor` (one attempt at a job, under any launcher) and `launch` (the verb).
"""
