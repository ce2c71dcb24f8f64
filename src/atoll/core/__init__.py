"""What every package needs: settings, artifacts, paths of a run, errors, checks. No torch but in `device`."""
