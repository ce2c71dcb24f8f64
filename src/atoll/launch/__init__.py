"""Launchers: every missing job of a run, on this machine, on Slurm or on Ray, behind one small interface.

`plan` says which jobs a run consists of, `attempt` is how any launcher runs one of them, `launch` ties both together.
"""
