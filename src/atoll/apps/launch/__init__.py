"""Launchers run all remaining jobs of a run on this machine, on Slurm or on Ray, behind one small interface.

`plan` lists the jobs of a run, `supervisor` runs one of them under any launcher, and `launch` combines both.
"""
