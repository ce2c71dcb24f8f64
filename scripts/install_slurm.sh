#!/usr/bin/env bash
# Slurm from Debian's packages, for the tests that run a real cluster of two nodes on this machine (14 MB).
# Installs programs only: no service is started. Without root or apt-get those tests skip, and say so.
set -euo pipefail
packages="slurm-wlm slurmctld slurmd slurm-client munge"
here=yes
for program in slurmctld slurmd sbatch munged; do
    command -v "$program" > /dev/null || here=no
done
if [ "$here" = yes ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "############################################################################" >&2
    echo "# SLURM WILL NOT BE TESTED: installing it needs root and apt-get.          #" >&2
    echo "############################################################################" >&2
    exit 0
fi
echo "installing $packages …"
# In run level 1 the packages do not start their services.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
install() { apt-get install -y -qq --no-install-recommends $packages > /dev/null; }
install || { apt-get update -qq && install; }
